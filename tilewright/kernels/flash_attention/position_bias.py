"""The canonical form of a bias that is computed from positions, its values, and its gradient where these are arrays."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.flash_attention.masking import Positions, ScoreShape
from tilewright.kernels.masks import Index
from tilewright.kernels.op.arguments import as_array, is_floating, reshape
from tilewright.ops.utils.stable_ids import stable_id

type Kind = Literal["alibi", "relative"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "q_positions"],
    meta_fields=["kind", "offset", "from_last_key"],
)
@stable_id("tilewright/flash_attention.PositionBias")
@dataclasses.dataclass(frozen=True, slots=True)
class PositionBias:
    """A bias of the difference of a key's index j and a query's position i + ``offset``; ``q_positions`` replace i.

    Attributes:
      values: "alibi": the slopes, ``[heads, 1]``. "relative": ``[heads | 1, differences]``.
      q_positions: ``[batch | 1, q_length]`` int32, or None for the row's index.
      from_last_key: whether entry ``kv_length - 1`` of relative values is that of the difference 0; else it is the
        entry ``differences - kv_length``, which is the length of the whole query less 1.
    """

    values: Float[Array, "#heads differences"]
    q_positions: Int[Array, "#batch q_length"] | None
    kind: Kind
    offset: int = 0
    from_last_key: bool = False

    def zero_entry(self, kv_length: int) -> int:
        """The entry of relative values for the difference 0."""
        return kv_length - 1 if self.from_last_key else self.values.shape[1] - kv_length

    def positions(self, q_start: Index, q_size: int) -> Int[Array, "#batch q_size"]:
        """Positions of queries among the keys."""
        if self.q_positions is None:
            return (q_start + jnp.arange(q_size, dtype=jnp.int32) + jnp.asarray(self.offset, jnp.int32))[None]
        return jax.lax.dynamic_slice_in_dim(self.q_positions, q_start, q_size, 1) + self.offset

    def differences(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> Int[Array, "#batch q k"]:
        """j − i of a tile."""
        columns = kv_start + jnp.arange(kv_size, dtype=jnp.int32)
        return columns - self.positions(q_start, q_size)[..., None]

    def entries(self, differences: Int[Array, "#batch q k"], kv_length: int) -> Int[Array, "#batch q k"]:
        """The entries of relative values for differences; any entry for those of masked positions."""
        return jnp.clip(differences + self.zero_entry(kv_length), 0, self.values.shape[1] - 1)

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int, kv_length: int) -> Any:
        """A tile of the bias, ``[batch | 1, heads | 1, q_size, kv_size]``, in the dtype of the values: the definition.

        Args:
          kv_length: of the whole call.
        """
        differences = self.differences(q_start, q_size, kv_start, kv_size)
        if self.kind == "alibi":
            return -self.values[..., None] * jnp.abs(differences)[:, None].astype(self.values.dtype)
        return jnp.moveaxis(self.values[:, self.entries(differences, kv_length)], 0, 1)


def is_position_bias(bias: object) -> bool:
    return isinstance(bias, AlibiBias | RelativeBias)


def position_bias(bias: AlibiBias | RelativeBias, shape: ScoreShape, positions: Positions, bottom_right: bool) -> Any:
    """The canonical form of a call's bias.

    Args:
      positions: of the queries among the keys.

    Raises:
      ValueError, TypeError: its array has another shape or dtype than the call needs.
    """
    if isinstance(bias, AlibiBias):
        name, array, kind = "bias.slopes", as_array("bias.slopes", bias.slopes), "alibi"
        wanted, found = (shape.heads,), tuple(array.shape)
        if found != wanted:
            raise ValueError(f"bias.slopes must have the shape [heads] = {list(wanted)}, got {name}.shape={found}")
        values = reshape(array, (shape.heads, 1))
    else:
        name, array, kind = "bias.values", as_array("bias.values", bias.values), "relative"
        differences, found = shape.q_length + shape.kv_length - 1, tuple(array.shape)
        if len(found) != 2 or found[0] not in (1, shape.heads) or found[1] != differences:
            raise ValueError(
                f"bias.values must have the shape [heads or 1, q_length + kv_length - 1] = "
                f"[{shape.heads} or 1, {differences}], got {name}.shape={found}"
            )
        values = array
    if not is_floating(array.dtype):
        raise TypeError(f"{name} is added to the logits and must be floating-point, got {name}.dtype={array.dtype!r}")
    return PositionBias(values, positions.q_positions, kind, positions.offset, bottom_right)  # type: ignore[arg-type]
