"""Every config of the cross-entropy in Triton that selection or tuning can take compiles without spills."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossResults
from tilewright.kernels.linear_cross_entropy.triton.backend import TritonLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.triton.params import TritonLossParams
from tilewright.kernels.triton import recorded_launches
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device

pytest.importorskip("triton")

from tilewright.kernels.triton.compiler import report

BACKEND = TritonLinearCrossEntropy()
CARDS = {
    "a100": find_device("NVIDIA A100-SXM4-80GB").device,
    "rtx4090": find_device("NVIDIA GeForce RTX 4090").device,
    "h100": find_device("NVIDIA H100 80GB HBM3").device,
}
CALLS: dict[str, dict[str, Any]] = {
    "large": {},
    "tied_with_cap": {"d": 2304, "vocab": 256000, "vocab_first": True, "logits_soft_cap": 30.0},
    "cap": {"logits_soft_cap": 30.0},
    "smoothing": {"bias": True, "label_smoothing": 0.1, "vocab_first": True},
    "all": {"bias": True, "label_smoothing": 0.1, "logits_soft_cap": 30.0, "gradient_epsilon": 1e-6},
    "float32": {"d": 1024, "vocab": 32768, "dtype": "float32", "bias": True},
    "float16": {"d": 1024, "vocab": 32768, "dtype": "float16", "vocab_first": True},
    "odd": {"tokens": 1000, "d": 130, "vocab": 50257},
    "odd_tied": {"d": 1056, "vocab": 50257, "vocab_first": True, "logits_soft_cap": 30.0},
    "masked": {"vocab": 151936, "vocab_first": True},
    "masked_smoothing": {"vocab": 151936, "bias": True, "label_smoothing": 0.1},
    "few_tokens": {"tokens": 20},
}

TUNED = ("large", "float32", "odd")
"""Every candidate of these calls is compiled; of the other calls only the first choice."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One config of one call, as shapes, for a card."""

    name: str
    card: str
    inputs: LossInputs
    direction: Direction
    params: Any


def inputs_of(
    tokens: int = 8192, d: int = 4096, vocab: int = 131072, dtype: str = "bfloat16", bias: bool = False,
    vocab_first: bool = False, **options: Any,
) -> LossInputs:  # fmt: skip
    def array(*shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return LossInputs(
        array(tokens, d),
        array(vocab, d) if vocab_first else array(d, vocab),
        array(tokens, dtype="int32"),
        array(vocab) if bias else None,
        vocab_first=vocab_first,
        keeps_gradients=True,
        **options,
    )


def compilations() -> Iterator[Compilation]:
    directions: tuple[Direction, ...] = ("forward", "backward")
    for (name, call), (card, device), direction in itertools.product(CALLS.items(), CARDS.items(), directions):
        inputs = inputs_of(**call)
        candidates: list[Any] = list(BACKEND.candidates(inputs, device, direction))
        # Other block sizes, or gradients that are there already, do not give other kernels worth compiling.
        if direction == "backward":
            candidates = [each for each in candidates if each.recompute]
        tile = lambda each: each.statistics if isinstance(each, TritonLossParams) else each.gradient
        distinct = {tile(each): each for each in reversed(candidates)}
        chosen = [each for each in candidates if distinct[tile(each)] is each]
        for number, params in enumerate(chosen if name in TUNED else chosen[:1]):
            yield Compilation(f"{name}-{card}-{direction}-{number}", card, inputs, direction, params)


def trace(compilation: Compilation) -> None:
    inputs, params = compilation.inputs, compilation.params
    if compilation.direction == "forward":
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, params), inputs)
        return
    by_token = jax.ShapeDtypeStruct(inputs.labels.shape, jnp.float32)
    results = LossResults((by_token, by_token, by_token))
    one = LossResults(total=jax.ShapeDtypeStruct((), jnp.float32))
    jax.eval_shape(lambda *given: BACKEND.backward(*given, params), inputs, results, one)


@pytest.mark.parametrize("compilation", list(compilations()), ids=lambda compilation: compilation.name)
def test_compiles_without_spills(compilation: Compilation) -> None:
    device = CARDS[compilation.card]
    with tilewright.target_device(device.name), recorded_launches() as launches:
        trace(compilation)
    assert device.capability is not None
    reports = [report(launch, device.capability) for launch in launches]
    names = {each.name for each in reports}
    keeps = isinstance(compilation.params, TritonLossParams) and compilation.params.keep
    both = isinstance(compilation.params, TritonLossParams) and not keeps
    assert names == ({"tile_statistics"} if keeps else set()) | (
        {"tile_statistics", "tile_gradient"} if both else set()
    ) | ({"tile_gradient"} if compilation.direction == "backward" else set())
    faults = [fault for each in reports for fault in each.faults]
    assert faults == [], [(each.name, each.registers) for each in reports]
