"""Calls over four devices: their arrays, what each option makes visible, and how they run on a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.context_parallel import oracle

SHARDS, BATCH, LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 32, 8, 4, 16, 8
ROWS = P(None, "s")


@dataclasses.dataclass(frozen=True)
class Call:
    """The options of a call, and the pairs that they make visible by their definition.

    Attributes:
      visible: of query positions ``[q, 1]`` and key positions ``[1, kv]``, broadcastable to ``[batch, 1, q, kv]``.
      by_rows: options along the rows, ``[batch, length]``, by whether they are those of the keys.
    """

    visible: Callable[[np.ndarray, np.ndarray], Any] = lambda q, k: q >= 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    whole: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    by_rows: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    sinks: bool = False
    batch: int = BATCH
    kv_length: int = LENGTH


SEGMENTS = np.array([[0] * 5 + [1] * 20 + [2] * 7, [3] * 32])
KEY_SEGMENTS = np.array([[0] * 9 + [1] * 16 + [7] * 7, [3] * 16 + [4] * 16])
Q_LENGTHS, KV_LENGTHS = np.array([32, 13]), np.array([6, 29])
BOUNDS = np.array([0, 3, 17, 17, 30])
KEY_BOUNDS = np.array([1, 8, 20, 26, 32])
SHORT_BOUNDS = np.array([0, 6, 6, 13, 19, 26, 32])


def _of_bounds(q: np.ndarray, k: np.ndarray, q_bounds: np.ndarray, k_bounds: np.ndarray, edge: int) -> np.ndarray:
    """Causal packed sequences, aligned at their first (0) or last (1) tokens."""
    seen = np.zeros((q.shape[0], k.shape[1]), bool)
    for n in range(len(q_bounds) - 1):
        inside = (q >= q_bounds[n]) & (q < q_bounds[n + 1]) & (k >= k_bounds[n]) & (k < k_bounds[n + 1])
        seen |= inside & (k - k_bounds[n + edge] <= q - q_bounds[n + edge])
    return seen


def _below(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return (q < Q_LENGTHS[:, None, None, None]) & (k < KV_LENGTHS[:, None, None, None])


def _ends_aligned(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return _below(q, k) & (k <= q + (KV_LENGTHS - Q_LENGTHS)[:, None, None, None])


CALLS = {
    "full": Call(),
    "causal": Call(lambda q, k: k <= q, {"causal": True}),
    "window": Call(lambda q, k: (k >= q - 9) & (k <= q + 3), {"sliding_window": (9, 3)}),
    "short window, sinks": Call(
        lambda q, k: (k <= q) & (k >= q - 3), {"causal": True, "sliding_window": 3}, sinks=True
    ),
    "soft cap, sinks": Call(lambda q, k: k <= q, {"causal": True, "logits_soft_cap": 1.5}, sinks=True),
    "segments": Call(
        lambda q, k: (SEGMENTS[:, None, :, None] == KEY_SEGMENTS[:, None, None, :]) & (k <= q),
        {"causal": True}, by_rows={"q_segment_ids": SEGMENTS, "kv_segment_ids": KEY_SEGMENTS},
    ),
    "segments alone": Call(
        lambda q, k: SEGMENTS[:, None, :, None] == KEY_SEGMENTS[:, None, None, :],
        by_rows={"q_segment_ids": SEGMENTS, "kv_segment_ids": KEY_SEGMENTS},
    ),
    "lengths": Call(_below, whole={"query_seq_lengths": Q_LENGTHS, "key_value_seq_lengths": KV_LENGTHS}),
    "lengths, sinks, ends aligned": Call(
        _ends_aligned, {"causal": True, "causal_alignment": "bottom_right"},
        {"query_seq_lengths": Q_LENGTHS, "key_value_seq_lengths": KV_LENGTHS}, sinks=True,
    ),
    "packed": Call(
        lambda q, k: _of_bounds(q, k, BOUNDS, BOUNDS, 0), {"causal": True},
        {"cum_seqlens_q": BOUNDS}, batch=1,
    ),
    "packed by the host, both directions": Call(
        lambda q, k: _of_bounds(q, k, SHORT_BOUNDS, SHORT_BOUNDS, 0) | _of_bounds(k.T, q.T, *[SHORT_BOUNDS] * 2, 0).T,
        {"cum_seqlens_q": SHORT_BOUNDS, "cum_seqlens_k": SHORT_BOUNDS}, batch=1,
    ),
    "packed, other keys, ends aligned": Call(
        lambda q, k: _of_bounds(q, k, BOUNDS, KEY_BOUNDS, 1), {"causal": True, "causal_alignment": "bottom_right"},
        {"cum_seqlens_q": BOUNDS, "cum_seqlens_k": KEY_BOUNDS}, batch=1,
    ),
    "more keys, ends aligned": Call(
        lambda q, k: k <= q + 16, {"causal": True, "causal_alignment": "bottom_right"}, kv_length=48
    ),
    "scale": Call(lambda q, k: k <= q, {"causal": True, "softmax_scale": 0.7}),
}  # fmt: skip


@functools.cache
def operands(call: str) -> tuple[jax.Array, ...]:
    """query, key, value, sinks, d_out, d_lse."""
    given = CALLS[call]
    rng = np.random.default_rng(7)
    shapes = (
        (given.batch, LENGTH, HEADS, DIM), (given.batch, given.kv_length, KV_HEADS, DIM),
        (given.batch, given.kv_length, KV_HEADS, VALUE_DIM), (HEADS,), (given.batch, LENGTH, HEADS, VALUE_DIM),
        (given.batch, HEADS, LENGTH),
    )  # fmt: skip
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


@functools.cache
def expected(call: str) -> oracle.Expected:
    """The whole call by the oracle; rows that see nothing get no cotangent of their lse, which is −inf."""
    given, (query, key, value, sinks, d_out, d_lse) = CALLS[call], operands(call)
    visible = given.visible(np.arange(LENGTH)[:, None], np.arange(given.kv_length)[None])
    return oracle.attention(
        query, key, value, sinks if given.sinks else np.full(HEADS, -np.inf), visible, d_out, d_lse,
        scale=given.options.get("softmax_scale", DIM**-0.5), cap=given.options.get("logits_soft_cap"),
    )  # fmt: skip


def mesh_of(shards: int = SHARDS, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((shards,), ("s",), axis_types=(kind,), devices=jax.devices()[:shards])


def split_results(
    call: str,
    strategy: str,
    layout: str,
    *,
    check_vma: bool = True,
    kind: AxisType = AxisType.Auto,
    dtype: Any = None,
    shards: int = SHARDS,
) -> dict[str, np.ndarray]:
    """out, lse and gradients of a call over several devices, in the order of the whole sequence."""
    given, arrays = CALLS[call], operands(call)
    *floats, d_lse = (x if dtype is None else x.astype(dtype) for x in arrays)
    names = ("query", "key", "value", "sinks")

    def on_device(floats: Any, d_lse: jax.Array, by_rows: Any, whole: Any) -> Any:
        options: dict[str, Any] = {**given.options, **by_rows, **whole}
        if "cum_seqlens_q" in options:
            options.setdefault("cum_seqlens_k", options["cum_seqlens_q"])

        def attend(query: Any, key: Any, value: Any, sinks: Any) -> Any:
            return tilewright.context_parallel_attention(
                query, key, value, axis_name="s", strategy=strategy, layout=layout, return_lse=True,
                softmax_aux=sinks if given.sinks else None, **options,
            )  # fmt: skip

        (out, lse), pull = jax.vjp(attend, *floats[:4])
        gradients = dict(zip(names, pull((floats[4], jnp.asarray(d_lse, lse.dtype))), strict=True))
        if not check_vma:  # types do not say that all devices have the same sinks, so nobody sums their gradients
            gradients["sinks"] = jax.lax.psum(gradients["sinks"], "s")
        return {"out": out, "lse": lse, **gradients}

    lse_rows = P(None, None, "s")
    specs = {"out": ROWS, "lse": lse_rows, "query": ROWS, "key": ROWS, "value": ROWS, "sinks": P()}
    mesh = mesh_of(shards, kind)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=((ROWS, ROWS, ROWS, P(), ROWS), lse_rows, ROWS, P()), out_specs=specs,
        check_vma=check_vma,
    )  # fmt: skip
    arranged = functools.partial(_arranged, tilewright.zigzag, layout, shards)
    operands_ = (
        tuple(arranged(x, specs.get(name, ROWS)) for name, x in zip((*names, "d_out"), floats, strict=True)),
        arranged(d_lse, lse_rows),
        {name: arranged(jnp.asarray(x), ROWS) for name, x in given.by_rows.items()},
        {name: jnp.asarray(x) for name, x in given.whole.items()},
    )
    with jax.set_mesh(mesh):
        if kind == AxisType.Explicit:
            in_specs = ((ROWS, ROWS, ROWS, P(), ROWS), lse_rows, dict.fromkeys(given.by_rows, ROWS), P())
            operands_ = jax.tree.map(jnp.asarray, operands_)
            placed = [
                jax.tree.map(lambda x, s=spec: jax.device_put(x, jax.NamedSharding(mesh, s)), tree)
                for tree, spec in zip(operands_[0], in_specs[0], strict=True)
            ]
            operands_ = (tuple(placed), jax.device_put(operands_[1], jax.NamedSharding(mesh, lse_rows)), *(
                jax.tree.map(lambda x, s=spec: jax.device_put(x, jax.NamedSharding(mesh, s)), tree)
                for tree, spec in ((operands_[2], ROWS), (operands_[3], P()))
            ))  # fmt: skip
        results = jax.jit(mapped)(*operands_)
    single = jax.devices()[0]
    return {
        name: np.asarray(
            _arranged(tilewright.unzigzag, layout, shards, jax.device_put(np.asarray(x), single), specs[name])
        )
        for name, x in results.items()
    }


def _arranged(reorder: Callable[..., Any], layout: str, shards: int, x: jax.Array, spec: P) -> jax.Array:
    if layout == "contiguous" or "s" not in tuple(spec):
        return x
    return reorder(x, tuple(spec).index("s"), shards)


def assert_as_expected(call: str, results: dict[str, np.ndarray], atol: float = 2e-5) -> None:
    wanted = expected(call)
    for name, got in results.items():
        if name == "sinks" and not CALLS[call].sinks:
            continue
        np.testing.assert_allclose(
            got.astype(np.float64), getattr(wanted, name), atol=atol, rtol=atol, err_msg=f"{call}: {name}"
        )
