"""Splits attention over the explicit axes of a mesh: by batch, by heads, by the length of the queries, and of the keys.

Keys and values are split by batch and heads like the query, or replicated. A replicated array is sliced to what a
device needs, which moves no data; its gradient is summed over the devices that share it. Lengths of queries and keys
are split by different axes here; where they share an axis, keys must travel: see ``distributed``.

Split keys: each device attends to its own, and the results are those of all by one maximum of the lse and one sum of
the weighted outputs. The backward pass has the out and lse of the whole, so that P = exp(S − lse) is right on every
device; the gradient of the query is their sum.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.masks import BandMask, CombinedMask, ExplicitMask, LengthMask, Mask, SegmentMask
from tilewright.kernels.numerics.softmax import merged_over_axes
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)

type Axes = str | tuple[str, ...] | None
"""The entry of a ``PartitionSpec`` for one dimension."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The mesh axes over which a call is split."""

    batch: Axes
    rows: Axes
    heads: Axes
    keys: Axes

    def scores(self, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array that broadcasts to ``[batch, heads, q_length, kv_length]``."""
        axes = (self.batch, self.heads, self.rows, self.keys)
        return PartitionSpec(*(each if size > 1 else None for each, size in zip(axes, shape, strict=True)))

    def missing(self, spec: PartitionSpec) -> tuple[str, ...]:
        """The axes over which the call is split and an array is not."""
        own_axes = {name for axes in spec for name in axis_names(axes)}
        used = [name for axes in (self.batch, self.rows, self.heads, self.keys) for name in axis_names(axes)]
        return tuple(name for name in used if name not in own_axes)


def attention_partitioning(inputs: AttentionInputs) -> Partitioning | None:
    """The partitioning implied by the types of query, key and value.

    Raises:
      ValueError: a head_dim is split; an axis splits the lengths of queries and keys; or keys or values are split
        differently or not like the query.
    """
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    split = _checked({name: typed_axes(array) for name, array in arrays.items()}, inputs)
    # Any: AttentionInputs is also the pytree that holds a spec in place of each of its arrays.
    rows: Any = PartitionSpec(split.batch, split.rows, split.heads, None)
    chosen = _key_heads(inputs, math.prod(mesh.shape[name] for name in axis_names(split.heads)))
    # Key heads that the devices do not divide stay whole: each device takes those that it needs in ``on_part``.
    keys: Any = PartitionSpec(split.batch, split.keys, None if chosen else split.heads, None)
    sinks: Any = PartitionSpec(split.heads, None)
    replicated: Any = PartitionSpec()
    gradients = {
        "query": GradientParts(rows, split.missing(rows), typed_spec(inputs.query)),
        "key": GradientParts(keys, split.missing(keys), typed_spec(inputs.key)),
        "value": GradientParts(keys, split.missing(keys), typed_spec(inputs.value)),
    }
    bias: Any = None
    if inputs.bias is not None:
        bias = split.scores(inputs.bias.shape)
        gradients["bias"] = GradientParts(bias, split.missing(bias), typed_spec(inputs.bias))
    position_bias: Any = None
    if inputs.position_bias is not None:
        position_bias = _position_bias_specs(inputs.position_bias, split, inputs.query.shape[0])
        spec, typed = position_bias.values, typed_spec(inputs.position_bias.values)
        gradients["position_bias"] = GradientParts(spec, split.missing(spec), typed)
    if inputs.softmax_aux is not None:
        gradients["softmax_aux"] = GradientParts(sinks, split.missing(sinks), typed_spec(inputs.softmax_aux))

    def on_part(part: AttentionInputs) -> AttentionInputs:
        if chosen:
            heads = chosen(_index(split.heads))
            part = part.replace(key=jnp.take(part.key, heads, axis=2), value=jnp.take(part.value, heads, axis=2))
        part = _with_own_positions(part, split)
        return _with_origin(_with_keys(part, split, inputs.key.shape[1]), split)

    def on_gradients(computed: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if not chosen:
            return computed
        heads = chosen(_index(split.heads))
        kv_heads = inputs.key.shape[2]
        shared = [name for name in ("key", "value") if name in computed]
        return computed | {name: _scattered(computed[name], heads, kv_heads) for name in shared}

    def on_results(results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if split.keys is None:
            return results
        # Each device has seen only its keys: its softmax is normalised by its own lse, by which the parts are weighted.
        out, lse = merged_over_axes(results[0], jnp.swapaxes(results[1], 1, 2), axis_names(split.keys))
        return out, jnp.swapaxes(lse, 1, 2)

    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(
            query=rows,
            key=keys,
            value=keys,
            bias=bias,
            mask=None if inputs.mask is None else _mask_specs(inputs.mask, split, inputs.query.shape[0]),
            softmax_aux=None if inputs.softmax_aux is None else sinks,
            dropout_seed=None if inputs.dropout_seed is None else replicated,
            position_bias=position_bias,
        ),
        results=(rows, PartitionSpec(split.batch, split.heads, split.rows)),
        gradients=gradients,
        on_part=on_part,
        on_gradients=on_gradients,
        on_results=on_results,
    )


def with_positions(
    mask: Mask | None, query: jax.Array | jax.ShapeDtypeStruct, key: jax.Array | jax.ShapeDtypeStruct
) -> Mask | None:
    """Gives a mask's bands explicit query positions if a length is split, so that parts do not count from 0.

    The positions are an array, split like the query. They are added before a config is chosen, because not every
    backend supports them.
    """
    if mask is None or not _parts_need_positions(query, key):
        return mask
    return _with_positions(mask, jnp.arange(query.shape[1], dtype=jnp.int32)[None])


def with_bias_positions(
    bias: PositionBias, query: jax.Array | jax.ShapeDtypeStruct, key: jax.Array | jax.ShapeDtypeStruct
) -> PositionBias:
    """Gives a bias explicit query positions where `with_positions` gives them to a mask."""
    if bias.q_positions is not None or not _parts_need_positions(query, key):
        return bias
    return dataclasses.replace(bias, q_positions=jnp.arange(query.shape[1], dtype=jnp.int32)[None])


def _parts_need_positions(*arrays: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return any(not isinstance(each, jax.ShapeDtypeStruct) and typed_axes(each)[1] is not None for each in arrays)


def _with_positions(mask: Mask, positions: jax.Array) -> Mask:
    """The mask with query positions in each band that has none."""
    if isinstance(mask, CombinedMask):
        return type(mask)(tuple(_with_positions(each, positions) for each in mask.masks))  # type: ignore[call-arg]
    if isinstance(mask, BandMask) and mask.q_positions is None:
        return dataclasses.replace(mask, q_positions=positions)  # type: ignore[type-var]
    return mask


def _with_own_positions(part: AttentionInputs, split: Split) -> AttentionInputs:
    """A device's part with the positions of its rows, where a length is split and types did not say so before."""
    if split.rows is None and split.keys is None:
        return part
    rows = part.query.shape[1]
    positions = (_index(split.rows).astype(jnp.int32) * rows + jnp.arange(rows, dtype=jnp.int32))[None]
    bias = part.position_bias
    if bias is not None and bias.q_positions is None:
        part = part.replace(position_bias=dataclasses.replace(bias, q_positions=positions))
    return part if part.mask is None else part.replace(mask=_with_positions(part.mask, positions))


def _with_origin(part: AttentionInputs, split: Split) -> AttentionInputs:
    """A device's part with its position in the whole call, from which dropout and lengths count."""
    # Arrays along the rows are split with them; only lengths of queries count from the first row of the whole call.
    if split.rows is not None and part.mask is not None:
        first_row = _index(split.rows).astype(jnp.int32) * part.query.shape[1]
        part = part.replace(mask=_from_row(part.mask, first_row))
    if part.dropout_seed is None:
        return part
    first = [_index(split.batch) * part.query.shape[0], _index(split.heads) * part.query.shape[2]]
    return part.replace(dropout_origin=jnp.stack(first))


def _from_row(mask: Mask, first: jax.Array) -> Mask:
    """The mask of the rows from ``first`` on, whose arrays already belong to those rows."""
    if isinstance(mask, CombinedMask):
        return type(mask)(tuple(_from_row(each, first) for each in mask.masks))  # type: ignore[call-arg]
    if isinstance(mask, LengthMask) and mask.q_lengths is not None:
        return LengthMask(jnp.maximum(mask.q_lengths - first, 0), mask.kv_lengths)
    return mask


def _with_keys(part: AttentionInputs, split: Split, kv_length: int) -> AttentionInputs:
    """A device's part whose keys are some of ``kv_length``: what counts columns counts from the first of these."""
    if split.keys is None:
        return part
    own_length = part.key.shape[1]
    first = _index(split.keys).astype(jnp.int32) * own_length
    bias, sinks = part.position_bias, part.softmax_aux
    if bias is not None and bias.q_positions is not None:
        # Relative values count from the last key of the whole call, which is not this part's.
        missing = kv_length - own_length if bias.from_last_key else own_length - kv_length
        shift = first if bias.kind == "alibi" else first + missing
        bias = dataclasses.replace(bias, q_positions=bias.q_positions - shift)
    if sinks is not None:
        # They count once. Finite, because a row that sees no key here may have no lse otherwise.
        sinks = jnp.where(first == 0, sinks, jnp.finfo(sinks.dtype).min / 4)
    mask = None if part.mask is None else _from_column(part.mask, first, own_length)
    return part.replace(mask=mask, position_bias=bias, softmax_aux=sinks)


def _from_column(mask: Mask, first: jax.Array, length: int) -> Mask:
    """The mask of ``length`` columns from ``first`` on, whose arrays already belong to those columns."""
    if isinstance(mask, CombinedMask):
        return type(mask)(tuple(_from_column(each, first, length) for each in mask.masks))  # type: ignore[call-arg]
    if isinstance(mask, BandMask) and mask.kv_positions is None and mask.q_positions is not None:
        # A band counts differences: shifting the queries is the same as counting this part's keys from ``first``.
        return dataclasses.replace(mask, q_positions=mask.q_positions - first)  # type: ignore[type-var]
    if isinstance(mask, LengthMask) and mask.kv_lengths is not None:
        return LengthMask(mask.q_lengths, jnp.clip(mask.kv_lengths - first, 0, length))
    return mask


def _key_heads(inputs: AttentionInputs, devices: int) -> Callable[[jax.Array], jax.Array] | None:
    """Maps a device's index to the key heads that its query heads read; ``None`` if slicing the heads gives them."""
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    if kv_heads % devices == 0:
        return None
    group, heads_per_device = heads // kv_heads, heads // devices
    if group % heads_per_device == 0:  # one key head serves all query heads of a device
        return lambda index: (index * heads_per_device // group)[None]
    # A key head may serve query heads on two devices: every query head gets a copy of its key head.
    return lambda index: (index * heads_per_device + jnp.arange(heads_per_device, dtype=jnp.uint32)) // group


def _scattered(gradient: jax.Array, heads: jax.Array, kv_heads: int) -> jax.Array:
    """The gradient of all key heads from that of a device's key heads, in which one may occur several times."""
    batch, length, _, size = gradient.shape
    # In float32 or wider, for parts of several query heads may be added up.
    zeros = jnp.zeros((batch, length, kv_heads, size), jnp.promote_types(gradient.dtype, jnp.float32))
    return zeros.at[:, :, heads].add(gradient.astype(zeros.dtype))


def _index(axes: Axes) -> jax.Array:
    return lax.axis_index(axis_names(axes)).astype(jnp.uint32) if axes else jnp.uint32(0)


def _checked(specs: dict[str, tuple[Axes, ...]], inputs: AttentionInputs) -> Split:
    batch, rows, heads, _ = specs["query"]
    text = ", ".join(f"{name}: {PartitionSpec(*spec)}" for name, spec in specs.items())
    if any(spec[3] is not None for spec in specs.values()):
        raise ValueError(f"attention cannot be split by head_dim ({text}); reshard it first")
    keys = specs["key"][1]
    if specs["value"][1] != keys:
        raise ValueError(f"key and value must be split by length alike ({text}); reshard one of them")
    for name in ("key", "value"):
        for position, dimension, axes in ((0, "batch", batch), (2, "heads", heads)):
            if specs[name][position] not in (None, axes):
                raise ValueError(f"{name} must be split by {dimension} as the query is, or whole ({text}); reshard it")
    shared = set(axis_names(keys)) & {name for axes in (batch, rows, heads) for name in axis_names(axes)}
    if shared:
        raise ValueError(
            f"query and keys are both split by {', '.join(sorted(shared))}, but not by their lengths over the very "
            f"same axes and else alike ({text}); reshard one of them"
        )
    if (rows is not None or keys is not None) and inputs.dropout:
        raise ValueError(
            f"dropout counts the rows and columns of the whole call, of which a length is split ({text}); reshard "
            f"{'the query' if keys is None else 'query, key and value'}, or leave dropout out"
        )
    return Split(batch, rows, heads, keys)


def _mask_specs(mask: Mask, split: Split, batch: int) -> Any:
    """The specs of a mask's arrays, in the mask's own structure.

    Raises:
      ValueError: the mask's class is unknown, and so the meaning of its arrays, and a length is split.
    """

    def by_batch(array: jax.Array | None, *axes: Axes) -> Any:
        # A batch dimension of 1 is broadcast, so every device has it.
        return None if array is None else PartitionSpec(split.batch if array.shape[0] == batch > 1 else None, *axes)

    match mask:
        case CombinedMask():
            return type(mask)(tuple(_mask_specs(each, split, batch) for each in mask.masks))  # type: ignore[call-arg]
        case BandMask():
            specs = by_batch(mask.q_positions, split.rows), by_batch(mask.kv_positions, split.keys)
            return dataclasses.replace(mask, q_positions=specs[0], kv_positions=specs[1])  # type: ignore[type-var]
        case SegmentMask():
            return SegmentMask(by_batch(mask.q_segment_ids, split.rows), by_batch(mask.kv_segment_ids, split.keys))
        case LengthMask():
            return LengthMask(by_batch(mask.q_lengths), by_batch(mask.kv_lengths))
        case ExplicitMask():
            return ExplicitMask(split.scores(mask.array.shape))  # type: ignore[arg-type]
    if split.rows is not None or split.keys is not None:
        whose = "a query that is" if split.keys is None else "keys that are"
        raise ValueError(f"{whose} split by length cannot have a mask of type {type(mask).__name__}")
    return jax.tree.map(lambda leaf: _leaf_spec(leaf.shape, batch, split), mask)


def _position_bias_specs(bias: PositionBias, split: Split, batch: int) -> Any:
    """The specs of a bias's arrays, in its own structure; of one for all heads every device has the whole."""
    values: Any = PartitionSpec(split.heads if bias.values.shape[0] > 1 else None, None)
    positions: Any = None
    if bias.q_positions is not None:
        by_batch = split.batch if bias.q_positions.shape[0] == batch > 1 else None
        positions = PartitionSpec(by_batch, split.rows)
    return dataclasses.replace(bias, values=values, q_positions=positions)


def _leaf_spec(shape: tuple[int, ...], batch: int, split: Split) -> PartitionSpec:
    """The spec of an array in a user's mask: [batch | 1, heads | 1, q, kv], [batch | 1, length] or [batch]."""
    if len(shape) == 4:
        return split.scores(shape)
    return PartitionSpec(split.batch if shape[0] == batch else None) if shape else PartitionSpec()
