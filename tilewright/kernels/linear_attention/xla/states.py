"""The states before all chunks of a row, from what each chunk does to a state: X₊ = D ∘ X − N X + E."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.op.sharding import vary_over, varying_axes
from tilewright.ops.kernel.arrays import is_symbolic

UNROLLED_STEPS = 4
"""Steps up to which there is no loop."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Maps:
    """The linear maps X ↦ keep · (D ∘ X − N X), each from the state before a chunk to that before the next one.

    Attributes:
      decay: D, ``[..., K, 1]`` or ``[..., 1, 1]``.
      removed: N, ``[..., K, K]``; None for 0.
      keep: False where no state flows on, ``[..., 1, 1]``; None if it always does.
    """

    decay: jax.Array
    removed: jax.Array | None
    keep: jax.Array | None

    def apply(self, states: jax.Array, precision: lax.Precision, *, transposed: bool = False) -> Any:
        """The maps of states ``[..., K, V]``; D is applied by itself, so that it is not rounded as operands are."""
        found = self.decay * states
        if self.removed is not None:
            removed = jnp.swapaxes(self.removed, -1, -2) if transposed else self.removed
            found = found - jnp.matmul(removed, states, precision=precision)
        # Not a product, since the state of another sequence may be infinite.
        return found if self.keep is None else jnp.where(self.keep, found, 0)


def states_before(maps: Maps, added: jax.Array, segment: int, precision: lax.Precision) -> jax.Array:
    """``[chunks, ..., K, V]``: X₀ = added₀ and X₊ = map(X) + added₊.

    With ``segment`` > 1, which divides the number of chunks, the segments of that many chunks run at the same time: at
    first without what flows in from their left, which is then computed by a loop over segments from the product of
    each one's maps, and once more with it. The derivatives run the same loops backwards; they need the states alone.
    """

    def apply(states: jax.Array) -> jax.Array:
        flows_on: Any = maps.apply(states, precision)
        before = jnp.concatenate([jnp.zeros_like(flows_on[:1]), flows_on[:-1]])
        return states - before

    def solve(_: Callable[[jax.Array], jax.Array], added: jax.Array) -> jax.Array:
        return _solved(maps, added, segment, precision, reverse=False)

    def transposed_solve(_: Callable[[jax.Array], jax.Array], added: jax.Array) -> jax.Array:
        return _solved(maps, added, segment, precision, reverse=True)

    found: jax.Array = lax.custom_linear_solve(apply, added, solve, transposed_solve)
    return found


def _solved(maps: Maps, added: jax.Array, segment: int, precision: lax.Precision, *, reverse: bool) -> jax.Array:
    """The states, or for cotangents of states those of what was added, from the last chunk to the first."""
    maps, added = jax.tree.map(lax.stop_gradient, (maps, added))

    def by_segment(x: jax.Array) -> jax.Array:
        # [segment, segments, ...]: a step of a loop is of all segments.
        return x[:, None] if segment == 1 else jnp.swapaxes(x.reshape(-1, segment, *x.shape[1:]), 0, 1)

    split, parts = jax.tree.map(by_segment, maps), by_segment(added)
    zeros = jnp.zeros_like(parts[0])
    if segment > 1:
        _, out = _run(split, parts, zeros, precision, reverse=reverse, keeps=False)
        whole = _composed(split, added.shape[-2])
        zeros = _entries(whole, out, reverse=reverse)
    found, _ = _run(split, parts, zeros, precision, reverse=reverse, keeps=True)
    return jnp.swapaxes(found, 0, 1).reshape(added.shape)


def _run(
    maps: Maps, added: jax.Array, entry: jax.Array, precision: lax.Precision, *, reverse: bool, keeps: bool
) -> tuple[Any, jax.Array]:
    """The states ``[steps, ...]`` of a chain, if they are kept, and what flows out of its end."""

    def step(at: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        kept, entering = carry
        here: Maps = jax.tree.map(lambda x: _at(x, at), maps)
        if reverse:
            state = entering = _at(added, at) + here.apply(entering, precision, transposed=True)
        else:
            state = _at(added, at) + entering
            entering = here.apply(state, precision)
        kept = lax.dynamic_update_index_in_dim(kept, state, at, 0) if keeps else None
        return kept, entering

    carry = jnp.zeros_like(added) if keeps else None, entry
    return _loop(step, carry, added.shape[0], (maps, added), reverse=reverse)


def _composed(maps: Maps, key_dim: int) -> Maps:
    """The maps of whole segments, from those of their chunks ``[steps, ...]``."""
    if maps.removed is None:
        decay = maps.decay if maps.keep is None else jnp.where(maps.keep, maps.decay, 0)
        return Maps(jnp.prod(decay, axis=0), None, None)
    leading = maps.decay.shape[1:-2]
    unit = jnp.broadcast_to(jnp.eye(key_dim, dtype=maps.decay.dtype), (*leading, key_dim, key_dim))

    def step(at: jax.Array, product: jax.Array) -> Any:
        here: Maps = jax.tree.map(lambda x: _at(x, at), maps)
        return here.apply(product, lax.Precision.HIGHEST)

    product = _loop(step, unit, maps.decay.shape[0], maps, reverse=False)
    return Maps(jnp.zeros_like(maps.decay[0]), -product, None)


def _entries(whole: Maps, out: jax.Array, *, reverse: bool) -> jax.Array:
    """The states that flow into segments, from those that flow out of each if nothing flows in."""

    def step(at: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        entries, entering = carry
        entries = lax.dynamic_update_index_in_dim(entries, entering, at, 0)
        here: Maps = jax.tree.map(lambda x: _at(x, at), whole)
        # Here and in the products, rounded operands would lose digits along all segments.
        return entries, _at(out, at) + here.apply(entering, lax.Precision.HIGHEST, transposed=reverse)

    carry = jnp.zeros_like(out), jnp.zeros_like(out[0])
    entries: jax.Array = _loop(step, carry, out.shape[0], (whole, out), reverse=reverse)[0]
    return entries


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _loop(step: Callable[[Any, Any], Any], carry: Any, count: int, operands: Any, *, reverse: bool) -> Any:
    """``carry`` after a step for each index, which has 32 bits, unlike that of a ``scan`` with ``jax_enable_x64``."""
    carry = vary_over(varying_axes((carry, operands)), carry)
    if not is_symbolic(count) and count <= UNROLLED_STEPS:
        for at in reversed(range(count)) if reverse else range(count):
            carry = step(at, carry)
        return carry
    steps = jnp.asarray(count, jnp.int32)

    def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        done, carry = state
        return done + 1, step(steps - 1 - done if reverse else done, carry)

    return lax.while_loop(lambda state: state[0] < steps, body, (jnp.int32(0), carry))[1]
