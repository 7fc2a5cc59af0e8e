"""Conformance of the XLA backend of the vocabulary losses; its blocks, its memory, what a program leaves out."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from tests.kernels.linear_cross_entropy.conformance import (
    CASES,
    LossConformance,
    call_of,
    check,
    cotangents_of,
    expected,
    through,
)
from tests.kernels.linear_cross_entropy.oracle import cross_entropy
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.xla.backend import XlaLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.xla.params import XlaLossBackwardParams, XlaLossParams, block_sizes
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import linear_cross_entropy
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.serialize import tagged, untagged

CPU = Device("cpu", "cpu", cores=8, fingerprint="cpu")


def config(tokens: int | None, vocab: int, recompute: bool = True) -> PerDirection:
    return PerDirection(
        Choice("xla", XlaLossParams(tokens, vocab)),
        Choice("xla", XlaLossBackwardParams(tokens, vocab, recompute)),
    )


FORMS = {
    "gradients in the forward pass": config(8, 128, recompute=False),
    "with the whole vocabulary": config(16, 1 << 20, recompute=False),
    "recomputed": config(8, 128),
    "recomputed in one block": config(64, 128),
    "whole": config(None, 128),
    "whole, kept": config(None, 1 << 20, recompute=False),
}


class TestXla(LossConformance):
    backend = XlaLinearCrossEntropy()
    forms = FORMS


@given(
    tokens=st.integers(1, 40),
    d=st.integers(1, 20),
    vocab=st.integers(1, 300),
    block_tokens=st.sampled_from([None, 1, 7, 16]),
    block_vocab=st.integers(1, 330),
    ignored=st.sampled_from([0.0, 0.5, 1.1]),
    options=st.fixed_dictionaries(
        {
            "vocab_first": st.booleans(), "bias": st.booleans(), "token_weights": st.booleans(),
            "label_smoothing": st.sampled_from([0.0, 0.2]), "z_loss": st.sampled_from([0.0, 0.05]),
            "logits_soft_cap": st.sampled_from([None, 1.5]), "reduction": st.sampled_from(["mean", "sum", "none"]),
            "return_lse": st.booleans(), "scale": st.sampled_from([1e-3, 1.0, 30.0]),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
        }
    ),
    recompute=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_sizes(
    tokens: int, d: int, vocab: int, block_tokens: Any, block_vocab: int, ignored: float, options: Any,
    recompute: bool, seed: int,
):  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda *_: 1)
        case = LinearCrossEntropyCase("", tokens=tokens, d=d, vocab=vocab, ignored=ignored, **options)
        args, kwargs = call_of(case, seed)
        cotangents = cotangents_of(args[0], kwargs)
        cfg = config(block_tokens, block_vocab, recompute)
        got = jax.jit(lambda *xs: through(LinearCrossEntropy(), xs, kwargs, *cotangents, cfg))(*args)
    near(got, expected(args, kwargs, *cotangents), args, cotangents, case)


def near(got: Any, want: Any, args: Any, cotangents: Any, case: LinearCrossEntropyCase) -> None:
    """Agreement within the errors that logits have, which are relative to the largest one; loose, but of any size."""
    size = np.abs(want["lse"]).max() + case.scale * 6
    error = 4e-6 * (1 + size) + (0.02 if case.dtype == "bfloat16" else 0)
    x, weight = (np.abs(np.asarray(each, np.float64)).max() for each in args[:2])
    largest = 2 * (np.abs(cotangents[0]).max() * (1 + 2 * case.z_loss * size) + 2)
    if cotangents[1] is not None:
        largest = largest + np.abs(cotangents[1]).max()
    scales = {"loss": 1 + size**2, "lse": 1, "x": weight, "weight": x, "bias": 1, "token_weights": 1 + size**2}
    for name, found in got.items():
        summed = case.tokens if name in ("weight", "bias", "loss") else 1
        allowed = error * scales[name] * largest * summed
        np.testing.assert_allclose(found.astype(np.float32), want[name], atol=allowed, rtol=error, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_ignored_tokens_reach_nothing(form: str, one_device: None):
    """Neither their NaN nor that of their weights and cotangents."""
    args, options = call_of(dataclasses.replace(CASES["all_options"], ignored=0.4))
    kernel, skipped = LinearCrossEntropy(), args[2] == -100
    run = jax.jit(lambda xs, w: through(kernel, xs, options | {"token_weights": w}, np.float32(2.0), None, FORMS[form]))
    want = run(args, options["token_weights"])
    x = jnp.where(skipped[:, None], jnp.nan, args[0])
    got = run((x, *args[1:]), jnp.where(skipped, jnp.inf, options["token_weights"]))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(got["x"][skipped])
    assert not np.any(got["token_weights"][skipped])


@pytest.mark.parametrize("form", ["gradients in the forward pass", "recomputed", "whole"])
def test_labels_out_of_range_are_nan_for_their_tokens_alone(form: str, one_device: None):
    args, options = call_of(CASES["none"])
    wrong = jnp.asarray(args[2]).at[0, 0, :3].set(jnp.array([301, -1, 2**31 - 1]))
    run = jax.jit(lambda labels: linear_cross_entropy(*args[:2], labels, **options, cfg=FORMS[form]))
    got, want = np.array(run(wrong)), np.array(run(args[2]))
    assert np.all(np.isnan(got[0, 0, :3]))
    got[0, 0, :3] = want[0, 0, :3] = 0
    np.testing.assert_array_equal(got, want)
    mean = jax.jit(lambda labels: linear_cross_entropy(*args[:2], labels, cfg=FORMS[form]))
    assert np.isnan(mean(wrong))


def compiled(case: LinearCrossEntropyCase, cfg: Any, gradients: bool = True) -> Any:
    args, options = call_of(case)
    loss = lambda x, weight: linear_cross_entropy(x, weight, args[2], **options, cfg=cfg)
    return jax.jit(jax.value_and_grad(loss, (0, 1)) if gradients else loss).lower(*args[:2]).compile()


@pytest.mark.parametrize("form", ["gradients in the forward pass", "recomputed", "whole"])
def test_memory_is_bounded(form: str, one_device: None):
    """A tenth of the logits, beside the operands' gradients in float32."""
    case = LinearCrossEntropyCase("", tokens=4096, d=16, vocab=4096)
    cfg = config(
        None if form == "whole" else 128, 256 if form != "whole" else 128, form != "gradients in the forward pass"
    )
    temporary = compiled(case, cfg).memory_analysis().temp_size_in_bytes
    assert temporary < 4 * 4096 * 4096 / 10


