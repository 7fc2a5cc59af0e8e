"""The ring: keys and values travel from device to device while each computes with those that it holds.

| name | meaning |
| --- | --- |
| step of shift s | device i has the keys of device i − s |
| partial result | out in float32 and lse, over the keys that were seen so far |
| contribution | dK and dV in float32, one after another in one array, of the keys that a device holds |

Order of issue, forward: the hop to step t + 1; the kernels of step t; their combination. Backward: the hop of the keys
to step t + 1, and that of dK and dV from step t − 1; the kernels of step t; their sum. Transfers read nothing that the
kernels of the step write, so XLA runs both at once. An ``optimization_barrier`` after each step keeps it from running
ahead with the transfers of later steps, each of which needs memory for another shard.

XLA has one ``collective-permute`` under way at a time, and waits at once for all others. So what travels together is
one array: the bits of keys, values and ids one after another, of which kernels read slices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tilewright.kernels.context_parallel.call import AxisName, ContextCall, MaskArrays, mask_of
from tilewright.kernels.context_parallel.plan import Rectangle, Step, ring_steps
from tilewright.kernels.flash_attention.inputs import AttentionInputs, AttentionOptions
from tilewright.kernels.flash_attention.operands import by_row
from tilewright.kernels.flash_attention.results import row_terms, sinks_gradient
from tilewright.kernels.portfolio import Portfolio
from tilewright.kernels.sharding import vary_over, varying_axes
from tilewright.kernels.softmax import accumulation_dtype, finite_shift

type AttentionKernel = Portfolio[Any, Any, Any]


class Keys(NamedTuple):
    """The arrays that travel."""

    key: jax.Array
    value: jax.Array
    ids: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Travelling:
    """The keys, values and ids of a device as one array of their bits, of which None stands for its own.

    Attributes:
      own: those with which the device begins.
    """

    own: Keys

    @property
    def bits(self) -> np.dtype:
        """The unsigned integers of the size of a key's elements; no operation changes these, as it may a float."""
        return np.dtype(f"uint{8 * self.own.key.dtype.itemsize}")

    def hop(self, held: jax.Array | None, axis: AxisName, by: int) -> jax.Array | None:
        """Sends what a device holds ``by`` devices on."""
        if by % lax.axis_size(axis) == 0:
            return held
        if held is None:
            parts = [lax.bitcast_convert_type(each, self.bits) for each in (self.own.key, self.own.value)]
            if self.own.ids is not None:
                # Wider than 32 bits only for float64 keys.
                ids = self.own.ids.astype(np.int64) if self.bits.itemsize == 8 else self.own.ids
                parts.append(lax.bitcast_convert_type(ids, self.bits))
            held = _in_one(parts)
        return _hop(held, axis, by)

    def keys(self, held: jax.Array | None) -> Keys:
        """The arrays that a device holds."""
        if held is None:
            return self.own
        shapes = [self.own.key.shape, self.own.value.shape]
        halves = max(4 // self.bits.itemsize, 1)
        if self.own.ids is not None:
            shapes.append((*self.own.ids.shape, halves) if halves > 1 else self.own.ids.shape)
        key, value, *ids = _cut(held, shapes)
        wide = np.int64 if self.bits.itemsize == 8 else np.int32
        return Keys(
            lax.bitcast_convert_type(key, self.own.key.dtype),
            lax.bitcast_convert_type(value, self.own.value.dtype),
            lax.bitcast_convert_type(ids[0], wide).astype(np.int32) if ids else None,
        )

    def no_contribution(self, dtype: Any) -> jax.Array:
        """Gradients of zero."""
        zeros = [jnp.zeros(each.shape, dtype) for each in (self.own.key, self.own.value)]
        return vary_over(varying_axes(self.own), _in_one(zeros))

    def gradients(self, flat: jax.Array) -> list[jax.Array]:
        """The gradients of key and value."""
        return _cut(flat, [self.own.key.shape, self.own.value.shape])


class Partial(NamedTuple):
    """``[batch, q_length, heads, value_dim]`` and ``[batch, heads, q_length]``, both float32 or wider."""

    out: jax.Array
    lse: jax.Array


def ring_attention(
    kernel: AttentionKernel,
    call: ContextCall,
    query: jax.Array,
    keys: Keys,
    sinks: jax.Array | None,
    arrays: MaskArrays,
) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of this device's queries, with gradients for query, key, value and sinks; reverse mode only."""
    operands = (query, *keys, sinks, arrays)
    # Gradients of what several devices share are summed where the transpose of this widens the type.
    query, key, value, ids, sinks, arrays = vary_over(varying_axes((operands, lax.axis_index(call.axis))), operands)
    return _ring(kernel, call, query, key, value, sinks, (ids, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    kernel: AttentionKernel,
    call: ContextCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    masking: tuple[jax.Array | None, MaskArrays],
) -> tuple[jax.Array, jax.Array]:
    return _forward(kernel, call, query, key, value, sinks, masking)[0]


def _forward(
    kernel: AttentionKernel,
    call: ContextCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    masking: tuple[jax.Array | None, MaskArrays],
) -> tuple[Any, Any]:
    ids, arrays = masking
    steps = ring_steps(call.layout, call.static_band)
    index = lax.axis_index(call.axis)
    partial = _nothing(query, value)
    travelling = Travelling(Keys(key, value, ids))
    held = travelling.hop(None, call.axis, steps[0].shift if steps else 0)
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arriving = None if following is None else travelling.hop(held, call.axis, following.shift - step.shift)

        def compute(
            plan: Sequence[Rectangle], operands: tuple[jax.Array | None, Partial], shift: int = step.shift
        ) -> Partial:
            keys, partial = travelling.keys(operands[0]), operands[1]
            for part in plan:
                rows = slice(*part.rows)
                mask = _mask(call, arrays, keys.ids, index, shift, part)
                columns = slice(*part.columns)
                found = kernel(
                    query[:, rows], keys.key[:, columns], keys.value[:, columns], None, mask,
                    return_lse=True, **dict(call.options),
                )  # fmt: skip
                partial = _combined(partial, rows, *found)
            return partial

        partial = _on_device(step, index, compute, (held, partial))
        held, partial = (held, partial) if arriving is None else lax.optimization_barrier((arriving, partial))
    partial = _with_sinks(partial, sinks)
    out = checkpoint_name(partial.out.astype(query.dtype), "flash_attention_out")
    lse = checkpoint_name(partial.lse, "flash_attention_residuals")
    return (out, lse), (query, key, value, sinks, masking, out, lse)


def _backward(kernel: AttentionKernel, call: ContextCall, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    # Without a barrier XLA takes the hops of the forward pass for those of this one, and keeps their results for it.
    (query, key, value, sinks, (ids, arrays), out, lse), (d_out, d_lse) = lax.optimization_barrier(
        (residuals, cotangents)
    )
    steps = ring_steps(call.layout, call.static_band)
    index = lax.axis_index(call.axis)
    dtype = accumulation_dtype(query.dtype)
    d_query = vary_over(varying_axes(query), jnp.zeros(query.shape, dtype))
    travelling = Travelling(Keys(key, value, ids))
    held = travelling.hop(None, call.axis, steps[0].shift if steps else 0)
    gradients = travelling.no_contribution(dtype)
    for step, previous, following in zip(steps, [None, *steps[:-1]], [*steps[1:], None], strict=True):
        arriving = None if following is None else travelling.hop(held, call.axis, following.shift - step.shift)
        received = None if previous is None else _hop(gradients, call.axis, step.shift - previous.shift)

        def compute(
            plan: Sequence[Rectangle], operands: tuple[jax.Array | None, jax.Array], shift: int = step.shift
        ) -> tuple[jax.Array, jax.Array]:
            keys, d_query = travelling.keys(operands[0]), operands[1]
            sums = [vary_over(varying_axes(query), jnp.zeros(each.shape, dtype)) for each in (key, value)]
            for part in plan:
                rows, columns = slice(*part.rows), slice(*part.columns)
                mask = _mask(call, arrays, keys.ids, index, shift, part)
                d_lse_part = (d_lse[:, :, rows],) if call.return_lse else ()
                # out and lse are those over all keys: P = exp(S − lse), and delta = rowsum(dO ∘ O) − dlse.
                found = kernel.gradients(
                    ("query", "key", "value"), (out[:, rows], lse[:, :, rows]), (d_out[:, rows], *d_lse_part),
                    query[:, rows], keys.key[:, columns], keys.value[:, columns], None, mask,
                    return_lse=call.return_lse, **dict(call.options),
                )  # fmt: skip
                d_query = _added(d_query, rows, found[0])
                sums = [_added(total, columns, each) for total, each in zip(sums, found[1:], strict=True)]
            return d_query, _in_one(sums)

        d_query, contribution = _on_device(step, index, compute, (held, d_query))
        # Only here does anything wait for what was received: the hop had the time of the kernels.
        gradients = contribution if received is None else received + contribution
        if arriving is not None:
            held, d_query, gradients = lax.optimization_barrier((arriving, d_query, gradients))
    # Complete, so that the rounding that comes anyway may come before the last hop, which nothing hides.
    complete = gradients.astype(key.dtype)
    d_key, d_value = travelling.gradients(_hop(complete, call.axis, -steps[-1].shift if steps else 0))
    # Of the sinks and the rows alone.
    inputs = AttentionInputs(query, key, value, None, None, sinks, None, AttentionOptions(1.0))
    terms = row_terms(inputs, out, lse, d_out, d_lse if call.return_lse else None)
    d_sinks = sinks_gradient(inputs, *terms)
    return d_query.astype(query.dtype), d_key, d_value, d_sinks, None


_ring.defvjp(_forward, _backward)


def _on_device[Operands, Results](
    step: Step, index: jax.Array, compute: Callable[[Sequence[Rectangle], Operands], Results], operands: Operands
) -> Results:
    """Runs this device's plan of a step."""
    # On a GPU the host reads which branch to launch. Kernels that are masked as a whole would cost more than that.
    branches = [functools.partial(compute, plan) for plan in step.plans]
    if len(branches) == 1:
        return branches[0](operands)
    choice = jnp.asarray(np.array(step.choice, np.int32))[index]
    results: Results = lax.switch(choice, branches, operands)
    return results


def _hop(array: jax.Array, axis: AxisName, by: int) -> jax.Array:
    """Sends an array ``by`` devices on, around the axis."""
    size = lax.axis_size(axis)
    if by % size == 0:
        return array
    moved: jax.Array = lax.ppermute(array, axis, [(source, (source + by) % size) for source in range(size)])
    return moved


def _mask(
    call: ContextCall, arrays: MaskArrays, kv_ids: jax.Array | None, index: jax.Array, shift: int, part: Rectangle
) -> Any:
    """The mask of a rectangle: its band, and what arrays say of the positions of its rows and columns."""
    rows, columns, layout = slice(*part.rows), slice(*part.columns), call.layout
    source = (index.astype(jnp.int32) - shift) % layout.shards
    return mask_of(
        call,
        arrays,
        (layout.positions(index, layout.q_length)[rows], None if arrays.q_ids is None else arrays.q_ids[:, rows]),
        (layout.positions(source, layout.kv_length)[columns], None if kv_ids is None else kv_ids[:, columns]),
        part.band,
    )


def _nothing(query: jax.Array, value: jax.Array) -> Partial:
    """The partial result over no key."""
    dtype = accumulation_dtype(query.dtype)
    batch, length, heads, _ = query.shape
    empty = Partial(
        jnp.zeros((batch, length, heads, value.shape[-1]), dtype), jnp.full((batch, heads, length), -jnp.inf, dtype)
    )
    return vary_over(varying_axes(query), empty)


def _combined(partial: Partial, rows: slice, out: jax.Array, lse: jax.Array) -> Partial:
    """A partial result with further keys for some of its rows."""
    lse = lse.astype(partial.lse.dtype)
    old = partial.lse[:, :, rows]
    total = jnp.logaddexp(old, lse)
    # The greater weight is near 1, so nothing overflows, in whatever order the devices' keys come.
    # Of a row without a visible key both weights are exp(−inf − 0).
    shift = finite_shift(total)
    kept, added = (by_row(jnp.exp(each - shift)) for each in (old, lse))
    merged = kept * partial.out[:, rows] + added * out.astype(partial.out.dtype)
    if merged.shape == partial.out.shape:
        return Partial(merged, total)
    return Partial(partial.out.at[:, rows].set(merged), partial.lse.at[:, :, rows].set(total))


def _with_sinks(partial: Partial, sinks: jax.Array | None) -> Partial:
    """The result with the sinks among the logits."""
    if sinks is None:
        return partial
    total = jnp.logaddexp(partial.lse, jax.nn.logsumexp(sinks.astype(partial.lse.dtype), axis=1)[None, :, None])
    return Partial(partial.out * by_row(jnp.exp(partial.lse - finite_shift(total))), total)


def _added(total: jax.Array, rows: slice, part: jax.Array) -> jax.Array:
    """A sum with further terms for some of its rows, along axis 1."""
    part = part.astype(total.dtype)
    return total + part if part.shape == total.shape else total.at[:, rows].add(part)


def _in_one(arrays: Sequence[jax.Array]) -> jax.Array:
    """The elements of arrays of one dtype, one array after another."""
    return jnp.concatenate([each.reshape(-1) for each in arrays])


def _cut(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The arrays whose elements stand one after another."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [flat[start:end].reshape(shape) for start, end, shape in zip([0, *ends[:-1]], ends, shapes, strict=True)]
