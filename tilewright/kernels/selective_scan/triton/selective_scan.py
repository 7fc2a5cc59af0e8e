"""The Triton backend of the selective scan, on NVIDIA GPUs: states in registers, every token read once."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.selective_scan.inputs import ScanResults, SelectiveScanInputs, pieces_of
from tilewright.kernels.selective_scan.triton.params import (
    MAX_STATE,
    ScanParams,
    candidates,
    heuristic,
    piece_size,
)
from tilewright.kernels.selective_scan.triton.table import marks_of, table_of
from tilewright.kernels.sequential import run_with_sequential_vmap
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction

BLOCK_T = {"forward": 8, "backward": 2}
"""Tokens of a block; backward their states are in registers, too: those of 4 spill 20 bytes on an H100."""

MAX_TOKENS = (1 << 31) - 1
"""Tokens of a call: their positions are int32 in the table."""


class TritonSelectiveScan(Backend[SelectiveScanInputs, ScanResults, ScanParams, ScanParams]):
    """Serves float16, bfloat16 and float32; sums are in float32, in one order."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = ScanParams
    backward_params: ClassVar[type] = ScanParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"D", "z", "delta_bias", "delta_softplus", "initial_state", "cum_seqlens", "segment_ids", "seq_lengths"}
    )

    def reasons(self, inputs: SelectiveScanInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias"):
            x = inputs.arrays[name]
            if x is not None and x.dtype.name not in ("float16", "bfloat16", "float32"):
                reasons.append(f"{name} must be float16, bfloat16 or float32, not {x.dtype}")
        if inputs.state > MAX_STATE:
            reasons.append(f"its threads have states of at most {MAX_STATE} elements, got {inputs.state}")
        if 0 in inputs.u.shape or not inputs.state or not inputs.sequences:
            reasons.append(f"its kernels need tokens and states, got {inputs.u.shape=}, {inputs.state=}")
        if inputs.batch * inputs.length > MAX_TOKENS:
            reasons.append(f"it has at most {MAX_TOKENS} tokens, got {inputs.batch * inputs.length}")
        return reasons

    def heuristic(self, inputs: SelectiveScanInputs, device: Device, direction: Direction) -> ScanParams:
        return heuristic(inputs, device, BLOCK_T[direction])

    def candidates(self, inputs: SelectiveScanInputs, device: Device, direction: Direction) -> Iterable[ScanParams]:
        return candidates(inputs, device, BLOCK_T[direction])

    def forward(self, inputs: SelectiveScanInputs, params: ScanParams) -> ScanResults:
        return run_with_sequential_vmap(lambda each: _forward(each, params), inputs)

    def backward(
        self, inputs: SelectiveScanInputs, results: ScanResults, cotangents: ScanResults, params: ScanParams
    ) -> dict[str, Any]:
        found: dict[str, Any] = run_with_sequential_vmap(
            lambda each: _backward(each[0], each[1], each[2], params), (inputs, results, cotangents)
        )
        return {name: found[name].astype(struct.dtype) for name, struct in inputs.gradients.items()}


class _Launches:
    """The launches of one direction: the table of pieces, and the constants of their kernels."""

    def __init__(self, inputs: SelectiveScanInputs, params: ScanParams) -> None:
        self.inputs, self.params = inputs, params
        self.size = piece_size(inputs, params)
        self.marks = marks_of(inputs)
        self.table = table_of(inputs, self.size, self.marks)
        self.pieces = self.table.shape[0]
        self.split = self.size < inputs.length
        # Blocks of channels do not go beyond a group.
        self.parts = -(-(inputs.channels // inputs.groups) // params.block_d)
        self.constants: dict[str, Any] = {
            "channels": inputs.channels,
            "groups": inputs.groups,
            "state": inputs.state,
            "block_d": params.block_d,
            "block_n": power_of_two(inputs.state),
            "block_t": params.block_t,
            "has_bias": inputs.delta_bias is not None,
            "delta_softplus": inputs.delta_softplus,
            "has_marks": self.marks is not None,
        }

    def given(self, *arrays: jax.Array | None) -> list[Any]:
        """The arrays, with a stand-in for those that are not given."""
        absent = jnp.zeros((0,), jnp.float32)
        return [absent if x is None else x for x in arrays]

    def states(self, *leading: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading, self.inputs.channels, self.inputs.state), jnp.float32)

    def vectors(self, present: bool = True) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.pieces, self.inputs.channels) if present else (0,), jnp.float32)

    def optional(self, struct: Any, present: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype) if present else jax.ShapeDtypeStruct((0,), jnp.float32)

    def run(self, kernel: Any, operands: list[Any], outputs: list[Any], **constants: Any) -> tuple[Any, ...]:
        return launch(
            kernel,
            operands,
            outputs,
            grid=[self.pieces * self.inputs.groups * self.parts],
            constants=self.constants | constants,
            num_warps=self.params.num_warps,
        )

    def of_empty(self, states: jax.Array, instead: jax.Array | None) -> Any:
        """States of sequences, of which no piece writes those of empty ones."""
        if self.inputs.cum_seqlens is None:
            return states
        pieces = pieces_of(self.inputs, self.size)
        return jnp.where((pieces.last_of < pieces.first_of)[:, None, None], 0.0 if instead is None else instead, states)


