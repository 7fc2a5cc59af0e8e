"""Splits linear attention over the explicit axes of a mesh: by batch and by heads.

A state is passed from token to token, and every channel of a key meets every channel of a value: lengths and channels
stay whole. Arrays that are whole over a split axis are sliced to what a device needs, and their gradients are summed.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)

_TOKENS = ("batch", "length", "heads", "channels")
_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "query": _TOKENS,
    "key": _TOKENS,
    "value": _TOKENS,
    "beta": _TOKENS,
    "removal_read": _TOKENS,
    "removal_write": _TOKENS,
    "bonus": ("heads", "channels"),
    "initial_state": ("sequences", "heads", "channels", "channels"),
    "cum_seqlens": ("boundaries",),
    "segment_ids": _TOKENS,
    "seq_lengths": ("batch",),
}
_SPLIT = ("batch", "heads")


def linear_attention_partitioning(inputs: LinearAttentionInputs) -> Partitioning | None:
    """The partitioning implied by the types of the arrays.

    Raises:
      ValueError: an array is split by something else, two are split in different ways, or key heads are shared by
        value heads of several devices.
    """
    arrays = {name: array for name, array in inputs.arrays.items() if array is not None}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    dimensions = {name: _dimensions(name, inputs)[: array.ndim] for name, array in arrays.items()}
    text = ", ".join(f"{name}: {typed_spec(array)}" for name, array in arrays.items())
    split: dict[str, Any] = dict.fromkeys(_SPLIT)
    for name, array in arrays.items():
        for dimension, axes in zip(dimensions[name], typed_axes(array), strict=True):
            if axes is None:
                continue
            if dimension not in split:
                raise ValueError(f"{name} must be split by batch and heads alone ({text}); reshard it first")
            others = [name for other in split if other != dimension for name in axis_names(split[other])]
            if split[dimension] not in (None, axes) or set(axis_names(axes)) & set(others):
                raise ValueError(f"arrays must be split alike or be whole ({text}); reshard {name} first")
            split[dimension] = axes
    parts = 1
    for name in axis_names(split["heads"]):
        parts *= mesh.shape[name]
    if inputs.heads % parts:
        raise ValueError(
            f"value heads over {parts} devices need key heads of their own, got {inputs.heads} of them; repeat query "
            f"and key for more heads first (jax.numpy.repeat along axis 2)"
        )
    used = [name for axes in split.values() for name in axis_names(axes)]

    def spec(names: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(split.get(name) for name in names))

    def gradient(name: str) -> GradientParts:
        own = spec(dimensions[name])
        mine = [each for axes in own for each in axis_names(axes)]
        return GradientParts(own, tuple(each for each in used if each not in mine), typed_spec(arrays[name]))

    out: Any = None if inputs.only_maps else spec(_TOKENS)
    has_state = inputs.return_state or inputs.only_maps
    state: Any = spec(_dimensions("initial_state", inputs)) if has_state else None
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(**{name: spec(each) for name, each in dimensions.items()}),
        results=LinearAttentionResults(out, state),
        gradients={name: gradient(name) for name in arrays},
    )


def _dimensions(name: str, inputs: LinearAttentionInputs) -> tuple[str, ...]:
    if name == "log_decay":
        return ("heads",) if inputs.gate == "head" else _TOKENS
    if name == "initial_state" and inputs.cum_seqlens is None:
        return "batch", *_DIMENSIONS[name][1:]
    return _DIMENSIONS[name]
