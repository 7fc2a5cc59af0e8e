# mypy: disable-error-code="assignment"
"""The fold of segments' maps in Triton: the states at the borders of segments, from what each makes of any state."""

import triton
import triton.language as tl

SIZE = tl.constexpr(64)


@triton.jit
def segment_states(
    external, maps, gamma, initial, segments, sequences, states,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STRIDE: tl.constexpr, MOST: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, INITIAL: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Goes through the segments of a sequence: writes S before each, S behind it being M S + ``external``.

    external   [segments, HV, K, STRIDE], whose first V channels count
    maps       [segments, HV, K, V + K] of ``chunk_states``: M is behind V; without a delta rule M is a decay
    MOST       chunks of a segment at most, a power of two
    REVERSE    goes from the last segment to the first, and M is transposed, for gradients
    """
    v_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % v_blocks, tl.program_id(0) // v_blocks % HV
    sequence = tl.program_id(0) // (v_blocks * HV)
    begin, count = tl.load(sequences + 2 * sequence), tl.load(sequences + 2 * sequence + 1)
    k, v, c = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, MOST)
    of_state, state_inside = k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]
    map_inside = (k < K)[:, None] & (k < K)[None, :]
    of_map = k[None, :] * (V + K) + k[:, None] if REVERSE else k[:, None] * (V + K) + k[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if INITIAL:
        state = tl.load(initial + (sequence * HV + head).to(tl.int64) * (K * V) + of_state, state_inside, other=0.0)
    for number in tl.range(0, count):
        segment = begin + (count - 1 - number if REVERSE else number)
        place = segment.to(tl.int64) * HV + head
        tl.store(states + place * (K * V) + of_state, state, state_inside)
        given = external + place * (K * STRIDE) + k[:, None] * STRIDE + v[None, :]
        added = tl.load(given, state_inside, other=0.0)
        if DELTA:
            factor = tl.load(maps + place * (K * (V + K)) + V + of_map, map_inside, other=0.0)
            state = tl.dot(factor, state, added, input_precision="tf32x3")
        else:
            if GATE:
                first, chunks = tl.load(segments + 2 * segment).to(tl.int64), tl.load(segments + 2 * segment + 1)
                sums = tl.load(gamma + ((first + c) * HV + head) * SIZE + (SIZE - 1), c < chunks, other=0.0)
                state *= tl.exp2(tl.sum(sums, 0))
            state += added
