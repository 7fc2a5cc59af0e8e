"""Attention over a cache in Triton: each program has a query tile, a key head and a part of the keys.

Keys are read by pages through pointers, into an online softmax; the parts of one row are combined by a second kernel
(Flash-Decoding, Dao et al., 2023). Stored elements are widened where they are loaded; their scales multiply logits and
weights, which are float32. Elements of one byte are widened to float16, in which int8 and both kinds of float8 are
exact, two at a time, and their products are computed in it, whatever the dtype of a 16-bit query.
"""

import functools

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 29)  # that of inputs.py

# Two neighbours in one byte each are loaded as 16 bits, of which a register has two, from two rows. These make a pair
# of float16, one of each row, of all first or all second neighbours: what a product on tensor cores takes.
_INT8 = """{
    .reg .b32 bytes, offset;
    xor.b32 bytes, $1, 0x80808080;
    prmt.b32 bytes, bytes, 0x64646464, %s;
    mov.b32 offset, 0x64806480;
    sub.f16x2 $0, bytes, offset;
}"""
_E4M3 = """{
    .reg .b32 bytes;
    .reg .b16 pair, other;
    prmt.b32 bytes, $1, 0, %s;
    mov.b32 {pair, other}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, pair;
}"""
INT8_FIRST, INT8_SECOND = tl.constexpr(_INT8 % "0x4240"), tl.constexpr(_INT8 % "0x4341")
E4M3_FIRST, E4M3_SECOND = tl.constexpr(_E4M3 % "0x0020"), tl.constexpr(_E4M3 % "0x0031")
E5M2_FIRST, E5M2_SECOND = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;"), tl.constexpr("prmt.b32 $0, $1, 0, 0x3414;")


def _neighbour(dtype: type, which: int, pairs: np.ndarray) -> np.ndarray:
    return pairs.view(dtype).reshape(*pairs.shape, 2)[..., which].astype(np.float16)


MEANINGS = {
    assembly.value: functools.partial(_neighbour, dtype, which)
    for dtype, both in (
        (np.int8, (INT8_FIRST, INT8_SECOND)),
        (ml_dtypes.float8_e4m3fn, (E4M3_FIRST, E4M3_SECOND)),
        (ml_dtypes.float8_e5m2, (E5M2_FIRST, E5M2_SECOND)),
    )
    for which, assembly in enumerate(both)
}
"""What the interpreter computes in the place of assembly."""

LIFT = tl.constexpr(15.0)
"""Weights in float16 are at most 2 to this power, not 1: it has few exponents below 1. A product sums in float32."""


@triton.jit
def _widened(stored, dtype: tl.constexpr):
    """Stored elements in the query's dtype, in which all of theirs are exact."""
    if stored.dtype.is_fp8() and dtype == tl.bfloat16:
        return stored.to(tl.float32).to(dtype)
    return stored.to(dtype)