def test_a_program_without_gradients_does_not_compute_them(one_device: None):
    case = LinearCrossEntropyCase("", tokens=256, d=64, vocab=512)
    kept = config(64, 128, recompute=False)
    alone, recomputed = compiled(case, kept, gradients=False), compiled(case, config(64, 128))
    dots = lambda program: program.as_text().count("dot(") + program.as_text().count("__onednn$matmul")
    assert dots(alone) == 1
    assert dots(recomputed) == 4
    assert dots(compiled(case, kept)) == 3
    args, options = call_of(case)
    # XLA does not find that a carry of two nested loops is dead, so the vocabulary is one block here.
    kept = config(64, 1 << 20, recompute=False)
    frozen = jax.jit(jax.grad(lambda x: linear_cross_entropy(x, *args[1:], **options, cfg=kept)))
    assert dots(frozen.lower(args[0]).compile()) == 2


def test_ignored_tokens_cost_nothing(one_device: None):
    """The loop runs over blocks of those that are not ignored."""
    args, _ = call_of(dataclasses.replace(CASES["float32"], tokens=256))
    counted: list[int] = []

    def counting(x: Any) -> Any:
        counted.append(1)
        return x

    from tilewright.kernels.linear_cross_entropy.blocks.tokens import TokenBlocks

    labels = jnp.where(jnp.arange(256) % 4 == 0, args[2], -1)

    def step(begin: Any, rows: Any, carry: Any) -> Any:
        jax.debug.callback(counting, begin)
        return carry + (rows < 256).sum()

    blocks = TokenBlocks.of(labels != -1, 16)
    assert int(blocks.over(step, jnp.int32(0), ())) == 64
    jax.effects_barrier()
    assert len(counted) == 4


