"""Device helpers that the Triton kernels of attention share: tiles in memory, score masks, logits, dropout.

Rows are queries and columns are keys throughout. ``rows`` and ``columns`` are indices that broadcast against each
other, so that the same functions serve S [queries, keys] and its transpose [keys, queries].

Names:
  head_index       batch · heads + head, of the heads of queries or of keys
  LOWEST, HIGHEST  the band: key - query is between them, both included; of indices (BANDED) or positions (HAS_ROWS)
  q_rows, kv_rows  int32 [batch or 1, 2, length]: segment ids, then positions; present with HAS_ROWS
  ranges           int32 [batch or 1, heads or 1, entries, 2]: first and end of what RANGE queries (or keys) may see
  BIAS, MASK, RANGES, SHAPE
                   shape bits of an array of scores: its dimensions that are not 1, of batch (8), heads (4),
                   queries (2) and keys (1); -1 if there is no array
  INSIDE           stride of int32 [batch or 1, 4] ``inside``: first and end of the queries and of the keys, outside of
                   which the lengths or packed sequences leave what may be NaN; -1 if there is nothing outside
  DIM, WIDTH       head dim of a tile, padded to a power of two, and head dim in memory
  TMA              tiles go through TMA descriptors (compute capability 9.0 and up), else through pointers

Offsets inside a batch element have 32 bits, as the backend declines longer sequences; offsets of a batch element or of
a head's scores have 64.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST_LSE: tl.constexpr = tl.constexpr(-16777216.0)
"""``LOWEST_LSE`` in ``results``, below which a row has no gradient."""
HIDING_BIAS: tl.constexpr = tl.constexpr(-1.7014117331926443e38)
"""``HIDING_BIAS`` in ``results``, at or below which a bias masks its key."""
PHILOX_MULTIPLIER: tl.constexpr = tl.constexpr(0xD256D193)

RANGE: tl.constexpr = tl.constexpr(64)
"""Queries or keys that one entry of the ranges covers; ``RANGE_TILE`` in ``mask_terms``."""


@triton.jit
def decode_program_id(num_tiles, AT_ONCE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Tile and head index of a program: the same tile of ``AT_ONCE`` heads comes before their next tile.

    ``AT_ONCE`` heads are worked on together, so that their keys and values stay in the L2 cache.
    """
    program = tl.program_id(0)
    group = program // (num_tiles * AT_ONCE)
    rest = program % (num_tiles * AT_ONCE)
    tile = rest // AT_ONCE
    # With a causal mask the last tiles of queries have most keys: they are launched first, lest they end last.
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    return tile, group * AT_ONCE + rest % AT_ONCE


