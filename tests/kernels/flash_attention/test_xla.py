"""What is XLA flash attention's own: tiles, steps, schedules, sharding, vmap; its conformance has a file of its own."""

import functools
import itertools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.xla import backward
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.flash_attention.xla.backward import attention_backward
from tilewright.kernels.flash_attention.xla.forward import attention_forward
from tilewright.kernels.flash_attention.xla.tiles import Tiling, is_unrolled, schedule
from tilewright.kernels.masks import CausalMask, ExplicitMask, LengthMask, Mask, SegmentMask, TileGrid, WindowMask
from tilewright.kernels.numerics.dropout import keep_mask
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.device import current_device

BACKEND = XlaFlashAttention()
SMALL = {"q_blocksize": 16, "kv_blocksize": 16}


def draw_inputs(
    shape: tuple[int, int, int, int, int] = (2, 33, 47, 4, 2),
    dims: tuple[int, int] = (16, 8),
    mask: Mask | None = None,
    bias: tuple[int, int, int, int] | None = None,
    sinks: int = 0,
    dtype: Any = jnp.float32,
    seed: int = 0,
    **options: Any,
) -> AttentionInputs:
    batch, q_length, kv_length, heads, kv_heads = shape
    random = np.random.default_rng(seed)

    def normal(*sizes: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(sizes), dtype)

    return AttentionInputs(
        normal(batch, q_length, heads, dims[0]),
        normal(batch, kv_length, kv_heads, dims[0]),
        normal(batch, kv_length, kv_heads, dims[1]),
        bias=None if bias is None else normal(*bias),
        mask=mask,
        softmax_aux=normal(heads, sinks) if sinks else None,
        dropout_seed=jnp.array([seed, 7], jnp.uint32) if options.get("dropout_prob") else None,
        **({"softmax_scale": 0.3} | options),
    )


