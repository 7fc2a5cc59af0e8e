"""The selective scan in plain XLA: the backend for every device and for float64."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.sharding import varying_as
from tilewright.kernels.selective_scan.elementwise import steps_of
from tilewright.kernels.selective_scan.inputs import ScanResults, SelectiveScanInputs
from tilewright.kernels.selective_scan.xla import recurrence
from tilewright.kernels.selective_scan.xla.chunks import Chunks, chunks_of
from tilewright.kernels.sequences import PADDING, without_padding
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaSelectiveScan(Backend[SelectiveScanInputs, ScanResults, FwdParams, BwdParams]):
    """Serves every call; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"D", "z", "delta_bias", "delta_softplus", "initial_state", "cum_seqlens", "segment_ids", "seq_lengths"}
    )

    def reasons(self, inputs: SelectiveScanInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(
        self, inputs: SelectiveScanInputs, device: Device, direction: Direction
    ) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: SelectiveScanInputs, params: FwdParams) -> ScanResults:
        dtype, chunks = inputs.dtype, chunks_of(inputs)
        tokens = _tokens(inputs, chunks, steps_of(inputs, chunks.ids, inputs.delta, inputs.delta_bias))
        initial = inputs.initial_state
        if initial is None:
            initial = _no_states(inputs)
        grouped = initial.astype(dtype).reshape(inputs.sequences, *tokens.a.shape)
        before, last = recurrence.states_before(tokens, grouped, chunks.pieces)
        y = recurrence.outputs(tokens, before).reshape(*tokens.u.shape[:3], inputs.channels)
        out = chunks.merge(y)
        if inputs.D is not None:
            out = out + inputs.D.astype(dtype) * without_padding(inputs.u, chunks.ids).astype(dtype)
        if inputs.z is not None:
            out = out * jax.nn.silu(without_padding(inputs.z, chunks.ids).astype(dtype))
        return ScanResults(
            out.astype(inputs.u.dtype),
            last.reshape(initial.shape) if inputs.return_state else None,
            before.reshape(*before.shape[:2], inputs.channels, inputs.state) if inputs.keeps else None,
        )

    def backward(
        self, inputs: SelectiveScanInputs, results: ScanResults, cotangents: ScanResults, params: BwdParams
    ) -> dict[str, Any]:
        dtype, chunks = inputs.dtype, chunks_of(inputs)
        delta, pull_delta = jax.vjp(
            lambda delta, bias: steps_of(inputs, chunks.ids, delta, bias), inputs.delta, inputs.delta_bias
        )
        tokens = _tokens(inputs, chunks, delta)
        assert cotangents.out is not None
        d_out = without_padding(cotangents.out, chunks.ids).astype(dtype)
        u = without_padding(inputs.u, chunks.ids).astype(dtype)
        if inputs.z is None:
            gate, pull_gate = None, None
        else:
            gate, pull_gate = jax.vjp(lambda z: jax.nn.silu(without_padding(z, chunks.ids).astype(dtype)), inputs.z)
        d_total = d_out if gate is None else d_out * gate
        d_y = chunks.split(d_total).reshape(tokens.u.shape)
        d_last = cotangents.state
        if d_last is None:
            d_last = _no_states(inputs)
        d_last = d_last.reshape(inputs.sequences, *tokens.a.shape)
        assert results.chunk_states is not None
        before = results.chunk_states.reshape(*tokens.u.shape[:2], *tokens.a.shape)
        if chunks.ids is not None:
            # Before chunks without tokens there may be anything.
            is_token = chunks.split(chunks.ids != PADDING)
            before = recurrence.unless(~jnp.any(is_token, axis=2), before)
        behind, d_initial = recurrence.cotangents_behind(tokens, d_y, d_last, chunks.pieces)
        y, d_c, d = recurrence.gradients(tokens, before, behind, d_y)

        def merged(x: jax.Array, of: jax.Array) -> Any:
            return chunks.merge(x.reshape(*x.shape[:3], *of.shape[2:]))

        d_u = merged(d.u, inputs.u)
        found: dict[str, Any] = {"A": d.a.reshape(inputs.A.shape)}
        found["delta"], found["delta_bias"] = pull_delta(merged(d.delta, inputs.delta))
        found["B"], found["C"] = merged(d.b, inputs.B), merged(d_c, inputs.C)
        if inputs.D is not None:
            d_u = d_u + inputs.D.astype(dtype) * d_total
            found["D"] = jnp.sum(u * d_total, axis=(0, 1))
        if pull_gate is not None:
            total = merged(y, inputs.u)
            if inputs.D is not None:
                total = total + inputs.D.astype(dtype) * u
            (found["z"],) = pull_gate(d_out * total)
        found["u"] = d_u
        if inputs.initial_state is not None:
            found["initial_state"] = d_initial.reshape(inputs.initial_state.shape)
        return {name: found[name].astype(struct.dtype) for name, struct in inputs.gradients.items()}


def _no_states(inputs: SelectiveScanInputs) -> Any:
    """States of zeros, or no cotangents of the states, of all sequences."""
    return varying_as(jnp.zeros((inputs.sequences, inputs.channels, inputs.state), inputs.dtype), inputs)


def _tokens(inputs: SelectiveScanInputs, chunks: Chunks, delta: jax.Array) -> recurrence.Tokens:
    """The tokens by chunks, in the dtype that is computed in."""
    dtype, groups = inputs.dtype, inputs.groups
    of_group = inputs.channels if groups == 1 else inputs.channels // groups

    def by_chunk(x: jax.Array) -> Any:
        found = chunks.split(x).astype(dtype)
        return found.reshape(*found.shape[:3], groups, of_group)

    return recurrence.Tokens(
        by_chunk(inputs.u),
        by_chunk(delta),
        chunks.split(inputs.B).astype(dtype),
        chunks.split(inputs.C).astype(dtype),
        chunks.resets(),
        inputs.A.astype(dtype).reshape(groups, of_group, inputs.state),
    )
