"""Biases of attention logits that are computed from positions, without an array of all pairs of a query and a key.

``flash_attention(..., bias=)`` takes them instead of an array. They are pytrees of their one array, so a transform of
JAX maps, splits and differentiates them as it does that array.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float

from tilewright.ops.utils.stable_ids import stable_id


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=[])
@stable_id("tilewright/biases.AlibiBias")
@dataclasses.dataclass(frozen=True, slots=True)
class AlibiBias:
    """``-slope · |i - j|`` for a query and a key at positions i and j (ALiBi, arXiv 2108.12409).

    Positions are those by which ``causal`` counts: ``causal_alignment`` moves them, with or without ``causal``, and
    packed sequences have their own.

    Attributes:
      slopes: ``[heads]``, floating-point, of either sign; differentiable.
    """

    slopes: Float[Array, " heads"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@stable_id("tilewright/biases.RelativeBias")
@dataclasses.dataclass(frozen=True, slots=True)
class RelativeBias:
    """One value for each difference of a key's and a query's position, such as T5's (arXiv 1910.10683).

    Key j has the bias ``values[:, j - i + q_length - 1]`` for query i, whatever the alignment: these are indices. In
    packed sequences, and with sequence lengths and ``causal_alignment="bottom_right"``, differences are counted inside
    of a sequence, from its first query and key to entry ``q_length - 1``, or from its last ones to entry
    ``kv_length - 1``.

    Attributes:
      values: ``[heads | 1, q_length + kv_length - 1]``, floating-point; differentiable.
    """

    values: Float[Array, "#heads differences"]
