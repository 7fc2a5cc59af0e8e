"""What the Triton kernels of attention do with scores: tiles that are left out, logits, masks, dropout.

Rows are queries and columns keys throughout. ``rows`` and ``columns`` are indices that broadcast against each other, so
that the same functions serve tiles of scores and transposed ones. A shape's bits say which of batch, heads, queries and
keys (8, 4, 2, 1) an array has in full; of the others it has one. -1 is no array.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

RANGE: tl.constexpr = tl.constexpr(64)
"""Queries or keys that an entry of the ranges speaks of; ``RANGE_TILE`` in ``mask_terms``."""


@triton.jit
def program_place(tiles, AT_ONCE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The tile and the head that a program works on: the same tile of ``AT_ONCE`` heads, then the next."""
    program = tl.program_id(0)
    group = program // (tiles * AT_ONCE)
    rest = program % (tiles * AT_ONCE)
    tile = rest // AT_ONCE
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, group * AT_ONCE + rest % AT_ONCE


@triton.jit
def tile_offsets(head, start, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of a tile of a head's rows are in ``[length, HEADS, WIDTH]``."""
    within = tl.arange(0, BLOCK)[:, None] * (HEADS * WIDTH) + tl.arange(0, DIM)[None, :]
    return (start * HEADS + head) * WIDTH + within


@triton.jit
def inside_of(start, length, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a tile there are."""
    inside = (start + tl.arange(0, BLOCK) < length)[:, None]
    if DIM != WIDTH:
        inside = inside & (tl.arange(0, DIM) < WIDTH)[None, :]
    return inside


@triton.jit
def described(
    tensor, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """What ``load_tile`` and ``add_tile`` take for ``[length, HEADS, WIDTH]``: a descriptor for TMA, or the pointer."""
    source = tensor
    if TMA:
        # The head leads, so that what is loaded is a matrix for Triton without a change of layout.
        source = tl.make_tensor_descriptor(tensor, [HEADS, length, WIDTH], [WIDTH, HEADS * WIDTH, 1], [1, BLOCK, DIM])
    return source


@triton.jit
def load_tile(
    source, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    CHECKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A head's rows from ``start`` on, with zeros beyond the length (if ``CHECKED``, by TMA always) and the width."""
    if TMA:
        loaded = source.load([head, start, 0]).reshape(BLOCK, DIM)
    else:
        tile = source + tile_offsets(head, start, HEADS, BLOCK, DIM, WIDTH)
        if CHECKED:
            loaded = tl.load(tile, mask=inside_of(start, length, BLOCK, DIM, WIDTH), other=0.0)
        elif DIM != WIDTH:
            loaded = tl.load(tile, mask=(tl.arange(0, DIM) < WIDTH)[None, :], other=0.0)
        else:
            loaded = tl.load(tile)
    return loaded


@triton.jit
def load_only_tile(
    tensor, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The tile of a head's rows that a program loads once; by TMA, as where elements are would stay in registers."""
    source = described(tensor, length, HEADS, BLOCK, DIM, WIDTH, TMA)
    return load_tile(source, head, start, length, HEADS, BLOCK, DIM, WIDTH, True, TMA)


@triton.jit
def store_tile(
    tensor, values, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    rounded = values.to(tensor.dtype.element_ty)
    if TMA:
        target = described(tensor, length, HEADS, BLOCK, DIM, WIDTH, TMA)
        target.store([head, start, 0], rounded.reshape(1, BLOCK, DIM))
    else:
        tile = tensor + tile_offsets(head, start, HEADS, BLOCK, DIM, WIDTH)
        tl.store(tile, rounded, mask=inside_of(start, length, BLOCK, DIM, WIDTH))


@triton.jit
def whole_length(length):
    """Of the rows of float32 that TMA loads or adds to: whole numbers of 16 bytes."""
    return (length + 3) // 4 * 4


@triton.jit
def described_rows(tensor, count, length, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """What ``load_row`` takes for float32 ``[count, whole_length(length)]``."""
    source = tensor
    if TMA:
        source = tl.make_tensor_descriptor(tensor, [count, length], [whole_length(length), 1], [1, BLOCK])
    return source


@triton.jit
def load_row(
    source, row, start, length, BLOCK: tl.constexpr, OTHER: tl.constexpr, CHECKED: tl.constexpr, TMA: tl.constexpr
):
    """A part of a row; what is beyond its length is ``OTHER``, by TMA zeros.

    By TMA it takes one thread; otherwise every one loads each element that it needs.
    """
    if TMA:
        loaded = source.load([row, start]).reshape(BLOCK)
    else:
        places = start + tl.arange(0, BLOCK)
        pointers = source + row.to(tl.int64) * whole_length(length) + places
        if CHECKED:
            loaded = tl.load(pointers, mask=places < length, other=OTHER)
        else:
            loaded = tl.load(pointers)
    return loaded


@triton.jit
def described_sums(
    tensor, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """What ``add_to_sums`` takes for ``[HEADS, WIDTH, whole_length(length)]``."""
    target = tensor
    if TMA:
        padded = whole_length(length)
        target = tl.make_tensor_descriptor(tensor, [HEADS * WIDTH, padded], [padded, 1], [DIM, BLOCK])
    return target


@triton.jit
def add_to_sums(
    target, values, head, start, length, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds [DIM, BLOCK] from ``start`` on to what other programs add to at the same time.

    What is beyond the width and the length has to be zeros: TMA adds it to the next head.
    """
    if TMA:
        target.atomic_add([head * WIDTH, start], values)
    else:
        padded = whole_length(length)
        rows, columns = tl.arange(0, DIM)[:, None], start + tl.arange(0, BLOCK)[None, :]
        places = target + head * (WIDTH * padded) + rows * padded + columns
        tl.atomic_add(places, values, mask=(rows < WIDTH) & (columns < length), sem="relaxed")


@triton.jit
def visible_span(
    start, length, other_length, ranges, members, BLOCK: tl.constexpr, STEP: tl.constexpr, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, BANDED: tl.constexpr, RANGED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What a tile from ``start`` on sees: from where, to where, and between which two it sees all without a mask.

    These are three parts, ``[first, full_first, full_end, end]`` their bounds, in steps from the first; the last step
    may go beyond the end. ``LOWEST <= other - own <= HIGHEST`` is the band. ``ranges`` are those of so many heads,
    [members, entries, 2]; with them nothing is seen without a mask, nor, if ``WHOLE``, by a tile beyond its length.
    """
    first = start * 0
    end = first + other_length
    if BANDED:
        first = tl.maximum(start + LOWEST, 0)
        end = tl.minimum(start + BLOCK + HIGHEST, other_length)
    if RANGED:
        entries = (length + RANGE - 1) // RANGE
        least = first + other_length
        greatest = first * 0
        for member in tl.range(members):
            for i in tl.static_range((BLOCK + RANGE - 1) // RANGE):
                entry = member * entries + tl.minimum(start // RANGE + i, entries - 1)
                least = tl.minimum(least, tl.load(ranges + 2 * entry))
                greatest = tl.maximum(greatest, tl.load(ranges + 2 * entry + 1))
        first = tl.maximum(first, least)
        end = tl.minimum(end, greatest)
    first = first // STEP * STEP
    end = tl.maximum(end, first)
    full_first = first
    full_end = tl.minimum(end, other_length // STEP * STEP)
    if RANGED:
        full_end = first
    elif BANDED:
        full_first = (tl.maximum(start + BLOCK - 1 + LOWEST, 0) + STEP - 1) // STEP * STEP
        full_end = tl.minimum(full_end, tl.maximum(start + HIGHEST + 1, 0) // STEP * STEP)
        full_first = tl.minimum(tl.maximum(full_first, first), end)
    if WHOLE:
        full_end = tl.where(start + BLOCK > length, full_first, full_end)
    # In whole steps between the two ends, and after the first part.
    full_end = tl.maximum(full_end, full_first)
    return first, full_first, full_end, end


@triton.jit
def of_batch(q_rows, kv_rows, batch, q_length, kv_length, ROWS_BATCH: tl.constexpr, COLUMNS_BATCH: tl.constexpr):
    """Pointers to the segments and positions of a batch element's queries and keys."""
    wide_batch = batch.to(tl.int64)
    return q_rows + wide_batch * ROWS_BATCH * 2 * q_length, kv_rows + wide_batch * COLUMNS_BATCH * 2 * kv_length


@triton.jit
def of_head(
    bias, mask, keys, batch, head, q_length, kv_length, HEADS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    """Pointers to a head's part of the bias, of the mask and of the keys of the dropout."""
    bias_of, mask_of, keys_of = bias, mask, keys
    if BIAS >= 0:
        bias_of = head_of_scores(bias, batch, head, HEADS, q_length, kv_length, BIAS)
    if MASK >= 0:
        mask_of = head_of_scores(mask, batch, head, HEADS, q_length, kv_length, MASK)
    if THRESHOLD > 0:
        keys_of = keys + (batch * HEADS + head) * 2
    return bias_of, mask_of, keys_of


@triton.jit
def ranges_of_head(ranges, batch, head, length, HEADS: tl.constexpr, RANGES: tl.constexpr):
    """The pointer to a head's ranges, [entries, 2]."""
    pointer = ranges
    if RANGES >= 0:
        pointer = head_of_scores(ranges, batch, head, HEADS, (length + RANGE - 1) // RANGE * 2, 1, RANGES | 2)
    return pointer


@triton.jit
def head_of_scores(pointer, batch, head, heads, q_length, kv_length, SHAPE: tl.constexpr):
    """The pointer to a head's part of an array of scores."""
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
def pointers_of_scores(pointer, first_row, rows, first_column, columns, kv_length, SHAPE: tl.constexpr):
    """Pointers to a tile's scores in a head's part."""
    offsets = (rows - first_row) * 0 + (columns - first_column) * 0
    # The corner takes 64 bits, what is inside the tile does not.
    if SHAPE & 2:
        if SHAPE & 1:
            pointer += (tl.program_id(0) * 0 + first_row).to(tl.int64) * kv_length  # a loop's index may be no tensor
            offsets += (rows - first_row) * kv_length
        else:
            pointer += first_row
            offsets += rows - first_row
    if SHAPE & 1:
        pointer += first_column
        offsets += columns - first_column
    return pointer + offsets


@triton.jit
def visible(
    first_row, rows, first_column, columns, q_length, kv_length, row_terms, column_terms, mask, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Whether rows see columns.

    ``row_terms`` and ``column_terms`` are a head's segments and positions, [2, length]; ``mask`` its part of a mask.
    With less of these comparisons ptxas makes the products of the backward pass wait for each other.
    """
    here, there = rows < q_length, columns < kv_length
    seen = there & here
    if BANDED:
        difference = columns - rows
        seen = seen & (difference >= LOWEST) & (difference <= HIGHEST)
    if ROWS:
        row_segments = tl.load(row_terms + rows, mask=here, other=0)
        column_segments = tl.load(column_terms + columns, mask=there, other=0)
        row_positions = tl.load(row_terms + q_length + rows, mask=here, other=0)
        column_positions = tl.load(column_terms + kv_length + columns, mask=there, other=0)
        # What is outside of its length is at the end of the integers: the difference takes more bits.
        difference = column_positions.to(tl.int64) - row_positions.to(tl.int64)
        seen = seen & (row_segments == column_segments) & (difference >= LOWEST) & (difference <= HIGHEST)
    if MASK >= 0:
        places = pointers_of_scores(mask, first_row, rows, first_column, columns, kv_length, MASK)
        seen = seen & (tl.load(places, mask=there & here, other=0) != 0)
    return seen


@triton.jit
def capped(
    products, first_row, rows, first_column, columns, q_length, kv_length, bias, SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Logits in units of log 2, and the derivative of the cap; ``SOFT_CAP`` 0 is none."""
    logits = products * SCALE
    if BIAS >= 0:
        inside = (columns < kv_length) & (rows < q_length)
        places = pointers_of_scores(bias, first_row, rows, first_column, columns, kv_length, BIAS)
        logits += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    slope = logits
    if SOFT_CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which neither overflows nor needs a library.
        ratio = 1.0 - 2.0 / (tl.exp2(logits * (2.0 / SOFT_CAP * LOG2E)) + 1.0)
        logits = SOFT_CAP * ratio
        slope = 1.0 - ratio * ratio
    return logits * LOG2E, slope


@triton.jit
def round_of(left, right, ROTATION: tl.constexpr):
    left = left + right
    return left, left ^ ((right << ROTATION) | (right >> (32 - ROTATION)))


@triton.jit
def four_rounds(left, right, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    left, right = round_of(left, right, A)
    left, right = round_of(left, right, B)
    left, right = round_of(left, right, C)
    return round_of(left, right, D)


@triton.jit
def kept(keys, rows, columns, THRESHOLD: tl.constexpr):
    """Which probabilities the dropout keeps: see ``tilewright.kernels.dropout``; ``keys`` are a head's two words."""
    first, second = tl.load(keys), tl.load(keys + 1)
    third = first ^ second ^ 0x1BD11BDA
    left = rows.to(tl.uint32) + columns.to(tl.uint32) * 0 + first
    right = (columns.to(tl.uint32) >> 1) + rows.to(tl.uint32) * 0 + second
    left, right = four_rounds(left, right, 13, 15, 26, 6)
    left, right = left + second, right + third + 1
    left, right = four_rounds(left, right, 17, 29, 16, 24)
    left, right = left + third, right + first + 2
    left, right = four_rounds(left, right, 13, 15, 26, 6)
    left, right = left + first, right + second + 3
    left, right = four_rounds(left, right, 17, 29, 16, 24)
    left, right = left + second, right + third + 4
    left, right = four_rounds(left, right, 13, 15, 26, 6)
    left, right = left + third, right + first + 5
    return tl.where((columns & 1) == 0, left, right) >= THRESHOLD
