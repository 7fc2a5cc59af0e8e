"""How attention is split over the explicit axes of a mesh: by batch and by heads, never by length."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.sharding import GradientParts, Partitioning, typed_spec
from tilewright.ops.core.arrays import explicit_sharding

Axes = Any  # what a PartitionSpec holds for one dimension: None, a name, or a tuple of names


def attention_partitioning(inputs: AttentionInputs) -> Partitioning | None:
    """The partitioning that the types of query, key and value ask for.

    Raises:
      ValueError: a length or a head_dim is split, or query, key and value disagree.
    """
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    shardings = {name: explicit_sharding(jax.typeof(array)) for name, array in arrays.items()}
    given = [sharding for sharding in shardings.values() if sharding is not None]
    if not given:
        return None
    specs = {name: _dimensions(sharding, 4) for name, sharding in shardings.items()}
    batch, heads = _checked(specs, inputs)
    sharded = {"batch": batch, "heads": heads}
    # Any: AttentionInputs is also the pytree that holds a spec in the place of each of its arrays.
    rows: Any = PartitionSpec(batch, None, heads, None)
    lse = PartitionSpec(batch, heads, None)
    gradients = {name: GradientParts(rows, (), rows) for name in arrays}
    bias: Any = None if inputs.bias is None else _broadcast_spec(inputs.bias.shape, sharded)
    whole: Any = PartitionSpec()
    sinks: Any = PartitionSpec(heads, None)
    if inputs.bias is not None:
        gradients["bias"] = GradientParts(bias, _missing(bias, sharded), typed_spec(inputs.bias))
    if inputs.softmax_aux is not None:
        gradients["softmax_aux"] = GradientParts(sinks, _names(batch), typed_spec(inputs.softmax_aux))
    return Partitioning(
        mesh=given[0].mesh,
        inputs=AttentionInputs(
            query=rows,
            key=rows,
            value=rows,
            bias=bias,
            mask=jax.tree.map(lambda leaf: _mask_spec(leaf.shape, inputs.query.shape, sharded), inputs.mask),
            softmax_aux=None if inputs.softmax_aux is None else sinks,
            dropout_seed=None if inputs.dropout_seed is None else whole,
            options=inputs.options,
        ),
        results=(rows, lse),
        gradients=gradients,
        on_part=lambda part: _located(part, batch, heads),
    )


def _located(part: AttentionInputs, batch: Axes, heads: Axes) -> AttentionInputs:
    """A device's part with the place of its first batch element and head, from which dropout counts."""
    if part.dropout_seed is None:
        return part
    first = [_index(batch) * part.query.shape[0], _index(heads) * part.query.shape[2]]
    return dataclasses.replace(part, dropout_origin=jnp.stack(first))


def _index(axes: Axes) -> Any:
    return jax.lax.axis_index(_names(axes)).astype(jnp.uint32) if axes else jnp.uint32(0)


def _dimensions(sharding: Any, rank: int) -> tuple[Axes, ...]:
    spec = () if sharding is None else tuple(sharding.spec)
    return spec + (None,) * (rank - len(spec))


def _checked(specs: dict[str, tuple[Axes, ...]], inputs: AttentionInputs) -> tuple[Axes, Axes]:
    batch, _, heads, _ = specs["query"]
    said = ", ".join(f"{name}: {PartitionSpec(*spec)}" for name, spec in specs.items())
    if any(length is not None or dim is not None for _, length, _, dim in specs.values()):
        raise ValueError(f"attention cannot be split by length or head_dim ({said}); reshard these axes first")
    if any(spec[0] != batch or spec[2] != heads for spec in specs.values()):
        raise ValueError(f"query, key and value must be split alike by batch and by heads ({said}); reshard them first")
    return batch, heads


def _broadcast_spec(shape: tuple[int, ...], sharded: dict[str, Axes]) -> PartitionSpec:
    """The spec of an array that broadcasts to [batch, heads, q, kv]."""
    batch = sharded["batch"] if shape[0] > 1 else None
    heads = sharded["heads"] if shape[1] > 1 else None
    return PartitionSpec(batch, heads, *(None,) * (len(shape) - 2))


def _mask_spec(shape: tuple[int, ...], query: tuple[int, ...], sharded: dict[str, Axes]) -> PartitionSpec:
    """The spec of a leaf of a mask: [batch | 1, heads | 1, q, kv], [batch | 1, length] or [batch]."""
    if len(shape) == 4:
        return _broadcast_spec(shape, sharded)
    batch = sharded["batch"] if shape and shape[0] == query[0] else None
    return PartitionSpec(batch, *(None,) * (len(shape) - 1)) if shape else PartitionSpec()


def _missing(spec: PartitionSpec, sharded: dict[str, Axes]) -> tuple[str, ...]:
    """The axes over which the call is split and an array is not."""
    return tuple(n for axes, mine in zip(sharded.values(), spec, strict=False) if mine is None for n in _names(axes))


def _names(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)
