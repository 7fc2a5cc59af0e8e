"""Every op's Triton kernels: a process that finds them on disk neither traces, compiles nor imports them."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.every_op.matrix import call_of, every_op
from tests.kernels.conftest import H100
from tilewright.kernels import kernel
from tilewright.kernels.op.choice import DECLARED, Platform
from tilewright.kernels.triton import compiler
from tilewright.ops.lowering import custom_calls, lowering, mlir_modules, stages
from tilewright.ops.utils import device
from tilewright.ops.utils.memory import clear_all

pytest.importorskip("triton")

MLA = {"heads": 4, "kv_length": 100, "sequences": 2, "head_dim": 80, "value_dim": 64}
"""Sizes of a latent that the backend serves; the op's small call is in float32, in which it does not."""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, without_builds: None) -> list[str]:
    """What is traced, lowered and compiled, in the order of work; compiled by a stand-in that tells launches apart."""
    found: list[str] = []
    trace, lower = stages._trace, mlir_modules.lower

    def traced(program: Any) -> Any:
        if program.cfg.value != DECLARED:
            found.append("traced")
        return trace(program)

    def lowered(*args: Any) -> Any:
        found.append("lowered")
        return lower(*args)

    def compiled(described: Any, capability: tuple[int, int], settings: Any) -> Any:
        found.append("compiled")
        code = {"ptx": f".entry {described.name} {described} {capability}"}
        size = types.SimpleNamespace(name=described.name, shared=0, global_scratch_size=0, global_scratch_align=1)
        return types.SimpleNamespace(metadata=size, asm=code)

    monkeypatch.setattr(stages, "_trace", traced)
    monkeypatch.setattr(mlir_modules, "lower", lowered)
    monkeypatch.setattr(compiler, "_compiled", compiled)
    for name in ("_device", "_device_of_mesh"):
        monkeypatch.setattr(device, name, lambda *_: H100)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    clear_all()
    return found


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_LOWERED", "0")
        clear_all()
        yield
    clear_all()


def lowered_text(function: Any, structs: list[Any]) -> str:
    """The program as a process with a GPU makes it: each time a new one, of which JAX knows nothing."""
    return jax.jit(lambda *args: function(*args)).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("op", [op for op in every_op() if any(
    each.platform is Platform.TRITON for each in kernel(op).backends.usable
)])  # fmt: skip
def test_the_next_process_has_nothing_to_do(op: str, work: list[str]):
    call = call_of(op, "bfloat16", **(MLA if op == "mla_decode" else {}))
    # Of a weight in four bits no kernel computes the gradient, which is XLA's.
    trains = call.differentiable and op != "weight_only_matmul"
    function, arrays = (call.training if trains else call.on_arrays)(platform="triton")
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with not_kept():
        plain = lowered_text(function, structs)
    assert lowering._FILES.usage()[0] == 0
    work.clear()
    first = lowered_text(function, structs)
    passes = 2 if trains else 1
    assert work.count("traced") == work.count("lowered") == passes
    assert "compiled" in work
    assert lowering._FILES.usage()[0] == 2 * passes  # of each pass its results and its module
    clear_all()
    work.clear()
    second = lowered_text(function, structs)
    assert work == []
    assert custom_calls.TRITON in second
    assert first == second
    assert first.count(custom_calls.TRITON) == plain.count(custom_calls.TRITON)
