"""Inside of a ``shard_map`` over one axis of a mesh, ops on the explicit other: results and gradients of one device."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.modules import (
    all_gather_matmul,
    context_parallel_attention,
    context_parallel_causal_conv1d,
    context_parallel_linear_attention,
    context_parallel_page_attention,
    flash_attention,
    grouped_matmul,
    linear_cross_entropy,
    linear_kl_divergence,
    matmul,
    matmul_reduce_scatter,
    rms_norm,
)

OUTER, INNER = "outer", "inner"
ROWS, HEADS, LENGTH, N = P(OUTER), P(None, None, INNER), P(None, INNER), P(None, INNER)


def causal(*qkv: Any) -> Any:
    return flash_attention(*qkv, causal=True)


def losses(x: Any, weight: Any, labels: Any) -> Any:
    return linear_cross_entropy(x, weight, labels, reduction="none")


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


ATTENTION = [normal(4, 16, 4, 8), normal(4, 16, 2, 8), normal(4, 16, 2, 6)]
# A function, its operands, and how each is split by the manual and by the explicit axis.
CALLS: dict[str, tuple[Callable[..., Any], list[jax.Array], tuple[P, ...], tuple[P, ...], P]] = {
    "heads": (causal, ATTENTION, (ROWS,) * 3, (HEADS,) * 3, ROWS),
    "keys": (causal, ATTENTION, (ROWS,) * 3, (P(), LENGTH, LENGTH), ROWS),
    "queries and keys": (causal, ATTENTION, (ROWS,) * 3, (LENGTH,) * 3, ROWS),
    "queries and keys beside shared keys": (
        lambda q, k, v: causal(q, *(jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))),
        [ATTENTION[0], ATTENTION[1][:1], ATTENTION[2][:1]], (ROWS, P(), P()), (LENGTH,) * 3, ROWS,
    ),
    "rows": (rms_norm, [normal(4, 6, 8), normal(8)], (ROWS, P()), (LENGTH, P()), ROWS),
    "k": (matmul, [normal(4, 6, 8), normal(8, 4)], (ROWS, P()), (HEADS, P(INNER)), ROWS),
    "groups": (
        grouped_matmul, [normal(16, 8), normal(4, 8, 6), jnp.array([3, 0, 6, 5])],
        (P(), P(None, None, OUTER), P()), (P(), P(INNER), P()), P(None, OUTER),
    ),
    "vocabulary": (
        losses, [normal(8, 6), normal(6, 12), jnp.arange(8) + 2], (ROWS, P(), ROWS), (P(), N, P()), ROWS
    ),
}  # fmt: skip


def both_passes(function: Callable[..., Any], operands: list[Any]) -> Any:
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*values: Any) -> Any:
        given = dict(zip(floats, values, strict=True))
        return function(*(given.get(i, x) for i, x in enumerate(operands)))

    out, pull = jax.vjp(of_floats, *(operands[i] for i in floats))
    return out, *pull(jnp.cos(out))


def both(*specs: P) -> P:
    """The spec that splits by both axes."""
    rank = max(map(len, specs))
    padded = [tuple(spec) + (None,) * (rank - len(spec)) for spec in specs]
    return P(*(a or b for a, b in zip(*padded, strict=True)))


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [(name, check_vma) for name in CALLS for check_vma in (True, False)],
)
def test_explicit_axes_inside_of_a_shard_map_over_another_axis(name: str, check_vma: bool) -> None:
    function, operands, manual, explicit, out = CALLS[name]
    mesh = jax.make_mesh((2, 2), (OUTER, INNER), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    split = jax.shard_map(function, mesh=mesh, in_specs=manual, out_specs=out, axis_names={OUTER}, check_vma=check_vma)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, both(*specs)))
            for x, *specs in zip(operands, manual, explicit, strict=True)
        ]
        got = jax.jit(lambda *xs: both_passes(split, list(xs)))(*placed)
    for each, want in zip(got, both_passes(function, operands), strict=True):
        np.testing.assert_allclose(each, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_explicit_axes_beside_one_of_xla(name: str) -> None:
    """What XLA may split is not gathered for the sake of the explicit axis, where a backend is XLA's operations."""
    function, operands, by_xla, explicit, _ = CALLS[name]
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), (OUTER, INNER), axis_types=kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, both(*specs)))
            for x, *specs in zip(operands, by_xla, explicit, strict=True)
        ]
        compiled = jax.jit(lambda *xs: both_passes(function, list(xs))).lower(*placed).compile()
    for each, want in zip(compiled(*placed), both_passes(function, operands), strict=True):
        np.testing.assert_allclose(each, want, atol=2e-5, rtol=1e-5)
    assert name not in ("heads", "keys", "rows", "k") or "all-gather" not in compiled.as_text()


