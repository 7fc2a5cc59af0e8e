"""A call of linear attention on Hopper: a Triton kernel for what chunks need, then one for all that has states.

Backward there are two of those, there and back. The gradients of tokens follow: of a delta rule by a kernel for queries
and keys and a Triton kernel for the rest, otherwise by the passes that Triton's backend has.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable, chunk_table, segment_table
from tilewright.kernels.linear_attention.hopper.backward import chunk_gradients
from tilewright.kernels.linear_attention.hopper.forward import chunk_forward
from tilewright.kernels.linear_attention.hopper.params import (
    HopperLinearAttentionGradientParams,
    HopperLinearAttentionParams,
)
from tilewright.kernels.linear_attention.hopper.plan import (
    GAMMA,
    GATES,
    PassCall,
    PassOperands,
    PassResults,
    Task,
)
from tilewright.kernels.linear_attention.hopper.tokens import TokenCall, TokenOperands, token_gradients
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.passes import gradients
from tilewright.kernels.linear_attention.passes.chunks import Chunks, absent, normalized
from tilewright.kernels.linear_attention.passes.gradients import StatePasses
from tilewright.kernels.linear_attention.segments import Segments
from tilewright.kernels.triton import launch

CLEARED = 1024
"""Elements of a store of zeros."""

type Params = HopperLinearAttentionParams | HopperLinearAttentionGradientParams


def pass_call(
    inputs: LinearAttentionInputs, params: Params, sequences: int, task: Task, *, stored: bool = True
) -> PassCall:
    """The static half of a kernel's call for so many sequences or segments."""
    ends = {"out": inputs.return_state, "states": False, "gradients": inputs.initial_state is not None}
    return PassCall(
        sequences=sequences,
        heads=inputs.heads,
        value_heads=inputs.value_heads,
        key_dim=inputs.key_dim,
        value_dim=inputs.value_dim,
        delta=inputs.beta is not None,
        return_state=ends[task] or not stored,
        consumers=params.consumers,
        stages=params.stages,
        task=task,
        stored=stored,
    )


@dataclasses.dataclass(frozen=True)
class Passes:
    """A call, and what its kernels have in common.

    Attributes:
      gates, solve: see `PassOperands`.
    """

    inputs: LinearAttentionInputs
    params: Params
    table: ChunkTable
    gates: jax.Array
    solve: jax.Array | None

    @property
    def whole(self) -> bool:
        """True if each token belongs to a sequence."""
        return self.inputs.cum_seqlens is None and self.inputs.seq_lengths is None

    def run(
        self,
        task: Task,
        spans: jax.Array,
        state: jax.Array | None,
        *,
        value: jax.Array | None = None,
        stored: bool = True,
    ) -> PassResults[jax.Array]:
        """Goes through sequences or segments, with states or their gradients that are not transposed."""
        inputs, rows = self.inputs, self.inputs.batch * self.inputs.length
        given = inputs.query, inputs.key, inputs.value if value is None else value
        query, key, values = (x.reshape(rows, *x.shape[2:]) for x in given)
        transposed = None if state is None else state.mT.astype(jnp.float32)
        operands = PassOperands(query, key, values, self.gates, self.solve, transposed, *rows_of(spans, self.table))
        call = pass_call(inputs, self.params, spans.shape[0], task, stored=stored)
        found = (chunk_gradients if task == "gradients" else chunk_forward)(operands, call)
        return found._replace(state=None if found.state is None else found.state.mT)

    def split(self, *, all_maps: bool) -> Segments:
        """The segments, with the maps of all, or of all but the last one of each sequence."""
        segments = segment_table(self.table, self.params.segment)
        mapped = segments.segments
        if not all_maps:
            last = segments.sequences[:, 0] + segments.sequences[:, 1] - 1
            mapped = mapped.at[jnp.where(last >= 0, last, segments.num_segments), 1].set(0, mode="drop")
        maps = self.run("states", mapped, None, stored=False).state
        assert maps is not None  # what is not stored gives states
        return Segments(self.inputs, segments, self.params.segment, maps, self.gates[:, :, GAMMA])