def brute_force(inputs: AttentionInputs, d_out: Any, d_lse: Any) -> dict[str, Any]:
    """Results and gradients written out in float64 numpy, the gradients by the formulas of the softmax's derivative."""
    batch, q_length, heads, _ = inputs.query.shape
    kv_length, kv_heads = inputs.key.shape[1:3]
    query, key, value = (np.asarray(x, np.float64) for x in (inputs.query, inputs.key, inputs.value))
    key, value = (np.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    x = inputs.softmax_scale * np.einsum("bqhd,bkhd->bhqk", query, key)
    if inputs.bias is not None:
        x = x + np.asarray(inputs.bias, np.float64)
    slope = np.ones_like(x)
    if inputs.logits_soft_cap is not None:
        bent = np.tanh(x / inputs.logits_soft_cap)
        x, slope = bent * inputs.logits_soft_cap, 1 - bent**2
    if inputs.mask is not None:
        x = np.where(np.asarray(inputs.mask.materialise(q_length, kv_length)), x, -np.inf)
    count = 0 if inputs.softmax_aux is None else inputs.softmax_aux.shape[1]
    sinks = np.zeros((heads, 0)) if inputs.softmax_aux is None else np.asarray(inputs.softmax_aux, np.float64)
    x = np.concatenate([x, np.broadcast_to(sinks[None, :, None], (batch, heads, q_length, count))], axis=-1)
    greatest = x.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(x - np.where(np.isneginf(greatest), 0, greatest))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isneginf(greatest), 0, greatest) + np.log(total))[..., 0]
    p = weights / np.where(total == 0, 1, total)
    keep = np.ones((batch, heads, q_length, kv_length))
    if inputs.dropout_seed is not None:
        prob = inputs.drawn_dropout
        keep = np.asarray(keep_mask(inputs.dropout_seed, *keep.shape, prob)) / (1 - prob)
    d_out, d_lse = np.asarray(d_out, np.float64), np.asarray(d_lse, np.float64)
    kept = p[..., :kv_length] * keep
    d_p = np.einsum("bqhv,bkhv->bhqk", d_out, value) * keep
    d_p = np.concatenate([d_p, np.zeros((batch, heads, q_length, count))], axis=-1)
    d_x = p * (d_p - (p * d_p).sum(-1, keepdims=True) + d_lse[..., None])
    d_logits = d_x[..., :kv_length] * slope
    split = (batch, kv_length, kv_heads, heads // kv_heads)
    d_key = inputs.softmax_scale * np.einsum("bhqk,bqhd->bkhd", d_logits, query)
    gradients = {
        "out": np.einsum("bhqk,bkhv->bqhv", kept, value),
        "lse": lse,
        "query": inputs.softmax_scale * np.einsum("bhqk,bkhd->bqhd", d_logits, key),
        "key": d_key.reshape(*split, key.shape[-1]).sum(3),
        "value": np.einsum("bhqk,bqhv->bkhv", kept, d_out).reshape(*split, value.shape[-1]).sum(3),
    }
    if inputs.bias is not None:
        summed = tuple(axis for axis in range(4) if inputs.bias.shape[axis] == 1)
        gradients["bias"] = d_logits.sum(summed, keepdims=True)
    if count:
        gradients["softmax_aux"] = d_x[..., kv_length:].sum((0, 2))
    return gradients


def cotangents(inputs: AttentionInputs, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(seed)
    batch, q_length, heads, _ = inputs.query.shape
    d_out = random.standard_normal((batch, q_length, heads, inputs.value.shape[-1]))
    return jnp.asarray(d_out, inputs.query.dtype), jnp.asarray(random.standard_normal((batch, heads, q_length)))


def both(inputs: AttentionInputs, d_out: Any, d_lse: Any, tiling: Tiling | dict[str, int]) -> dict[str, Any]:
    """Results and gradients with one tiling for both directions, or through the backend with block sizes."""
    if isinstance(tiling, Tiling):
        out, lse = attention_forward(inputs, tiling)
        gradients = attention_backward(inputs, out, lse, d_out, d_lse, tiling)
    else:
        out, lse = BACKEND.forward(inputs, FwdParams(**tiling))
        gradients = BACKEND.backward(inputs, (out, lse), (d_out, d_lse), BwdParams(**tiling))
    return {"out": out, "lse": lse} | {name: part for name, part in gradients.items() if part is not None}


def check(got: dict[str, Any], want: dict[str, Any], tolerance: float = 3e-5) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert np.all(np.isfinite(np.asarray(got[name], np.float32)) == np.isfinite(array)), name
        np.testing.assert_allclose(np.asarray(got[name]), array, rtol=tolerance, atol=tolerance, err_msg=name)


# What runs once is compiled without optimisation: most of its time is compilation.
compiled_both = jax.jit(
    both,
    static_argnames="tiling",
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)


def tiling_of(inputs: AttentionInputs, block_q: int, block_k: int, batch_size: int = 0, head_size: int = 0) -> Tiling:
    batch, q_length, heads, _ = inputs.query.shape
    kv_length, kv_heads = inputs.key.shape[1:3]
    grid = TileGrid(q_length, kv_length, block_q, block_k)
    return Tiling(batch, kv_heads, heads // kv_heads, grid, batch_size or batch, head_size or kv_heads)


IDS = (jnp.array([[0] * 20 + [1] * 13, [0] * 5 + [1] * 6 + [2] * 22]), jnp.array([[0] * 16 + [1] * 31, [2] * 47]))
EXPLICIT = ExplicitMask(jnp.asarray(np.random.default_rng(3).random((2, 4, 33, 47)) < 0.3))
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": CausalMask(3),
    "window": WindowMask(9, 2, -2) | CausalMask(-20),
    "segments": SegmentMask(*IDS) & CausalMask(14),
    "lengths": LengthMask(jnp.array([33, 10]), jnp.array([0, 40])),
    "explicit": EXPLICIT,
    "positions": CausalMask(0, q_positions=jnp.asarray(np.arange(33)[None] + np.array([[0], [14]]))),
}


STEPS = [(name, (1, 1)) for name in MASKS] + [("explicit", (2, 2)), ("segments", (1, 2)), ("none", (2, 1))]


@pytest.mark.parametrize(
    ("name", "steps"),
    STEPS,
)
def test_steps_and_masks(name: str, steps: tuple[int, int]):
    """Any cut into steps over batch and heads, with every kind of mask, under the loop and with all options at once."""
    inputs = draw_inputs(mask=MASKS[name], bias=(1, 4, 33, 47), sinks=2, logits_soft_cap=3.0, dropout_prob=0.25)
    d = cotangents(inputs)
    if steps == (2, 1):
        inputs = inputs.replace(bias=inputs.bias[:, :1, :1])
    check(compiled_both(inputs, *d, tiling_of(inputs, 16, 8, *steps)), brute_force(inputs, *d))


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.sampled_from([(1, 1), (1, 40), (40, 1), (33, 47), (48, 32)]),
    block_q=st.sampled_from([1, 7, 16, 64]),
    block_k=st.sampled_from([5, 16, 64]),
    name=st.sampled_from(["none", "causal", "window"]),
)
def test_any_tiles(lengths: tuple[int, int], block_q: int, block_k: int, name: str):
    if lengths[0] * lengths[1] / (block_q * block_k) > 200:
        block_q, block_k = 16, 16
    inputs = draw_inputs((1, *lengths, 2, 1), (8, 8), MASKS[name])
    d = cotangents(inputs)
    check(compiled_both(inputs, *d, tiling_of(inputs, block_q, block_k)), brute_force(inputs, *d))


@pytest.mark.parametrize("block_q", [64, 32, 16], ids=["one tile", "unrolled", "loop"])
def test_float64(block_q: int):
    blocks = block_q, {64: 64, 32: 32, 16: 8}[block_q]
    with jax.enable_x64(True):
        inputs = draw_inputs(mask=CausalMask(5), bias=(2, 1, 33, 1), sinks=1, dtype=jnp.float64, logits_soft_cap=4.0)
        d = cotangents(inputs)
        got = compiled_both(inputs, *d, tiling_of(inputs, *blocks))
        assert got["lse"].dtype == got["out"].dtype == jnp.float64
        check(got, brute_force(inputs, *d), 1e-12)


@pytest.mark.parametrize(("dtype", "scale"), list(itertools.product(["bfloat16", "float16"], [0.125, 0.3, -0.5, 0.0])))
def test_scale_of_either_sign(scale: float, dtype: str):
    inputs = draw_inputs(mask=CausalMask(14), softmax_scale=scale, dtype=dtype)
    d = cotangents(inputs)
    got = compiled_both(inputs, *d, tiling_of(inputs, 16, 16))
    check(got, brute_force(inputs, *d), 0.06 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize(
    ("shape", "sinks"), list(itertools.product([(2, 5, 0, 4, 2), (2, 0, 7, 4, 2), (0, 5, 7, 4, 2)], [0, 2]))
)
def test_nothing_to_attend_to(shape: tuple[int, int, int, int, int], sinks: int):
    inputs = draw_inputs(shape, sinks=sinks, bias=(1, 1, *shape[1:3]), mask=CausalMask())
    d = cotangents(inputs)
    check(both(inputs, *d, {}), brute_force(inputs, *d))


def test_a_sum_over_a_tile_that_float16_cannot_hold():
    """Weights are normalised at the end: until then the sum of 128 values of 1000 is 128000."""
    inputs = draw_inputs((1, 16, 256, 2, 1), dtype=jnp.float16)
    inputs = inputs.replace(query=jnp.zeros_like(inputs.query), value=jnp.full_like(inputs.value, 1000.0))
    out, _ = BACKEND.forward(inputs, FwdParams(q_blocksize=16, kv_blocksize=128))
    np.testing.assert_array_equal(out, 1000.0)


def test_visits_no_empty_tile_and_masks_no_full_one():
    """The values of an empty tile's keys do not matter, not even NaN; the schedule holds exactly the right tiles."""
    grid = TileGrid(64, 64, 8, 8)
    tiling = Tiling(1, 1, 1, grid, 1, 1)
    partial, full = schedule(tiling, CausalMask() & WindowMask(15, 0))
    assert list(zip(partial.rows, partial.columns, strict=True)) == [
        (i, j) for i in range(8) for j in range(8) if i - j in (0, 2)
    ]
    assert list(zip(full.rows, full.columns, strict=True)) == [(i, i - 1) for i in range(1, 8)]
    ids = jnp.repeat(jnp.arange(4), 16)[None]
    partial, full = jax.jit(lambda ids: [v.count for v in schedule(tiling, SegmentMask(ids, ids))])(ids)
    assert (int(partial), int(full)) == (0, 16)
    partial, full = jax.jit(lambda ids: [v.count for v in schedule(tiling, SegmentMask(ids, ids) & CausalMask())])(ids)
    assert (int(partial), int(full)) == (8, 4)

    inputs = draw_inputs((1, 64, 64, 2, 2), mask=LengthMask(None, jnp.array([20])))
    poisoned = inputs.replace(value=inputs.value.at[:, 24:].set(jnp.nan))
    out, _ = BACKEND.forward(poisoned, FwdParams(q_blocksize=8, kv_blocksize=8))
    assert np.all(np.isfinite(out))


def test_few_tiles_are_written_out_and_many_loop():
    few, many = (Tiling(1, 1, 1, TileGrid(64, 64, block, block), 1, 1) for block in (32, 8))
    assert is_unrolled(schedule(few, CausalMask()))
    assert not is_unrolled(schedule(many, CausalMask()))
    inputs = draw_inputs((1, 4096, 4096, 1, 1), mask=CausalMask())
    d = cotangents(inputs)
    small = str(jax.make_jaxpr(both, static_argnums=3)(inputs, *d, tiling_of(inputs, 512, 512)))
    large = str(jax.make_jaxpr(both, static_argnums=3)(inputs, *d, tiling_of(inputs, 64, 64)))
    assert abs(small.count("dot_general") - large.count("dot_general")) == 0


def test_under_vmap():
    """Over everything: arrays, bias, the mask's own arrays, the dropout's seed; a map of gradients too."""
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (3, 2, 33)), axis=-1))
    each = [
        draw_inputs(
            (2, 33, 33, 4, 2), mask=SegmentMask(i, i) & CausalMask(), bias=(1, 4, 1, 33), dropout_prob=0.2, seed=n
        )
        for n, i in enumerate(ids)
    ]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
    d = jax.tree.map(lambda *parts: jnp.stack(parts), *[cotangents(inputs, n) for n, inputs in enumerate(each)])
    got = jax.jit(jax.vmap(lambda inputs, d: both(inputs, *d, SMALL)))(stacked, d)
    for n, inputs in enumerate(each):
        check({name: part[n] for name, part in got.items()}, brute_force(inputs, d[0][n], d[1][n]))


COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
    ("axes", "options", "block"),
    list(itertools.product(["batch", "heads", "both"], [{}, {"dropout_prob": 0.2, "logits_soft_cap": 5.0}], [64, 16])),
)
def test_sharded_without_collectives(axes: str, options: dict[str, Any], block: int):
    shape = {"batch": (8, 1), "heads": (1, 8), "both": (2, 4)}[axes]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(shape), ("data", "model"))
    inputs = draw_inputs((8, 48, 48, 16, 8), mask=CausalMask() & WindowMask(30, 0), **options)
    d = cotangents(inputs)
    rows, lse = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data", None, "model"), ("data", "model")))
    specs = jax.tree.map(lambda leaf: rows if leaf.ndim == 4 else NamedSharding(mesh, PartitionSpec()), inputs)
    placed = jax.device_put(inputs, specs), jax.device_put(d[0], rows), jax.device_put(d[1], lse)
    blocks = {"q_blocksize": block, "kv_blocksize": block}
    compiled = compiled_both.lower(*placed, _Frozen(blocks)).compile()
    assert not COLLECTIVES.findall(compiled.as_text())
    check(compiled(*placed), brute_force(inputs, *d))


class _Frozen(dict):  # type: ignore[type-arg]
    """Block sizes as a static argument."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_in_shard_map():
    """Of arguments that devices share, here sinks and bias along the batch, each has its part of the gradient."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs = draw_inputs((4, 33, 47, 4, 2), mask=CausalMask(), sinks=1, bias=(1, 4, 33, 1))
    d = cotangents(inputs)
    rows, lse = PartitionSpec("data", None, "model"), PartitionSpec("data", "model")
    specs = inputs.replace(
        query=rows, key=rows, value=rows, softmax_aux=PartitionSpec("model"), bias=PartitionSpec(None, "model")
    )
    results = dict.fromkeys(("out", "query", "key", "value"), rows)
    results |= {"lse": lse, "softmax_aux": PartitionSpec("model"), "bias": PartitionSpec(None, "model")}

    def part(*operands: Any) -> Any:
        found = both(*operands, tiling=SMALL)
        return found | {name: jax.lax.psum(found[name], "data") for name in ("softmax_aux", "bias")}

    run = jax.shard_map(part, mesh=mesh, in_specs=(specs, rows, lse), out_specs=results, check_vma=True)
    check(jax.jit(run)(inputs, *d), brute_force(inputs, *d))