def with_axis(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return functools.partial(function, axis_name=OUTER, **options)


# Functions that communicate, with operands that are whole but for the axis of which they are told the name.
TOLD: dict[str, tuple[Callable[..., Any], list[jax.Array], tuple[P, ...], P]] = {
    **{
        f"context_parallel_attention {strategy}": (
            with_axis(context_parallel_attention, strategy=strategy, layout="contiguous", causal=True),
            ATTENTION, (P(None, OUTER),) * 3, P(None, OUTER),
        )
        for strategy in ("ring", "auto", "all_gather", "ulysses")
    },
    "all_gather_matmul": (
        with_axis(all_gather_matmul), [normal(8, 4), normal(4, 6)], (P(OUTER), P(None, OUTER)), P(None, OUTER)
    ),
    "matmul_reduce_scatter": (
        with_axis(matmul_reduce_scatter), [normal(8, 4), normal(4, 6)], (P(None, OUTER), P(OUTER)), P(OUTER)
    ),
    "linear_cross_entropy": (
        with_axis(linear_cross_entropy), [normal(8, 6), normal(6, 12), jnp.arange(8)], (P(), P(None, OUTER), P()), P()
    ),
    "linear_kl_divergence": (
        with_axis(linear_kl_divergence), [normal(8, 6), normal(6, 12)] * 2, (P(), P(None, OUTER)) * 2, P()
    ),
    "context_parallel_linear_attention": (
        with_axis(context_parallel_linear_attention),
        [normal(2, 8, 4, 4)] * 3, (P(None, OUTER),) * 3, P(None, OUTER),
    ),
    "context_parallel_causal_conv1d": (
        with_axis(context_parallel_causal_conv1d),
        [normal(2, 8, 4), normal(4, 3)], (P(None, OUTER), P()), P(None, OUTER),
    ),
    "context_parallel_page_attention": (
        with_axis(context_parallel_page_attention),
        [normal(2, 4, 8), normal(8, 4, 4, 8), normal(8, 4, 4, 8), jnp.zeros((2, 2), int), jnp.ones(2, int)],
        (P(), P(OUTER), P(OUTER), P(), P()), P(),
    ),
}  # fmt: skip
RINGS = [name for name in TOLD if name.endswith(("ring", "auto"))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Explicit) for name in TOLD), *((name, AxisType.Auto) for name in TOLD)],
)
def test_what_communicates_wants_all_axes_of_more_than_one_device(name: str, kind: AxisType) -> None:
    """A branch that some devices take must have no transfer that XLA puts into it: they would wait for each other."""
    function, operands, specs, out = TOLD[name]

    def trace(sizes: tuple[int, int]) -> Any:
        mesh = jax.make_mesh(sizes, (OUTER, INNER), axis_types=(kind,) * 2, devices=jax.devices()[: math.prod(sizes)])
        split = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, axis_names={OUTER})
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
            return jax.eval_shape(split, *placed)

    trace((2, 1))
    if kind == AxisType.Explicit or name in RINGS:
        left = "to types" if kind == AxisType.Explicit else "to XLA"
        with pytest.raises(ValueError, match=f"^{name.split()[0]}: .*must be manual over all axes.*inner {left}"):
            trace((2, 2))
    else:
        trace((2, 2))