def test_float64(one_device: None):
    args, options = call_of(CASES["all_options"])
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
        options = options | {name: wide(options[name]) for name in ("bias", "token_weights")}
        for cfg in FORMS.values():
            got = through(LinearCrossEntropy(), (wide(args[0]), wide(args[1]), args[2]), options, 1.0, None, cfg)
            for name, exact in expected(args, options, 1.0, None).items():
                if name in got:
                    assert got[name].dtype == np.float64
                    np.testing.assert_allclose(got[name], exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("vocab", [50257, 257_000])
def test_large_vocabularies(vocab: int, one_device: None):
    case = LinearCrossEntropyCase("", tokens=9, d=4, vocab=vocab, dtype="bfloat16", ignored=0.2, scale=3.0)
    args, options = call_of(case)
    got = jax.jit(lambda *xs: through(LinearCrossEntropy(), xs, options, np.float32(1.0), None, None))(*args)
    check(got, expected(args, options, 1.0, None))


def test_more_logits_than_32_bits_count(one_device: None):
    """257 000 classes and 8400 tokens: of most tokens all logits are equal, of the last one they are not."""
    vocab, tokens = 257_000, 8400
    assert vocab * tokens > 2**31
    x = jnp.zeros((tokens, 1)).at[-1, 0].set(1.0)
    weight = jnp.linspace(-1.0, 1.0, vocab)[None]
    labels = jnp.full(tokens, vocab - 1)
    loss, (d_x, d_weight) = jax.jit(
        jax.value_and_grad(lambda *xs: linear_cross_entropy(*xs, labels, reduction="sum"), (0, 1))
    )(x, weight)
    want = cross_entropy(x[-1:], weight, labels[-1:], reduction="sum")
    np.testing.assert_allclose(loss, want["loss"] + (tokens - 1) * np.log(vocab), rtol=1e-5)
    np.testing.assert_allclose(d_x[-1], want["x"][0], rtol=1e-4)
    np.testing.assert_allclose(d_x[0], np.mean(np.asarray(weight)) - 1.0, rtol=1e-4)
    np.testing.assert_allclose(d_weight, want["weight"], rtol=1e-4, atol=1e-6)


def test_bfloat16_gradients_are_summed_in_float32(one_device: None):
    """Many blocks of tokens: summed in bfloat16, small parts would be lost beside the sum so far."""
    case = LinearCrossEntropyCase("", tokens=4096, d=2, vocab=3, dtype="bfloat16", reduction="sum")
    args, options = call_of(case)
    args = (jnp.abs(args[0]), *args[1:])
    want = expected(args, options, 1.0, None)
    for recompute in (False, True):
        cfg = config(16, 128, recompute)
        got = jax.jit(lambda *xs, cfg=cfg: through(LinearCrossEntropy(), xs, options, np.float32(1), None, cfg))(*args)
        scale = np.abs(want["weight"]).max()
        np.testing.assert_allclose(got["weight"].astype(np.float32), want["weight"], atol=8e-3 * scale)


def test_params():
    for params in (XlaLossParams(16, 128), XlaLossParams(None, 7), XlaLossBackwardParams(8, 128, recompute=False)):
        assert untagged(tagged(params)) == params
    with pytest.raises(ValueError, match="XlaLossParams needs a positive integer, got block_vocab=0"):
        XlaLossParams(None, 0)
    with pytest.raises(ValueError, match="got block_tokens=True"):
        XlaLossBackwardParams(True, 8)
    with pytest.raises(TypeError, match=r"needs a bool, got self\.recompute=1"):
        XlaLossBackwardParams(8, 8, recompute=1)  # type: ignore[arg-type]
    for vocab in (1, 100, 32768, 257_000):
        for whole in (False, True):
            tokens, classes = block_sizes(8192, vocab, CPU, whole=whole)
            assert (tokens is None) == whole
            assert 1 <= classes <= vocab
            assert (8192 if whole else min(tokens or 0, 64)) * min(classes, 128) * 4 <= 64 << 20


def test_candidates(one_device: None):
    backend = XlaLinearCrossEntropy()
    args, options = call_of(dataclasses.replace(CASES["float32"], vocab=32768))
    inputs = LinearCrossEntropy().prepare(*args, **options).structs
    for direction in ("forward", "backward"):
        candidates = list(backend.candidates(inputs, current_device(), direction))
        assert candidates[0] == backend.heuristic(inputs, current_device(), direction)
        assert len(candidates) == len(set(candidates)) > 2
    forms = {params.recompute for params in candidates}
    assert forms == {False, True}