def test_memory_is_linear_in_the_length():
    def temporary(length: int) -> int:
        inputs = jax.eval_shape(lambda: draw_inputs((1, length, length, 2, 2), (32, 32), CausalMask()))
        d = jax.eval_shape(lambda: (inputs.query, jnp.zeros((1, 2, length))))
        blocks = _Frozen(q_blocksize=128, kv_blocksize=128)
        return jax.jit(both, static_argnums=3).lower(inputs, *d, blocks).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) <= 2.2 * temporary(2048)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(1, 4096, 4096, 8, 8), (8, 1, 2048, 8, 2), (2, 1000, 37, 4, 1), (1, 1, 0, 1, 1)])
def test_candidates(shape: tuple[int, int, int, int, int], direction: Direction):
    inputs = draw_inputs(shape).structs
    assert BACKEND.not_supported_reasons(inputs, current_device(), direction) == []
    best = BACKEND.heuristic(inputs, current_device(), direction)
    candidates = list(BACKEND.candidates(inputs, current_device(), direction))
    assert candidates[0] == best
    assert len(set(candidates)) == len(candidates) <= 10
    if shape[1] == 4096:
        assert len(candidates) >= 4
    for params in candidates:
        assert type(params) is (FwdParams if direction == "forward" else BwdParams)


