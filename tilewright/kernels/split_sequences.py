"""Sequences whose tokens are split over a mesh axis, for ops that carry a state from token to token.

Device i of n has the tokens i · length to (i + 1) · length of every row. A border between two devices is crossed by
every row, or by one sequence of a packed row at most: those states flow from device to device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.sharding import (
    AxisName,
    SplitDimensions,
    gathered,
    over_explicit_axes,
    typed_axes,
    vary_over,
    varying_axes,
)
from tilewright.kernels.sequences import number_up_to
from tilewright.ops.utils.promotion import default_promotion


@dataclasses.dataclass(frozen=True)
class SplitSequences:
    """The sequences of a call, as one device sees them inside ``shard_map``.

    Attributes:
      length: the tokens of a device.
      index: the number of this device.
      cum_seqlens, seq_lengths: of the whole rows; see ``sequences.sequence_arrays``.
      crossing: int32 ``[devices + 1]``, for packed rows: the sequence that crosses the left border of each device, and
        the right one of the last; the number of sequences for none.
    """

    axis: AxisName
    devices: int
    length: int
    index: jax.Array
    cum_seqlens: jax.Array | None
    seq_lengths: jax.Array | None
    crossing: jax.Array | None

    @classmethod
    def of(
        cls, axis: AxisName, length: int, cum_seqlens: jax.Array | None = None, seq_lengths: jax.Array | None = None
    ) -> Self:
        devices, index = int(lax.axis_size(axis)), lax.axis_index(axis).astype(jnp.int32)
        if cum_seqlens is None:
            return cls(axis, devices, length, index, None, seq_lengths, None)
        bounds = jnp.clip(cum_seqlens, 0, devices * length)
        sequences = bounds.shape[0] - 1
        borders = length * jnp.arange(devices + 1, dtype=jnp.int32)
        # That of the token before a border, if it has the token behind it, too.
        before = number_up_to(bounds, borders - 1) - 1
        goes_on = (before >= 0) & (jnp.append(bounds, 0)[before + 1] > borders)
        return cls(axis, devices, length, index, bounds, None, jnp.where(goes_on, before, sequences))

    @property
    def sequences(self) -> int:
        """The sequences of a packed row."""
        assert self.cum_seqlens is not None
        return self.cum_seqlens.shape[0] - 1

    @property
    def entering(self) -> Any:
        """The sequence of a packed row that comes from the device on the left."""
        return None if self.crossing is None else self.crossing[self.index]

    @property
    def leaving(self) -> Any:
        """The sequence of a packed row that goes on to the device on the right."""
        return None if self.crossing is None else self.crossing[self.index + 1]

    def parts(self) -> dict[str, Any]:
        """The description of all sequences in the tokens of this device, by argument."""
        if self.cum_seqlens is not None:
            return {"cum_seqlens": jnp.clip(self.cum_seqlens - self.index * self.length, 0, self.length)}
        if self.seq_lengths is None:
            return {}
        return {"seq_lengths": jnp.clip(self.seq_lengths - self.index * self.length, 0, self.length)}

    def leaving_parts(self) -> dict[str, Any]:
        """The description of those that go on to the right: of a packed row one, which may have no token."""
        if self.leaving is None:
            return self.parts()
        bounds = jnp.pad(self.parts()["cum_seqlens"], (0, 1), mode="edge")
        return {"cum_seqlens": lax.dynamic_slice(bounds, (self.leaving,), (2,))}

    def flows(self, states: jax.Array, sequence: jax.Array | None) -> Any:
        """The states of the sequences that cross a border, of those of all; zeros if none does."""
        if sequence is None:
            return states
        return states.at[sequence].get(mode="fill", fill_value=0)[None]

    def begun(self, states: jax.Array | None) -> Any:
        """The states before those sequences that go on to the right, if nothing comes from the left; None for zeros."""
        if states is None or self.leaving is None:
            return None
        return jnp.where(self.leaving == self.entering, 0, self.flows(states, self.leaving))

    def with_entering(self, states: jax.Array | None, flow: jax.Array) -> jax.Array:
        """The states before all sequences of this device, of which some come from the left.

        Args:
          states: those of the caller's, before the first tokens of sequences; None for zeros.
        """
        if self.entering is None:
            return flow
        if states is None:
            states = jnp.zeros((self.sequences, *flow.shape[1:]), flow.dtype)
        return states.at[self.entering].set(flow[0], mode="drop")

    def without_entering(self, states: jax.Array) -> jax.Array:
        """Zeros for the states before sequences whose first tokens are on other devices."""
        if self.entering is None:
            return jnp.where(self.index == 0, states, 0)
        return states.at[self.entering].set(0, mode="drop")

    def plus_leaving(self, states: jax.Array, flow: jax.Array) -> jax.Array:
        """The states behind all sequences of this device, with more for those that go on to the right."""
        if self.leaving is None:
            return states + flow
        return states.at[self.leaving].add(flow[0], mode="drop")

    def final(self, states: jax.Array) -> Any:
        """The states behind the last tokens of all sequences, equal on all devices, of those on each device."""
        if self.cum_seqlens is not None:
            ends = self.cum_seqlens[1:]
        elif self.seq_lengths is not None:
            ends = self.seq_lengths
        else:
            ends = jnp.full(states.shape[0], self.devices * self.length, jnp.int32)
        owner = jnp.clip((ends - 1) // max(self.length, 1), 0, self.devices - 1)
        here = jnp.expand_dims(owner == self.index, range(1, states.ndim))
        return lax.psum(jnp.where(here, states, 0), self.axis)

    def carried(self, maps: "StateMaps", added: jax.Array, first: jax.Array | None, *, back: bool = False) -> jax.Array:
        """The states that flow into this device from the left, or with ``back`` their gradients from the right.

        One all-gather, and then a product for each device, which all devices compute.

        Args:
          maps: of the states that flow through this device.
          added: what flows out of it if nothing flows in.
          first: what flows into the first device; None for zeros.
        """
        every, columns = gathered(maps.beside(added), self.axis), added.shape[-1]
        found = flow = jnp.zeros_like(added) if first is None else first
        # The last device passes nothing on, and back the first one.
        order = range(self.devices - 1, 0, -1) if back else range(self.devices - 1)
        for device in order:
            here, more = jnp.split(every[device], [every.shape[-1] - columns], axis=-1)
            passed = maps.apply(here, flow, transposed=back)
            if self.crossing is not None:
                spans = (self.crossing[device] == self.crossing[device + 1]) & (self.crossing[device] < self.sequences)
                passed = jnp.where(spans, passed, 0)
            flow = passed + more
            found = jnp.where(self.index == device + (-1 if back else 1), flow, found)
        return found


def splits_tokens(*tokens: object) -> bool:
    """True if the type of one of some arrays ``[batch, length, ...]`` splits its length over explicit axes."""
    arrays = (each for each in tokens if isinstance(each, jax.Array) and each.ndim > 1)
    return any(typed_axes(each)[1] is not None for each in arrays)


def on_explicit_axes(
    function: Callable[[Any, AxisName], Any],
    inputs: OpInputs,
    layouts: Mapping[str, str],
    results: tuple[str, ...],
    allowed: Mapping[str, str],
) -> Any:
    """The results of a call whose types split its tokens over explicit axes, by a function for ``shard_map``.

    Args:
      function: of a device's inputs and the axes that split the tokens.
      layouts: a letter for each dimension of the arrays by name, "t" for tokens.
      results: those of the results.
      allowed: the dimensions that may be split: their names, for errors, by letter.

    Raises:
      ValueError: arrays are split in different ways, or along a dimension that must be whole; there are segment ids.
    """
    if inputs.arrays.get("segment_ids") is not None:
        raise ValueError(
            "segment_ids cannot be followed over devices that split the length; pass the boundaries of the segments as "
            "cum_seqlens, or reshard to a whole length"
        )
    split = SplitDimensions.of(inputs, layouts, allowed)
    assert split is not None  # the caller has seen the types

    def on_device(parts: dict[str, Any]) -> Any:
        return function(inputs.replace(**parts), split.axes["t"])

    out = tuple(map(split.spec, results))
    return over_explicit_axes(on_device, split.mesh, dict(split.arrays), split.specs, out if len(out) > 1 else out[0])


class StateMaps(NamedTuple):
    """The linear maps of states that the tokens of a device are: a matrix from the left, or factors; else the identity.

    Attributes:
      matrix: ``[sequences, heads, K, K]``.
      factors: of all dimensions of states, where they broadcast.
    """

    matrix: jax.Array | None = None
    factors: jax.Array | None = None

    @property
    def own(self) -> Any:
        """The array of these maps."""
        return self.factors if self.matrix is None else self.matrix

    def beside(self, states: jax.Array) -> jax.Array:
        """The maps and some states in one array, for one collective."""
        own = self.own
        if own is None:
            return states
        return jnp.concatenate([jnp.broadcast_to(own, (*states.shape[:-1], own.shape[-1])), states], axis=-1)

    def apply(self, own: jax.Array, states: jax.Array, *, transposed: bool) -> Any:
        """The maps of another device, of this one's kind, of states.

        Products are precise, since their errors go along all devices.
        """
        if self.matrix is not None:
            matrix = jnp.swapaxes(own, -1, -2) if transposed else own
            return jnp.matmul(matrix, states, precision=lax.Precision.HIGHEST)
        return states if self.factors is None else own * states


class RecurrentInputs(Protocol):
    """The fields of the inputs of an op with a state, as the split needs them."""

    initial_state: Any
    cum_seqlens: Any
    seq_lengths: Any
    return_state: bool

    @property
    def length(self) -> int: ...

    @property
    def gradients(self) -> dict[str, Any]: ...

    @property
    def arrays(self) -> dict[str, Any]: ...

    def replace(self, **changes: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """An op that is linear in its states, over the devices of a mesh axis.

    Attributes:
      op: called by each device on its tokens; its backward pass needs no results.
      maps: of the op, inputs whose sequences are those that leave a device, and ``cfg``: the maps of the states that
        flow through that device, and what its tokens make of states of zeros.
      cfg: a config for the calls of the op.
    """

    op: PortfolioKernel[Any, Any]
    maps: Callable[[PortfolioKernel[Any, Any], Any, object], tuple[StateMaps, jax.Array]]
    axis: AxisName
    cfg: object

    def run(self, inputs: Any) -> Any:
        """The results of this device's tokens, and with ``return_state`` the states behind the sequences.

        Args:
          inputs: those of this device's tokens, with the sequences and states of the whole rows.
        """
        with default_promotion():
            axes = varying_axes(lax.axis_index(self.axis)) | varying_axes(inputs)
            inputs = vary_over(axes, inputs)
            is_whole = lax.axis_size(self.axis) == 1
            found = self.op(inputs, cfg=self.cfg) if is_whole else _recurrent(inputs, self)
            return (found[0], self.split(inputs).final(found[1])) if inputs.return_state else found

    def split(self, inputs: RecurrentInputs) -> SplitSequences:
        return SplitSequences.of(self.axis, inputs.length, inputs.cum_seqlens, inputs.seq_lengths)

    def gradients(self, inputs: Any, cotangents: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, Any]:
        """Gradients by name of a call with ``return_state``."""
        nothing = self.op.residuals(self.op.results(inputs))
        found = self.op.gradients(names, nothing, cotangents, inputs, cfg=self.cfg)
        return dict(zip([name for name in inputs.arrays if name in names], found, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _recurrent(inputs: Any, recurrence: Recurrence) -> Any:
    """The results of this device's tokens, and the states behind these. Reverse mode only.

    Each device runs its tokens twice: at first for the states that they leave behind if none comes from the left, and
    once more with those that come. The backward pass likewise: for the gradients of the states that come from the left
    without those from the right, and then with them.
    """
    return _forward(inputs, recurrence)[0]


@default_promotion()
def _forward(inputs: Any, recurrence: Recurrence) -> tuple[Any, Any]:
    split, first = recurrence.split(inputs), inputs.initial_state
    leaving = inputs.replace(initial_state=None, **split.leaving_parts())
    maps, added = recurrence.maps(recurrence.op, leaving, recurrence.cfg)
    if (begun := split.begun(first)) is not None:
        added = added + maps.apply(maps.own, begun, transposed=False)
    flow = split.carried(maps, added, first if split.crossing is None else None)
    name = f"{recurrence.op.name}_residuals"
    maps, states = jax.tree.map(lambda x: checkpoint_name(x, name), (maps, split.with_entering(first, flow)))
    found = recurrence.op(inputs.replace(initial_state=states, **split.parts()), cfg=recurrence.cfg)
    return found, (inputs, maps, states)


@default_promotion()
def _backward(recurrence: Recurrence, residuals: Any, cotangents: Any) -> tuple[Any]:
    inputs, maps, states = residuals
    split = recurrence.split(inputs)
    d_out, d_state = cotangents if inputs.return_state else (cotangents, jnp.zeros_like(states))
    # The same call twice but for what comes from the right: what does not depend on that is computed once.
    whole = inputs.replace(initial_state=states, return_state=True, **split.parts())
    added = recurrence.gradients(whole, (d_out, d_state), ("initial_state",))["initial_state"]
    flow = split.carried(maps, split.flows(added, split.entering), None, back=True)
    d_state = split.plus_leaving(d_state, flow)
    found = recurrence.gradients(whole, (d_out, d_state), tuple(whole.gradients))
    d_first = found.pop("initial_state")
    if inputs.initial_state is not None:
        found["initial_state"] = split.without_entering(d_first)
    return (inputs.replace(**dict.fromkeys(inputs.arrays) | found),)


_recurrent.defvjp(_forward, _backward)
