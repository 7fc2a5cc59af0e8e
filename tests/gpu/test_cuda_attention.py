"""Every variant of attention in CUDA C++ that runs on a GPU, beside ``test_attention_backends.py``."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.kernels.flash_attention.conformance import (
    inputs_of,
    run_and_judge,
)
from tilewright.kernels.cuda.devices import capability_of
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaBackwardParams, CudaFlashAttention, CudaForwardParams
from tilewright.kernels.flash_attention.cuda.selection import TABLES
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

BACKEND = CudaFlashAttention()
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


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
