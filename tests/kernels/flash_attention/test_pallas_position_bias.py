"""Biases of positions in the Hopper kernels, interpreted on the CPU, against the oracle."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import H100
from tests.kernels.flash_attention.conformance import (
    cotangents,
    inputs_of,
    judge,
    judge_gradients,
    oracles,
    run_and_judge,
)
from tests.kernels.flash_attention.test_pallas_transforms import (
    check,
    one_device_at_a_time,
    with_gradients,
)
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.hopper import backend
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.bias_gradient import PositionGradient
from tilewright.kernels.flash_attention.hopper.call import GroupParts
from tilewright.kernels.flash_attention.hopper.params import (
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention

__all__ = ["one_device_at_a_time"]  # a fixture

BACKEND = PallasGpuFlashAttention()
FORWARD = {
    "one by one": HopperForwardParams(128, 64, 2, False, False),
    "persistent": HopperForwardParams(128, 128, 2, True, True),
    "three consumers": HopperForwardParams(192, 80, 2, True, True),
}
ADDED, FIXED, BROAD = (HopperBackwardParams(*each) for each in ((64, 2, False), (64, 2, True), (128, 2, False)))
WIDE_ADDED, WIDE_FIXED = WideBackwardParams(False, d_out_stages=1, d_query_buffers=2), WideBackwardParams()
KINDS = ("alibi", "relative", "relative of all heads")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_mosaic():
        yield


def case(kind: str, q_length: int = 150, kv_length: int = 190, **options: Any) -> AttentionCase:
    sizes: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"}
    given = sizes | {"position_bias": kind, "bias_dtype": "float32"} | options
    return AttentionCase("", q_length=q_length, kv_length=kv_length, **given)


@pytest.mark.parametrize(
    ("kind", "params", "causal"),
    [(kind, params, causal) for kind in KINDS for params in FORWARD for causal in (False, True)],
)
def test_forward(kind: str, params: str, causal: bool) -> None:
    inputs = inputs_of(case(kind, 330, 290, batch=1, causal=causal))
    exact, low = oracles(inputs, *cotangents(inputs))
    results = jax.jit(lambda inputs: BACKEND.forward(inputs, FORWARD[params]))(inputs)
    judge(dict(zip(("out", "lse"), results, strict=True)), exact.results, low.results, 2.0)


BACKWARD: dict[str, tuple[AttentionCase, tuple[Any, ...]]] = {
    "alibi": (case("alibi", causal=True, causal_alignment="bottom_right"), (ADDED, FIXED)),
    "alibi, two sides": (case("alibi", 130, 70), (ADDED, BROAD)),
    "alibi, later keys": (case("alibi", sliding_window=(0, 90), batch=1), (ADDED,)),
    "alibi, cap, dropout": (case("alibi", causal=True, logits_soft_cap=3.0, dropout_prob=0.2), (ADDED, FIXED)),
    "alibi, negative scale": (case("alibi", softmax_scale=-0.2, batch=1), (ADDED,)),
    "alibi, lengths, GQA": (case("alibi", lengths=True, heads=6, kv_heads=2), (ADDED,)),
    "relative": (case("relative"), (ADDED, FIXED)),
    "relative, causal": (case("relative", 130, 70, causal=True, head_dim=128), (ADDED, FIXED)),
    "relative, broad": (case("relative", 200, 70, batch=1), (BROAD,)),
    "relative of all heads": (case("relative of all heads", heads=6, kv_heads=2), (ADDED,)),
    "relative, packed": (case("relative", 150, 150, batch=1, packed=True), (ADDED,)),
    "relative, cap, sinks": (case("relative", logits_soft_cap=3.0, sinks=1, softmax_scale=-0.2), (FIXED,)),
    "alibi, d256": (case("alibi", 130, 100, batch=1, head_dim=256, causal=True), (WIDE_ADDED, WIDE_FIXED)),
    "alibi, d192, two sides": (case("alibi", 70, 100, head_dim=192, value_dim=64), (WIDE_ADDED, WIDE_FIXED)),
    "relative, d192": (case("relative", 130, 100, head_dim=192, value_dim=64), (WIDE_ADDED, WIDE_FIXED)),
    "relative, d256, cap": (
        case("relative", 70, 70, batch=1, head_dim=256, logits_soft_cap=3.0, causal=True), (WIDE_ADDED,)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    BACKWARD,
)
def test_backward(name: str) -> None:
    case, configs = BACKWARD[name]
    judge_gradients(BACKEND, inputs_of(case), configs, case.tolerance_factor)


@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_split_query_heads(kind: str) -> None:
    """Parts of a key head's query heads are work items of their own: here two of three, of five heads."""
    split = functools.partial(GroupParts, parts=3)
    one = case(kind, heads=5, causal=True)
    with mock.patch.object(backend, "group_parts", lambda inputs, plan, num_sms: split(inputs.heads)):
        judge_gradients(BACKEND, inputs_of(one), (ADDED,), 2.0)


