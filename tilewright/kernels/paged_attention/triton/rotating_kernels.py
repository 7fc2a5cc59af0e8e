"""Rotates queries and keys and writes into pages in Triton: a program has one token's keys, values, or some queries."""

import triton
import triton.language as tl

ROUNDING = tl.constexpr(12582912.0)
"""1.5 · 2²³: between it and its double float32 has no fractions, so that adding it rounds to nearest even."""


@triton.jit
def _stored(x, dtype: tl.constexpr, limit: tl.constexpr):
    """Float32 as a cache stores it; with a ``limit`` it saturates, and integers are rounded."""
    if limit > 0:
        # NaN stays NaN.
        x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    if dtype == tl.int8:
        x = (x + ROUNDING) - ROUNDING
    return x.to(dtype)


@triton.jit
def _move(
    source, target, scale, factor, cos, sin, token, slot, head, valid,
    heads: tl.constexpr, dim: tl.constexpr, rotated: tl.constexpr, interleaved: tl.constexpr, block_h: tl.constexpr,
    block_p: tl.constexpr, block_r: tl.constexpr, limit: tl.constexpr, greatest: tl.constexpr,
    computes_scale: tl.constexpr, has_factor: tl.constexpr, scale_heads: tl.constexpr,
):  # fmt: skip
    """Moves some heads of a token, the first ``rotated`` elements of each turned, divided by their scale if any.

    Args:
      source: [tokens, heads, dim].
      target: [slots, heads, dim].
      scale: [slots, scale_heads], written where ``computes_scale``.
      factor: [tokens, scale_heads], what elements are divided by where ``has_factor``.
      cos, sin: [tokens, rotated / 2], with the factor of the rotation.
      head, valid: [block_h].
      block_p, block_r: powers of two that are at least the pairs, and at least the elements that are not rotated.
      greatest: the number that the greatest element of a token is stored as, where ``computes_scale``.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    stored: tl.constexpr = target.dtype.element_ty
    half: tl.constexpr = rotated // 2
    read = source + (token * heads + head)[:, None] * dim
    write = target + (slot * heads + head)[:, None] * dim
    largest = tl.zeros([block_h], tl.float32)
    p, r, pairs = tl.arange(0, block_p), tl.arange(0, block_r), tl.arange(0, 2 * block_p)
    mask_p = valid[:, None] & (p < half)[None, :]
    mask_r = valid[:, None] & (r < dim - rotated)[None, :]
    mask_pairs = valid[:, None] & (pairs < rotated)[None, :]
    if rotated > 0:
        c = tl.load(cos + token * half + p, mask=p < half, other=0.0)[None, :]
        s = tl.load(sin + token * half + p, mask=p < half, other=0.0)[None, :]
        if interleaved:
            both = tl.load(read + pairs[None, :], mask=mask_pairs, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(both, [block_h, block_p, 2]))
        else:
            first = tl.load(read + p[None, :], mask=mask_p, other=0.0).to(tl.float32)
            second = tl.load(read + half + p[None, :], mask=mask_p, other=0.0).to(tl.float32)
        # Rounded as a rotation of its own rounds.
        turned = (first * c - second * s).to(dtype).to(tl.float32)
        second = (second * c + first * s).to(dtype).to(tl.float32)
        first = turned
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    if dim > rotated:
        rest = tl.load(read + rotated + r[None, :], mask=mask_r, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))

    if computes_scale:
        if scale_heads == 1:
            largest = tl.zeros([block_h], tl.float32) + tl.max(largest, 0)
        unit = tl.where(largest == 0.0, 1.0, tl.div_rn(largest, tl.full([block_h], greatest, tl.float32)))
        if scale_heads == 1:
            tl.store(scale + slot + head, unit, mask=head == 0)
        else:
            tl.store(scale + slot * heads + head, unit, mask=valid)
    elif has_factor:
        unit = tl.load(factor + token * scale_heads + (head if scale_heads > 1 else head * 0), mask=valid, other=1.0)
    if rotated > 0:
        if computes_scale or has_factor:
            units = tl.broadcast_to(unit[:, None], [block_h, block_p])
            first, second = tl.div_rn(first, units), tl.div_rn(second, units)
        if interleaved:
            both = tl.reshape(tl.join(first, second), [block_h, 2 * block_p])
            tl.store(write + pairs[None, :], _stored(both, stored, limit), mask=mask_pairs)
        else:
            tl.store(write + p[None, :], _stored(first, stored, limit), mask=mask_p)
            tl.store(write + half + p[None, :], _stored(second, stored, limit), mask=mask_p)
    if dim > rotated:
        if computes_scale or has_factor:
            rest = tl.div_rn(rest, tl.broadcast_to(unit[:, None], [block_h, block_r]))
        tl.store(write + rotated + r[None, :], _stored(rest, stored, limit), mask=mask_r)


@triton.jit
def rotate_and_write(
    query, key, value, cos, sin, page, page_row, key_factor, value_factor, key_pages, value_pages, key_scale,
    value_scale, num_pages, out,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    page_size: tl.constexpr, rotated: tl.constexpr, interleaved: tl.constexpr, query_parts: tl.constexpr,
    block_h: tl.constexpr, block_kv: tl.constexpr, block_p: tl.constexpr, block_r: tl.constexpr, block_v: tl.constexpr,
    limit: tl.constexpr, greatest: tl.constexpr,
    computes_key_scale: tl.constexpr, has_key_factor: tl.constexpr, key_scale_heads: tl.constexpr,
    computes_value_scale: tl.constexpr, has_value_factor: tl.constexpr, value_scale_heads: tl.constexpr,
):  # fmt: skip
    """Rotates some query heads of a token into ``out``, or its keys into their page, or stores its values.

    Args:
      query, key, value: [tokens, heads or kv_heads, head_dim or value_dim].
      page, page_row: [tokens]; nothing is written to a page from ``num_pages`` on.
      key_pages, value_pages: [num_pages, page_size, kv_heads, ...], updated in place.
      key_scale, value_scale: [num_pages, page_size, ...], likewise where they are computed.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < query_parts:
        head = part * block_h + tl.arange(0, block_h)
        _move(
            query, out, key_scale, key_factor, cos, sin, token, token, head, head < heads,
            heads, head_dim, rotated, interleaved, block_h, block_p, block_r, 0.0, greatest, False, False, 1,
        )  # fmt: skip
    else:
        number = tl.load(page + token).to(tl.int64)
        if number < num_pages:
            slot = number * page_size + tl.load(page_row + token)
            head = tl.arange(0, block_kv)
            if part == query_parts:
                _move(
                    key, key_pages, key_scale, key_factor, cos, sin, token, slot, head, head < kv_heads,
                    kv_heads, head_dim, rotated, interleaved, block_kv, block_p, block_r, limit, greatest,
                    computes_key_scale, has_key_factor, key_scale_heads,
                )  # fmt: skip
            else:
                _move(
                    value, value_pages, value_scale, value_factor, cos, sin, token, slot, head, head < kv_heads,
                    kv_heads, value_dim, 0, False, block_kv, 1, block_v, limit, greatest,
                    computes_value_scale, has_value_factor, value_scale_heads,
                )  # fmt: skip