@triton.jit
def _of_pairs(pairs, assembly: tl.constexpr):
    return tl.inline_asm_elementwise(assembly, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _neighbours(pairs, dtype: tl.constexpr):
    """The first and the second of each two neighbours of one-byte elements, in float16."""
    if dtype == tl.int8:
        both = _of_pairs(pairs, INT8_FIRST), _of_pairs(pairs, INT8_SECOND)
    elif dtype == tl.float8e4nv:
        both = _of_pairs(pairs, E4M3_FIRST), _of_pairs(pairs, E4M3_SECOND)
    else:
        both = _of_pairs(pairs, E5M2_FIRST), _of_pairs(pairs, E5M2_SECOND)
    return both


@triton.jit
def _rows_of(query, place, there, first, size, block: tl.constexpr, step: tl.constexpr, row: tl.constexpr):
    """Every ``step``-th element of rows from ``first`` on, of ``size`` from there."""
    d = tl.arange(0, block // step) * step
    return tl.load(
        query + place[:, None] * row + first + d[None, :], mask=there[:, None] & (d < size)[None, :], other=0.0
    )


@triton.jit
def _numbers(row, first, end, page_size: tl.constexpr, block_n: tl.constexpr, pages: tl.constexpr):
    """The numbers of pages of ``block_n`` positions from ``first`` on: one of each page, or if ``pages`` is 0 of each
    position; −1 from position ``end`` on."""
    if pages > 0:
        position = first + tl.arange(0, pages) * page_size
    else:
        position = first + tl.arange(0, block_n)
    return tl.load(row + position // page_size, mask=position < end, other=-1)


@triton.jit
def _scale(
    scale, number, row, head, there, page_stride: tl.constexpr, row_stride: tl.constexpr, head_stride: tl.constexpr
):
    return tl.load(scale + number * page_stride + row * row_stride + head * head_stride, mask=there, other=0.0)


@triton.jit
def attend(
    query,
    key,
    value,
    table,
    lengths,
    starts,
    tiles,
    key_scale,
    value_scale,
    slopes,
    sinks,
    num_pages,
    num_tiles,
    out,
    lse,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    page_size: tl.constexpr,
    columns: tl.constexpr,
    capacity: tl.constexpr,
    q_length: tl.constexpr,
    tiles_per_sequence: tl.constexpr,
    paged: tl.constexpr,
    packed: tl.constexpr,
    latent: tl.constexpr,
    has_starts: tl.constexpr,
    has_key_scale: tl.constexpr,
    has_value_scale: tl.constexpr,
    key_scale_page: tl.constexpr,
    key_scale_row: tl.constexpr,
    key_scale_head: tl.constexpr,
    value_scale_page: tl.constexpr,
    value_scale_row: tl.constexpr,
    value_scale_head: tl.constexpr,
    has_slopes: tl.constexpr,
    num_sinks: tl.constexpr,
    block_sinks: tl.constexpr,
    softmax_scale: tl.constexpr,
    soft_cap: tl.constexpr,
    has_soft_cap: tl.constexpr,
    left: tl.constexpr,
    has_left: tl.constexpr,
    right: tl.constexpr,
    has_right: tl.constexpr,
    splits: tl.constexpr,
    block_q: tl.constexpr,
    block_g: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    block_r: tl.constexpr,
    block_v: tl.constexpr,
    tile_dim: tl.constexpr,
    exact: tl.constexpr,
    stages: tl.constexpr,
    half: tl.constexpr,
):
    """One query tile's heads of one key head against one of ``splits`` parts of its keys.

    ``tile_dim`` elements of keys are in the first product, the rest (``block_r`` > 0) in a second; where ``latent``,
    the first are the value. ``out`` and ``lse`` are the results, or with several splits [tokens, heads, splits, ...] of
    partial ones, whose ``lse`` is of base 2. ``half``: stored elements have one byte, are read two neighbours at a
    time, and multiplied in float16.
    """
    groups: tl.constexpr = heads // kv_heads
    group_blocks: tl.constexpr = (groups + block_g - 1) // block_g
    # Heads first: those of one token lie side by side in memory, and are read at about the same time.
    program = tl.program_id(0)
    kv_head = program % (kv_heads * group_blocks) // group_blocks
    group_block = program % group_blocks
    tile = program // (kv_heads * group_blocks) % num_tiles
    split = program // (kv_heads * group_blocks) // num_tiles

    if packed:
        sequence = tl.load(tiles + tile)
        token = tl.load(tiles + num_tiles + tile)
        rows = tl.load(tiles + 2 * num_tiles + tile)
        first = tl.load(tiles + 3 * num_tiles + tile)
        length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), FAR)
    else:
        sequence = tile // tiles_per_sequence
        offset = tile % tiles_per_sequence * block_q
        token = sequence * q_length + offset
        rows = tl.minimum(q_length - offset, block_q)
        length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), FAR)
        first = length - q_length + offset
    if rows <= 0:
        return

    # The positions that any row sees, cut into blocks, of which each split takes as many.
    low = 0
    if has_starts:
        low = tl.minimum(tl.maximum(tl.load(starts + sequence), 0), FAR)
    if has_left:
        low = tl.maximum(low, first - left)
    high = tl.minimum(length, capacity)
    if has_right:
        high = tl.minimum(high, first + rows + right)
    begin = low // block_n
    blocks = tl.maximum((high + block_n - 1) // block_n - begin, 0)
    per_split = (blocks + splits - 1) // splits
    start = (begin + split * per_split) * block_n
    end = tl.minimum(start + per_split * block_n, high)

    m = tl.arange(0, block_m)
    row, group = m // block_g, group_block * block_g + m % block_g
    there_m = (row < rows) & (group < groups)
    head = kv_head * groups + group
    place = (token + row).to(tl.int64) * heads + head
    pairs: tl.constexpr = 2 if half else 1
    nothing: tl.constexpr = 0 if half else 0.0
    stored: tl.constexpr = key.dtype.element_ty
    if half:
        key = key.to(tl.pointer_type(tl.int16), bitcast=True)
        value = value.to(tl.pointer_type(tl.int16), bitcast=True)
    d, v = tl.arange(0, block_d // pairs), tl.arange(0, block_v // pairs)
    q = _rows_of(query, place, there_m, 0, tile_dim, block_d, pairs, head_dim)
    if half:
        q_second = _rows_of(query + 1, place, there_m, 0, tile_dim, block_d, pairs, head_dim)
    if block_r > 0:
        r = tl.arange(0, block_r // pairs)
        there_r = r < (head_dim - tile_dim) // pairs
        q_rest = _rows_of(query, place, there_m, tile_dim, head_dim - tile_dim, block_r, pairs, head_dim)
        if half:
            q_rest_second = _rows_of(query + 1, place, there_m, tile_dim, head_dim - tile_dim, block_r, pairs, head_dim)
    scaled_rows: tl.constexpr = half and query.dtype.element_ty != tl.float16
    if scaled_rows:
        # Float16 has few exponents: each row is divided by a power of two of its magnitude.
        size_m = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(q_second.to(tl.float32)), 1))
        if block_r > 0:
            size_m = tl.maximum(size_m, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
            size_m = tl.maximum(size_m, tl.max(tl.abs(q_rest_second.to(tl.float32)), 1))
        unit_m = tl.exp2(tl.floor(tl.log2(tl.maximum(size_m, 2.0**-100))))
        inverse_m = (1.0 / unit_m)[:, None]
        q = (q.to(tl.float32) * inverse_m).to(tl.float16)
        q_second = (q_second.to(tl.float32) * inverse_m).to(tl.float16)
        if block_r > 0:
            q_rest = (q_rest.to(tl.float32) * inverse_m).to(tl.float16)
            q_rest_second = (q_rest_second.to(tl.float32) * inverse_m).to(tl.float16)
    if has_slopes:
        slope = tl.load(slopes + head, mask=there_m, other=0.0).to(tl.float32)
    position_m = first + row

    # A scale that is the same for all of a head's tokens needs no vector of them: those of values wait until the end.
    one_key_scale: tl.constexpr = key_scale_page == 0 and key_scale_row == 0
    one_value_scale: tl.constexpr = one_key_scale if latent else value_scale_page == 0 and value_scale_row == 0
    if has_key_scale and one_key_scale:
        all_keys = tl.load(key_scale + kv_head * key_scale_head)
    scaled_values: tl.constexpr = (has_key_scale if latent else has_value_scale) and not one_value_scale
    if latent:
        if has_key_scale and one_key_scale:
            all_values = all_keys
    elif has_value_scale and one_value_scale:
        all_values = tl.load(value_scale + kv_head * value_scale_head)

    greatest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    weighted = tl.zeros([block_m, block_v // pairs], tl.float32)
    if half:
        weighted_second = tl.zeros([block_m, block_v // pairs], tl.float32)
    if scaled_values and half:
        value_unit = 0.0
    n = tl.arange(0, block_n)
    key_head: tl.constexpr = head_dim // pairs
    value_head: tl.constexpr = value_dim // pairs
    key_row: tl.constexpr = kv_heads * key_head
    value_row: tl.constexpr = kv_heads * value_head
    # Where a block has several pages, their numbers are loaded one block ahead: what is loaded by them need not wait.
    several: tl.constexpr = paged and page_size % block_n > 0
    pages: tl.constexpr = block_n // page_size if block_n % page_size == 0 else 0
    table_row = table + sequence.to(tl.int64) * columns
    if several:
        ahead = _numbers(table_row, start, end, page_size, block_n, pages)

    for at in tl.range(start, end, block_n, num_stages=stages):
        position = at + n
        there = (position >= low) & (position < end)
        if not paged:
            number = sequence.to(tl.int64)
            row_n = position
        elif several:
            number = ahead
            ahead = _numbers(table_row, at + block_n, end, page_size, block_n, pages)
            if pages > 0:
                number = tl.reshape(tl.broadcast_to(number[:, None], [pages, page_size]), [block_n])
            there = there & (number >= 0) & (number < num_pages)
            number = tl.where(there, number, 0).to(tl.int64)
            row_n = position % page_size
        else:
            # A block lies in one page: one number, and rows side by side.
            number = tl.load(table_row + at // page_size).to(tl.int64)
            real = (number >= 0) & (number < num_pages)
            there = (position >= low) & (position < tl.where(real, end, 0))
            number = tl.where(real, number, 0)
            row_n = at % page_size + n
        base = (number * page_size + row_n).to(tl.int64)
        # Before what they are multiplied with is waited for: they are not brought to shared memory ahead of time.
        if has_key_scale and not one_key_scale:
            k_scale = _scale(key_scale, number, row_n, kv_head, there, key_scale_page, key_scale_row, key_scale_head)
        if scaled_values:
            if latent:
                v_scale = k_scale
            else:
                v_scale = _scale(
                    value_scale, number, row_n, kv_head, there, value_scale_page, value_scale_row, value_scale_head
                )
        k = tl.load(
            key + (base * key_row + kv_head * key_head)[None, :] + d[:, None],
            mask=there[None, :] & (d < tile_dim // pairs)[:, None],
            other=nothing,
        )
        if half:
            k_first, k_second = _neighbours(k, stored)
            logits = tl.dot(q_second, k_second, tl.dot(q, k_first))
        else:
            k = _widened(k, query.dtype.element_ty)
            logits = tl.dot(q, k, input_precision="ieee" if exact else "tf32")
        if block_r > 0:
            k_rest = tl.load(
                key + (base * key_row + kv_head * key_head + tile_dim // pairs)[None, :] + r[:, None],
                mask=there[None, :] & there_r[:, None],
                other=nothing,
            )
            if half:
                rest_first, rest_second = _neighbours(k_rest, stored)
                logits = tl.dot(q_rest_second, rest_second, tl.dot(q_rest, rest_first, logits))
            else:
                k_rest = _widened(k_rest, query.dtype.element_ty)
                logits = tl.dot(q_rest, k_rest, logits, input_precision="ieee" if exact else "tf32")
        if scaled_rows:
            logits = logits * unit_m[:, None]
        if has_key_scale:
            if one_key_scale:
                logits = logits * all_keys
            else:
                logits = logits * k_scale[None, :]
        seen = there[None, :]
        distance = position[None, :] - position_m[:, None]
        if has_slopes or has_soft_cap:
            logits = logits * softmax_scale
            if has_slopes:
                logits = logits + slope[:, None] * distance.to(tl.float32)
            if has_soft_cap:
                # tanh by exp2 of what is not positive, which cannot overflow.
                size = tl.abs(logits)
                small = tl.exp2(size * (-2.0 * LOG2E / soft_cap))
                size = soft_cap * (1.0 - small) / (1.0 + small)
                logits = tl.where(logits < 0, -size, size)
            logits = logits * LOG2E
        else:
            logits = logits * (softmax_scale * LOG2E)
        if has_left:
            seen = seen & (distance >= -left)
        if has_right:
            seen = seen & (distance <= right)
        logits = tl.where(seen, logits, float("-inf"))

        now = tl.maximum(greatest, tl.max(logits, 1) - (LIFT if half else 0.0))
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(greatest - shift)
        total = total * shrink + tl.sum(weights, 1)
        greatest = now
        if scaled_values:
            if half:
                # Sums are in units of the greatest scale so far, so that weights times scales fit float16 as well.
                unit = tl.maximum(value_unit, tl.max(tl.abs(v_scale), 0))
                per_unit = 1.0 / tl.where(unit == 0.0, 1.0, unit)
                v_scale = v_scale * per_unit
                shrink = shrink * (value_unit * per_unit)
                value_unit = unit
            weights = weights * v_scale[None, :]
        if not latent:
            values = tl.load(
                value + (base * value_row + kv_head * value_head)[:, None] + v[None, :],
                mask=there[:, None] & (v < value_head)[None, :],
                other=nothing,
            )
        if half:
            weights = weights.to(tl.float16)
            if latent:
                values_first, values_second = tl.trans(k_first), tl.trans(k_second)
            else:
                values_first, values_second = _neighbours(values, stored)
            weighted = tl.dot(weights, values_first, weighted * shrink[:, None])
            weighted_second = tl.dot(weights, values_second, weighted_second * shrink[:, None])
        else:
            if latent:
                values = tl.trans(k)
            else:
                values = _widened(values, query.dtype.element_ty)
            weighted = tl.dot(
                weights.to(values.dtype),
                values,
                weighted * shrink[:, None],
                input_precision="ieee" if exact else "tf32",
            )

    if half:
        weighted = tl.reshape(tl.join(weighted, weighted_second), [block_m, block_v])
    every_v = tl.arange(0, block_v)
    if scaled_values and half:
        weighted = weighted * value_unit
    if (has_key_scale if latent else has_value_scale) and one_value_scale:
        weighted = weighted * all_values

    if splits == 1:
        if num_sinks > 0:
            s = tl.arange(0, block_sinks)
            sink = tl.load(
                sinks + head[:, None] * num_sinks + s[None, :],
                mask=there_m[:, None] & (s < num_sinks)[None, :],
                other=float("-inf"),
            ).to(tl.float32)
            sink = sink * LOG2E
            now = tl.maximum(greatest, tl.max(sink, 1))
            shift = tl.where(now == float("-inf"), 0.0, now)
            shrink = tl.exp2(greatest - shift)
            total = total * shrink + tl.sum(tl.exp2(sink - shift[:, None]), 1)
            weighted = weighted * shrink[:, None]
            greatest = now
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        sum_of_exp = tl.where(total == 0.0, float("-inf"), (greatest + tl.log2(total)) * LN2)
        out_place = place
    else:
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        sum_of_exp = tl.where(total == 0.0, float("-inf"), greatest + tl.log2(total))
        out_place = place * splits + split
    tl.store(
        out + out_place[:, None] * value_dim + every_v[None, :],
        result.to(out.dtype.element_ty),
        mask=there_m[:, None] & (every_v < value_dim)[None, :],
    )
    tl.store(lse + out_place, sum_of_exp, mask=there_m)


@triton.jit
def combine(
    parts,
    part_lse,
    sinks,
    out,
    lse,
    heads: tl.constexpr,
    value_dim: tl.constexpr,
    num_sinks: tl.constexpr,
    block_sinks: tl.constexpr,
    splits: tl.constexpr,
    block_s: tl.constexpr,
    block_v: tl.constexpr,
):
    """One row of one head from its parts and its sinks; a part that saw nothing has the log-sum-exp −inf."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * heads + head
    s, v = tl.arange(0, block_s), tl.arange(0, block_v)
    part = tl.load(part_lse + place * splits + s, mask=s < splits, other=float("-inf"))
    greatest = tl.max(part, 0)
    if num_sinks > 0:
        i = tl.arange(0, block_sinks)
        sink = tl.load(sinks + head * num_sinks + i, mask=i < num_sinks, other=float("-inf")).to(tl.float32) * LOG2E
        greatest = tl.maximum(greatest, tl.max(sink, 0))
    shift = tl.where(greatest == float("-inf"), 0.0, greatest)
    weights = tl.exp2(part - shift)
    total = tl.sum(weights, 0)
    if num_sinks > 0:
        total = total + tl.sum(tl.exp2(sink - shift), 0)
    values = tl.load(
        parts + (place * splits + s)[:, None] * value_dim + v[None, :],
        mask=(weights > 0.0)[:, None] & (v < value_dim)[None, :],
        other=0.0,
    )
    result = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * value_dim + v, result.to(out.dtype.element_ty), mask=v < value_dim)
    tl.store(lse + place, tl.where(total == 0.0, float("-inf"), (shift + tl.log2(total)) * LN2))
