"""The op and its losses: what models of Hugging Face compute, ties, what is not finite, and how it is split."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from tests.support.draws import draw
from tilewright.modules import load_balancing_loss, router_z_loss, top_k_router

RECORD = json.loads((Path(__file__).parent / "hugging_face.json").read_text())
"""Made by the libraries that ``made_by`` names, whose routers got an identity as their weight.

Experts of a token are in their own order, since torch promises none; ``gradient`` is that of ``Σ i · weight`` where i
counts the experts in this order from 1.
"""
MODELS: dict[str, Any] = RECORD["models"]
LOGITS = draw(6, 16)
EVERY = [
    {"scoring": scoring, "normalize": normalize, **more}
    for scoring in ("softmax", "sigmoid", "softmax_after")
    for normalize in ((True,) if scoring == "softmax_after" else (True, False))
    for more in ({}, {"bias": draw(16, seed=3), "num_groups": 4, "top_groups": 2})
]
"""Every scoring, by logits alone and by all that changes the choice."""


def name_of(options: dict[str, Any]) -> str:
    return "-".join([options["scoring"], *("sum" * options["normalize"],), *("groups" * ("bias" in options),)])


every = pytest.mark.parametrize("options", EVERY, ids=name_of)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_router(name: str):
    model = MODELS[name]
    bias = {"bias": jnp.array(model["bias"])} if "bias" in model else {}

    def by_expert(logits: Any) -> Any:
        weights, experts = top_k_router(logits, model["k"], **bias, **model["options"])
        order = jnp.argsort(experts)
        weights = jnp.take_along_axis(weights, order, -1)
        return (weights * jnp.arange(1.0, model["k"] + 1)).sum(), (weights, jnp.take_along_axis(experts, order, -1))

    gradient, (weights, experts) = jax.grad(by_expert, has_aux=True)(jnp.array(model["logits"]))
    np.testing.assert_array_equal(experts, model["experts"])
    np.testing.assert_allclose(weights, model["weights"], rtol=1e-5)
    np.testing.assert_allclose(gradient, model["gradient"], atol=1e-6)


@every
def test_best_first_and_ties_go_to_the_lower_index(options: dict[str, Any]):
    options = {**options, "bias": None} if "bias" in options else options
    logits = jnp.array([[2.0, 1.0, 2.0, 0.0], [-0.0, 0.0, 0.0, -0.0], [40.0, 50.0, 50.0, 60.0]])
    limits = {"num_groups": 2, "top_groups": 2} if "num_groups" in options else {}
    _, experts = top_k_router(logits, 3, **{**options, **limits})
    np.testing.assert_array_equal(experts, [[0, 2, 1], [0, 1, 2], [3, 1, 2]])


def test_ties_of_groups_and_of_biased_scores():
    same = jnp.zeros((1, 8))
    assert top_k_router(same, 3, num_groups=4, top_groups=2)[1].tolist() == [[0, 1, 2]]
    assert top_k_router(same, 3, bias=jnp.array([0.0, 0, 1, 0, 0, 1, 0, 0]))[1].tolist() == [[2, 5, 0]]
    bias = jnp.array([0.3, 0.0, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0])  # the sum of two counts and not the best
    assert top_k_router(same, 2, bias=bias, num_groups=4, top_groups=1)[1].tolist() == [[2, 3]]


@every
@pytest.mark.parametrize("missing", [np.nan, -np.inf])
def test_what_is_missing_loses_and_has_weight_zero(options: dict[str, Any], missing: float):
    """As if those experts did not exist; with too few others they are chosen, lower index first."""
    absent = np.array([0, 1, 2, 5, 8, 9, 10, 11])  # a whole group among them
    logits = LOGITS.at[:, absent].set(missing).at[0, jnp.array([3, 4, 6, 7, 12, 13])].set(missing)
    logits = logits.at[1].set(missing)

    def loss(logits: Any) -> Any:
        weights, experts = top_k_router(logits, 3, **options)
        return (weights * jnp.arange(1.0, 4.0)).sum(), (weights, experts)

    gradient, (weights, experts) = jax.jit(jax.grad(loss, has_aux=True))(logits)
    assert np.isfinite(gradient).all()
    assert np.isfinite(weights).all()
    assert not np.isin(experts[2:], absent).any()
    assert set(experts[0, :2].tolist()) == {14, 15}
    assert not weights[0, 2]
    assert not weights[1].any()
    assert not gradient[1].any()
    assert not gradient[:, absent].any()
    assert all(len(set(row)) == 3 for row in experts.tolist())
    if "num_groups" not in options:
        assert experts[:2].tolist() == [[*experts[0, :2].tolist(), 0], [0, 1, 2]]
    if options["normalize"]:
        np.testing.assert_allclose(weights.sum(-1), [1, 0, 1, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after"])
def test_a_bias_does_not_lift_what_is_missing(scoring: Any):
    logits, bias = jnp.array([-jnp.inf, -200.0, jnp.nan, -300.0]), jnp.array([9.0, 0.0, 9.0, jnp.nan])
    assert top_k_router(logits, 3, scoring=scoring, bias=bias)[1].tolist() == [1, 0, 2]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after"])
def test_an_infinite_logit_is_chosen_first_with_a_bias_and_with_groups(scoring: Any):
    logits, bias = jnp.array([0.0, 3.0, 1.0, jnp.inf, 2.0, -1.0]), jnp.array([0.0, 0.0, 0.25, 0.5, 0.0, 0.0])
    groups: dict[str, Any] = {"num_groups": 3, "top_groups": 2}
    for options in ({"bias": bias}, groups, {"bias": bias, **groups}):
        assert top_k_router(logits, 2, scoring=scoring, **options)[1].tolist()[0] == 3


def test_few_experts_in_the_best_groups_leave_the_others_before_what_is_missing():
    logits = jnp.array([-jnp.inf, 5.0, -jnp.inf, -jnp.inf, -jnp.inf, 4.0, 3.0, -jnp.inf])
    for scoring in ("softmax", "sigmoid", "softmax_after"):
        options: dict[str, Any] = {"scoring": scoring, "num_groups": 4, "top_groups": 1}
        assert top_k_router(logits, 2, **options)[1].tolist()[0] == 1
        weights, experts = top_k_router(logits, 2, **options)
        assert experts.tolist() == [1, 5]
        assert np.isfinite(weights).all()


def test_a_group_with_one_expert_is_better_than_an_empty_one():
    logits = jnp.array([-jnp.inf, -jnp.inf, -jnp.inf, 4.0, 5.0, 3.0, -jnp.inf, -jnp.inf])
    for scoring in ("softmax", "sigmoid", "softmax_after"):
        assert top_k_router(logits, 2, scoring=scoring, num_groups=4, top_groups=2)[1].tolist() == [4, 3]


def test_great_logits_choose_by_themselves():
    """Their scores round to one, and to zero."""
    for scoring in ("softmax", "sigmoid"):
        assert top_k_router(jnp.array([-300.0, 200.0, -200.0, 300.0]), 3, scoring=scoring)[1].tolist() == [3, 1, 2]


def test_without_a_gradient_of_the_bias():
    gradient = jax.grad(lambda bias: (top_k_router(LOGITS, 2, bias=bias)[0] ** 2).sum())(jnp.ones(16))
    assert not gradient.any()


@every
def test_derivatives_of_both_orders(options: dict[str, Any]):
    def loss(logits: Any) -> Any:
        return jnp.sin(3.0 * top_k_router(logits, 3, **options)[0]).sum()

    direction, step = draw(6, 16, seed=9), 1e-6
    with jax.enable_x64(True):
        logits, along = (jnp.asarray(np.asarray(x), jnp.float64) for x in (LOGITS, direction))
        options = (
            {**options, "bias": jnp.asarray(np.asarray(options["bias"]), jnp.float64)} if "bias" in options else options
        )
        there, back = (jax.value_and_grad(loss)(logits + sign * step * along) for sign in (1, -1))
        slope, tangent = jax.jvp(loss, (logits,), (along,))[1], jax.jvp(jax.grad(loss), (logits,), (along,))[1]
        np.testing.assert_allclose(slope, (there[0] - back[0]) / (2 * step), rtol=1e-6)
        np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(logits), along), slope, rtol=1e-9)
        np.testing.assert_allclose(tangent, (there[1] - back[1]) / (2 * step), rtol=1e-4, atol=1e-7)


def test_leading_dimensions_and_maps():
    weights, experts = top_k_router(LOGITS, 3)
    for shape in ((16,), (2, 3, 16)):
        got = top_k_router(LOGITS[0] if shape == (16,) else LOGITS.reshape(shape), 3)
        wanted = (weights[0], experts[0]) if shape == (16,) else tuple(x.reshape(2, 3, 3) for x in (weights, experts))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    mapped = jax.vmap(lambda row, bias: top_k_router(row, 3, bias=bias))(LOGITS, jnp.zeros((6, 16)))
    np.testing.assert_array_equal(mapped[1], experts)
    gradient = jax.grad(lambda x: (top_k_router(x, 3)[0] ** 2).sum())
    np.testing.assert_allclose(jax.vmap(gradient)(LOGITS), gradient(LOGITS), rtol=1e-6, atol=1e-8)


def test_the_backward_pass_has_no_array_of_choices_by_experts():
    """Beside the logits a derivative keeps the experts alone."""
    traced = jax.make_jaxpr(jax.grad(lambda x: top_k_router(x, 3, scoring="sigmoid")[0].sum()))(LOGITS)
    assert "6,3,16" not in str(traced)
    lowered = jax.jit(jax.grad(lambda x: top_k_router(x, 3, scoring="sigmoid")[0].sum())).lower(LOGITS).as_text()
    assert "6x16" in lowered
    assert "6x3x16" not in lowered


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])


def losses(logits: Any) -> Any:
    weights, experts = top_k_router(logits, 3, bias=jnp.zeros(16))
    balance = load_balancing_loss(jax.nn.softmax(logits), experts, 16)
    return (weights**2).sum() + 0.01 * balance + 0.001 * router_z_loss(logits)


def test_tokens_split_over_explicit_axes():
    wanted = jax.value_and_grad(losses)(LOGITS)
    for shape, spec in (((6, 16), P("a", None)), ((3, 2, 16), P(None, "a", None))):
        with jax.set_mesh(mesh()):
            logits = jax.device_put(LOGITS.reshape(shape), jax.NamedSharding(mesh(), spec))
            loss, gradient = jax.jit(jax.value_and_grad(losses))(logits)
        assert jax.typeof(gradient).sharding.spec == spec
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-6)
        np.testing.assert_allclose(gradient, wanted[1].reshape(shape), rtol=1e-5, atol=1e-7)


def test_split_experts_are_refused():
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match="logits must be split by its first 1 dimensions alone"):
        jax.jit(lambda x: top_k_router(x, 2))(jax.device_put(LOGITS, jax.NamedSharding(mesh(), P(None, "a"))))


def test_balance_of_a_model():
    record = RECORD["load_balancing"]

    def loss(logits: Any) -> Any:
        return load_balancing_loss(jax.nn.softmax(logits), top_k_router(logits, record["k"])[1], logits.shape[-1])

    got, gradient = jax.value_and_grad(loss)(jnp.array(record["logits"]))
    np.testing.assert_allclose(got, record["loss"], rtol=1e-6)
    np.testing.assert_allclose(gradient, record["gradient"], atol=1e-7)


def test_balance_of_all_alike_is_k_and_strange_ids_do_not_count():
    probabilities, experts = jnp.full((2, 4, 8), 1 / 8), jnp.arange(16).reshape(2, 4, 2) % 8
    assert load_balancing_loss(probabilities, experts, 8) == pytest.approx(2.0)
    half = experts.at[:, :, 0].set(jnp.array([-1, 8, -8, 2**31 - 1]))
    assert load_balancing_loss(probabilities, half, 8) == pytest.approx(1.0)


def test_counts_have_no_one_hot_matrix_in_memory():
    shapes = jax.ShapeDtypeStruct((512, 128), jnp.float32), jax.ShapeDtypeStruct((512, 8), jnp.int32)
    compiled = jax.jit(lambda *arrays: load_balancing_loss(*arrays, 128)).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 128


def test_z_loss():
    logits = np.asarray(LOGITS, np.float64)
    wanted = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    got = router_z_loss(LOGITS.astype(jnp.bfloat16))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-2)
    np.testing.assert_allclose(router_z_loss(LOGITS), wanted, rtol=1e-6)


def test_losses_under_strict_settings():
    wanted = losses(LOGITS)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        np.testing.assert_array_equal(losses(LOGITS), wanted)
        with jax.enable_x64(True):
            assert losses(LOGITS).dtype == np.float32


def test_losses_without_tokens_and_with_symbolic_ones():
    assert router_z_loss(jnp.zeros((0, 4))) == load_balancing_loss(jnp.zeros((0, 4)), jnp.zeros((0, 2), int), 4) == 0.0
    (tokens,) = export.symbolic_shape("tokens")
    exported = export.export(jax.jit(losses))(jax.ShapeDtypeStruct((tokens, 16), jnp.float32))
    np.testing.assert_allclose(exported.call(LOGITS), losses(LOGITS), rtol=1e-6)


PROBABILITIES, CHOICES = jax.nn.softmax(LOGITS), jnp.zeros((6, 2), int)


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (ValueError, "logits must be a floating-point array", lambda: top_k_router(jnp.ones((3, 4), int), 2)),
        (ValueError, "k must be from 1 to the 16 experts in logits, got k=17", lambda: top_k_router(LOGITS, 17)),
        (ValueError, "k must be from 1 to the 16 experts in logits, got k=0", lambda: top_k_router(LOGITS, 0)),
        (TypeError, "k must be an int, got 2.0", lambda: top_k_router(LOGITS, 2.0)),  # type: ignore[arg-type]
        (ValueError, "scoring must be one of", lambda: top_k_router(LOGITS, 2, scoring="top")),  # type: ignore[arg-type]
        (ValueError, r"bias must be floating-point \(16,\), got", lambda: top_k_router(LOGITS, 2, bias=jnp.ones(8))),
        (ValueError, "bias must be floating-point", lambda: top_k_router(LOGITS, 2, bias=jnp.ones(16, int))),
        (ValueError, "experts=16, num_groups=3", lambda: top_k_router(LOGITS, 2, num_groups=3)),
        (ValueError, "num_groups=2, top_groups=3", lambda: top_k_router(LOGITS, 2, num_groups=2, top_groups=3)),
        (ValueError, "num_groups=2, top_groups=0", lambda: top_k_router(LOGITS, 2, num_groups=2, top_groups=0)),
        (ValueError, "the 4 experts in 1 of 4 groups of 16, got k=5", lambda: top_k_router(LOGITS, 5, num_groups=4)),
        (TypeError, "normalize must be True or False", lambda: top_k_router(LOGITS, 2, normalize=1)),  # type: ignore[arg-type]
        (ValueError, "scale must be finite", lambda: top_k_router(LOGITS, 2, scale=np.inf)),
        (TypeError, "experts must hold integers", lambda: load_balancing_loss(PROBABILITIES, LOGITS, 16)),
        (ValueError, r"got probabilities.shape=\(6, 16\)", lambda: load_balancing_loss(PROBABILITIES, CHOICES, 8)),
        (ValueError, r"experts.shape=\(5, 2\)", lambda: load_balancing_loss(PROBABILITIES, CHOICES[1:], 16)),
        (ValueError, "probabilities must be a floating", lambda: load_balancing_loss(CHOICES, CHOICES, 2)),
        (ValueError, "logits must be a floating-point array", functools.partial(router_z_loss, 1.0)),
    ],
)  # fmt: skip
def test_what_they_do_not_take(error: type[Exception], said: str, call: Any):
    with pytest.raises(error, match=said):
        call()
