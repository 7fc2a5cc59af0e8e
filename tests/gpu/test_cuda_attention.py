"""Attention in CUDA C++ on a GPU: conformance, every variant that runs there, real lengths, and several devices."""

import dataclasses
import functools
import itertools
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
    CASES,
    Conformance,
    inputs_of,
    run_and_judge,
)
from tilewright.kernels.cuda.devices import capability_of
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaBackwardParams, CudaFlashAttention, CudaForwardParams
from tilewright.kernels.flash_attention.cuda.selection import TABLES
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.op.backend import Backend
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

BACKEND = CudaFlashAttention()
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


class TestCuda(Conformance):
    backend: ClassVar[Backend] = BACKEND
    low_bias = False
    deterministic: ClassVar[bool] = False
    cases = CASES[::2]


class TestCudaDeterministic(Conformance):
    backend: ClassVar[Backend] = BACKEND
    low_bias = False
    cases = CASES[1::2]

    def params(self, inputs: AttentionInputs, direction: Direction) -> CudaForwardParams | CudaBackwardParams:
        return CudaForwardParams() if direction == "forward" else CudaBackwardParams(None, True)


def variant_names(direction: Direction) -> list[str]:
    capability = capability_of(current_device()) or 0
    return [variant.name for table in TABLES[direction] for variant in table.for_capability(capability)]


@functools.cache
def structs_of(case: AttentionCase) -> AttentionInputs:
    return inputs_of(case).structs


@dataclasses.dataclass(frozen=True)
class Trial:
    """A case of some hundred positions, and the precision that its products have."""

    case: AttentionCase
    precision: str | None

    def reasons(self, direction: Direction, params: Any) -> list[str]:
        with jax.default_matmul_precision(self.precision):
            return BACKEND.config_reasons(structs_of(self.case), current_device(), direction, params)

    def run(self, forward: CudaForwardParams, backward: CudaBackwardParams) -> None:
        with jax.default_matmul_precision(self.precision):
            run_and_judge(BACKEND, self.case, forward, backward)


def trials(name: str) -> Iterator[Trial]:
    """What a variant of such a name may take, the most of it first."""
    dtype = next(long for short, long in DTYPES.items() if f"_{short}_" in name)
    options: list[dict[str, Any]] = [
        {"dropout_prob": 0.2, "bias": "hqk", "causal": True, "sliding_window": 150},
        {"bias": "hqk", "causal": True, "sliding_window": 150, "logits_soft_cap": 4.0},
        {"causal": True, "sliding_window": 150},
        {"causal": True},
        {},
    ]
    for option, heads, lengths in itertools.product(options, ((4, 2), (2, 2)), ((200, 330), (256, 384))):
        for dim, precision in itertools.product((512, 200, 128, 96, 64, 32), (None, "highest")):
            sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": dim, "dtype": dtype}
            yield Trial(AttentionCase("", 2, *lengths, **sizes, **option), precision)


def trial_of(direction: Direction, name: str, params: Any) -> Trial:
    for trial in trials(name):
        if not trial.reasons(direction, params):
            return trial
    pytest.skip("it is for another device, or takes none of the cases here")


@pytest.mark.parametrize("name", variant_names("forward"))
def test_forward_variant(name: str):
    params = CudaForwardParams(name)
    trial_of("forward", name, params).run(params, CudaBackwardParams())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", variant_names("backward"))
def test_backward_variant(name: str, deterministic: bool):
    params = CudaBackwardParams(name, deterministic)
    trial_of("backward", name, params).run(CudaForwardParams(), params)


LONG = REAL | {
    "widest": long_case(1100, head_dim=512, causal=True),
    "widest_window": long_case(
        1000, 1399, heads=4, kv_heads=2, head_dim=400, dtype="float16", sliding_window=(300, 20)
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_at_real_lengths(name: str):
    def configs(inputs: AttentionInputs, direction: Direction) -> list[Any]:
        return [CudaForwardParams()] if direction == "forward" else [CudaBackwardParams(None, d) for d in (False, True)]

    check_at_real_lengths(BACKEND, LONG[name], configs)


def test_vmap_and_gradients():
    query, key, value = (jnp.stack([jnp.asarray(a)] * 2) for a in LONG["window"].arguments()[0])

    def loss(*arrays: Any) -> Any:
        return flash_attention(*arrays, causal=True, platform="cuda").astype(jnp.float32).sum()

    one = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query[0], key[0], value[0])
    both = jax.jit(jax.grad(lambda *a: jax.vmap(loss)(*a).sum(), argnums=(0, 1, 2)))(query, key, value)
    for a, b in zip(one[1:], both[1:], strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b[0]))
        assert np.array_equal(np.asarray(a), np.asarray(b[1]))


def test_inside_a_command_buffer():
    check_in_a_command_buffer(LONG["narrow"], platform="cuda")


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
def test_on_every_device_of_a_process():
    check_on_every_device(LONG["causal"], platform="cuda")