def passes_of(inputs: LinearAttentionInputs, params: Params) -> Passes:
    """The passes of a call, after the kernel that prepares chunks."""
    table = chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    return Passes(inputs, params, table, *prepared(inputs, table))


def forward(inputs: LinearAttentionInputs, params: HopperLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    passes = passes_of(inputs, params)
    if params.segment:
        # Nothing follows the last segment of a sequence.
        split = passes.split(all_maps=False)
        results = passes.run("out", split.table.segments, split.states(split.maps, inputs.initial_state))
        state = None if results.state is None else split.outermost(results.state, inputs.initial_state)
    else:
        results = passes.run("out", passes.table.sequences, inputs.initial_state)
        state = results.state
    assert results.out is not None  # the result of the task
    out = results.out if passes.whole else _with_zeros(results.out, passes.table)
    return LinearAttentionResults(out.reshape(inputs.value.shape), state)


def backward(
    inputs: LinearAttentionInputs, cotangents: LinearAttentionResults, params: HopperLinearAttentionGradientParams
) -> dict[str, Any]:
    """Gradients by name, of all that is differentiable; the states are computed again."""
    passes = passes_of(inputs, params)
    d_out = jnp.zeros_like(inputs.value) if cotangents.out is None else cotangents.out
    d_final = cotangents.state
    if params.segment:
        # Without a gradient behind the last segment of a sequence none goes through its map.
        split = passes.split(all_maps=d_final is not None)
        spans = split.table.segments
        kept = passes.run("states", spans, split.states(split.maps, inputs.initial_state))
        d_external = passes.run("gradients", spans, None, value=d_out, stored=False).state
        assert d_external is not None  # what is not stored gives states
        back = passes.run("gradients", spans, split.states(d_external, d_final, reverse=True), value=d_out)
        d_initial = None if back.state is None else split.outermost(back.state, d_final, first=True)
    else:
        kept = passes.run("states", passes.table.sequences, inputs.initial_state)
        back = passes.run("gradients", passes.table.sequences, d_final, value=d_out)
        d_initial = back.state
    assert kept.states is not None  # the results of their tasks
    assert back.states is not None
    assert back.out is not None
    if params.ctas and kept.out is not None:
        return _gradients_of_delta_rule(
            passes, d_out, kept.states, kept.out, back.states, back.out, d_initial, params.ctas
        )
    updates = inputs.value if kept.out is None else kept.out
    # Those of a delta rule are not read where a token belongs to no sequence.
    d_updates = back.out if passes.whole or kept.out is not None else _with_zeros(back.out, passes.table)
    gamma = absent(None)
    if inputs.log_decay is not None:
        # Those of chunks without a token are not written.
        gamma = jnp.where(passes.table.chunks[:, 2, None, None] > 0, passes.gates[:, :, GAMMA], 0.0)
    query, key = normalized(inputs, inputs.query, inputs.key)
    chunks = Chunks(inputs, passes.table, query, key, gamma, absent(None), transposed=True)
    passed = StatePasses(kept.states, updates, back.states, d_updates.reshape(inputs.value.shape), d_initial)
    _, pairs, diagonal = gradients.local_gradients(chunks, d_out, updates, params.tokens, through_scores=False)
    return gradients.token_gradients(chunks, d_out, passed, pairs, diagonal, params.tokens)


def token_call(inputs: LinearAttentionInputs, chunks: int, ctas: int) -> TokenCall:
    """The static half of the kernel of tokens' gradients."""
    return TokenCall(
        chunks=chunks,
        heads=inputs.heads,
        value_heads=inputs.value_heads,
        key_dim=inputs.key_dim,
        value_dim=inputs.value_dim,
        scale=float(inputs.scale),
        norm=inputs.qk_l2norm,
        ctas=ctas,
    )


def _gradients_of_delta_rule(
    passes: Passes,
    d_out: jax.Array,
    states: jax.Array,
    updates: jax.Array,
    d_states: jax.Array,
    d_updates: jax.Array,
    d_initial: jax.Array | None,
    ctas: int,
) -> dict[str, Any]:
    """Gradients by name, from both passes over states."""
    from tilewright.kernels.linear_attention.hopper import value_kernels as kernels

    inputs, table = passes.inputs, passes.table
    rows, gate = inputs.batch * inputs.length, inputs.log_decay is not None
    query, key, above = (x.reshape(rows, *x.shape[2:]) for x in (inputs.query, inputs.key, d_out))
    operands = TokenOperands(query, key, above, updates, d_updates, states, d_states, passes.gates, table.chunks)
    of_tokens = token_gradients(operands, token_call(inputs, table.num_chunks, ctas))
    per_token = inputs.value.shape[:3]
    d_value, d_beta, d_decay = launch(
        kernels.value_gradients,
        [inputs.value, absent(inputs.beta), d_updates, passes.gates, of_tokens.sums, table.chunks],
        [
            jax.ShapeDtypeStruct(inputs.value.shape, inputs.value.dtype),
            jax.ShapeDtypeStruct(per_token, jnp.float32),
            jax.ShapeDtypeStruct(per_token if gate else (0,), jnp.float32),
        ],
        grid=[table.num_chunks * inputs.value_heads],
        constants={"HV": inputs.value_heads, "V": inputs.value_dim, "BLOCK_V": ROWS, "GATE": gate},
    )
    if inputs.gate == "head":
        d_decay = d_decay.sum((0, 1))
    found: dict[str, Any] = {
        "query": of_tokens.d_query.reshape(inputs.query.shape),
        "key": of_tokens.d_key.reshape(inputs.key.shape),
        "value": d_value,
        "beta": d_beta,
        "log_decay": d_decay,
        "initial_state": d_initial,
    }
    return {name: found[name].astype(getattr(inputs, name).dtype) for name in inputs.gradients}


def rows_of(spans: jax.Array, table: ChunkTable) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first row, the first chunk and the number of tokens of spans, ``[spans, 2]`` like those of the table."""
    first, count = spans[:, 0], spans[:, 1]
    # All chunks of a span but the last one are full.
    begin, last = (jnp.clip(each, 0, table.num_chunks - 1) for each in (first, first + count - 1))
    tokens = jnp.where(count > 0, (count - 1) * CHUNK + table.chunks[last, 2], 0)
    return table.chunks[begin, 0], first, tokens


def prepared(inputs: LinearAttentionInputs, table: ChunkTable) -> tuple[jax.Array, jax.Array | None]:
    """The gates of all chunks and, for a delta rule, T: see `PassOperands`."""
    from tilewright.kernels.linear_attention.hopper import prepare_kernels as kernels

    delta = inputs.beta is not None
    chunks = table.num_chunks, inputs.value_heads
    gates, solve = launch(
        kernels.prepare_chunk,
        [
            inputs.query, inputs.key, absent(inputs.log_decay), absent(inputs.beta), table.chunks,
        ],
        [
            jax.ShapeDtypeStruct((*chunks, GATES, CHUNK), jnp.float32),
            jax.ShapeDtypeStruct((*chunks, 2 * CHUNK, CHUNK) if delta else (0,), inputs.value.dtype),
        ],
        grid=[table.num_chunks * inputs.heads],
        constants={
            "H": inputs.heads,
            "HV": inputs.value_heads,
            "K": inputs.key_dim,
            "STRIDE": 0 if inputs.gate == "head" else inputs.value_heads,
            "GATE": inputs.log_decay is not None,
            "DELTA": delta,
            "NORM": inputs.qk_l2norm,
            "EPS": float(inputs.l2norm_eps),
            "SCALE": float(inputs.scale),
        },
        num_warps=1,
    )  # fmt: skip
    return gates, solve if delta else None


def _with_zeros(out: jax.Array, table: ChunkTable) -> jax.Array:
    """Zeros where a token belongs to no sequence, which the kernel has not written."""
    from tilewright.kernels.linear_attention.hopper import prepare_kernels as kernels

    (cleared,) = launch(
        kernels.clear_padding,
        [table.chunks, out],
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        grid=[table.num_chunks],
        constants={"WIDTH": out.shape[1] * out.shape[2], "BLOCK": CLEARED},
        in_place={0: 1},
    )
    return cleared
