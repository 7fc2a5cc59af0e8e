"""The ring: keys and values travel from device to device while each computes with those that it holds.

| name | meaning |
| --- | --- |
| step of shift s | device i has the keys of device i − s |
| partial result | out in float32 and lse, over the keys that were seen so far |
| contribution | dK and dV, one after another in one array, of the keys that a device holds, from its own queries |

Order of issue, forward: the hop to step t + 1; the kernels of step t; their combination. Backward: the hop of the keys
to step t + 1 and of dK and dV from step t − 1; the kernels of step t; their sum. Transfers read nothing that the
kernels of the step write, so XLA runs both at once. An ``optimization_barrier`` after each step keeps it from running
ahead with the transfers of later steps, each of which needs memory for another shard.

XLA has one ``collective-permute`` under way at a time, and waits at once for all others. So what travels together is
one array: the bits of keys, values, ids and gradients one after another; kernels read slices of it.

Kernels round what they compute in a step to the query's dtype, in which those of the first step wait for the second;
every sum is float32. A branch of a step combines its results with the rows of the sums that they belong to, and rounds
them in the last step: each sum is read and written once in a step.

NCCL moves data by CTAs, each of which takes an SM. A kernel with one CTA on every SM for its whole time starts on some
of them only when the transfer ends, and takes so much longer. So kernels beside a hop are told of it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.distributed.masks import mask_of
from tilewright.kernels.flash_attention.distributed.plan import Rectangle, Segment, Step, ring_steps, segments
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import by_row
from tilewright.kernels.flash_attention.results import row_terms, sinks_gradient
from tilewright.kernels.numerics.softmax import accumulation_dtype, finite_shift
from tilewright.kernels.op.sharding import AxisName, vary_over, varying_axes
from tilewright.kernels.op.xla_flags import permutes_by_copies
from tilewright.ops.kernel.prepared import prepare
from tilewright.ops.utils.promotion import default_promotion

type Index = int | jax.Array
type Range = tuple[int, int]


class Keys(NamedTuple):
    """The arrays that travel."""

    key: jax.Array
    value: jax.Array
    ids: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Travelling:
    """The keys, values and ids of a device as one array of their bits; None stands for its own.

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

    def hop_both(
        self, held: jax.Array | None, gradients: Any, axis: AxisName, out: int | None, received: int | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Sends keys ``out`` devices on and gradients ``received``, as one array if equally far; None: not at all."""
        if held is None or out is None or out != received:
            arriving = None if out is None else self.hop(held, axis, out)
            return arriving, None if received is None else _hop(gradients, axis, received)
        bits = lax.bitcast_convert_type(gradients, self.bits)
        message = _hop(_in_one([held, bits]), axis, out)
        arriving, moved = _cut(message, [held.shape, bits.shape])
        return arriving, lax.bitcast_convert_type(moved, gradients.dtype)

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

    def no_contribution(self) -> jax.Array:
        """Gradients of zero."""
        return _in_one([jnp.zeros_like(each) for each in (self.own.key, self.own.value)])

    def gradients(self, flat: jax.Array) -> list[jax.Array]:
        """The gradients of key and value."""
        return _cut(flat, [self.own.key.shape, self.own.value.shape])


class Turn(NamedTuple):
    """The shift of a step, and for each device which of its plans it takes."""

    shift: Index
    choice: jax.Array


class Separate(NamedTuple):
    """True if no two rectangles of any plan of a step share a row, or a column: then a branch sums nothing."""

    rows: bool
    columns: bool


class StepContext(NamedTuple):
    """The facts of a step that its branches need.

    Attributes:
      last: True if no step follows, so that no hop runs beside this one's kernels.
    """

    shift: Index
    separate: Separate
    last: bool


class Partial(NamedTuple):
    """``[batch, q_length, heads, value_dim]`` and ``[batch, heads, q_length]``; of one step as its kernel gives it."""

    out: jax.Array
    lse: jax.Array

    def rounded(self, dtype: jax.typing.DTypeLike) -> "Partial":
        """The same with ``out`` in a dtype, and ``lse`` in that of sums."""
        return Partial(self.out.astype(dtype), self.lse.astype(accumulation_dtype(self.out.dtype)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def ring_attention(inputs: ContextInputs, cfg: object) -> tuple[jax.Array, jax.Array]:
    """``(out, lse)`` of this device's queries, with gradients for query, key, value and sinks; reverse mode only."""
    return _forward(inputs, cfg)[0]


@default_promotion()
def _forward(inputs: ContextInputs, cfg: object) -> tuple[Any, Any]:
    query, value, sinks = inputs.query, inputs.value, inputs.softmax_aux
    steps = ring_steps(inputs.rows, inputs.static_band)
    index = lax.axis_index(inputs.axis)
    travelling = Travelling(Keys(inputs.key, value, inputs.kv_ids))

    def compute(
        context: StepContext, plan: Sequence[Rectangle], held: jax.Array | None, partial: Partial | None
    ) -> Partial:
        keys, found = travelling.keys(held), []
        for part in plan:
            of_part = _inputs(inputs, keys, part, (index, context.shift), return_lse=True)
            # Backward kernels have no form that leaves SMs, so they are not told.
            of_part = of_part.replace(beside_transfer=not context.last and not permutes_by_copies())
            found.append((part.rows, inputs.kernel(of_part, cfg=cfg)))
        if partial is None and context.separate.rows:
            shape = (*query.shape[:3], value.shape[3])
            out = _placed([(rows, out) for rows, (out, _) in found], shape, 1, query)
            return Partial(out, _placed([(rows, lse) for rows, (_, lse) in found], _of_rows(shape), 2, query, -jnp.inf))
        partial = _nothing(query, value) if partial is None else partial
        # The sinks join the result before it is rounded.
        dtype = query.dtype if context.last and sinks is None else accumulation_dtype(query.dtype)
        return functools.reduce(lambda sums, each: _combined(sums, *each), found, partial).rounded(dtype)

    def step(segment: Segment, carry: tuple[jax.Array | None, Partial | None], turn: Turn) -> Any:
        held, partial = carry
        arriving = None if segment.hop_out is None else travelling.hop(held, inputs.axis, segment.hop_out)
        partial = _on_device(segment, turn, index, compute, held, partial)
        return (held, partial) if arriving is None else lax.optimization_barrier((arriving, partial))

    held = travelling.hop(None, inputs.axis, steps[0].shift if steps else 0)
    _, partial = _over_steps(steps, step, (held, None))
    partial = _with_sinks(_nothing(query, value) if partial is None else partial, sinks)
    out = checkpoint_name(partial.out.astype(query.dtype), "flash_attention_out")
    lse = checkpoint_name(partial.lse, "flash_attention_residuals")
    return (out, lse), (inputs, out, lse)


@jax.custom_vjp
def _once(gradients: ContextInputs) -> ContextInputs:
    """The gradients of a ring, which cannot be differentiated: those of keys and values would be wrong."""
    return gradients


def _refuse(residuals: object, cotangents: object) -> Any:
    raise TypeError(
        "context_parallel_attention: a ring has no second derivatives; pass strategy='all_gather', or 'ulysses' where "
        "the devices divide the heads"
    )


_once.defvjp(lambda gradients: (gradients, None), _refuse)


@default_promotion()
def _backward(cfg: object, residuals: Any, cotangents: Any) -> tuple[ContextInputs]:
    # Without a barrier XLA takes the hops of the forward pass for those of this one, and keeps their results for it.
    (inputs, out, lse), (d_out, d_lse) = lax.optimization_barrier((residuals, cotangents))
    query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.softmax_aux
    steps = ring_steps(inputs.rows, inputs.static_band)
    index = lax.axis_index(inputs.axis)
    dtype = accumulation_dtype(query.dtype)
    travelling = Travelling(Keys(key, value, inputs.kv_ids))

    def compute(
        context: StepContext, plan: Sequence[Rectangle], held: jax.Array | None, d_query: jax.Array | None
    ) -> Any:
        keys, found = travelling.keys(held), []
        for part in plan:
            rows = slice(*part.rows)
            d_lse_part = (d_lse[:, :, rows],) if inputs.return_lse else ()
            # out and lse are those over all keys: P = exp(S − lse), and delta = rowsum(dO ∘ O) − dlse.
            results, d_results = (out[:, rows], lse[:, :, rows]), (d_out[:, rows], *d_lse_part)
            of_part = _inputs(inputs, keys, part, (index, context.shift), return_lse=inputs.return_lse)
            gradients = inputs.kernel.gradients(("query", "key", "value"), results, d_results, of_part, cfg=cfg)
            found.append((part.rows, part.columns, gradients))
        if d_query is None:
            together = _placed if context.separate.rows else _summed
            d_query = together([(where, each[0]) for where, _, each in found], query.shape, 1, query)
        else:
            # Widened here, where it is one operation with the sum.
            d_query = d_query.astype(dtype)
            for where, _, (added, *_) in found:
                d_query = _with_rows(d_query, where, 1, functools.partial(jnp.add, added.astype(dtype)))
            d_query = d_query.astype(query.dtype if context.last else dtype)
        together = _placed if context.separate.columns else _summed
        return d_query, _in_one([
            together([(where, each[i]) for _, where, each in found], operand.shape, 1, query)
            for i, operand in ((1, key), (2, value))
        ])  # fmt: skip

    def step(segment: Segment, carry: tuple[jax.Array | None, jax.Array | None, Any], turn: Turn) -> Any:
        held, d_query, gradients = carry
        arriving, received = travelling.hop_both(held, gradients, inputs.axis, segment.hop_out, segment.hop_in)
        d_query, contribution = _on_device(segment, turn, index, compute, held, d_query)
        # Only here does anything wait for what was received: the hop had the time of the kernels.
        gradients = contribution if received is None else received.astype(dtype) + contribution.astype(dtype)
        if arriving is None:
            return held, d_query, gradients
        return lax.optimization_barrier((arriving, d_query, gradients))

    held = travelling.hop(None, inputs.axis, steps[0].shift if steps else 0)
    _, d_query, gradients = _over_steps(steps, step, (held, None, None))
    if d_query is None or gradients is None:  # no device has a visible pair
        d_query, gradients = jnp.zeros_like(query), travelling.no_contribution()
    # Complete, so that the rounding that comes anyway may come before the last hop, which nothing hides.
    complete = gradients.astype(key.dtype)
    d_key, d_value = travelling.gradients(_hop(complete, inputs.axis, -steps[-1].shift if steps else 0))
    # From only the sinks and the rows.
    plain = AttentionInputs(query, key, value, 1.0, softmax_aux=sinks)
    d_sinks = sinks_gradient(plain, *row_terms(plain, out, lse, d_out, d_lse if inputs.return_lse else None))
    of_arrays = {**dict.fromkeys(inputs.arrays), "query": d_query.astype(query.dtype), "key": d_key, "value": d_value}
    return (_once(inputs.replace(**of_arrays | {"softmax_aux": d_sinks})),)


ring_attention.defvjp(_forward, _backward)


def _over_steps(steps: Sequence[Step], step: Callable[..., Any], carry: Any) -> Any:
    """The carry after all steps; runs of like steps are a loop."""
    for segment in segments(steps):
        shifts = np.array([each.shift for each in segment.steps], np.int32)
        choices = np.array([each.choice for each in segment.steps], np.int32)
        if len(shifts) == 1:
            carry = step(segment, carry, Turn(shifts[0], jnp.asarray(choices[0])))
        else:
            # Between its steps, as before and after them, keys travel by one.
            body = functools.partial(_looped, step, segment)
            carry, _ = lax.scan(body, _widened(carry), Turn(jnp.asarray(shifts), jnp.asarray(choices)))
    return carry


def _looped(step: Callable[..., Any], segment: Segment, carry: Any, turn: Turn) -> tuple[Any, None]:
    return step(segment, carry, turn), None


def _widened[T](carry: T) -> T:
    """A carry whose sums have the dtype of accumulation; the bits that travel are not floats."""
    return jax.tree.map(
        lambda x: x.astype(accumulation_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x, carry
    )


def _on_device(
    segment: Segment, turn: Turn, index: jax.Array, compute: Callable[..., Any], held: jax.Array | None, sums: Any
) -> Any:
    """Runs this device's plan of a step, whose results have the same shapes whatever the plan."""
    plans = segment.steps[0].plans
    separate = Separate(*(all(map(_are_separate, each)) for each in zip(*map(_ranges, plans), strict=True)))
    context = StepContext(turn.shift, separate, last=segment.hop_out is None)
    # On a GPU the host reads which branch to launch. Kernels that are masked as a whole would cost more than that.
    branches = [functools.partial(compute, context, plan) for plan in plans]
    return branches[0](held, sums) if len(branches) == 1 else lax.switch(turn.choice[index], branches, held, sums)


def _ranges(plan: Sequence[Rectangle]) -> tuple[list[Range], list[Range]]:
    return [part.rows for part in plan], [part.columns for part in plan]


def _are_separate(ranges: Sequence[Range]) -> bool:
    """True if no two of some ranges overlap."""
    return all(first[1] <= second[0] for first, second in itertools.pairwise(sorted(ranges)))


def _hop(array: jax.Array, axis: AxisName, by: int) -> jax.Array:
    """Sends an array ``by`` devices on, around the axis."""
    size = lax.axis_size(axis)
    if by % size == 0:
        return array
    moved: jax.Array = lax.ppermute(array, axis, [(source, (source + by) % size) for source in range(size)])
    return moved


def _inputs(
    inputs: ContextInputs,
    keys: Keys,
    part: Rectangle,
    place: tuple[jax.Array, Index],
    *,
    return_lse: bool,
) -> AttentionInputs:
    """The kernel's inputs for a rectangle: its mask is its band, and what arrays say of its rows and columns.

    Args:
      place: the device's index, and the shift of the step.
    """
    rows, columns, layout, (index, shift) = slice(*part.rows), slice(*part.columns), inputs.rows, place
    source = (index.astype(jnp.int32) - shift) % layout.shards
    mask = mask_of(
        inputs,
        (layout.positions(index, layout.q_length)[rows], None if inputs.q_ids is None else inputs.q_ids[:, rows]),
        (layout.positions(source, layout.kv_length)[columns], None if keys.ids is None else keys.ids[:, columns]),
        part.band,
    )
    arrays = inputs.query[:, rows], keys.key[:, columns], keys.value[:, columns], None, mask
    (found,), _ = prepare(inputs.kernel, arrays, {"return_lse": return_lse, **inputs.of_parts})
    return cast(AttentionInputs, found)


def _nothing(query: jax.Array, value: jax.Array) -> Partial:
    """The partial result over no key."""
    dtype = accumulation_dtype(query.dtype)
    shape = (*query.shape[:3], value.shape[3])
    empty = Partial(jnp.zeros(shape, dtype), jnp.full(_of_rows(shape), -jnp.inf, dtype))
    return vary_over(varying_axes(query), empty)


def _of_rows(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """``[batch, heads, length]`` of ``[batch, length, heads, head_dim]``."""
    return shape[0], shape[2], shape[1]


def _combined(partial: Partial, rows: Range, further: tuple[jax.Array, jax.Array]) -> Partial:
    """A partial result with further keys for some of its rows, in float32 or wider."""
    select = slice(*rows)
    partial = _widened(partial)
    out, lse = further[0].astype(partial.out.dtype), further[1].astype(partial.lse.dtype)
    old = partial.lse[:, :, select]
    total = jnp.logaddexp(old, lse)
    # The greater weight is near 1, so nothing overflows, in whatever order the devices' keys come.
    # Of a row without a visible key both weights are exp(−inf − 0).
    shift = finite_shift(total)
    kept, added = (by_row(jnp.exp(each - shift)) for each in (old, lse))
    merged = kept * partial.out[:, select] + added * out
    return Partial(
        _with_rows(partial.out, rows, 1, lambda _: merged), _with_rows(partial.lse, rows, 2, lambda _: total)
    )


def _with_rows(x: jax.Array, rows: Range, axis: int, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """An array with a range of an axis changed: written as a whole, since a conditional copies what it is given."""
    ends = (0, *rows, x.shape[axis])
    parts = [lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in itertools.pairwise(ends)]
    parts[1] = change(parts[1])
    kept = [part for part in parts if part.shape[axis]]
    return kept[0] if len(kept) == 1 else jnp.concatenate(kept, axis)


def _with_sinks(partial: Partial, sinks: jax.Array | None) -> Partial:
    """The result with the sinks among the logits."""
    if sinks is None:
        return partial
    partial = _widened(partial)
    total = jnp.logaddexp(partial.lse, jax.nn.logsumexp(sinks.astype(partial.lse.dtype), axis=1)[None, :, None])
    return Partial(partial.out * by_row(jnp.exp(partial.lse - finite_shift(total))), total)


def _placed(
    parts: Sequence[tuple[Range, jax.Array]], shape: tuple[int, ...], axis: int, like: jax.Array, fill: float = 0.0
) -> jax.Array:
    """An array with parts in separate ranges of an axis and ``fill`` elsewhere; varies over devices as ``like`` does.

    It has the parts' dtype: the query's for results in it, float32 for its statistics.
    """
    dtype = parts[0][1].dtype if parts else like.dtype if len(shape) == 4 else accumulation_dtype(like.dtype)

    def filled(length: int) -> jax.Array:
        size = (*shape[:axis], length, *shape[axis + 1 :])
        return vary_over(varying_axes(like), jnp.full(size, fill, dtype))

    pieces, end = [], 0
    for (start, stop), part in sorted(parts, key=lambda each: each[0]):
        pieces += [filled(start - end)] * (start > end) + [part]
        end = stop
    pieces += [filled(shape[axis] - end)] * (shape[axis] > end)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)


def _summed(parts: Sequence[tuple[Range, jax.Array]], shape: tuple[int, ...], axis: int, like: jax.Array) -> jax.Array:
    """The sum of parts in ranges of an axis that may overlap, in float32 or wider."""
    dtype = accumulation_dtype(like.dtype)
    # Pad rather than add in place: the latter is a scatter, and jaxlib 0.11.2 crashed while compiling one.
    padded = [_placed([(where, part.astype(dtype))], shape, axis, like) for where, part in parts]
    return functools.reduce(jnp.add, padded) if padded else _placed([], shape, axis, like).astype(dtype)


def _in_one(arrays: Sequence[jax.Array]) -> jax.Array:
    """The elements of arrays of one dtype, one array after another."""
    return jnp.concatenate([each.reshape(-1) for each in arrays])


def _cut(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The arrays whose elements stand one after another."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [flat[start:end].reshape(shape) for start, end, shape in zip([0, *ends[:-1]], ends, shapes, strict=True)]
