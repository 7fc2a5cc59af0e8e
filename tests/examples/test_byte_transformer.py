"""The demo's model and text."""

import dataclasses
import functools
import zlib

import byte_transformer as bt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stdlib_text

from tests.support.tiny_transformer import MODEL
from tilewright.modules import flash_attention

ONE_LAYER = dataclasses.replace(MODEL, layers=1)
OPTIMIZER = bt.OptimizerConfig(steps=120, warmup=4, peak=2e-2)


def ours(query, key, value, *, sliding_window):
    return flash_attention(query, key, value, causal=True, sliding_window=sliding_window)


def theirs(query, key, value, *, sliding_window):
    window = None if sliding_window is None else (sliding_window, 0)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=window)


@pytest.fixture(scope="module")
def parameters():
    return bt.initial_parameters(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 33)), jnp.int32)


def test_both_attentions_give_the_same_loss_and_gradients(parameters, tokens):
    (our_loss, our_gradients), (their_loss, their_gradients) = (
        jax.jit(jax.value_and_grad(functools.partial(bt.loss, config=MODEL, attention=attention)))(parameters, tokens)
        for attention in (ours, theirs)
    )
    np.testing.assert_allclose(our_loss, their_loss, rtol=1e-6)
    for left, right in zip(jax.tree.leaves(our_gradients), jax.tree.leaves(their_gradients), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6 + 1e-4 * float(jnp.abs(right).max()))
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(their_gradients))


def test_a_large_vocabulary_has_the_same_loss(tokens):
    """Without logits in memory, and with them."""
    model = dataclasses.replace(ONE_LAYER, vocabulary=bt.LARGE_VOCABULARY)
    parameters = bt.initial_parameters(model, jax.random.key(0))

    def plain(parameters, tokens):
        log_p = jax.nn.log_softmax(bt.logits(parameters, tokens[:, :-1], model, ours))
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()

    loss = functools.partial(bt.loss, config=model, attention=ours)
    got, want = (jax.jit(jax.value_and_grad(each))(parameters, 9 * tokens) for each in (loss, plain))
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6 + 1e-4 * float(jnp.abs(right).max()))


def test_no_logit_depends_on_a_later_byte(parameters, tokens):
    logits = jax.jit(functools.partial(bt.logits, config=MODEL, attention=ours))
    before, after = logits(parameters, tokens), logits(parameters, tokens.at[:, 20:].set(7))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.allclose(before[:, 20], after[:, 20])


def test_adamw_without_decay_and_clipping_is_the_published_update():
    optimizer = bt.OptimizerConfig(steps=10, warmup=1, weight_decay=0.0, clip_norm=1e9)
    state = bt.initial_state(ONE_LAYER, jax.random.key(2))
    text = jnp.ones((1, 9), jnp.int32)
    gradients = jax.jit(jax.grad(functools.partial(bt.loss, config=ONE_LAYER, attention=theirs)))(
        state.parameters, text
    )
    step = jax.jit(functools.partial(bt.train_step, model=ONE_LAYER, optimizer=optimizer, attention=theirs))
    after, _ = step(state, text)
    # The first unbiased step of Adam moves every parameter by the rate along the gradient's sign.
    for old, new, gradient in zip(*map(jax.tree.leaves, (state.parameters, after.parameters, gradients)), strict=True):
        moved = np.asarray(jnp.abs(gradient) > 1e-5)
        np.testing.assert_allclose(
            np.asarray(new - old)[moved], -optimizer.peak * np.sign(gradient)[moved], rtol=1e-2, atol=1e-7
        )


def test_training_learns_a_repeating_text():
    step = jax.jit(functools.partial(bt.train_step, model=MODEL, optimizer=OPTIMIZER, attention=ours))
    state = bt.initial_state(MODEL, jax.random.key(0))
    text = jnp.asarray(np.frombuffer(b"def f(x):\n    return x\n" * 3, np.uint8)[None, :49], jnp.int32)
    losses = []
    for _ in range(OPTIMIZER.steps):
        state, loss = step(state, text)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-1] < 0.3
    drawn = bt.generate(
        state.parameters, text[0, :24], jax.random.key(1), count=8, config=MODEL, attention=ours, temperature=0.1
    )
    assert drawn.shape == (8,)
    assert ((drawn >= 0) & (drawn < 256)).all()


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"self.heads=3, self.kv_heads=2"):
        bt.ModelConfig(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match=r"self.head_dim=7"):
        bt.ModelConfig(head_dim=7)


def test_the_standard_library_is_split_by_file():
    files = stdlib_text.source_files()
    assert {"argparse.py", "os.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)
    train, validation = stdlib_text.load_text()
    assert 0.01 < len(validation) / len(train) < 0.2
    assert len(train) > 3_000_000
    # Not a line of any length of the held-out files' code may be memorised: no held-out file is in the training text.
    held_out = validation.tobytes().split(b"\0")[0]
    assert held_out not in train.tobytes()


def test_too_little_text_is_an_error_that_names_the_place(tmp_path):
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        stdlib_text.load_text(tmp_path)


def test_batches_are_contiguous_and_repeat_with_the_seed():
    text = np.arange(251, dtype=np.uint8)
    batch = next(stdlib_text.batches(text, 3, 10, seed=4))
    assert batch.shape == (3, 11)
    assert (np.diff(batch) == 1).all()
    again = next(stdlib_text.batches(text, 3, 10, seed=4))
    assert zlib.crc32(batch.tobytes()) == zlib.crc32(again.tobytes())
