"""What a kernel was lowered to in another process compiles to the same machine code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiler import KernelReport, compile_for_h100, compile_lowered, lower_as_there, missing_packages
from tilewright.modules import flash_attention
from tilewright.ops.core import mlir_modules
from tilewright.ops.core.memory import forget_all

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages() or "nothing")

QUERY = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
KEY = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)


def gradients(query, key, value):
    out = lambda *arrays: flash_attention(*arrays, causal=True, platform="pallas").astype(jnp.float32).sum()
    return jax.value_and_grad(out, (0, 1, 2))(query, key, value)


def facts(reports: list[KernelReport]) -> list[KernelReport]:
    """The reports without what depends on the order of compilation."""
    return sorted((dataclasses.replace(report, shared_bytes=None) for report in reports), key=lambda each: each.name)


def test_kernels_from_the_disk_are_the_same_machine_code(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    in_place = compile_for_h100(gradients, QUERY, KEY, KEY)
    assert not list(tmp_path.iterdir())  # who asks for the compiler's words gets all of its work
    forget_all()
    first = lower_as_there(gradients, QUERY, KEY, KEY)
    assert len(list((tmp_path / "lowered").iterdir())) == 4
    forget_all()

    def never(*_):
        raise AssertionError("it is on disk")

    monkeypatch.setattr(mlir_modules, "lower", never)
    from_disk = lower_as_there(gradients, QUERY, KEY, KEY)
    assert from_disk.as_text() == first.as_text()
    reports = compile_lowered(from_disk)
    assert len(in_place) >= 3
    assert facts(reports) == facts(in_place)
