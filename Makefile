# make test: environment, lint, types, tests.  make quick: after every change.  make help: the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
STAMP := .make/installed
AOT := .aot/venv
AOT_TPU := .aot/tpu
KERNELS := .kernels/venv
DOCS := .docs/venv
PROGRAMS := .programs/venv
PYTHON ?= $(VENV)/bin/python
# The processes of pytest-xdist; of tests/conftest.py the suite (quick, test or full) and the hypothesis profile (dev, ci
# or full). Of make test-costs: the tests to measure, all without a record if none are named.
JOBS ?= 2
SUITE ?= test
PROFILE ?= ci
PYTEST_ARGS ?=
TESTS ?=
# Of make wheel-test and make sdist-test: such as --python python3.14 --require jax==0.11.2; and the sdist's tests to run.
SHIP_ARGS ?=
PROGRAM ?=
# Of make kernels-wheel: such as --arch 90a --group bf16_k128 -j 8. And the CUDA whose nvcc compiles: drivers for any
# release of a major version run what its first one made.
KERNELS_ARGS ?=
KERNELS_CUDA ?= 13.0
SDIST_TESTS ?= tests/test_packaging.py tests/test_docs.py tests/ops tests/modules tests/cli tests/tools

.PHONY: help install quick test test-full test-costs lint types unit aot aot-tpu test-gpu memcheck wheel-test sdist-test kernels-wheel programs demo generate serve \
  bench table stubs picture docs format clean

help:
	@echo 'make quick     after every change: lint, types, and the tests that catch most for their time'
	@echo 'make test      environment, lint, types and tests (JOBS=2, PROFILE=ci, PYTEST_ARGS=...)'
	@echo 'make test-full the same with every combination, and fresh random examples; before a piece of work is done'
	@echo 'make test-costs measures new tests (or TESTS=...) alone, and chooses the tests of make quick and make test anew'
	@echo 'make demo      tune and train a byte-level transformer on the CPU; writes .demo/'
	@echo 'make serve     the same model over HTTP by the completions API of OpenAI, on port 8000'
	@echo 'make generate  serve the model of make demo (which runs first if it has not): continuous batching over pages'
	@echo 'make lint      ruff check and ruff format --check'
	@echo 'make types     mypy; mypy and pyright over README, docs and examples'
	@echo 'make unit      the tests alone (SUITE=test)'
	@echo 'make aot       compile what ships for an H100 and for Blackwell GPUs, without one; fails on spills'
	@echo 'make aot-tpu   compile every op and kernel for TPUs, without one: memory, spills, simulated cycles'
	@echo 'make test-gpu  tests/gpu on the accelerator (PYTHON=python3 for an environment of your own)'
	@echo 'make memcheck  short runs of the GPU kernels under compute-sanitizer'
	@echo 'make wheel-test builds sdist and wheel, and runs README and docs with the wheel alone (SHIP_ARGS=--python python3.14)'
	@echo 'make sdist-test runs tests of the unpacked sdist (SDIST_TESTS=...)'
	@echo 'make kernels-wheel compiles the CUDA kernels that calls can come to into a wheel (KERNELS_ARGS=--arch 90a); hours on few cores'
	@echo 'make programs  models of gemma and Tunix with our ops in place, beside what they are without (PROGRAM=a part of a name)'
	@echo 'make bench     the benchmarks; writes benchmarks/results/'
	@echo 'make table     writes the tables of docs/capabilities.md'
	@echo 'make stubs     writes the types of the public functions, tilewright/modules/__init__.pyi'
	@echo 'make picture   writes the picture of the README from benchmarks/results/'
	@echo 'make docs      the site, without the network, into .docs/site; a warning is an error'
	@echo 'make format    ruff format and the fixes ruff can make'
	@echo 'make clean     removes what make made: environment, stamps, tool caches'

install: $(STAMP)

# A failed installation leaves no stamp, so the next run repeats it.
$(STAMP): pyproject.toml .python-version
	@wanted="$$(cut -d. -f1,2 .python-version)"; python=; \
	for candidate in python3 "python$$wanted"; do \
	  if [ "$$("$$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$$wanted" ]; then \
	    python="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "tilewright: neither python3 nor python$$wanted is a Python $$wanted; install one (pyenv install $$wanted)" >&2; \
	  exit 1; \
	fi; \
	[ -x $(VENV)/bin/python ] || "$$python" -m venv $(VENV); \
	echo "installing tilewright into $(VENV) ($$($(VENV)/bin/python --version))"; \
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint,plot,cuda,release]'
	@mkdir -p $(@D) && touch $@

