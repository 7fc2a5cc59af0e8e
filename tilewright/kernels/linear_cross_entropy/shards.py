"""A vocabulary that is split over a mesh axis inside ``shard_map``: every device's statistics, made those of all.

One gather of the statistics of each token forward. The gradient of x is a sum over the devices; that of a device's part
of the matrix is complete. On explicit axes the types of the matrices ask for the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs
from tilewright.kernels.linear_cross_entropy.kl_inputs import KlInputs
from tilewright.kernels.linear_cross_entropy.partitioning import arrays_of, token_axes
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.sharding import (
    axis_names,
    explicit_mesh,
    over_explicit_axes,
    typed_axes,
    vary_over,
    varying_axes,
)


@dataclasses.dataclass(frozen=True)
class TypedSplit:
    """A split of the vocabulary, and maybe of tokens, in the types of a call's arrays.

    Attributes:
      tokens: the mesh axes of every dimension of the tokens.
      token_names: the names of all of them.
      vocab: the axes that split the vocabulary.
    """

    mesh: AbstractMesh | Mesh
    tokens: PartitionSpec
    token_names: tuple[str, ...]
    vocab: tuple[str, ...]

    @classmethod
    def of(cls, inputs: LossInputs | KlInputs) -> "TypedSplit | None":
        """The split; None if the vocabulary is whole, or split over the axes of the tokens, so that it is gathered.

        Raises:
          ValueError: tokens are split in two ways, or d is.
        """
        arrays, axes = arrays_of(inputs), inputs.vocab_axes
        by_token = {name: array for name, array in arrays.items() if name not in axes}
        split = [axis_names(typed_axes(arrays[name])[axis]) for name, axis in axes.items() if name in arrays]
        if not any(split):
            return None
        tokens, token_names = token_axes(by_token, len(inputs.token_shape))
        vocab = [name for name in next(filter(None, split)) if name not in token_names]
        mesh = explicit_mesh(*(arrays[name] for name in axes if name in arrays))
        if mesh is None or not vocab:
            return None
        return cls(mesh, PartitionSpec(*tokens), token_names, tuple(vocab))

    def run(self, function: Callable[[Any], Any], inputs: LossInputs | KlInputs, out: Any) -> Any:
        """Runs a function of the devices' parts of a call, inside ``shard_map``."""
        arrays = arrays_of(inputs)
        specs = {name: self._spec(array.ndim, inputs.vocab_axes.get(name)) for name, array in arrays.items()}
        return over_explicit_axes(lambda parts: function(inputs.replace(**parts)), self.mesh, arrays, specs, out)

    def _spec(self, rank: int, vocab_axis: int | None) -> PartitionSpec:
        """The spec of an array of some rank; of one by tokens, if the vocabulary is none of its axes."""
        if vocab_axis is None:
            return self.tokens
        return PartitionSpec(*(self.vocab if axis == vocab_axis else None for axis in range(rank)))


def splits_vocabulary(vocab_first: object, *matrices: object) -> bool:
    """True if the type of a matrix splits the vocabulary: of nearly every call this is all that is read."""
    axis, known = 0 if vocab_first else 1, [x for x in matrices if isinstance(x, jax.Array) and x.ndim == 2]
    return len(known) == len(matrices) and any(typed_axes(x)[axis] is not None for x in known)


def of_all_devices(x: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
    """An operand that is the same along an axis; its gradient is summed over the devices in float32 or wider."""
    axes = varying_axes(lax.axis_index(axis_name)) - varying_axes(x)
    # Without checked types the transpose of ``shard_map`` sums, in the operand's dtype.
    return _of_all_devices(x, axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _of_all_devices(x: jax.Array, axes: frozenset[str]) -> Any:
    return vary_over(axes, x)


def _of_all_devices_forward(x: jax.Array, axes: frozenset[str]) -> tuple[jax.Array, None]:
    return _of_all_devices(x, axes), None


def _of_all_devices_backward(axes: frozenset[str], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(accumulation_dtype(gradient.dtype))
    return (lax.psum(wide, tuple(sorted(axes))).astype(gradient.dtype),)


_of_all_devices.defvjp(_of_all_devices_forward, _of_all_devices_backward)


def local_labels(labels: jax.Array, part: int, axis_name: str | tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Labels in a device's part of the vocabulary, for statistics of which none is ignored; and which are wrong.

    Args:
      labels: canonical, with ``IGNORED``, of the whole vocabulary.
      part: classes of each device.
    """
    count = lax.axis_size(axis_name)
    wrong = labels >= part * count
    # A label of another part is no class of this one: its logit comes from the device that has it.
    own = labels - lax.axis_index(axis_name).astype(jnp.int32) * part
    inside = (own >= 0) & (own < part)
    return jnp.where(labels == IGNORED, IGNORED, jnp.where(inside, own, part)), wrong


def summed_over[T](parts: T, names: tuple[str, ...]) -> T:
    """The sums of the devices' parts over mesh axes, if there are any."""
    summed: T = lax.psum(parts, names) if names else parts
    return summed


def merged_lse(lses: jax.Array) -> jax.Array:
    """lse of the whole vocabulary from those of its parts, along axis 0."""
    return jax.nn.logsumexp(lses, 0)
