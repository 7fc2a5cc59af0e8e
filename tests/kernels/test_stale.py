"""A change of a kernel makes the configs stale that were measured with it, and no others."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from tilewright.kernels import OPS, kernel
from tilewright.kernels.op import choosing
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.choosing import _source
from tilewright.ops import ConfigSelectorChain, Invocation, Kernel, PersistentCache
from tilewright.ops.config.results import TunedCall
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.tuning.journal import Journal

FILES = {
    "__init__.py": "",
    "op.py": "from tests_op import reference",
    "reference.py": "",
    "shared.py": "",
    "xla.py": "from tests_op import shared",
    "cuda/__init__.py": "",
    "cuda/backend.py": "from tests_op.cuda import params\nfrom tilewright.kernels import masks",
    "cuda/params.py": "from tests_op import shared",
    "cuda/kernel.cuh": "",
    "late.py": "from tilewright.kernels.op import arguments",
}
BACKENDS = {"xla": ("tests_op.xla", ""), "cuda": ("tests_op.cuda.backend", "tests_op.late")}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "tests_op"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("tests_op")
    yield folder
    del sys.modules["tests_op"]
    _source.cache_clear()


def write(file: Path, text: str) -> None:
    file.write_text(text)
    os.utime(file, (1.0, 1.0))


def hashes() -> dict[str, str]:
    _source.cache_clear()
    own, packages = frozenset({"tests_op.op"}), frozenset({"tests_op", "tilewright"})
    return {name: _source(own, frozenset(modules), packages) for name, modules in BACKENDS.items()}


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("op.py", {"xla", "cuda"}),
        ("shared.py", {"xla", "cuda"}),
        ("xla.py", {"xla"}),
        ("cuda/backend.py", {"cuda"}),
        ("cuda/params.py", {"cuda"}),
        ("cuda/kernel.cuh", {"cuda"}),
        ("late.py", {"cuda"}),
        ("reference.py", set()),
        ("__init__.py", {"xla", "cuda"}),
    ],
)
def test_what_a_change_of_a_file_makes_stale(package: Path, file: str, stale: set[str]) -> None:
    before = hashes()
    assert all(before.values())
    write(package / file, FILES[file] + "\n# changed")
    after = hashes()
    assert {name for name in BACKENDS if after[name] != before[name]} == stale
    write(package / file, FILES[file])
    assert hashes() == before


def test_of_this_package_kernels_count_and_what_all_ops_are_made_with_does_not(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Path] = {}
    monkeypatch.setattr(choosing, "sources_fingerprint", lambda found: seen.update(found) or "hash")
    hashes()
    ours = {name for name in seen if name.startswith("tilewright")}
    assert ours == {"tilewright.kernels.masks"}


def norm_call(direction: Any = "forward") -> Invocation[Any, Any]:
    inv, _ = prepared(kernel("rms_norm"), (jnp.ones((4, 32)),), {}, concrete=False)
    return dataclasses.replace(inv, direction=direction)


def test_each_backend_has_a_source_of_its_own() -> None:
    op = kernel("rms_norm")
    found = {op.source(Choice(backend)) for backend in ("xla", "triton")}
    assert len(found) == 2
    assert all(found)
    assert op.source(Choice("xla")) == op.source(norm_call().kernel.heuristic_cfg(norm_call()))
    assert op.source(Choice("gone")) == ""


class TestEntries:
    """Of a backend are stale after its own change."""

    @pytest.fixture
    def changed(self, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        """The backends that have changed, at first none."""
        backends: set[str] = set()
        source = choosing.ChoosingOp.source

        def changing(self: Any, cfg: Choice) -> str:
            return ("changed since: " if cfg.backend in backends else "") + source(self, cfg)

        monkeypatch.setattr(choosing.ChoosingOp, "source", changing)
        return backends

    def test_on_disk(self, tmp_path: Path, changed: set[str]) -> None:
        inv, cache = norm_call(), PersistentCache(tmp_path)
        config = inv.kernel.heuristic_cfg(inv)
        assert config.backend == "xla"
        ConfigSelectorChain(persistent=cache).store(inv, config, [Candidate(config, (1.0,))], 1.0, True)
        changed.add("triton")
        assert ConfigSelectorChain(persistent=cache).lookup(inv).step == "disk"
        assert ConfigSelectorChain(persistent=cache).stale_config(inv) is None
        changed.add("xla")
        assert ConfigSelectorChain(persistent=cache).lookup(inv).step == "heuristic"
        assert ConfigSelectorChain(persistent=cache).stale_config(inv) == config

    def test_of_tables(self, changed: set[str]) -> None:
        inv = norm_call()
        config = inv.kernel.heuristic_cfg(inv)
        entry = TunedCall.of(inv, [Candidate(config, (1.0,))], 0, source=inv.kernel.source(config))
        assert not entry.is_stale(inv.kernel)
        changed.add("xla")
        assert entry.is_stale(inv.kernel)
        assert dataclasses.replace(entry, source="").is_stale(inv.kernel)

    def test_failures_are_forgotten_after_the_change_of_any_candidate(self, tmp_path: Path, changed: set[str]) -> None:
        inv, chain = norm_call(), ConfigSelectorChain(persistent=PersistentCache(tmp_path))
        config, failed = inv.kernel.heuristic_cfg(inv), Choice("triton", "no params")
        candidates = [Candidate(config, (1.0,)), Candidate(failed, (), error="it failed")]
        chain.store(inv, config, candidates, 1.0, True)
        assert set(Journal(chain, inv, [config, failed]).known()) == {1}
        changed.add("triton")
        assert Journal(chain, inv, [config, failed]).known() == {}


def test_a_kernel_of_a_user_counts_by_the_source_of_its_class() -> None:
    class Once(Kernel[int, Any]):
        def run(self, x: Any, *, cfg: int) -> Any:
            return x

        def heuristic_cfg(self, inv: Any) -> int:
            return 1

    class Twice(Once):
        def run(self, x: Any, *, cfg: int) -> Any:
            return 2 * x

    found = {kind(f"tests.{kind.__name__}", version="1").source(cfg) for kind in (Once, Twice) for cfg in (1, 2)}
    assert len(found) == 2


@pytest.mark.parametrize("name", OPS)
def test_every_backend_has_a_source(name: str) -> None:
    op = kernel(name)
    found = [op.source(Choice(each.name)) for each in op.backends.usable]
    assert found
    assert all(found)
    assert len(set(found)) == len(found)