@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_constant_values_get_no_gradient(kind: str) -> None:
    inputs = inputs_of(case(kind)).replace(wanted=frozenset({"query", "key", "value"}))
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = exact.results["out"].astype(inputs.query.dtype), exact.results["lse"]
    with mock.patch.object(PositionGradient, "store", side_effect=AssertionError):
        gradients = jax.jit(lambda i, r, d: BACKEND.backward(i, r, d, ADDED))(inputs, results, (d_out, d_lse))
    assert gradients.pop("position_bias") is None
    wanted = ({k: v for k, v in each.gradients.items() if k != "position_bias"} for each in (exact, low))
    judge(gradients, *wanted, 2.0)


def test_relative_values_of_minus_infinity_mask() -> None:
    """As a window that only the values know: rows of tiles without a visible key, and a row of none."""
    inputs = inputs_of(case("relative", 200, 140, batch=1))
    assert inputs.position_bias is not None
    values = inputs.position_bias.values.at[:, :130].set(-jnp.inf).at[:, 230:].set(-jnp.inf)
    inputs = inputs.replace(position_bias=dataclasses.replace(inputs.position_bias, values=values))
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    out, lse = jax.jit(lambda inputs: BACKEND.forward(inputs, FORWARD["one by one"]))(inputs)
    judge({"out": out, "lse": lse}, exact.results, low.results, 2.0)
    gradients = jax.jit(lambda i, r, d: BACKEND.backward(i, r, d, ADDED))(inputs, (out, lse), (d_out, d_lse))
    assert all(np.all(np.isfinite(np.asarray(g, np.float32))) for g in gradients.values() if g is not None)


@pytest.mark.parametrize(("kind", "params"), list(itertools.product(["alibi", "relative"], [ADDED, WIDE_FIXED])))
def test_races(kind: str, params: Any) -> None:
    head_dim = 192 if isinstance(params, WideBackwardParams) else 64
    one = case(kind, 70, 150, batch=1, head_dim=head_dim, value_dim=64, causal=True)
    with interpret_mosaic(detect_races=True):
        run_and_judge(BACKEND, one, HopperForwardParams(128, 64, 2, False, False), params)


def operands(heads: int = 2) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(5), 4)
    return [jax.random.normal(each, (2, 40, heads, 64), jnp.bfloat16) for each in keys]


BIASES = {
    "alibi": AlibiBias(jnp.linspace(-0.1, 0.2, 2)),
    "relative": RelativeBias(jnp.sin(jnp.arange(158.0)).reshape(2, 79)),
}


def attention(platform: str) -> Any:
    cfg = PerDirection(backward=Choice("hopper", ADDED)) if platform == "pallas" else None
    return functools.partial(flash_attention, causal=True, platform=platform, cfg=cfg)


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize(
    ("kind", "axes"),
    list(itertools.product(BIASES, [(None, None, None, 0), (0, None, 0, None)])),
)
def test_vmap(kind: str, axes: Any) -> None:
    *qkv, cotangent = operands()
    both = [x if axis is None else jax.tree.map(lambda y: jnp.stack([y, -y]), x)
            for x, axis in zip((*qkv, BIASES[kind]), axes, strict=True)]  # fmt: skip
    cotangent = jnp.stack([cotangent, 2 * cotangent])

    def mapped(platform: str) -> Any:
        return jax.jit(with_gradients(jax.vmap(attention(platform), in_axes=axes)))

    got, want = (jax.tree.leaves(mapped(platform)(*both, cotangent)) for platform in ("pallas", "xla"))
    check(got, want)


@pytest.mark.usefixtures("on_an_h100", "one_device_at_a_time")
@pytest.mark.parametrize("kind", BIASES)
def test_heads_split_over_explicit_axes(kind: str) -> None:
    """Each device takes the slopes or values of its heads."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    *qkv, cotangent = operands()
    expected = jax.tree.leaves(with_gradients(attention("xla"))(*qkv, BIASES[kind], cotangent))
    with jax.set_mesh(mesh):
        *parts, part = (jax.device_put(x, NamedSharding(mesh, P(None, None, "x"))) for x in (*qkv, cotangent))
        bias = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), BIASES[kind])
        got = jax.tree.leaves(jax.jit(with_gradients(attention("pallas")))(*parts, bias, part))
        check(got, expected)


def test_positions_that_are_an_array_are_declined() -> None:
    packed = case("alibi", 40, 56, batch=1, packed=True)
    reasons = BACKEND.not_supported_reasons(inputs_of(packed).structs, H100, "forward")
    assert reasons == ["counts the positions of a bias by index, got positions that are an array"]
    zero = case("alibi", softmax_scale=0.0)
    reasons = BACKEND.not_supported_reasons(inputs_of(zero).structs, H100, "forward")
    assert reasons == ["starts from a bias over the scale, got scale=0.0"]
