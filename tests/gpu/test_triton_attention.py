"""Attention in Triton on a GPU: conformance, every candidate at real lengths, its residuals, and transformations."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.real_lengths import (
    REAL,
    check_at_real_lengths,
    check_in_a_command_buffer,
    check_on_every_device,
    long_case,
)
from tests.kernels.flash_attention.conformance import (
    Conformance,
    cotangents,
    inputs_of,
    judge,
    oracles,
    run_and_judge,
)
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaFlashAttention
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.op.backend import Backend
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

BACKEND = TritonFlashAttention()


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


class TestTriton(Conformance):
    backend: ClassVar[Backend] = BACKEND


@pytest.mark.parametrize("name", REAL)
def test_at_real_lengths(name: str):
    def configs(inputs: AttentionInputs, direction: Direction) -> list[Any]:
        return BACKEND.candidates(inputs.structs, current_device(), direction)[:1]

    check_at_real_lengths(BACKEND, REAL[name], configs)


def candidates(case: AttentionCase, direction: Direction) -> list[Any]:
    return BACKEND.candidates(inputs_of(case).structs, current_device(), direction)


TILED = {
    f"{'causal' if causal else 'full'}_d{dim}": long_case(600, 500, head_dim=dim, causal=causal)
    for dim in (64, 128, 256)
    for causal in (False, True)
}


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("name", TILED)
def test_candidates(name: str, index: int):
    forward, backward = (candidates(TILED[name], direction) for direction in ("forward", "backward"))
    if index >= max(len(forward), len(backward)):
        pytest.skip("there are fewer")
    run_and_judge(BACKEND, TILED[name], forward[index % len(forward)], backward[index % len(backward)])


@pytest.mark.parametrize(
    "other",
    [PallasGpuFlashAttention(), CudaFlashAttention(), XlaFlashAttention()],
    ids=lambda other: str(other.platform),
)
@pytest.mark.parametrize("name", ["causal", "grouped", "window"])
def test_pairs_with_every_backend(name: str, other: Backend):
    inputs = inputs_of(dataclasses.replace(REAL[name], q_length=300))
    structs, device = inputs.replace(return_lse=True).structs, current_device()
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        if why := other.not_supported_reasons(structs, device, direction):
            pytest.skip("; ".join(why))
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    for first, second in ((BACKEND, other), (other, BACKEND)):
        params = [each.heuristic(structs, device, way) for each, way in zip((first, second), directions, strict=True)]
        results = jax.jit(lambda inputs, first=first, p=params[0]: first.forward(inputs, p))(inputs)
        run = jax.jit(lambda inputs, results, d, second=second, p=params[1]: second.backward(inputs, results, d, p))
        gradients = run(inputs, results, (d_out, d_lse))
        judge({"out": results[0], "lse": results[1], **gradients}, exact.arrays, low.arrays, 2.0)


def test_vmap_and_gradients():
    query, key, value = (jnp.stack([jnp.asarray(a)] * 2) for a in REAL["window"].arguments()[0])

    def loss(*arrays: Any) -> Any:
        return flash_attention(*arrays, causal=True, platform="triton").astype(jnp.float32).sum()

    one = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query[0], key[0], value[0])
    both = jax.jit(jax.grad(lambda *a: jax.vmap(loss)(*a).sum(), argnums=(0, 1, 2)))(query, key, value)
    for alone, mapped in zip(one, both, strict=True):
        want = np.asarray(alone, np.float32)
        for got in np.asarray(mapped, np.float32):  # to a rounding: the gradient of queries is summed in no fixed order
            assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()


def test_inside_a_command_buffer():
    check_in_a_command_buffer(REAL["narrow"], platform="triton")


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
def test_on_every_device_of_a_process():
    check_on_every_device(REAL["causal"], platform="triton")
