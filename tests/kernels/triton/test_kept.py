"""What is kept on disk of Triton kernels: under every transformation, and never for a call that would make another."""

import dataclasses
import importlib.metadata
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")

from tests.every_op.matrix import without_builds
from tests.kernels.conftest import H100
from tilewright.kernels.norms.triton.params import NormForwardParams
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.triton import compiler
from tilewright.modules import rms_norm
from tilewright.ops.lowering import custom_calls, lowering, mlir_modules
from tilewright.ops.types import Device
from tilewright.ops.utils import device as devices
from tilewright.ops.utils import fingerprint, sources
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.memory import clear_all

X, WEIGHT = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)


def norm(x: Any, weight: Any, **options: Any) -> Any:
    return rms_norm(x, weight, platform="triton", **options)


def loss(x: Any, weight: Any) -> Any:
    return norm(x, weight).astype(jnp.float32).sum()


def text_of(function: Callable[..., Any] = norm, *structs: Any) -> str:
    """The program as a new process with a GPU lowers it."""
    clear_all()
    fresh = jax.jit(lambda *args: function(*args))
    return fresh.trace(*(structs or (X, WEIGHT))).lower(lowering_platforms=("cuda",)).as_text()


def kept() -> list[Path]:
    """The files of modules."""
    return sorted(path for path in lowering._FILES.path.iterdir() if "-cuda-" in path.name)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, on_an_h100: Device) -> Iterator[list[str]]:
    """The launches that were lowered, not found on disk; nothing is on disk at first."""
    found: list[str] = []
    lower = mlir_modules.lower

    def lowered(*args: Any) -> Any:
        found.append("module")
        return lower(*args)

    monkeypatch.setattr(mlir_modules, "lower", lowered)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    with without_builds():
        yield found
    clear_all()


class TestTransforms:
    @pytest.fixture
    def mesh(self) -> jax.sharding.Mesh:
        return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    @pytest.mark.parametrize(
        "transform",
        ["grad", "vmap", "vmap of grad", "grad of vmap", "remat", "scan", "grad of scan", "cond", "jit", "split"],
    )
    def test_are_the_same_from_disk(self, made: list[str], mesh: jax.sharding.Mesh, transform: str):
        stacked = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
        split = jax.shard_map(norm, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))

        def scanned(x: Any, weight: Any) -> Any:
            return jax.lax.scan(lambda carry, _: (norm(carry, weight), None), x, None, length=3)[0]

        function, structs = {
            "grad": (jax.grad(loss, (0, 1)), (X, WEIGHT)),
            "vmap": (jax.vmap(norm, (0, None)), (stacked, WEIGHT)),
            "vmap of grad": (jax.vmap(jax.grad(loss, (0, 1)), (0, None)), (stacked, WEIGHT)),
            "grad of vmap": (jax.grad(lambda x, w: jax.vmap(loss, (0, None))(x, w).sum(), (0, 1)), (stacked, WEIGHT)),
            "remat": (jax.grad(jax.checkpoint(loss), (0, 1)), (X, WEIGHT)),
            "scan": (scanned, (X, WEIGHT)),
            "grad of scan": (jax.grad(lambda x, w: scanned(x, w).astype(jnp.float32).sum(), (0, 1)), (X, WEIGHT)),
            "cond": (lambda x, w: jax.lax.cond(x[0, 0] > 0, norm, lambda x, w: norm(2 * x, w), x, w), (X, WEIGHT)),
            "jit": (jax.jit(jax.grad(jax.jit(loss))), (X, WEIGHT)),
            "split": (jax.grad(lambda x, w: split(x, w).astype(jnp.float32).sum(), (0, 1)), (X, WEIGHT)),
        }[transform]
        first = text_of(function, *structs)
        assert made
        made.clear()
        assert text_of(function, *structs) == first
        assert made == []
        assert custom_calls.TRITON in first


