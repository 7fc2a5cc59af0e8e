"""What the package is as a whole: its layers, what importing it does, its metadata."""

import ast
import functools
import importlib.metadata
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tilewright
from tools.pages import linked_file, links, repository

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tilewright"

# For each layer what of ours it may import, beside itself.
LAYERS = {
    "tilewright.ops": ("tilewright.errors",),
    "tilewright.kernels": (
        "tilewright.errors",
        "tilewright.ops.types",
        "tilewright.ops.utils",
        "tilewright.ops.kernel",
    ),
    "tilewright.compat": ("tilewright.errors", "tilewright.ops", "tilewright.kernels"),
    "tilewright.modules": ("tilewright.errors", "tilewright.ops", "tilewright.kernels", "tilewright.compat"),
    "tilewright.integrations": ("tilewright.errors", "tilewright.ops", "tilewright.kernels", "tilewright.modules"),
    "tilewright.errors": (),
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, inside functions and under ``TYPE_CHECKING`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_the_layers_below_it(layer):
    files = {file: tree for file, tree in trees().items() if within(module_name(file), layer)}
    assert files
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file, tree in files.items()
        for name in imported_names(tree)
        if within(name, "tilewright") and not any(within(name, allowed) for allowed in (layer, *LAYERS[layer]))
    ]
    assert wrong == []


def test_imports_are_absolute():
    for file, tree in trees().items():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file.relative_to(ROOT)}:{node.lineno}"


# Once it has imported `tilewright.ops` it says what that opened and loaded. Any use of a device would initialise a
# backend, and there is none of the name that the environment gives.
IMPORTING = """
import json, sys
import jax
opened, before = [], set(sys.modules)
def audit(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"):
        opened.append(f"{event} {arguments[0]}")
sys.addaudithook(audit)
import tilewright.ops
said = {"opened": list(opened), "loaded": sorted(sys.modules.keys() - before)}
import tilewright.modules, tilewright.modules.base
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("imported") / "cache"
    # Without bytecode to write: that is the interpreter's doing, not ours.
    ours = {"TILEWRIGHT_CACHE_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "nonesuch"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], env=os.environ | ours, cwd=ROOT, capture_output=True, text=True
    )
    return {"code": done.returncode, "errors": done.stderr, "cache": folder} | json.loads(done.stdout or "{}")


def test_importing_touches_no_device(imported):
    assert imported["code"] == 0, imported["errors"]


def test_importing_opens_nothing_but_code(imported):
    lines = [line for line in imported["opened"] if not line.endswith((".py", ".pyc", ".so"))]
    # The import system looks into the standard library's zip, jaxtyping reads its own version.
    assert [line for line in lines if not line.endswith((".zip", "dist-info/METADATA"))] == []
    assert not imported["cache"].exists()


def test_importing_loads_nothing_heavy(imported):
    heavy = {
        "msgspec",
        "platformdirs",
        "rich",
        "typer",
        "matplotlib",
        "scipy",
        "tilewright.cli",
        "tilewright.kernels.cuda",
    }
    assert heavy.isdisjoint(imported["loaded"])


def test_one_version_everywhere():
    assert importlib.metadata.version("tilewright") == tilewright.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(tilewright.__version__)}\b", changelog, re.MULTILINE)


def test_the_command_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tilewright")
    assert script.value == "tilewright.cli:main"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_requirements_are_those_of_the_contract(project):
    assert project["requires-python"] == ">=3.12"
    assert "jax>=0.11.2,<0.13" in project["dependencies"]
    assert (ROOT / ".python-version").read_text().strip() == "3.12"


def test_an_accelerators_extra_takes_the_same_jax(project):
    (ours,) = (requirement for requirement in project["dependencies"] if requirement.startswith("jax>"))
    for extra in ("cuda12", "cuda13", "tpu"):
        assert ours.replace("jax", f"jax[{extra}]", 1) in project["optional-dependencies"][extra]


def test_a_requirement_has_one_bound_in_every_extra(project):
    bounds = {}
    for requirement in (*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())):
        name, bound = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", requirement).groups()
        assert bounds.setdefault(name, bound) == bound, requirement


def test_classifiers(project):
    classifiers = project["classifiers"]
    assert len(set(classifiers)) == len(classifiers)
    # Beside a license expression PEP 639 forbids them, and setuptools refuses to build.
    assert project["license"] == "Apache-2.0"
    assert not any(classifier.startswith("License ::") for classifier in classifiers)
    versions = re.findall(r"Python :: 3\.(\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert f">=3.{min(map(int, versions))}" == project["requires-python"]
    assert sys.version_info.minor in map(int, versions)
    assert ("Typing :: Typed" in classifiers) == (PACKAGE / "py.typed").exists()


def test_addresses_lead_to_files_of_the_repository(project):
    urls = project["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(urls)
    assert linked_file(urls["Documentation"], ROOT) == ROOT / "docs"
    assert linked_file(urls["Changelog"], ROOT) == ROOT / "CHANGELOG.md"


def test_the_readme_of_the_metadata_has_links_that_lead_out_of_the_repository():
    with_absolute_links = runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"]
    targets = links(with_absolute_links((ROOT / "README.md").read_text(), repository()))
    assert targets
    for target in targets:
        assert target.startswith("https://")
        file = linked_file(target, ROOT / "nonesuch")
        assert file is None or file.exists(), target
    kept = "[here](#more), [there](https://example.org/a)"
    assert with_absolute_links(f"{kept}, [CLI](docs/cli.md#tune)", "https://example.org/x") == (
        f"{kept}, [CLI](https://example.org/x/blob/main/docs/cli.md#tune)"
    )
    # A page of the repository's site shows no picture in another page: that takes the file itself.
    picture = "![speeds of ours](docs/speed.svg)"
    assert with_absolute_links(picture, "https://example.org/x") == (
        "![speeds of ours](https://example.org/x/raw/main/docs/speed.svg)"
    )


def test_templates_and_sources_that_are_compiled_later_are_package_data():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tilewright"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    sources = {path for kind in ("*.h", "*.hpp", "*.cuh", "*.cu", "*.html") for path in PACKAGE.rglob(kind)}
    assert sources
    assert sources <= packaged


def test_every_table_of_cuda_variants_can_be_found():
    from tilewright.kernels import cuda_tables
    from tilewright.kernels.cuda import VariantTable
    from tilewright.ops.utils.serialize import resolve

    for name, where in cuda_tables().items():
        table = resolve(where)
        assert isinstance(table, VariantTable)
        assert table.name == name


def test_the_functions_of_every_op_are_found_by_their_names():
    """The names stand in a table, from which they are imported; the stub, which type checkers read, is made from it."""
    from tilewright import modules
    from tilewright.kernels import OPS, function, kernel

    for name in OPS:
        kind = type(kernel(name))
        assert {name, kind.__name__} <= set(modules.__all__)
        assert (getattr(modules, name), getattr(modules, kind.__name__)) == (function(name), kind), name
    for name in modules.__all__:
        assert getattr(modules, name) is not None
        assert name in dir(modules)


def test_a_function_imports_its_own_op_alone():
    code = """
import sys
from tilewright.modules import page_attention
ops = {name.split(".")[2] for name in sys.modules if name.startswith("tilewright.kernels.")}
assert "paged_attention" in ops, ops
print(*sorted(ops & {"experts", "flash_attention", "linear_cross_entropy", "matmul", "norms", "permutation", "router"}))
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_capability_tables_show_what_the_backends_declare():
    made = runpy.run_path(str(ROOT / "docs" / "capability_table.py"))
    page = (ROOT / "docs" / "capabilities.md").read_text()
    assert made["with_table"](page, made["capability_table"]()) == page, "run make table"
