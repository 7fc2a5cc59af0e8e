"""The gradient of a bias from the Hopper kernels, interpreted on the CPU, against the oracle."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.kernels.flash_attention.conformance import cotangents, inputs_of, judge_gradients, oracle
from tests.kernels.flash_attention.test_pallas_transforms import check, with_gradients
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.heuristics import UNREDUCED_BYTES
from tilewright.kernels.flash_attention.hopper.params import HopperBackwardParams, WideBackwardParams
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.utils.device import current_device

BACKEND = PallasGpuFlashAttention()
ADDED, FIXED = HopperBackwardParams(64, 2, False), HopperBackwardParams(64, 2, True)
WIDE_ADDED, WIDE_FIXED = WideBackwardParams(False, d_out_stages=1), WideBackwardParams()
SIZES: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_mosaic():
        yield


def case(q_length: int = 70, kv_length: int = 150, **options: Any) -> AttentionCase:
    return AttentionCase("", q_length=q_length, kv_length=kv_length, **SIZES | options)


def run(case: AttentionCase, *configs: Any, bias_dtype: str | None = None) -> None:
    """Compares all gradients with the oracle's, from the oracle's residuals."""
    inputs = inputs_of(case)
    if bias_dtype is not None:
        inputs = inputs.replace(bias=inputs.bias.astype(bias_dtype))
    judge_gradients(BACKEND, inputs, configs, case.tolerance_factor)


@pytest.mark.parametrize("bias", ["bhqk", "bhk", "bqk", "hqk", "qk", "bk", "k", "hq", "q", "bh", ""])
def test_every_way_to_broadcast(bias: str):
    configs = (ADDED, FIXED) if bias in ("bhqk", "hqk", "bk", "q") else (ADDED,)
    run(case(bias=bias, causal=len(bias) % 2 == 0), *configs)


OPTIONS: dict[str, tuple[AttentionCase, tuple[Any, ...]]] = {
    "d128": (case(150, 150, head_dim=128, bias="bqk", causal=True, logits_soft_cap=4.0, dropout_prob=0.2), (ADDED,)),
    "d128_fixed": (case(130, 70, head_dim=128, bias="hqk", dropout_prob=0.2, sinks=1), (FIXED,)),
    "values_narrower": (case(batch=1, value_dim=40, bias="hk", logits_soft_cap=4.0), (ADDED,)),
    "two_parts": (case(150, batch=1, heads=1, bias="k"), (HopperBackwardParams(128, 1, False),)),
    "two_parts_fixed": (case(150, batch=1, heads=1, bias="qk"), (HopperBackwardParams(128, 1, True),)),
    "stored": (case(300, 290, bias="bhqk", causal=True, sliding_window=(100, 0)), (ADDED, FIXED)),
    "stored_d128": (case(130, 197, head_dim=128, kv_heads=2, bias="bhqk", causal=True), (ADDED,)),
    "stored_packed": (case(200, 200, batch=1, packed=True, bias="hqk", causal=True), (ADDED,)),
    "stored_d192": (case(200, 200, batch=1, head_dim=192, bias="hqk", causal=True), (WIDE_ADDED, WIDE_FIXED)),
    "d192": (case(heads=4, kv_heads=2, head_dim=192, bias="hqk", causal=True), (WIDE_ADDED, WIDE_FIXED)),
    "d256": (
        case(70, 70, batch=1, head_dim=256, bias="qk", logits_soft_cap=4.0, dropout_prob=0.2),
        (WideBackwardParams(False, d_out_stages=1, d_query_columns=16), WIDE_FIXED),
    ),
    "d256_of_keys": (case(130, batch=1, head_dim=256, bias="bk", dtype="float16"), (WIDE_ADDED, WIDE_FIXED)),
    "d256_of_queries": (case(70, 70, head_dim=256, bias="q", sliding_window=20), (WIDE_ADDED,)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str):
    case, configs = OPTIONS[name]
    run(case, *configs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bias_of_another_dtype(dtype: str):
    run(case(batch=1, bias="bhqk"), ADDED, bias_dtype=dtype)
    run(case(bias="qk"), FIXED, bias_dtype=dtype)


@pytest.mark.parametrize(
    ("name", "params", "options"),
    [
        ("added", ADDED, {"head_dim": 128, "bias": "hqk", "causal": True}),
        ("of_keys", ADDED, {"bias": "k"}),
        ("fixed", FIXED, {"bias": "bhqk"}),
        ("wide_added", WIDE_ADDED, {"head_dim": 192, "bias": "qk"}),
        ("wide_fixed", WIDE_FIXED, {"head_dim": 192, "bias": "hk"}),
    ],
)
def test_races(name: str, params: Any, options: dict[str, Any]):
    with interpret_mosaic(detect_races=True):
        run(case(130, 200, **{"batch": 1, **options}), params)


def test_tiles_that_nothing_sees_are_zeros():
    inputs = inputs_of(case(300, 300, batch=1, bias="hqk", causal=True, sliding_window=30))
    d_out, d_lse = cotangents(inputs)
    results = oracle(inputs, d_out, d_lse).results
    results = results["out"].astype(inputs.query.dtype), results["lse"]
    got = jax.jit(lambda *args: BACKEND.backward(*args, ADDED))(inputs, results, (d_out, d_lse))["bias"]
    rows, columns = np.arange(300)[:, None], np.arange(300)
    assert not np.asarray(got)[..., (columns > rows) | (columns < rows - 30)].any()
    assert np.asarray(got)[..., columns == rows].all()


@pytest.mark.parametrize("bias", ["hqk", "qk"])
def test_a_bias_of_minus_infinity(bias: str):
    """Over a tile of keys, and over a whole row."""
    inputs = inputs_of(case(130, 200, batch=1, bias=bias))
    masked = inputs.bias.at[..., 40:, :128].set(-jnp.inf).at[..., 100, :].set(-jnp.inf)
    judge_gradients(BACKEND, inputs.replace(bias=masked), (ADDED, FIXED), 2.0)


def test_what_is_stored():
    scores = (2, 3, 100, 200)
    whole = BiasGradient((2, 3, 100, 200), jnp.bfloat16, scores, False)
    assert (whole.shape, whole.dtype, whole.added) == ((2, 3, 100, 200), jnp.bfloat16, False)
    ragged = BiasGradient((2, 3, 100, 197), jnp.bfloat16, (2, 3, 100, 197), False)
    assert ragged.shape == (2, 3, 100, 200)
    exact = dataclasses.replace(whole, bias_dtype=jnp.float32)
    assert (exact.shape, exact.dtype, exact.added) == ((2, 3, 128, 256), jnp.float32, False)
    shared = BiasGradient((1, 3, 100, 200), jnp.bfloat16, scores, False)
    assert (shared.shape, shared.dtype, shared.added) == ((1, 3, 128, 256), jnp.float32, True)
    apart = dataclasses.replace(shared, deterministic=True)
    assert (apart.shape, apart.added) == ((2, 3, 128, 256), False)
    of_keys = BiasGradient((2, 1, 1, 200), jnp.bfloat16, scores, False)
    assert (of_keys.shape, of_keys.added) == ((2, 1, 2, 256), True)
    with pytest.raises(ValueError, match="bias_shape"):
        BiasGradient((2, 3, 100, 7), jnp.bfloat16, scores, False)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("bias", ["bhqk", "hqk", "bk"])
def test_candidates_fit(head_dim: int, bias: str):
    inputs = inputs_of(case(head_dim=head_dim, bias=bias)).structs
    device = current_device()
    assert not BACKEND.not_supported_reasons(inputs, device, "backward")
    found = BACKEND.candidates(inputs, device, "backward")
    assert {params.deterministic for params in found} == {False, True}
    assert not any(BACKEND.config_reasons(inputs, device, "backward", params) for params in found)


def test_what_does_not_fit():
    inputs = inputs_of(case(head_dim=128, bias="hqk")).structs
    (reason,) = BACKEND.config_reasons(inputs, current_device(), "backward", HopperBackwardParams(128, 2, False))
    assert "with the gradient of a bias" in reason


def test_a_large_bias_is_added_up():
    inputs, device = inputs_of(case(bias="hqk")).structs, current_device()
    assert BACKEND.heuristic(inputs, device, "backward").deterministic
    longer = {
        name: jax.ShapeDtypeStruct((64, 1024, *array.shape[2:]), array.dtype)
        for name, array in inputs.arrays.items()
        if name in ("query", "key", "value")
    }
    large = inputs.replace(bias=jax.ShapeDtypeStruct((1, 2, 1024, 1024), jnp.bfloat16), **longer)
    assert large.score_shape == (64, 2, 1024, 1024)
    assert UNREDUCED_BYTES < 64 * 2 * 1024 * 1024 * 4
    assert not BACKEND.heuristic(large, device, "backward").deterministic


def operands() -> list[jax.Array]:
    """query, key, value, a bias that batch and heads share, and the cotangent of the output."""
    keys = jax.random.split(jax.random.key(5), 5)
    shapes = [(1, 40, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), (1, 1, 40, 40), (1, 40, 2, 64)]
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def attention(platform: str, params: Any = None) -> Any:
    cfg = None if params is None else PerDirection(backward=Choice("hopper", params))
    return lambda *args: flash_attention(*args, causal=True, platform=platform, cfg=cfg)


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize(
    ("in_axes", "params"), [((0, None, None, 0), ADDED), ((0, 0, 0, None), FIXED)], ids=["added", "fixed"]
)
def test_vmap(in_axes: Any, params: HopperBackwardParams):
    *arrays, cotangent = operands()
    arrays = [x if axis is None else jnp.stack([x, 1 - x]) for x, axis in zip(arrays, in_axes, strict=True)]
    cotangent = jnp.stack([cotangent, cotangent[:, ::-1] * 2])

    def mapped(platform: str, params: Any = None) -> Any:
        return jax.jit(with_gradients(jax.vmap(attention(platform, params), in_axes=in_axes)))

    check(mapped("pallas", params)(*arrays, cotangent), mapped("xla")(*arrays, cotangent))


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize(("where", "params"), list(itertools.product(["inside", "outside"], [ADDED, FIXED])))
def test_gradients_that_devices_share_are_summed(where: str, params: HopperBackwardParams):
    """A collective cannot follow an interpreted kernel on few cores: its place in the program is looked at instead."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    split, whole = P(None, None, "x"), P()

    def program(platform: str, params: Any = None) -> Any:
        function = attention(platform, params)
        map_ = lambda function, **specs: jax.shard_map(function, mesh=mesh, check_vma=True, **specs)
        if where == "outside":
            return with_gradients(map_(function, in_specs=(split, split, split, whole), out_specs=split))
        specs = (split, split, split, whole, split)
        return map_(with_gradients(function), in_specs=specs, out_specs=(split, split, split, split, whole))

    def sums(platform: str, params: Any = None) -> int:
        return str(jax.make_jaxpr(program(platform, params))(*operands())).count("psum")

    assert sums("pallas", params) == sums("xla") > 0
