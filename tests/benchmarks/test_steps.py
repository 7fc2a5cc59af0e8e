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
        if stack.experts is not None:
            sizes |= {"experts": 6, "top": 2}
        return dataclasses.replace(stack, **sizes, windows=windows)

    encoder = None if model.encoder is None else (cut(model.encoder[0]), 24)
    return dataclasses.replace(model, batch=2, length=32, vocab=50, stack=cut(model.stack), encoder=encoder)


def _forms(name):
    """Every form of two models, of the others those that differ most."""
    return steps.forms_of(MODELS[name]) if name in ("llama_1b", "moe_small_experts") else ["plain", "all"]


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_a_model_takes_the_same_steps(name, monkeypatch):
    monkeypatch.setitem(MODELS, name, small(MODELS[name]))
    forms = _forms(name)
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


def test_what_does_not_fit_is_recorded_and_the_others_go_on(monkeypatch):
    monkeypatch.setitem(MODELS, "gpt2", small(MODELS["gpt2"]))
    compiled_step = steps.compiled_step

    def without_memory(model, form):
        if form == "plain":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwith details")
        return compiled_step(model, form)

    monkeypatch.setattr(steps, "compiled_step", without_memory)
    found = steps.measured(MODELS["gpt2"], ("plain", "all"), 1, ())
    assert found["plain"] == {"error": "RESOURCE_EXHAUSTED: Out of memory"}
    assert found["all"]["step_s"] > 0
    assert "RESOURCE_EXHAUSTED" in steps.table("gpt2", found)


def test_a_form_takes_one_op_and_all_takes_every_one():
    taken = {form: {x.name for x in dataclasses.fields(steps.PLAIN) if _differs(form, x.name)} for form in steps.FORMS}
    assert taken["plain"] == set()
    every = {"attention", "rms", "layer", "rope", "mlp", "experts", "loss"}
    assert taken["all, attention kept"] == taken["all"] == taken["all_today"] == every
    assert set().union(*(taken[form] for form in steps.SWAPS)) == every
    assert steps.ops_of("experts_today").experts is steps.ops_of("all_today").experts is not steps.OURS.experts


def _differs(form, field):
    return getattr(steps.ops_of(form), field) is not getattr(steps.PLAIN, field)


def test_a_step_s_flops_are_those_of_its_matmuls():
    model = dataclasses.replace(small(MODELS["llama_1b"]), stack=small(MODELS["llama_1b"]).stack)
    w = jax.eval_shape(model.parameters, jax.random.key(0))
    matrices = sum(x.size for name, x in w["stack"].items() if x.ndim == 3) + w["embedding"].size
    attention = 12 * model.stack.layers * model.batch * model.length**2 / 2 * 4 * 8
    assert model.flops() == pytest.approx(6 * model.batch * model.length * matrices + attention)


def test_of_experts_a_step_counts_those_of_a_token():
    model = small(MODELS["moe_small_experts"])
    dense = dataclasses.replace(model, stack=dataclasses.replace(model.stack, experts=None, ff=2 * 64))
    tokens, layers = model.batch * model.length, model.stack.layers
    assert model.flops() == pytest.approx(dense.flops() + 6 * tokens * layers * 32 * 6)


def test_a_second_process_finds_what_the_first_one_kept():
    first, second = steps.starts("gpt2", "all")
    assert set(first) == set(second) == {"lower_s", "compile_s"}
    assert second["compile_s"] < first["compile_s"]