def test_tiles_are_finer_where_the_mask_empties_more():
    def block(length: int, mask: Mask | None) -> int | None:
        inputs = draw_inputs((1, length, length, 2, 2), mask=mask).structs
        return BACKEND.heuristic(inputs, current_device(), "forward").q_blocksize

    assert block(2048, None) == 512
    assert block(4096, CausalMask()) == 512
    assert block(512, CausalMask()) == 256
    assert block(2048, WindowMask(63, 0)) == 128
    assert block(1000, None) == 512  # two tiles, a multiple of 16


@pytest.mark.parametrize("argnums", [(0, 1, 2), (0, 1, 2, 3)])
def test_the_gradient_of_a_bias_is_computed_only_where_it_is_used(argnums: tuple[int, ...]):
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(each, (1, 48, 2, 16)) for each in keys[:3])
    bias = jax.random.normal(keys[3], (2, 48, 48))

    def loss(query, key, value, bias, attention):
        return jnp.sin(attention(query, key, value, bias)).sum()

    def plain(query, key, value, bias):
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 4 + bias
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)

    with mock.patch.object(backward, "_add_bias", side_effect=backward._add_bias) as added:
        attention = functools.partial(flash_attention, platform="xla")
        got = jax.grad(functools.partial(loss, attention=attention), argnums)(query, key, value, bias)
    want = jax.grad(functools.partial(loss, attention=plain), argnums)(query, key, value, bias)
    assert added.called == (3 in argnums)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
