"""Conformance of the Hopper backend of the cross-entropy, interpreted on the CPU; hostile cases, and its params."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import check_candidates
from tests.kernels.conftest import A100, H100
from tests.kernels.linear_cross_entropy.conformance import (
    CASES,
    KernelLossConformance,
    call_of,
    check,
    cotangents_of,
    directly,
    expected,
    served,
)
from tests.kernels.linear_cross_entropy.oracle import Found
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import aligned, even_blocks
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.hopper import backend
from tilewright.kernels.linear_cross_entropy.hopper.params import (
    WORKSPACE,
    HopperLossBackwardParams,
    HopperLossParams,
    kept_tokens,
    vocab_block,
)
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.ops.types import Direction

BACKEND = backend.HopperLinearCrossEntropy()
PAIR = MatmulParams(128, 128, 2, cluster_m=2, band=1)
SMALL = MatmulParams(64, 64, 2, band=2)
SIDE = MatmulParams(256, 128, 2, cluster_n=2)


def config(
    tokens: int | None, vocab: int, *, keep: bool, recompute: bool, tiles: tuple[MatmulParams, MatmulParams]
) -> PerDirection:
    return PerDirection(
        Choice("hopper", HopperLossParams(tokens, vocab, *tiles, keep)),
        Choice("hopper", HopperLossBackwardParams(None, vocab, tiles[1], recompute)),
    )


FORMS = {
    "kept": config(128, 1 << 20, keep=True, recompute=False, tiles=(PAIR, SMALL)),
    "kept, in blocks": config(24, 128, keep=True, recompute=False, tiles=(SMALL, SMALL)),
    "recomputed forward": config(64, 128, keep=False, recompute=False, tiles=(SIDE, PAIR)),
    "recomputed": config(24, 128, keep=False, recompute=True, tiles=(SMALL, SIDE)),
    "whole": config(None, 192, keep=False, recompute=True, tiles=(PAIR, PAIR)),
}


@pytest.fixture(autouse=True)
def few_sms(one_device: None) -> Iterator[None]:
    """Few programs, so that each has several items."""
    with mock.patch.object(backend, "num_sms", return_value=4):
        yield


def structs_of(args: Any, options: dict[str, Any]) -> LossInputs:
    return LinearCrossEntropy().prepare(*args, **options).structs


def run(args: Any, options: dict[str, Any], d_loss: Any, d_lse: Any, cfg: Any, races: bool = False) -> Found:
    with interpret_mosaic(detect_races=races):
        call = jax.jit(lambda *arrays: directly(BACKEND, arrays, options, d_loss, d_lse, cfg))
        return jax.block_until_ready(call(*args))


def forms_of(inputs: LossInputs) -> list[str]:
    """Those that serve a call: at least two that do not keep anything."""

    def serves(cfg: PerDirection) -> bool:
        return not any(
            BACKEND.config_reasons(inputs, H100, direction, each.params)
            for direction, each in (("forward", cfg.forward), ("backward", cfg.backward))
        )

    names = [name for name, cfg in FORMS.items() if serves(cfg)]
    assert {"recomputed", "whole"} <= set(names)
    return names if inputs.keeps_gradients else ["recomputed", "whole"]


class TestHopper(KernelLossConformance):
    """The cases in 16 bits."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_mosaic)
    forms = FORMS
    ruled_out = ("kept", "whole")
    edges = ("whole",)
    names = tuple(n for n in CASES if n not in ("float16", "two_dtypes", "no_tokens", "all_options_bfloat16"))

    def reasons(self, inputs: LossInputs, direction: Direction) -> list[str]:
        found = super().reasons(inputs, direction)
        assert not found, found
        return found

    def adapted(self, case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
        return served(case)

    def configs(self, inputs: LossInputs) -> list[Any]:
        return [FORMS[name] for name in forms_of(inputs)]


@pytest.mark.parametrize("form", list(FORMS))
def test_no_races(form: str):
    args, options = call_of(dataclasses.replace(served(CASES["all_options"]), tokens=70, logits_soft_cap=None))
    cotangents = cotangents_of(args[0], options)
    check(run(args, options, *cotangents, FORMS[form], races=True), expected(args, options, *cotangents), form)


def test_ignored_tokens_reach_nothing():
    """Whatever an ignored token holds."""
    args, options = call_of(dataclasses.replace(served(CASES["token_weights"]), tokens=40))
    ignored = np.asarray(args[2]) == -100
    x = jnp.where(ignored[:, None], jnp.nan, args[0])
    for form in ("kept", "whole"):
        got = run((x, *args[1:]), options, np.float32(1), None, FORMS[form])
        check(got, expected(args, options, 1.0, None), form)


MAPPED = {"x": (0, None, None), "all": (0, 0, 0)}


@pytest.mark.parametrize("mapped", list(MAPPED))
def test_vmap(mapped: str):
    axes = MAPPED[mapped]
    args, options = call_of(dataclasses.replace(served(CASES["sum"]), tokens=20))
    given = [x if axis is None else jnp.stack([x, x[::-1]]) for x, axis in zip(args, axes, strict=True)]
    # One block of everything: the interpreter's effects have no place in a loop that is mapped.
    cfg = config(None, 1 << 20, keep=False, recompute=True, tiles=(PAIR, SMALL))

    def one(*args: Any) -> Found:
        return directly(BACKEND, args, options, np.float32(1), None, cfg)

    with interpret_mosaic():
        got = jax.block_until_ready(jax.jit(jax.vmap(one, axes))(*given))
    for index in range(2):
        each = [x if axis is None else x[index] for x, axis in zip(given, axes, strict=True)]
        check({name: x[index] for name, x in got.items()}, expected(each, options, 1.0, None))


def test_reasons():
    base = served(CASES["float32"])
    reasons = lambda device=H100, direction="forward", **fields: BACKEND.not_supported_reasons(
        structs_of(*call_of(dataclasses.replace(base, **fields))), device, direction
    )
    assert not reasons()
    assert not reasons(vocab=50257, vocab_first=True)
    assert reasons(device=A100)
    assert reasons(d=20)
    assert reasons(dtype="float32")
    assert reasons(weight_dtype="float32")
    assert reasons(tokens=0)
    assert not reasons(vocab=7)
    # float16 has no gradients here, and a forward pass that keeps them neither.
    assert reasons(dtype="float16")
    assert not reasons(dtype="float16", reduction="none")
    assert reasons(dtype="float16", reduction="none", direction="backward")


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 8192, "d": 4096, "vocab": 131072},
        {"tokens": 32768, "d": 2560, "vocab": 128256},
        {"tokens": 16384, "d": 768, "vocab": 50257, "vocab_first": True},
        {"tokens": 3, "d": 8, "vocab": 8},
        {"tokens": 200_000, "d": 64, "vocab": 256000, "logits_soft_cap": 30.0, "label_smoothing": 0.1},
    ],
)
def test_params(fields: dict[str, Any]):
    """All that are listed serve the call, keep within the workspace, and survive a cache."""
    case = dataclasses.replace(served(CASES["float32"]), **fields)
    options = {name: getattr(case, name) for name in ("vocab_first", "label_smoothing", "logits_soft_cap")}
    struct = jax.ShapeDtypeStruct
    shape = (case.vocab, case.d) if case.vocab_first else (case.d, case.vocab)
    args = (struct((case.tokens, case.d), jnp.bfloat16), struct(shape, jnp.bfloat16), struct((case.tokens,), jnp.int32))
    inputs = structs_of(args, options)
    with mock.patch.object(backend, "num_sms", return_value=132):
        every = check_candidates(BACKEND, inputs, H100, least=1)
    for listed in every.values():
        for params in listed:
            if isinstance(params, HopperLossParams) and params.keep:
                assert params.block_tokens * case.vocab * 2 <= WORKSPACE
                assert params.block_vocab == aligned(case.vocab)
            elif case.tokens < 100_000:
                assert case.tokens * params.block_vocab * 2 <= 1.1 * WORKSPACE