quick: $(STAMP)
	@$(MAKE) lint
	@$(PYTHON) -m mypy
	@$(MAKE) unit SUITE=quick

test: install
	@$(MAKE) lint
	@$(MAKE) types
	@$(MAKE) unit

test-full: install
	@$(MAKE) lint
	@$(MAKE) types
	@$(MAKE) unit SUITE=full PROFILE=full

test-costs: $(STAMP)
	@$(PYTHON) -m tools.suites measure --jobs $(JOBS) $(TESTS)

lint: $(STAMP)
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check

types: $(STAMP)
	@$(PYTHON) -m mypy
	@$(PYTHON) -m tools.snippets

unit: $(STAMP)
	@TILEWRIGHT_HYPOTHESIS_PROFILE=$(PROFILE) $(PYTHON) -m pytest --suite $(SUITE) -n $(JOBS) --dist worksteal \
	  $(PYTEST_ARGS)

aot: .aot/installed
	@TILEWRIGHT_HYPOTHESIS_PROFILE=$(PROFILE) $(AOT)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  -o addopts='-ra --strict-markers --import-mode=importlib' --suite full tests/aot $(PYTEST_ARGS)

# An environment of its own: with the CUDA plugin beside it, jax in the other would look for a GPU. The plugin's own
# requirements are a gigabyte of libraries that only running needs. Of PyTorch FlashAttention-4's kernels use names alone.
.aot/installed: pyproject.toml .python-version $(STAMP)
	@[ -x $(AOT)/bin/python ] || $(VENV)/bin/python -m venv $(AOT)
	@pip() { $(AOT)/bin/python -m pip install --quiet --disable-pip-version-check "$$@"; }; \
	jax="$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"; \
	echo "installing the CUDA compiler for jax $$jax into $(AOT)"; \
	pip -e '.[test]' "jax==$$jax"; \
	pip --no-deps "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" nvidia-cuda-nvcc nvidia-nvvm; \
	pip nvidia-cutlass-dsl apache-tvm-ffi einops; pip --no-deps --pre flash-attn-4 quack-kernels
	@mkdir -p $(@D) && touch $@

aot-tpu: .aot/tpu-installed
	@TILEWRIGHT_HYPOTHESIS_PROFILE=$(PROFILE) JAX_PLATFORMS=cpu $(AOT_TPU)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  -o addopts='-ra --strict-markers --import-mode=importlib' --suite full tests/aot_tpu tests/ops/utils/test_topology.py $(PYTEST_ARGS)

# An environment of its own: with libtpu beside it, jax in the other would look for a TPU.
.aot/tpu-installed: pyproject.toml .python-version $(STAMP)
	@[ -x $(AOT_TPU)/bin/python ] || $(VENV)/bin/python -m venv $(AOT_TPU); \
	jax="$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"; \
	echo "installing libtpu beside jax $$jax into $(AOT_TPU)"; \
	$(AOT_TPU)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' "jax[tpu]==$$jax"
	@mkdir -p $(@D) && touch $@

# Without the stamp: an accelerator's machine brings its own jax, which PYTHON names.
test-gpu:
	@if ! compgen -G 'tests/gpu/test_*.py' >/dev/null; then echo 'there are no tests in tests/gpu yet'; exit 0; fi; \
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} JAX_PLATFORMS=$${JAX_PLATFORMS:-cuda,cpu} \
	  TILEWRIGHT_HYPOTHESIS_PROFILE=$(PROFILE) $(PYTHON) -m pytest -o addopts='-ra --strict-markers' --suite full tests/gpu $(PYTEST_ARGS)

# compute-sanitizer 2025.3 itself ends in a segmentation fault now and then, before any test has run: once more.
memcheck:
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} JAX_PLATFORMS=$${JAX_PLATFORMS:-cuda,cpu} XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
	  $(PYTHON) -m pytest -o addopts='-ra --strict-markers' --suite full tests/gpu/test_memory_access.py \
	  tests/gpu/test_serving.py tests/gpu/test_grouped_matmul.py \
	  -k 'in_bounds or hostile or beyond or any_kind or nobody' $(PYTEST_ARGS)