class TestTheKey:
    """A call that would be lowered to something else does not find what is there, and leaves it."""

    def check_is_another(self, made: list[str], before: str, again: Callable[[], str], *, differs: bool = True) -> None:
        made.clear()
        found = again()
        assert made == ["module"]
        assert (found != before) == differs

    @pytest.fixture
    def before(self, made: list[str]) -> Iterator[str]:
        """The program whose kernel is on disk, and after the test still is."""
        text = text_of()
        assert made == ["module"]
        yield text
        made.clear()
        assert text_of() == text
        assert made == []

    def test_another_device(self, made: list[str], before: str):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_device", "_device_of_mesh"):
                patch.setattr(devices, name, lambda *_: find_device("NVIDIA A100-SXM4-80GB").device)
            self.check_is_another(made, before, text_of)

    def test_another_number_of_multiprocessors(self, made: list[str], before: str):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_device", "_device_of_mesh"):
                patch.setattr(devices, name, lambda *_: dataclasses.replace(H100, cores=114))
            self.check_is_another(made, before, text_of, differs=False)

    @pytest.mark.parametrize("params", [NormForwardParams(4, 256, 4), NormForwardParams(1, 256, 2)])
    def test_another_config(self, made: list[str], before: str, params: NormForwardParams):
        cfg = Choice("triton", params)
        self.check_is_another(made, before, lambda: text_of(lambda x, w: norm(x, w, cfg=cfg)))

    @pytest.mark.parametrize("option", [{"eps": 1e-3}, {"weight_offset": 1.0}])
    def test_another_option(self, made: list[str], before: str, option: dict[str, Any]):
        self.check_is_another(made, before, lambda: text_of(lambda x, w: norm(x, w, **option)))

    def test_another_version_of_triton(self, made: list[str], before: str):
        version = importlib.metadata.version
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda name: "99" if name == "triton" else version(name))
            fingerprint._toolchain.cache_clear()
            self.check_is_another(made, before, text_of, differs=False)
        fingerprint._toolchain.cache_clear()

    def test_another_source(self, made: list[str], before: str, tmp_path: Any):
        """A package that takes part changes by a line."""
        package = sources._package

        def changed(name: str) -> Any:
            file = tmp_path / "added.py"
            return {**package(name), "tilewright/kernels/norms/triton/added.py": file}

        (tmp_path / "added.py").write_text("VALUE = 1\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "_package", changed)
            patch.setattr(sources, "_STARTED", (tmp_path / "added.py").stat().st_mtime)
            sources.packages_fingerprint.cache_clear()
            self.check_is_another(made, before, text_of, differs=False)
        sources.packages_fingerprint.cache_clear()

    @pytest.mark.parametrize("name", ["TRITON_DISABLE_LINE_INFO", "DISABLE_LLVM_OPT"])
    def test_a_variable_that_changes_the_code(self, made: list[str], before: str, name: str):
        """It is neither found nor kept; nor is the kernel, compiled under it, taken for one of a later program."""
        files = kept()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, "1")
            self.check_is_another(made, before, text_of)
            self.check_is_another(made, before, text_of)
            other = text_of(lambda x, w: norm(x, w, eps=1e-2))
        assert kept() == files
        self.check_is_another(made, other, lambda: text_of(lambda x, w: norm(x, w, eps=1e-2)))

    def test_what_is_set_in_the_process(self, made: list[str], before: str):
        from triton import knobs

        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            self.check_is_another(made, before, text_of)

    @pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"])
    def test_a_variable_that_does_not(self, made: list[str], before: str, name: str, monkeypatch: Any, tmp_path: Any):
        monkeypatch.setenv(name, str(tmp_path))
        made.clear()
        assert text_of() == before
        assert made == []


class TestFiles:
    """What is on disk is not believed."""

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "without a plugin"])
    def test_a_damaged_file_is_made_again(self, made: list[str], damage: str, caplog: Any, monkeypatch: Any):
        before = text_of()
        (path,) = kept()
        data = path.read_bytes()
        middle = len(data) // 2
        if damage == "foreign":  # with the right checksums, from a version with another idea of such calls
            key = json.loads(data.split(b"\n", 2)[1])["key"]
            assert lowering._FILES.put(key, {"targets": ["triton_kernel_call_of_old"]}, data.split(b"\n", 2)[2])
        elif damage == "without a plugin":
            monkeypatch.setitem(custom_calls._TARGETS, custom_calls.TRITON, self.fail)
        else:
            path.write_bytes(
                {
                    "truncated": data[:middle],
                    "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
                    "empty": b"",
                }[damage]
            )
        made.clear()
        with caplog.at_level(logging.WARNING):
            assert text_of() == before
        assert made == ["module"]
        assert "is not used" in caplog.text

    @staticmethod
    def fail() -> None:
        raise ImportError("there is no plugin")

    def test_the_call_on_disk_is_self_contained(self, made: list[str]):
        """It names PTX and numbers, no object of the process."""
        text_of()
        (path,) = kept()
        data = path.read_bytes()
        proto = zlib.decompressobj().decompress(data[data.index(b"\x78\x9c") :])
        assert b".entry tilewright_rms_norm" in proto
        assert b" at 0x" not in proto


def test_a_kernel_is_compiled_again_under_other_settings(monkeypatch: pytest.MonkeyPatch):
    given = []
    monkeypatch.setattr(compiler, "_compiled", lambda *args: given.append(args[2]))
    launch: Any = object()
    compiler.compiled(launch, (9, 0))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    compiler.compiled(launch, (9, 0))
    assert given == [(), ("TRITON_DISABLE_LINE_INFO=1",)]
