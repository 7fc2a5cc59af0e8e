"""The models of the training-step benchmark are the same function in every form, and its table reads them."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import steps
from benchmarks.step_models import MODELS, Model


def small(model: Model) -> Model:
    """A model of two layers that a CPU runs at once."""

    def cut(stack):
        heads, kv_heads = 4, 4 * stack.kv_heads // stack.heads
        windows = tuple(None if window is None else 7 for window in stack.windows)
        sizes = {"layers": 2, "d": 32, "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "ff": 64}
        return dataclasses.replace(stack, **sizes, windows=windows)

    encoder = None if model.encoder is None else (cut(model.encoder[0]), 24)
    return dataclasses.replace(model, batch=2, length=32, vocab=50, stack=cut(model.stack), encoder=encoder)


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_a_model_takes_the_same_steps(name, monkeypatch):
    monkeypatch.setitem(MODELS, name, small(MODELS[name]))
    forms = steps.FORMS if name == "llama_1b" else ("plain", "all")
    found = steps.measured(MODELS[name], forms, 1, ())
    wanted = found["plain"]["losses"]
    # The loss of random labels, which falls as parameters move.
    assert wanted[0] == pytest.approx(np.log(50), rel=0.6)
    assert wanted[2] < wanted[0]
    for form in forms:
        np.testing.assert_allclose(found[form]["losses"], wanted, rtol=1e-2)
        assert found[form]["step_s"] > 0
    text = steps.table(name, found)
    assert all(form in text for form in forms)


def test_a_form_takes_one_op_and_all_takes_every_one():
    taken = {form: {x.name for x in dataclasses.fields(steps.PLAIN) if _differs(form, x.name)} for form in steps.FORMS}
    assert taken["plain"] == set()
    assert taken["all, attention kept"] == taken["all"] == {"attention", "rms", "layer", "rope", "mlp", "loss"}
    assert set().union(*(taken[form] for form in steps.SWAPS)) == taken["all"]


def _differs(form, field):
    return getattr(steps.ops_of(form), field) is not getattr(steps.PLAIN, field)


def test_a_step_s_flops_are_those_of_its_matmuls():
    model = dataclasses.replace(small(MODELS["llama_1b"]), stack=small(MODELS["llama_1b"]).stack)
    w = jax.eval_shape(model.parameters, jax.random.key(0))
    matrices = sum(x.size for name, x in w["stack"].items() if x.ndim == 3) + w["embedding"].size
    attention = 12 * model.stack.layers * model.batch * model.length**2 / 2 * 4 * 8
    assert model.flops() == pytest.approx(6 * model.batch * model.length * matrices + attention)


def test_a_second_process_finds_what_the_first_one_kept():
    first, second = steps.starts("gpt2", "all")
    assert set(first) == set(second) == {"lower_s", "compile_s"}
    assert second["compile_s"] < first["compile_s"]
