"""Attention over a cache in Triton: each program has a query tile, a key head and a part of the keys.

Keys are read by pages through pointers, into an online softmax; the parts of one row are combined by a second kernel
(Flash-Decoding, Dao et al., 2023). Stored elements are widened where they are loaded; their scales multiply logits and
weights, which are float32.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 29)  # that of inputs.py


@triton.jit
def _widened(stored, dtype: tl.constexpr):
    """Stored elements in the query's dtype, in which all of theirs are exact."""
    if stored.dtype.is_fp8() and dtype == tl.bfloat16:
        return stored.to(tl.float32).to(dtype)
    return stored.to(dtype)


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
):
    """One query tile's heads of one key head against one of ``splits`` parts of its keys.

    ``tile_dim`` elements of keys are in the first product, the rest (``block_r`` > 0) in a second; where ``latent``,
    the first are the value. ``out`` and ``lse`` are the results, or with several splits [tokens, heads, splits, ...] of
    partial ones, whose ``lse`` is of base 2.
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
    d = tl.arange(0, block_d)
    q = tl.load(
        query + place[:, None] * head_dim + d[None, :], mask=there_m[:, None] & (d < tile_dim)[None, :], other=0.0
    )
    if block_r > 0:
        r = tl.arange(0, block_r)
        there_r = r < head_dim - tile_dim
        q_rest = tl.load(
            query + place[:, None] * head_dim + tile_dim + r[None, :],
            mask=there_m[:, None] & there_r[None, :],
            other=0.0,
        )
    if has_slopes:
        slope = tl.load(slopes + head, mask=there_m, other=0.0).to(tl.float32)
    position_m = first + row

    # A scale that is the same for all of a head's tokens needs no vector of them: those of values wait until the end.
    one_key_scale: tl.constexpr = key_scale_page == 0 and key_scale_row == 0
    one_value_scale: tl.constexpr = one_key_scale if latent else value_scale_page == 0 and value_scale_row == 0
    if has_key_scale and one_key_scale:
        all_keys = tl.load(key_scale + kv_head * key_scale_head)
    if latent:
        if has_key_scale and one_key_scale:
            all_values = all_keys
    elif has_value_scale and one_value_scale:
        all_values = tl.load(value_scale + kv_head * value_scale_head)

    greatest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    weighted = tl.zeros([block_m, block_v], tl.float32)
    v = tl.arange(0, block_v)
    n = tl.arange(0, block_n)
    key_row: tl.constexpr = kv_heads * head_dim
    value_row: tl.constexpr = kv_heads * value_dim

    for at in tl.range(start, end, block_n, num_stages=stages):
        position = at + n
        there = (position >= low) & (position < end)
        if not paged:
            number = sequence.to(tl.int64)
            row_n = position
        elif page_size % block_n == 0:
            # A block lies in one page: one number, and rows side by side.
            number = tl.load(table + sequence.to(tl.int64) * columns + at // page_size).to(tl.int64)
            real = (number >= 0) & (number < num_pages)
            there = (position >= low) & (position < tl.where(real, end, 0))
            number = tl.where(real, number, 0)
            row_n = at % page_size + n
        else:
            number = tl.load(table + sequence.to(tl.int64) * columns + position // page_size, mask=there, other=-1).to(
                tl.int64
            )
            there = there & (number >= 0) & (number < num_pages)
            number = tl.where(there, number, 0)
            row_n = position % page_size
        base = (number * page_size + row_n).to(tl.int64)
        k = tl.load(
            key + (base * key_row + kv_head * head_dim)[None, :] + d[:, None],
            mask=there[None, :] & (d < tile_dim)[:, None],
            other=0.0,
        )
        k = _widened(k, query.dtype.element_ty)
        logits = tl.dot(q, k, input_precision="ieee" if exact else "tf32")
        if block_r > 0:
            k_rest = tl.load(
                key + (base * key_row + kv_head * head_dim + tile_dim)[None, :] + r[:, None],
                mask=there[None, :] & there_r[:, None],
                other=0.0,
            )
            k_rest = _widened(k_rest, query.dtype.element_ty)
            logits = tl.dot(q_rest, k_rest, logits, input_precision="ieee" if exact else "tf32")
        if has_key_scale:
            if one_key_scale:
                logits = logits * all_keys
            else:
                k_scale = _scale(
                    key_scale, number, row_n, kv_head, there, key_scale_page, key_scale_row, key_scale_head
                )
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

        now = tl.maximum(greatest, tl.max(logits, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(greatest - shift)
        total = total * shrink + tl.sum(weights, 1)
        greatest = now
        if latent:
            values = tl.trans(k)
            if has_key_scale and not one_key_scale:
                weights = weights * k_scale[None, :]
        else:
            values = tl.load(
                value + (base * value_row + kv_head * value_dim)[:, None] + v[None, :],
                mask=there[:, None] & (v < value_dim)[None, :],
                other=0.0,
            )
            values = _widened(values, query.dtype.element_ty)
            if has_value_scale and not one_value_scale:
                v_scale = _scale(
                    value_scale, number, row_n, kv_head, there, value_scale_page, value_scale_row, value_scale_head
                )
                weights = weights * v_scale[None, :]
        weighted = tl.dot(
            weights.to(values.dtype),
            values,
            weighted * shrink[:, None],
            input_precision="ieee" if exact else "tf32",
        )

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
        out + out_place[:, None] * value_dim + v[None, :],
        result.to(out.dtype.element_ty),
        mask=there_m[:, None] & (v < value_dim)[None, :],
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
