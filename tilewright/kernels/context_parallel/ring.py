"""The ring: keys and values travel from device to device while each computes with those that it holds.

| name | meaning |
| --- | --- |
| step of shift s | device i has the keys of device i − s |
| partial result | out in float32 and lse, over the keys that were seen so far |
| contribution | dK and dV in float32 of the keys that a device holds, from its own queries |

Order of issue, forward: the hop to step t + 1; the kernels of step t; their combination. Backward: the hop of the keys
to step t + 1, and that of dK and dV from step t − 1; the kernels of step t; their sum. Transfers read nothing that the
kernels of the step write, so XLA runs both at once. An ``optimization_barrier`` after each step keeps it from running
ahead with the transfers of later steps, each of which needs memory for another shard.
"""

import functools
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


class Partial(NamedTuple):
    """``[batch, q_length, heads, value_dim]`` and ``[batch, heads, q_length]``, both float32 or wider."""

    out: jax.Array
    lse: jax.Array


class Contribution(NamedTuple):
    """Gradients of keys and values, float32 or wider."""

    key: jax.Array
    value: jax.Array


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
    held = _hop(Keys(key, value, ids), call.axis, steps[0].shift if steps else 0)
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arriving = None if following is None else _hop(held, call.axis, following.shift - step.shift)

        def compute(plan: Sequence[Rectangle], operands: tuple[Keys, Partial], shift: int = step.shift) -> Partial:
            keys, partial = operands
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
    query, key, value, sinks, (ids, arrays), out, lse = residuals
    d_out, d_lse = cotangents
    steps = ring_steps(call.layout, call.static_band)
    index = lax.axis_index(call.axis)
    dtype = accumulation_dtype(query.dtype)
    d_query = vary_over(varying_axes(query), jnp.zeros(query.shape, dtype))
    held = _hop(Keys(key, value, ids), call.axis, steps[0].shift if steps else 0)
    travelling = _no_contribution(held, dtype)
    for step, previous, following in zip(steps, [None, *steps[:-1]], [*steps[1:], None], strict=True):
        arriving = None if following is None else _hop(held, call.axis, following.shift - step.shift)
        received = None if previous is None else _hop(travelling, call.axis, step.shift - previous.shift)

        def compute(
            plan: Sequence[Rectangle], operands: tuple[Keys, jax.Array], shift: int = step.shift
        ) -> tuple[jax.Array, Contribution]:
            keys, d_query = operands
            contribution = _no_contribution(keys, dtype)
            for part in plan:
                rows, columns = slice(*part.rows), slice(*part.columns)
                mask = _mask(call, arrays, keys.ids, index, shift, part)
                d_lse_part = (d_lse[:, :, rows],) if call.return_lse else ()
                # out and lse are those over all keys: P = exp(S − lse), and delta = rowsum(dO ∘ O) − dlse.
                gradients = kernel.gradients(
                    ("query", "key", "value"), (out[:, rows], lse[:, :, rows]), (d_out[:, rows], *d_lse_part),
                    query[:, rows], keys.key[:, columns], keys.value[:, columns], None, mask,
                    return_lse=call.return_lse, **dict(call.options),
                )  # fmt: skip
                d_query = _added(d_query, rows, gradients[0])
                contribution = Contribution(
                    *(_added(sum_, columns, each) for sum_, each in zip(contribution, gradients[1:], strict=True))
                )
            return d_query, contribution

        d_query, contribution = _on_device(step, index, compute, (held, d_query))
        # Only here does anything wait for what was received: the hop had the time of the kernels.
        travelling = contribution if received is None else jax.tree.map(jnp.add, received, contribution)
        if arriving is not None:
            held, d_query, travelling = lax.optimization_barrier((arriving, d_query, travelling))
    d_key, d_value = _hop(travelling, call.axis, -steps[-1].shift if steps else 0)
    # Of the sinks and the rows alone.
    inputs = AttentionInputs(query, key, value, None, None, sinks, None, AttentionOptions(1.0))
    terms = row_terms(inputs, out, lse, d_out, d_lse if call.return_lse else None)
    d_sinks = sinks_gradient(inputs, *terms)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), d_sinks, None


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


def _hop[T](tree: T, axis: AxisName, by: int) -> T:
    """Sends arrays ``by`` devices on, around the axis."""
    size = lax.axis_size(axis)
    if by % size == 0:
        return tree
    pairs = [(source, (source + by) % size) for source in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


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


def _no_contribution(keys: Keys, dtype: Any) -> Contribution:
    zeros = (jnp.zeros(each.shape, dtype) for each in (keys.key, keys.value))
    return vary_over(varying_axes(keys), Contribution(*zeros))


def _added(total: jax.Array, rows: slice, part: jax.Array) -> jax.Array:
    """A sum with further terms for some of its rows, along axis 1."""
    part = part.astype(total.dtype)
    return total + part if part.shape == total.shape else total.at[:, rows].add(part)