def test_sizes_of_blocks():
    assert kept_tokens(8192, 131072, 2) == 2048
    assert kept_tokens(100, 1000, 2) == 100
    assert kept_tokens(8192, 1 << 30, 2) == 128
    assert vocab_block(8192, 131072, 2) == 32768
    assert vocab_block(1 << 30, 131072, 2) == 256
    for size, limit in ((50257, 50256), (301, 128), (1, 1), (256, 1000)):
        block = even_blocks(size, limit, 64)
        assert 1 <= block <= size
        count = -(-size // block)
        assert count * block - size < 64 * count


def test_wrong_params():
    with pytest.raises(ValueError, match="keep something"):
        HopperLossParams(None, 128, SMALL, SMALL, True)
    with pytest.raises(ValueError, match="tokens and classes"):
        HopperLossBackwardParams(0, 128, SMALL, True)
    inputs = structs_of(*call_of(served(CASES["smoothing"])))
    capped = inputs.replace(logits_soft_cap=2.0)
    kept = HopperLossParams(64, 304, SMALL, SMALL, True)
    assert not BACKEND.config_reasons(inputs, H100, "forward", kept)
    assert BACKEND.config_reasons(capped, H100, "forward", kept)
    assert BACKEND.config_reasons(inputs, H100, "backward", HopperLossBackwardParams(None, 30, SMALL, True))