@triton.jit
def tile_offsets(head, start, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a tile [BLOCK, DIM] of a head's rows in ``[length, HEADS, WIDTH]``."""
    within = tl.arange(0, BLOCK)[:, None] * (HEADS * WIDTH) + tl.arange(0, DIM)[None, :]
    return (start * HEADS + head) * WIDTH + within


@triton.jit
def inside_of_batch(inside, batch, q_length, kv_length, INSIDE: tl.constexpr):
    """First and end of a batch element's queries, and of its keys, that are not outside; all of them without INSIDE."""
    q_first, q_end, kv_first, kv_end = 0, q_length, 0, kv_length
    if INSIDE >= 0:
        ranges = inside + batch * INSIDE
        q_first, q_end = tl.load(ranges), tl.load(ranges + 1)
        kv_first, kv_end = tl.load(ranges + 2), tl.load(ranges + 3)
    return q_first, q_end, kv_first, kv_end


@triton.jit
def tile_bounds_mask(
    start, first, length, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, INSIDE: tl.constexpr
):
    """Mask of the elements of a tile that lie within the length and the width, and with INSIDE not before ``first``."""
    inside = (start + tl.arange(0, BLOCK) < length)[:, None]
    if INSIDE >= 0:
        inside = inside & (start + tl.arange(0, BLOCK) >= first)[:, None]
    if DIM != WIDTH:
        inside = inside & (tl.arange(0, DIM) < WIDTH)[None, :]
    return inside


@triton.jit
def tile_source(
    tensor, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr, first=0, INSIDE: tl.constexpr = -1,
):  # fmt: skip
    """Source that ``load_tile`` takes for ``[length, HEADS, WIDTH]``: a TMA descriptor, or the pointer itself."""
    source = tensor
    if TMA and INSIDE >= 0:
        # Of the rows inside alone: TMA gives zeros for what lies outside of a tensor, and coordinates may be negative.
        # Of no rows there is no descriptor; none of them is loaded then.
        rows = tl.maximum(length - first, 1)
        inside = tensor + first.to(tl.int64) * (HEADS * WIDTH)
        source = tl.make_tensor_descriptor(inside, [HEADS, rows, WIDTH], [WIDTH, HEADS * WIDTH, 1], [1, BLOCK, DIM])
    elif TMA:
        # Heads lead, so that a loaded block is [1, BLOCK, DIM], a matrix for Triton without a change of layout.
        source = tl.make_tensor_descriptor(tensor, [HEADS, length, WIDTH], [WIDTH, HEADS * WIDTH, 1], [1, BLOCK, DIM])
    return source


@triton.jit
def load_tile(
    source, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    CHECKED: tl.constexpr, TMA: tl.constexpr, first=0, INSIDE: tl.constexpr = -1,
):  # fmt: skip
    """Loads a head's rows from ``start`` on: zeros beyond the width, and beyond the length if ``CHECKED`` or by TMA.

    With INSIDE, which comes with ``CHECKED``, the rows inside are those from ``first`` to ``length``.
    """
    if TMA and INSIDE >= 0:
        loaded = source.load([head, start - first, 0]).reshape(BLOCK, DIM)
    elif TMA:
        loaded = source.load([head, start, 0]).reshape(BLOCK, DIM)
    else:
        tile = source + tile_offsets(head, start, HEADS, BLOCK, DIM, WIDTH)
        if CHECKED:
            loaded = tl.load(tile, mask=tile_bounds_mask(start, first, length, BLOCK, DIM, WIDTH, INSIDE), other=0.0)
        elif DIM != WIDTH:
            loaded = tl.load(tile, mask=(tl.arange(0, DIM) < WIDTH)[None, :], other=0.0)
        else:
            loaded = tl.load(tile)
    return loaded


@triton.jit
def load_resident_tile(
    tensor, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr, first=0, INSIDE: tl.constexpr = -1,
):  # fmt: skip
    """Loads the tile of a head's rows that a program keeps; by TMA, as pointers would stay in registers."""
    source = tile_source(tensor, length, HEADS, BLOCK, DIM, WIDTH, TMA, first, INSIDE)
    return load_tile(source, head, start, length, HEADS, BLOCK, DIM, WIDTH, True, TMA, first, INSIDE)


@triton.jit
def store_tile(
    tensor, values, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Stores a tile of a head's rows in the dtype of ``tensor``; leaves out elements beyond the length or the width."""
    rounded = values.to(tensor.dtype.element_ty)
    if TMA:
        target = tile_source(tensor, length, HEADS, BLOCK, DIM, WIDTH, TMA)
        target.store([head, start, 0], rounded.reshape(1, BLOCK, DIM))
    else:
        tile = tensor + tile_offsets(head, start, HEADS, BLOCK, DIM, WIDTH)
        tl.store(tile, rounded, mask=tile_bounds_mask(start, 0, length, BLOCK, DIM, WIDTH, -1))


@triton.jit
def padded_length(length):
    """Row stride of the float32 rows that TMA reads or adds to: a whole number of 16 bytes."""
    return (length + 3) // 4 * 4


@triton.jit
def row_source(tensor, count, length, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Source that ``load_row`` takes for float32 ``[count, padded_length(length)]``."""
    source = tensor
    if TMA:
        source = tl.make_tensor_descriptor(tensor, [count, length], [padded_length(length), 1], [1, BLOCK])
    return source


@triton.jit
def load_row(
    source, row, start, length, BLOCK: tl.constexpr, OTHER: tl.constexpr, CHECKED: tl.constexpr, TMA: tl.constexpr
):
    """Loads ``BLOCK`` elements of a row; beyond its length they are ``OTHER``, by TMA zeros.

    By TMA one thread loads them; by pointers every thread loads each element that it needs.
    """
    if TMA:
        loaded = source.load([row, start]).reshape(BLOCK)
    else:
        indices = start + tl.arange(0, BLOCK)
        pointers = source + row.to(tl.int64) * padded_length(length) + indices
        if CHECKED:
            loaded = tl.load(pointers, mask=indices < length, other=OTHER)
        else:
            loaded = tl.load(pointers)
    return loaded


@triton.jit
def accumulator_target(
    tensor, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Target that ``add_to_accumulator`` takes for float32 ``[HEADS, WIDTH, padded_length(length)]``."""
    target = tensor
    if TMA:
        padded = padded_length(length)
        target = tl.make_tensor_descriptor(tensor, [HEADS * WIDTH, padded], [padded, 1], [DIM, BLOCK])
    return target


@triton.jit
def add_to_accumulator(
    target, values, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds [DIM, BLOCK] from ``start`` on to the accumulator of a head, atomically: other programs add to it, too.

    ``values`` must be zeros beyond the width and the length, as TMA adds rows beyond the width to the next head.
    """
    if TMA:
        # A TMA reduction: one instruction for the tile, and no registers for its pointers.
        target.atomic_add([head * WIDTH, start], values)
    else:
        padded = padded_length(length)
        rows, columns = tl.arange(0, DIM)[:, None], start + tl.arange(0, BLOCK)[None, :]
        pointers = target + head * (WIDTH * padded) + rows * padded + columns
        # Relaxed: no other access is ordered by these additions, the sum is read after the kernel.
        tl.atomic_add(pointers, values, mask=(rows < WIDTH) & (columns < length), sem="relaxed")


@triton.jit
def visible_span(
    start, length, other_length, ranges, members, BLOCK: tl.constexpr, STEP: tl.constexpr, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, BANDED: tl.constexpr, RANGED: tl.constexpr, MASK_TAIL: tl.constexpr,
):  # fmt: skip
    """Bounds ``first, full_first, full_end, end`` of what a program's tile of ``BLOCK`` from ``start`` on can see.

    They delimit three parts: masked, fully visible (no mask is evaluated), masked again. Parts are whole steps of
    ``STEP``, counted from a multiple of it; the last step may go beyond the end. The band is
    ``LOWEST <= other - own <= HIGHEST``. ``ranges`` [members, entries, 2] are those of several heads, whose union
    is taken; they are bounds only, so with ``RANGED`` no step is fully visible. With ``MASK_TAIL`` neither is
    any step of a tile that reaches beyond its own length.
    """
    first = start * 0
    end = first + other_length
    if BANDED:
        first = tl.maximum(start + LOWEST, 0)
        end = tl.minimum(start + BLOCK + HIGHEST, other_length)
    if RANGED:
        entries = (length + RANGE - 1) // RANGE
        range_min = first + other_length
        range_max = first * 0
        for member in tl.range(members):
            for i in tl.static_range((BLOCK + RANGE - 1) // RANGE):
                # A tile that reaches beyond the last entry reads that one again.
                entry = member * entries + tl.minimum(start // RANGE + i, entries - 1)
                range_min = tl.minimum(range_min, tl.load(ranges + 2 * entry))
                range_max = tl.maximum(range_max, tl.load(ranges + 2 * entry + 1))
        first = tl.maximum(first, range_min)
        end = tl.minimum(end, range_max)
    # Steps begin at multiples of STEP, so that the parts meet between steps.
    first = first // STEP * STEP
    # Nothing is visible where the end was before the first: all parts are empty then.
    end = tl.maximum(end, first)
    full_first = first
    full_end = tl.minimum(end, other_length // STEP * STEP)
    if RANGED:
        full_end = first
    elif BANDED:
        # Fully visible: inside the band for the last row of the tile (lower bound) and for its first (upper bound).
        full_first = (tl.maximum(start + BLOCK - 1 + LOWEST, 0) + STEP - 1) // STEP * STEP
        full_end = tl.minimum(full_end, tl.maximum(start + HIGHEST + 1, 0) // STEP * STEP)
        full_first = tl.minimum(tl.maximum(full_first, first), end)
    if MASK_TAIL:
        full_end = tl.where(start + BLOCK > length, full_first, full_end)
    # The second part may be empty, but must not begin before the first part ends.
    full_end = tl.maximum(full_end, full_first)
    return first, full_first, full_end, end


@triton.jit
def rows_of_batch(q_rows, kv_rows, batch, q_length, kv_length, Q_ROWS_BATCH: tl.constexpr, KV_ROWS_BATCH: tl.constexpr):
    """Pointers to the segment ids and positions of a batch element's queries and keys.

    ``Q_ROWS_BATCH`` and ``KV_ROWS_BATCH`` are 0 where all batch elements share them, else 1.
    """
    batch_64 = batch.to(tl.int64)
    return q_rows + batch_64 * Q_ROWS_BATCH * 2 * q_length, kv_rows + batch_64 * KV_ROWS_BATCH * 2 * kv_length


@triton.jit
def score_terms_of_head(
    bias, mask, dropout_keys, batch, head, q_length, kv_length, HEADS: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """Pointers to a head's part of the bias and of the mask, and to its key of the dropout."""
    head_bias, head_mask, dropout_key = bias, mask, dropout_keys
    if BIAS >= 0:
        head_bias = scores_of_head(bias, batch, head, HEADS, q_length, kv_length, BIAS)
    if MASK >= 0:
        head_mask = scores_of_head(mask, batch, head, HEADS, q_length, kv_length, MASK)
    if THRESHOLD > 0:
        dropout_key = dropout_keys + (batch * HEADS + head) * 2
    return head_bias, head_mask, dropout_key


@triton.jit
def ranges_of_head(ranges, batch, head, length, HEADS: tl.constexpr, RANGES: tl.constexpr):
    """Pointer to a head's ranges, [entries, 2]."""
    pointer = ranges
    if RANGES >= 0:
        pointer = scores_of_head(ranges, batch, head, HEADS, (length + RANGE - 1) // RANGE * 2, 1, RANGES | 2)
    return pointer


@triton.jit
def scores_of_head(pointer, batch, head, heads, q_length, kv_length, SHAPE: tl.constexpr):
    """Pointer to a head's part of an array of scores; ``SHAPE`` are the shape bits."""
    index = batch.to(tl.int64) * 0
    if SHAPE & 8:
        index = batch.to(tl.int64)
    if SHAPE & 4:
        index = index * heads + head
    if SHAPE & 2:
        index = index * q_length
    if SHAPE & 1:
        index = index * kv_length
    return pointer + index


@triton.jit
def score_pointers(pointer, first_row, rows, first_column, columns, kv_length, SHAPE: tl.constexpr):
    """Pointers to the scores of a tile within a head's part of an array; ``SHAPE`` are the shape bits."""
    offsets = (rows - first_row) * 0 + (columns - first_column) * 0
    # The corner of the tile needs 64 bits, offsets inside the tile do not.
    if SHAPE & 2:
        if SHAPE & 1:
            # The sum with program_id makes a tensor of first_row, which may be a loop's index and have no .to().
            pointer += (tl.program_id(0) * 0 + first_row).to(tl.int64) * kv_length
            offsets += (rows - first_row) * kv_length
        else:
            pointer += first_row
            offsets += rows - first_row
    if SHAPE & 1:
        pointer += first_column
        offsets += columns - first_column
    return pointer + offsets


@triton.jit
def visibility_mask(
    first_row, rows, first_column, columns, q_length, kv_length, q_rows, kv_rows, mask, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, BANDED: tl.constexpr, HAS_ROWS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Mask of the scores of a tile that are visible: lengths, band, segments, positions and the mask array.

    ``q_rows`` and ``kv_rows`` are a batch element's segment ids and positions, [2, length]; ``mask`` is a head's part.
    Both lengths are always compared: with fewer comparisons ptxas serialises the wgmmas of the backward pass.
    """
    row_inside, column_inside = rows < q_length, columns < kv_length
    visible = column_inside & row_inside
    if BANDED:
        # Indices fit 32 bits, unlike positions below.
        difference = columns - rows
        visible = visible & (difference >= LOWEST) & (difference <= HIGHEST)
    if HAS_ROWS:
        q_segments = tl.load(q_rows + rows, mask=row_inside, other=0)
        kv_segments = tl.load(kv_rows + columns, mask=column_inside, other=0)
        q_positions = tl.load(q_rows + q_length + rows, mask=row_inside, other=0)
        kv_positions = tl.load(kv_rows + kv_length + columns, mask=column_inside, other=0)
        # Padding has the largest or the smallest int32 as its position, so the difference needs 64 bits.
        difference = kv_positions.to(tl.int64) - q_positions.to(tl.int64)
        visible = visible & (q_segments == kv_segments) & (difference >= LOWEST) & (difference <= HIGHEST)
    if MASK >= 0:
        pointers = score_pointers(mask, first_row, rows, first_column, columns, kv_length, MASK)
        visible = visible & (tl.load(pointers, mask=column_inside & row_inside, other=0) != 0)
    return visible


@triton.jit
def capped_logits(
    scores, first_row, rows, first_column, columns, q_length, kv_length, bias, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Logits of scores QK^T, and the derivative of the soft cap (``SOFT_CAP`` 0 is none); float32."""
    logits = scores * SCALE
    if BIAS >= 0:
        inside = (columns < kv_length) & (rows < q_length)
        pointers = score_pointers(bias, first_row, rows, first_column, columns, kv_length, BIAS)
        added = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        logits += added
    slope = logits
    if SOFT_CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which neither overflows nor needs a library.
        ratio = 1.0 - 2.0 / (tl.exp2(logits * (2.0 / SOFT_CAP * LOG2E)) + 1.0)
        logits = SOFT_CAP * ratio
        slope = 1.0 - ratio * ratio
        # Without a cap the sum is as low as such a bias: it has no probability beside any other key, and a row that has
        # nothing else is found at its end.
        if BIAS >= 0:
            logits = tl.where(added <= HIDING_BIAS, float("-inf"), logits)
    return logits, slope


@triton.jit
def dropout_keep_mask(dropout_key, rows, columns, THRESHOLD: tl.constexpr):
    """Mask of the probabilities that the dropout keeps: ``kernels.numerics.dropout`` with a head's key of two words.

    Philox-2x32 with 10 rounds, whose counter are the numbers of the row and of the column; bit 3 of the row selects a
    word of the result, bit 3 of the column its half. Each element computes its own call.
    """
    key, second = tl.load(dropout_key), tl.load(dropout_key + 1)
    rows, columns = rows.to(tl.uint32), columns.to(tl.uint32)
    # Positions without bit 3: {row, row + 8} × {column, column + 8} share a call. The first multiplication is one of
    # the rows alone; what follows broadcasts to the tile.
    left = (rows >> 4 << 3) | (rows & 7)
    right = ((columns >> 4 << 3) | (columns & 7)) ^ second
    for _ in tl.static_range(10):
        left, right = tl.umulhi(left, PHILOX_MULTIPLIER) ^ key ^ right, left * PHILOX_MULTIPLIER
        key += 0x9E3779B9
    word = tl.where((rows & 8) == 0, left, right)
    return ((word >> ((columns & 8) << 1)) & 0xFFFF) >= THRESHOLD
