"""The inputs and results of every backend of the convolution, and what its sequences leave behind."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.sequences import num_sequences, sequence_ids
from tilewright.ops.kernel.arrays import struct_like

type ConvActivation = Literal["silu", "swish"]

MAX_STEP = 8
"""Tokens of a sequence that one step takes, at most."""


class ConvInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      initial_state: the last inputs before each sequence, the oldest first.
      activation: "silu" or None.
      return_state: also give the last inputs of each sequence.
    """

    x: Float[Array, "batch length channels"]
    weight: Float[Array, "channels width"]
    bias: Float[Array, " channels"] | None = None
    initial_state: Float[Array, "sequences channels width-1"] | None = None
    cum_seqlens: Int[Array, " sequences+1"] | None = None
    segment_ids: Int[Array, "batch length"] | None = None
    seq_lengths: Int[Array, " batch"] | None = None
    activation: str | None = static(default=None)
    return_state: bool = static(default=False, role="call")

    @functools.cached_property
    def width(self) -> int:
        return self.weight.shape[1]

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype of products and sums."""
        return jnp.promote_types(self.x.dtype, jnp.float32)

    @functools.cached_property
    def sequences(self) -> int:
        """The number of sequences that have a state."""
        return num_sequences(self.x.shape[0], self.cum_seqlens)

    @functools.cached_property
    def state(self) -> jax.ShapeDtypeStruct:
        """The final states: in x's dtype, or in a wider one that also holds the initial states."""
        dtype = self.x.dtype
        if self.initial_state is not None:
            dtype = jnp.promote_types(dtype, self.initial_state.dtype)
        return jax.ShapeDtypeStruct((self.sequences, self.x.shape[2], self.width - 1), dtype)

    def ids(self) -> jax.Array | None:
        """``[batch, length]``: the sequence of each token, counted in each row; see ``sequence_ids``."""
        given = {name: getattr(self, name) for name in ("cum_seqlens", "segment_ids", "seq_lengths")}
        return sequence_ids(*self.x.shape[:2], **given)

    def bounds(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Row, first position and length of each sequence, ``[sequences]`` each; not for segments."""
        batch, length = self.x.shape[:2]
        if self.cum_seqlens is not None:
            within = jnp.clip(self.cum_seqlens, 0, length)
            return jnp.zeros_like(within[1:]), within[:-1], jnp.maximum(within[1:] - within[:-1], 0)
        row = jnp.arange(batch, dtype=jnp.int32)
        lengths = jnp.full_like(row, length) if self.seq_lengths is None else jnp.clip(self.seq_lengths, 0, length)
        return row, jnp.zeros_like(row), lengths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConvResults:
    """The results of a forward pass, or their cotangents.

    Attributes:
      state: the last inputs of each sequence; ``None`` if they are not asked for, or for a zero cotangent.
    """

    out: Float[Array, "batch length channels"]
    state: Float[Array, "sequences channels width-1"] | None


def results_of(inputs: ConvInputs) -> Any:
    return ConvResults(struct_like(inputs.x), inputs.state if inputs.return_state else None)  # type: ignore[arg-type]


def tokens_at(x: jax.Array, row: jax.Array, position: jax.Array) -> Any:
    """Tokens of ``[batch, length, channels]``; zeros at positions out of range."""
    if 0 in x.shape:
        return jnp.zeros((*jnp.broadcast_shapes(row.shape, position.shape), x.shape[2]), x.dtype)
    return x.at[row, position].get(mode="fill", fill_value=0)


def _last_inputs(inputs: ConvInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The places of the inputs that are left as states: rows [sequences, 1], then [sequences, width - 1] each.

    The second are positions in the row; they are ``length`` where a sequence is too short. The third are those
    of the initial state in its place; they are ``width - 1`` elsewhere.
    """
    row, begin, length = inputs.bounds()
    kept = inputs.width - 1
    column = jnp.arange(kept, dtype=jnp.int32)
    before = length[:, None] + column  # counted from the oldest of the initial state
    position = jnp.where(before >= kept, begin[:, None] + before - kept, inputs.x.shape[1])
    return row[:, None], position, jnp.minimum(before, kept)


def final_state(inputs: ConvInputs) -> Any:
    """The last ``width - 1`` inputs of each sequence, the oldest first; of a short one also of its initial state."""
    row, position, before = _last_inputs(inputs)
    dtype = inputs.state.dtype
    found = tokens_at(inputs.x, row, position).astype(dtype).swapaxes(1, 2)
    if inputs.initial_state is None or inputs.width == 1:
        return found
    kept = jnp.pad(inputs.initial_state.astype(dtype), ((0, 0), (0, 0), (0, 1)))
    earlier = jnp.take_along_axis(kept, before[:, None], axis=2, mode="clip")
    return jnp.where((before < inputs.width - 1)[:, None], earlier, found)


def shifted_state_gradient(inputs: ConvInputs, d_state: jax.Array) -> Any:
    """The gradient of the initial states through the final states of sequences that are shorter than these."""
    before, kept = _last_inputs(inputs)[2], inputs.width - 1
    # [sequences, final column, initial column]: a sequence's length apart.
    same = before[:, :, None] == jnp.arange(kept, dtype=jnp.int32)
    return jnp.sum(jnp.where(same[:, None], d_state[..., None], 0), axis=2)


def add_to_last_inputs(inputs: ConvInputs, d_x: jax.Array, d_state: jax.Array) -> Any:
    """The gradient of x with that of the final states added."""
    if 0 in d_x.shape:
        return d_x
    row, position, _ = _last_inputs(inputs)
    return d_x.at[row, position].add(d_state.swapaxes(1, 2).astype(d_x.dtype), mode="drop")


class StepInputs(OpInputs):
    """Some tokens of each sequence, and the pool of their states.

    Attributes:
      conv_pool: the last inputs of each sequence by slot, the oldest first.
      read, write: the slots of each row's state; what does not exist is neither read nor written.
      single: the caller's arrays have no dimension of tokens.
    """

    x: Float[Array, "batch tokens channels"]
    conv_pool: Float[Array, "slots channels width-1"]
    weight: Float[Array, "channels width"]
    bias: Float[Array, " channels"] | None = None
    state_indices: Int[Array, " batch"] | None = None
    write_indices: Int[Array, " batch"] | None = None
    activation: str | None = static(default=None)
    single: bool = static(default=False, role="call")

    @functools.cached_property
    def width(self) -> int:
        return self.weight.shape[1]

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype of products and sums."""
        return jnp.promote_types(self.x.dtype, jnp.float32)