wheel-test: $(STAMP)
	@$(PYTHON) -m tools.wheel_test $(SHIP_ARGS)

sdist-test: $(STAMP)
	@$(PYTHON) -m tools.wheel_test $(SHIP_ARGS) --tests -n $(JOBS) $(SDIST_TESTS)

# Without CUDA_HOME of the machine: nvcc is the one that is installed here.
kernels-wheel: .kernels/installed-$(KERNELS_CUDA)
	@CUDA_HOME="$$(echo $(CURDIR)/$(KERNELS)/lib/python3*/site-packages/nvidia/cu*)" CUDA_PATH= JAX_PLATFORMS=cpu \
	  $(KERNELS)/bin/python -m tools.kernels_wheel $(KERNELS_ARGS)

# An environment of its own, with nvcc; and with the oldest jax that we run with: later ones take what was compiled with
# its headers of XLA's FFI, older ones refuse what was compiled with later headers.
.kernels/installed-$(KERNELS_CUDA): pyproject.toml .python-version $(STAMP)
	@[ -x $(KERNELS)/bin/python ] || $(VENV)/bin/python -m venv $(KERNELS); \
	jax="$$(sed -n 's/^ *"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)"; \
	echo "installing nvcc of CUDA $(KERNELS_CUDA) beside jax $$jax into $(KERNELS)"; \
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cuda]' "jax==$$jax" "jaxlib==$$jax" \
	  'cuda-toolkit[nvcc,cudart,cccl]==$(KERNELS_CUDA).*'
	@rm -f $(@D)/installed-* && touch $@

programs: .programs/installed
	@$(PROGRAMS)/bin/python -m tools.model_programs '$(PROGRAM)'

# An environment of its own, of what the libraries require: with TensorFlow 3.4 GB. uv, because pip tries releases of
# google-cloud-* for more than ten minutes; the versions, because the edits name lines of theirs.
.programs/installed: pyproject.toml .python-version $(STAMP)
	@[ -x $(PROGRAMS)/bin/python ] || $(VENV)/bin/python -m venv $(PROGRAMS); \
	jax="$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"; \
	echo "installing gemma and Tunix beside jax $$jax into $(PROGRAMS)"; \
	$(PROGRAMS)/bin/python -m pip install --quiet --disable-pip-version-check uv; \
	$(PROGRAMS)/bin/uv pip install --quiet --python $(PROGRAMS)/bin/python -e . gemma==4.0.1 google-tunix==0.1.7 \
	  "jax==$$jax" "jaxlib==$$jax"
	@mkdir -p $(@D) && touch $@

demo: $(STAMP)
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(PYTHON) examples/train_demo.py

generate: $(STAMP)
	@[ -f .demo/parameters.npz ] || $(MAKE) demo
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(PYTHON) examples/generate.py

serve: $(STAMP)
	@[ -f .demo/parameters.npz ] || $(MAKE) demo
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(PYTHON) examples/serve.py

bench: $(STAMP)
	@for benchmark in import_time eager_overhead selection_cost flash_attention_cpu linear_cross_entropy_cpu; do $(PYTHON) -m benchmarks.$$benchmark; done

table: $(STAMP)
	@$(PYTHON) docs/capability_table.py --write

stubs: $(STAMP)
	@$(PYTHON) -m tools.stubs

picture: $(STAMP)
	@$(PYTHON) -m benchmarks.speed_picture

docs: .docs/installed
	@rm -rf .docs/site
	@JAX_PLATFORMS=cpu $(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d .docs/doctrees . .docs/site
	@echo 'the site is .docs/site/index.html'

# An environment of its own: Sphinx, and the libraries whose integrations the reference describes.
.docs/installed: pyproject.toml .python-version $(STAMP)
	@[ -x $(DOCS)/bin/python ] || $(VENV)/bin/python -m venv $(DOCS); \
	jax="$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"; \
	echo "installing Sphinx beside jax $$jax into $(DOCS)"; \
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs,flax,equinox]' "jax==$$jax"
	@mkdir -p $(@D) && touch $@

format: $(STAMP)
	@$(PYTHON) -m ruff check --fix
	@$(PYTHON) -m ruff format

clean:
	rm -rf $(VENV) .make .aot .kernels .docs .programs .demo .llama .mutants .jax_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
