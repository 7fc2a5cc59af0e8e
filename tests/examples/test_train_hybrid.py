"""The hybrid model: its task, that it learns, and that token by token it says what it says of whole rows."""

import jax
import numpy as np
import train_hybrid

MODEL = train_hybrid.Model(periods=2, width=16, key_heads=1, value_heads=2, heads=2, kv_heads=1, head_dim=8, hidden=16)


def test_every_question_has_one_answer_in_the_row():
    tokens, labels = train_hybrid.recall(np.random.default_rng(0), 5, 6, MODEL)
    assert tokens.shape == labels.shape == (5, 48)
    for row, wanted in zip(tokens, labels, strict=True):
        pairs = dict(row[:12].reshape(6, 2).tolist())
        assert len(pairs) == 6
        assert max(pairs) < 16 <= min(pairs.values())
        asked = row[12::2].reshape(3, 6)
        assert (np.sort(asked) == sorted(pairs)).all()
        assert wanted[12::2].tolist() == [pairs[key] for key in row[12::2]]
        assert (np.delete(wanted, np.arange(12, 48, 2)) == -100).all()


def test_token_by_token_it_says_what_it_says_of_whole_rows():
    w = train_hybrid.parameters(jax.random.key(1), MODEL)
    tokens, _ = train_hybrid.recall(np.random.default_rng(0), 3, 4, MODEL)
    whole, _ = jax.jit(train_hybrid.features, static_argnums=2)(w, tokens, MODEL)
    logits = np.asarray(whole @ w["embedding"].T)
    np.testing.assert_allclose(train_hybrid.decoded(w, tokens, 8, MODEL), logits[:, 8:], atol=5e-4)
    # Both kinds of layers must matter, and the past of the prompt.
    other = tokens.copy()
    other[:, 1] = 16 + (other[:, 1] - 15) % 16
    assert np.abs(train_hybrid.decoded(w, other, 8, MODEL) - logits[:, 8:]).max() > 1e-3


def test_training_lowers_the_loss():
    _, losses = train_hybrid.train(MODEL, steps=12, rows=8, pairs=2, rate=2e-2)
    assert np.mean(losses[-3:]) < losses[0] - 0.3
