"""Conformance of the cross-entropy's kernels for TPUs by JAX's interpreter, whose memory starts as NaN; and params."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.conformance import check_candidates
from tests.kernels.conftest import H100
from tests.kernels.linear_cross_entropy.conformance import (
    CASES,
    KernelLossConformance,
    call_of,
    check,
    cotangents_of,
    directly,
    expected,
)
from tests.support.tpu_interpret import TPUS, interpret_tpu
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.tpu.backend import TpuLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.tpu.params import (
    WORKSPACE,
    TpuLossBackwardParams,
    TpuLossParams,
    TpuTile,
    vocab_block,
)
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import linear_cross_entropy
from tilewright.ops.utils.known_devices import find_device

BACKEND = TpuLinearCrossEntropy()
V5E = find_device("TPU v5e").device
TILE = TpuTile(32, 256)
OTHER = TpuTile(32, 128)


def config(tokens: int | None, vocab: int, *, recompute: bool, tiles: tuple[TpuTile, TpuTile]) -> PerDirection:
    """Tiles that are smaller than the blocks, so that there are several along each dimension."""
    return PerDirection(
        Choice("tpu", TpuLossParams(tokens, vocab, *tiles)),
        Choice("tpu", TpuLossBackwardParams(tokens, vocab, tiles[1], recompute)),
    )


FORMS = {
    "recomputed forward": config(32, 256, recompute=False, tiles=(TILE, TILE)),
    "recomputed": config(32, 256, recompute=True, tiles=(TILE, TILE)),
    "whole": config(None, 1 << 20, recompute=True, tiles=(TILE, OTHER)),
}


def adapted(case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
    """The case as the kernels take it: d of whole registers, one dtype, not in float16."""
    dtype = "bfloat16" if case.dtype == "float16" else case.dtype
    return dataclasses.replace(case, d=128, dtype=dtype, weight_dtype=None)


class TestTpu(KernelLossConformance):
    backend = BACKEND
    device = V5E
    machine = staticmethod(interpret_tpu)
    forms = FORMS
    ruled_out = ("whole",)
    edges = ("whole",)
    names = tuple(name for name in CASES if name != "no_tokens")

    def reasons(self, inputs: LossInputs, direction: Any) -> list[str]:
        found = super().reasons(inputs, direction)
        assert not found, found
        return found

    def adapted(self, case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
        return adapted(case)

    def configs(self, inputs: LossInputs) -> list[Any]:
        if inputs.needs_sum or not inputs.keeps_gradients:
            return [FORMS["recomputed"]]
        return [FORMS["whole" if inputs.bias is None else "recomputed forward"]]


def run(args: Any, options: dict[str, Any], cfg: Any, **machine: Any) -> Any:
    cotangents = cotangents_of(args[0], options)
    with interpret_tpu(**machine):
        call = jax.jit(lambda *arrays: directly(BACKEND, arrays, options, *cotangents, cfg))
        got = jax.block_until_ready(call(*args))
    check(got, expected(args, options, *cotangents))
    return got


@pytest.mark.parametrize("name", TPUS)
def test_no_races(name: str):
    args, options = call_of(dataclasses.replace(adapted(CASES["all_options_bfloat16"]), tokens=40))
    dma = "eager" if name == "TPU7x" else "on_wait"
    run(args, options, FORMS["whole"], name=name, detect_races=True, dma=dma, seed=1)


def test_rows_in_parts():
    """Tiles of more rows than are computed at a time, of which the last has few tokens."""
    args, options = call_of(dataclasses.replace(adapted(CASES["smoothing"]), tokens=700, vocab=130))
    tile = TpuTile(512, 128)
    run(args, options, config(None, 256, recompute=True, tiles=(tile, tile)))


def test_ignored_tokens_reach_nothing():
    """Neither their NaN nor that of their weights."""
    args, options = call_of(dataclasses.replace(adapted(CASES["token_weights"]), ignored=0.4))
    skipped = args[2] == -100
    x = jnp.where(skipped[:, None], jnp.nan, args[0])
    weights = jnp.where(skipped, jnp.inf, options["token_weights"])
    for form in ("recomputed", "whole"):
        with interpret_tpu():
            given = (x, *args[1:]), options | {"token_weights": weights}
            got = directly(BACKEND, *given, np.float32(2), None, FORMS[form])
        check(got, expected(args, options, 2.0, None), form)
        assert not np.any(got["x"][skipped])


def test_vmap():
    args, options = call_of(dataclasses.replace(adapted(CASES["sum"]), tokens=20))
    given = [jnp.stack([x, x[::-1]]) for x in args]

    def one(*args: Any) -> Any:
        return directly(BACKEND, args, options, np.float32(1), None, FORMS["whole"])

    with interpret_tpu():
        got = jax.block_until_ready(jax.jit(jax.vmap(one))(*given))
    for index in range(2):
        want = expected([x[index] for x in given], options, 1.0, None)
        check({name: x[index] for name, x in got.items()}, want)


def test_reasons():
    base = adapted(CASES["float32"])

    def reasons(device: Any = V5E, direction: Any = "forward", **fields: Any) -> list[str]:
        args, options = call_of(dataclasses.replace(base, **fields))
        inputs = LinearCrossEntropy().prepare(*args, **options).structs
        return BACKEND.not_supported_reasons(inputs, device, direction)

    for name in TPUS:
        assert not reasons(find_device(name).device)
    assert not reasons(vocab=50257, vocab_first=True)
    assert reasons(H100)
    assert reasons(d=24)
    assert reasons(tokens=0)
    assert reasons(dtype="float16")
    assert reasons(weight_dtype="bfloat16")


@pytest.mark.parametrize("name", TPUS)
@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 8192, "d": 4096, "vocab": 131072},
        {"tokens": 32768, "d": 2560, "vocab": 128256},
        {"tokens": 4096, "d": 8192, "vocab": 151936},
        {"tokens": 8192, "d": 4096, "vocab": 128256, "dtype": "float32"},
        {"tokens": 16384, "d": 768, "vocab": 50257, "vocab_first": True},
        {"tokens": 3, "d": 128, "vocab": 8},
        {"tokens": 64, "d": 16384, "vocab": 256000, "logits_soft_cap": 30.0, "label_smoothing": 0.1},
    ],
)
def test_params(name: str, fields: dict[str, Any]):
    """All that are listed serve the call, keep within the workspace, and survive a cache."""
    case = dataclasses.replace(adapted(CASES["bfloat16"]), **{"d": 128} | fields)
    struct, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    shape = (case.vocab, case.d) if case.vocab_first else (case.d, case.vocab)
    inputs = LinearCrossEntropy().prepare(
        struct((case.tokens, case.d), dtype), struct(shape, dtype), struct((case.tokens,), jnp.int32),
        vocab_first=case.vocab_first, label_smoothing=case.label_smoothing, logits_soft_cap=case.logits_soft_cap,
    ).structs  # fmt: skip
    for listed in check_candidates(BACKEND, inputs, find_device(name).device, least=1).values():
        for params in listed:
            assert case.tokens * params.block_vocab * dtype.itemsize <= 1.1 * WORKSPACE
            size = min(params.block_vocab, -(-case.vocab // 128) * 128)
            assert params.gradient.dividing(size) >= min(256, params.gradient.block_classes, size)


def test_sizes_of_blocks():
    """One that divides the vocabulary, where one does; else one that leaves room for copies of the matrix."""
    struct = jax.ShapeDtypeStruct

    def block(tokens: int, d: int, vocab: int) -> int:
        arrays = struct((tokens, d), jnp.bfloat16), struct((d, vocab), jnp.bfloat16), struct((tokens,), jnp.int32)
        return vocab_block(LinearCrossEntropy().prepare(*arrays).structs, TpuTile(1024, 512))

    assert block(8192, 4096, 131072) == 32768
    assert block(32, 128, 1000) == 1024
    assert block(9000, 4096, 131072) == 16384
    for tokens, d, vocab in ((4096, 8192, 151936), (8192, 4096, 128256)):
        assert (tokens + d) * (block(tokens, d, vocab) - 512) * 2 <= WORKSPACE  # rounded up to steps of 512


def test_wrong_params():
    for rows, classes in ((8, 128), (20, 128), (300, 128), (16, 100), (True, 128)):
        with pytest.raises(ValueError, match="needs a multiple of"):
            TpuTile(rows, classes)
    with pytest.raises(ValueError, match="positive integer"):
        TpuLossParams(0, 128, TILE, TILE)
    with pytest.raises(ValueError, match="multiple of 128 classes"):
        TpuLossBackwardParams(None, 100, TILE)
    with pytest.raises(TypeError, match="bool"):
        TpuLossBackwardParams(None, 128, TILE, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TPUS)
def test_chosen_first(name: str):
    """Before XLA on a TPU; and not where its kernels do not serve a call."""

    def backends(d: int) -> set[str]:
        """Those of the loss and of its gradients."""
        struct = jax.ShapeDtypeStruct
        loss = jax.value_and_grad(lambda x, weight, labels: linear_cross_entropy(x, weight, labels))
        arrays = struct((512, d), jnp.bfloat16), struct((d, 1000), jnp.bfloat16), struct((512,), jnp.int32)
        return {each.choice.config.backend for each in tilewright.explain(loss, *arrays)}

    with tilewright.target_device(name):
        assert backends(256) == {"tpu"}
        assert backends(100) == {"xla"}