def _forward(inputs: SelectiveScanInputs, params: ScanParams) -> ScanResults:
    from tilewright.kernels.selective_scan.triton import forward_kernels

    launches = _Launches(inputs, params)
    ends, sums = launches.given(None, None)
    if launches.split:
        ends, sums = launches.run(
            forward_kernels.piece_ends,
            launches.given(
                launches.table, inputs.u, inputs.delta, inputs.A, inputs.B, inputs.delta_bias, launches.marks
            ),
            [launches.states(launches.pieces), launches.vectors()],
        )
    final = launches.states(inputs.sequences)
    chunk_states = launches.states(inputs.batch, inputs.chunks)
    out, last, before = launches.run(
        forward_kernels.scan,
        launches.given(
            launches.table, inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C, inputs.D, inputs.z,
            inputs.delta_bias, inputs.initial_state, launches.marks, ends, sums,
        ),
        [
            launches.optional(inputs.u, True),
            launches.optional(final, inputs.return_state),
            launches.optional(chunk_states, inputs.keeps),
        ],
        chunk=inputs.chunk,
        has_skip=inputs.D is not None,
        has_gate=inputs.z is not None,
        has_initial=inputs.initial_state is not None,
        split=launches.split,
        returns_state=inputs.return_state,
        keeps=inputs.keeps,
    )  # fmt: skip
    return ScanResults(
        out,
        launches.of_empty(last, inputs.initial_state) if inputs.return_state else None,
        before if inputs.keeps else None,
    )


def _backward(
    inputs: SelectiveScanInputs, results: ScanResults, cotangents: ScanResults, params: ScanParams
) -> dict[str, Any]:
    from tilewright.kernels.selective_scan.triton import backward_kernels

    launches = _Launches(inputs, params)
    batch, length = inputs.batch, inputs.length
    starts, sums = launches.given(None, None)
    has_gate = inputs.z is not None
    if launches.split:
        starts, sums = launches.run(
            backward_kernels.piece_starts,
            launches.given(
                launches.table, inputs.delta, inputs.A, inputs.C, inputs.z, inputs.delta_bias, launches.marks,
                cotangents.out,
            ),
            [launches.states(launches.pieces), launches.vectors()],
            has_gate=has_gate,
        )  # fmt: skip
    has_initial = inputs.initial_state is not None
    of_blocks = jax.ShapeDtypeStruct((launches.parts, batch * length, inputs.groups, inputs.state), jnp.float32)
    block_n = power_of_two(inputs.state)
    kept = inputs.chunk // params.block_t * block_n * params.block_d
    d_u, d_delta, d_z, d_decay, d_b, d_c, d_skip, d_bias, d_initial, _ = launches.run(
        backward_kernels.gradients,
        launches.given(
            launches.table, inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C, inputs.D, inputs.z,
            inputs.delta_bias, launches.marks, results.chunk_states, cotangents.out, cotangents.state, starts, sums,
        ),
        [
            launches.optional(inputs.u, True),
            launches.optional(inputs.delta, True),
            launches.optional(inputs.z, has_gate),
            launches.states(launches.pieces),
            of_blocks,
            of_blocks,
            launches.vectors(inputs.D is not None),
            launches.vectors(inputs.delta_bias is not None),
            launches.optional(inputs.initial_state, has_initial),
            jax.ShapeDtypeStruct((launches.pieces * inputs.groups * launches.parts, kept), jnp.float32),
        ],
        tokens=batch * length,
        chunk=inputs.chunk,
        has_skip=inputs.D is not None,
        has_gate=has_gate,
        has_initial=has_initial,
        has_final=cotangents.state is not None,
        split=launches.split,
    )  # fmt: skip
    found = {"u": d_u, "delta": d_delta, "z": d_z, "A": jnp.sum(d_decay, axis=0)}
    found |= {"B": jnp.sum(d_b, axis=0).reshape(inputs.B.shape), "C": jnp.sum(d_c, axis=0).reshape(inputs.C.shape)}
    if inputs.D is not None:
        found["D"] = jnp.sum(d_skip, axis=0)
    if inputs.delta_bias is not None:
        found["delta_bias"] = jnp.sum(d_bias, axis=0)
    if has_initial:
        found["initial_state"] = launches.of_empty(d_initial, cotangents.state)
    return found
