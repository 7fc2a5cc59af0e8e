"""Models with recurrent layers: their task, that they learn, and that token by token they say what they say of rows."""

import dataclasses

import jax
import numpy as np
import pytest
import train_recurrent
from train_recurrent import MODELS

families = pytest.mark.parametrize("family", MODELS)


def test_every_question_has_one_answer_in_the_row():
    tokens, labels = train_recurrent.recall(np.random.default_rng(0), 5, 6)
    assert tokens.shape == labels.shape == (5, 48)
    for row, wanted in zip(tokens, labels, strict=True):
        pairs = dict(row[:12].reshape(6, 2).tolist())
        assert len(pairs) == 6
        assert max(pairs) < 16 <= min(pairs.values())
        asked = row[12::2].reshape(3, 6)
        assert (np.sort(asked) == sorted(pairs)).all()
        assert wanted[12::2].tolist() == [pairs[key] for key in row[12::2]]
        assert (np.delete(wanted, np.arange(12, 48, 2)) == -100).all()


@families
def test_token_by_token_it_says_what_it_says_of_whole_rows(family):
    model = MODELS[family]
    w = train_recurrent.parameters(jax.random.key(1), model)
    tokens, _ = train_recurrent.recall(np.random.default_rng(0), 3, 2)
    logits = np.asarray(train_recurrent.whole(w, tokens, model))
    np.testing.assert_allclose(train_recurrent.decoded(w, tokens, 4, model), logits[:, 4:], atol=5e-4)
    # The past of the prompt must matter.
    other = tokens.copy()
    other[:, 1] = 16 + (other[:, 1] - 15) % 16
    assert np.abs(train_recurrent.decoded(w, other, 4, model) - logits[:, 4:]).max() > 1e-3


@families
def test_training_lowers_the_loss(family):
    model = MODELS[family]
    recurrent = dataclasses.replace(model, layers=(*model.layers[:2], *model.layers[-2:]))
    _, losses = train_recurrent.train(recurrent, steps=16, rows=8, pairs=2, rate=2e-2)
    assert np.mean(losses[-3:]) < losses[0] - 0.3
