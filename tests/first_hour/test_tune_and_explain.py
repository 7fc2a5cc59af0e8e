"""tune and explain take what programs hold: jitted by JAX, Flax or Equinox, with static arguments, or lowered."""

import functools
import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tilewright
from tests.support.draws import array
from tilewright.modules import FlashAttention, flash_attention
from tilewright.ops import ConfigSelectorChain, Tuner
from tilewright.ops.utils.describe import describe_config

X = array(np.ones((1, 32, 2, 8)), jnp.float32)


def layer(x, causal=False, name="full", *, scale=1.0, window=None):
    if name == "window":
        return flash_attention(x, x, x, causal=causal, sliding_window=window, softmax_scale=scale)
    return flash_attention(x, x, x, causal=causal, softmax_scale=scale)


class Model(eqx.Module):
    """A pytree with leaves that are not arrays."""

    weight: jax.Array
    activation: object = jax.nn.gelu

    def __call__(self, x):
        return self.activation(layer(x * self.weight, causal=True))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return layer(self.linear(x), causal=True)


def train_step(model, x):
    return nnx.value_and_grad(lambda model: model(x).sum())(model)


def optax_step(parameters, x, optimiser):
    """A step as Optax users write it; its optimiser is not an array."""
    gradients = jax.grad(lambda p: layer(x * p).sum())(parameters)
    updates, _ = optimiser.update(gradients, optimiser.init(parameters))
    return optax.apply_updates(parameters, updates)


BOTH = ["forward", "backward"]
CALLS = {
    "a function": lambda: (layer, (X,), {}, ["forward"]),
    "static keywords": lambda: (
        layer,
        (X,),
        {"causal": True, "name": "window", "window": 3, "scale": 0.5},
        ["forward"],
    ),
    "structs": lambda: (layer, (jax.ShapeDtypeStruct(X.shape, X.dtype),), {"causal": True}, ["forward"]),
    "jit": lambda: (jax.jit(layer, static_argnames=("causal", "name", "window")), (X,), {"causal": True}, ["forward"]),
    "static positions": lambda: (jax.jit(layer, static_argnums=(1, 2)), (X, True, "full"), {}, ["forward"]),
    "partial": lambda: (functools.partial(layer, causal=True), (X,), {}, ["forward"]),
    "grad": lambda: (jax.grad(lambda x: layer(x).sum()), (X,), {}, BOTH),
    "lowered": lambda: (jax.jit(lambda x: layer(x, True)).lower(X), (), {}, ["forward"]),
    "eqx.filter_jit": lambda: (eqx.filter_jit(lambda model, x: model(x)), (Model(jnp.ones(8)), X), {}, ["forward"]),
    "eqx lowered": lambda: (
        eqx.filter_jit(lambda model, x: model(x)).lower(Model(jnp.ones(8)), X),
        (),
        {},
        ["forward"],
    ),
    "eqx without jit": lambda: (
        eqx.filter_value_and_grad(lambda model, x: model(x).sum()),
        (Model(jnp.ones(8)), X),
        {},
        BOTH,
    ),
    "nnx.jit": lambda: (nnx.jit(train_step), (NnxModel(nnx.Rngs(0)), X), {}, BOTH),
    "nnx lowered": lambda: (nnx.jit(train_step).lower(NnxModel(nnx.Rngs(0)), X), (), {}, BOTH),
    "nnx without jit": lambda: (lambda model, x: model(x), (NnxModel(nnx.Rngs(0)), X), {}, ["forward"]),
    "optax": lambda: (optax_step, (jnp.ones(8), X, optax.adam(1e-3)), {}, BOTH),
}


@pytest.mark.parametrize("name", CALLS)
def test_explain_takes_it_and_says_what_would_run(name, capsys):
    function, args, kwargs, directions = CALLS[name]()
    explained = tilewright.explain(function, *args, **kwargs)
    assert [call.direction for call in explained] == directions
    assert {call.op for call in explained} == {"flash_attention"}
    assert all(call.config.backend == "xla" and call.step == "heuristic" for call in explained)
    assert all("hopper" in call.choice.rejected for call in explained)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["static keywords", "nnx.jit", "eqx lowered"])
def test_tune_takes_it_and_the_call_then_runs_what_was_measured(name):
    function, args, kwargs, directions = CALLS[name]()
    chain = ConfigSelectorChain()
    result = tilewright.tune(
        function, *args, **kwargs, chooser=chain, tuner=Tuner(warmup=0, iters=1), call_budget_s=0.1
    )
    assert [entry.direction for entry in result.entries] == directions
    assert {call.step for call in tilewright.explain(function, *args, **kwargs, chooser=chain)} == {"memory"}


def test_what_explain_returns_prints_well():
    explained = tilewright.explain(jax.grad(lambda x: layer(x, True).sum()), X)
    text, page = str(explained), explained._repr_html_()
    assert text.splitlines() == [
        "on cpu",
        "flash_attention of f32[1,32,2,8]×3 mask=causal softmax_scale=1",
        f"  forward:  {describe_config(explained[0].config)} (heuristic; not measured)",
        f"  backward: {describe_config(explained[1].config)} (heuristic; not measured)",
        "there is no GPU, which hopper, cuda, cudnn, fa4 and triton need; "
        "tilewright.target_device explains for one elsewhere",
        "2 calls: 2 on xla",
    ]
    assert page.count("<tr>") == 2
    assert page.count("there is no GPU") == 1
    assert repr(explained) == text
    assert str(tilewright.explain(jnp.sin, X)) == "no call of a kernel of tilewright"


def test_an_explicit_config_is_explained_as_that():
    cfg = tilewright.explain(layer, X)[0].config
    (call,) = tilewright.explain(lambda x: flash_attention(x, x, x, cfg=cfg), X)
    assert (call.step, call.config) == ("explicit", cfg)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tilewright.explain(3, X), "3 of type int is neither a function nor lowered"),
        (lambda: tilewright.tune(jax.jit(layer).lower(X), X), "is lowered already and takes no arguments"),
        (lambda: tilewright.tune(jax.jit(layer).lower(X).compile()), "give the function, or its Lowered"),
    ],
)
def test_what_is_no_function_is_refused(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_logging_says_what_each_traced_call_chose_and_nothing_by_default(caplog):
    fresh = X[:, :24]
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        jax.jit(lambda x: layer(x))(fresh)
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="tilewright"):
        jax.jit(lambda x: layer(x, True))(fresh)
        tilewright.explain(layer, fresh)
    (record,) = caplog.records
    assert record.name.startswith("tilewright.")
    assert "flash_attention forward f32[1,24,2,8]" in record.getMessage()
    assert "xla" in record.getMessage()
    assert "(heuristic)" in record.getMessage()


def test_logging_says_what_a_tuning_measures(caplog):
    with caplog.at_level(logging.INFO, logger="tilewright"):
        tilewright.tune(
            layer, X[:, :16], chooser=ConfigSelectorChain(), tuner=Tuner(warmup=0, iters=1), call_budget_s=0.1
        )
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("tuning flash_attention forward f32[1,16,2,8]") for message in messages)
    assert any(message.startswith("tuned flash_attention forward: xla") for message in messages)


def test_the_kernels_own_explain_still_is_there(capsys):
    assert tilewright.ops.default_executor().explain(FlashAttention(), X, X, X).op == "flash_attention"
    assert "xla" in capsys.readouterr().out
