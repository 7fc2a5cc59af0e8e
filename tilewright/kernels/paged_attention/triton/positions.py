"""Addresses of a program of `kernels.attend`: its query tile, its keys in their pages, scales, slopes and bits."""

import triton
import triton.language as tl

FAR = tl.constexpr(1 << 29)  # that of inputs.py


@triton.jit
def query_tile(
    tiles, lengths, tile, num_tiles,
    packed: tl.constexpr, q_length: tl.constexpr, tiles_per_sequence: tl.constexpr, block_q: tl.constexpr,
):  # fmt: skip
    """Sequence, first token, number of tokens, position of the first token, and length of the keys of a tile.

    Args:
      tiles: where ``packed``, int32 [4 · num_tiles]: the first four of these.
    """
    if packed:
        sequence = tl.load(tiles + tile)
        token = tl.load(tiles + num_tiles + tile)
        # 0 where the grid has more programs than there are tiles, which only the device knows.
        rows = tl.load(tiles + 2 * num_tiles + tile)
        first = tl.load(tiles + 3 * num_tiles + tile)
        # FAR leaves room for sums of positions and windows in int32.
        length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), FAR)
    else:
        sequence = tile // tiles_per_sequence
        offset = tile % tiles_per_sequence * block_q
        token = sequence * q_length + offset
        rows = tl.minimum(q_length - offset, block_q)
        length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), FAR)
        first = length - q_length + offset
    return sequence, token, rows, first, length


@triton.jit
def kv_range(
    starts, sequence, first, rows, length, split,
    capacity: tl.constexpr, left: tl.constexpr, right: tl.constexpr,
    has_starts: tl.constexpr, has_left: tl.constexpr, has_right: tl.constexpr, splits: tl.constexpr,
    block_n: tl.constexpr,
):  # fmt: skip
    """First position that some row sees, and the positions [start, end) of a split.

    The positions that some row sees are cut into blocks, as many for each split; the first block begins at a
    multiple of ``block_n``, maybe before the first position.
    """
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
    # Rounded up: the last splits may be empty, with an end that is not behind their start.
    per_split = (blocks + splits - 1) // splits
    start = (begin + split * per_split) * block_n
    end = tl.minimum(start + per_split * block_n, high)
    return low, start, end


@triton.jit
def page_numbers(table_row, first, end, page_size: tl.constexpr, block_n: tl.constexpr, pages: tl.constexpr):
    """Entries of the page table for ``block_n`` positions from ``first`` on, −1 from position ``end`` on.

    Args:
      table_row: pointer to the row of the sequence.
      pages: entries of a block, one for each page; if 0, one for each position.
    """
    # Whole pages in a block: one entry for each, broadcast to its rows later. Else each position looks up its own.
    if pages > 0:
        position = first + tl.arange(0, pages) * page_size
    else:
        position = first + tl.arange(0, block_n)
    return tl.load(table_row + position // page_size, mask=position < end, other=-1)


@triton.jit
def page_rows(
    page, position, valid, at, n, low, end, num_pages,
    page_size: tl.constexpr, block_n: tl.constexpr, paged: tl.constexpr, many_pages: tl.constexpr, pages: tl.constexpr,
):  # fmt: skip
    """Page, row in it, and validity of each position of a step; a page that does not exist becomes page 0, masked.

    Args:
      page: [pages] or [block_n] of `page_numbers` where ``many_pages``; else a scalar, the page of the whole block, or
        the sequence if not ``paged``.
      position, n: [block_n], ``at + n``.
      valid: [block_n], positions in ``[low, end)``.
    """
    if not paged:
        page = page.to(tl.int64)
        page_row = position
    elif many_pages:
        if pages > 0:
            page = tl.reshape(tl.broadcast_to(page[:, None], [pages, page_size]), [block_n])
        valid = valid & (page >= 0) & (page < num_pages)
        # In 64 bits: a cache may have more than 2³¹ elements.
        page = tl.where(valid, page, 0).to(tl.int64)
        page_row = position % page_size
    else:
        # A block lies in one page: one number, and rows side by side.
        page = page.to(tl.int64)
        exists = (page >= 0) & (page < num_pages)
        valid = (position >= low) & (position < tl.where(exists, end, 0))
        page = tl.where(exists, page, 0)
        # ``at`` is a multiple of block_n, which divides a page here: no division for each row.
        page_row = at % page_size + n
    return page, page_row, valid


@triton.jit
def _load_scale(
    scale, page, row, head, valid, page_stride: tl.constexpr, row_stride: tl.constexpr, head_stride: tl.constexpr
):
    """Scales of the tokens of a step, [block_n]; 0 where they are not valid."""
    # Strides of 0 broadcast a scale that tokens, pages or heads share.
    return tl.load(scale + page * page_stride + row * row_stride + head * head_stride, mask=valid, other=0.0)


@triton.jit
def head_scales(
    key_scale, value_scale, head, key_scale_head: tl.constexpr, value_scale_head: tl.constexpr,
    scaled_keys: tl.constexpr, scaled_values: tl.constexpr, latent: tl.constexpr,
):  # fmt: skip
    """Scales of K and of V that all tokens of a head share, as scalars; 1 where there is none."""
    k_scale = 1.0
    if scaled_keys:
        k_scale = tl.load(key_scale + head * key_scale_head)
    v_scale = k_scale
    if scaled_values and not latent:
        v_scale = tl.load(value_scale + head * value_scale_head)
    return k_scale, v_scale


@triton.jit
def token_scales(
    key_scale, value_scale, page, row, head, valid,
    key_scale_page: tl.constexpr, key_scale_row: tl.constexpr, key_scale_head: tl.constexpr,
    value_scale_page: tl.constexpr, value_scale_row: tl.constexpr, value_scale_head: tl.constexpr,
    scaled_keys: tl.constexpr, scaled_values: tl.constexpr, latent: tl.constexpr,
):  # fmt: skip
    """Scales of K and of V for the tokens of a step, [block_n] each; what has no scale of its tokens has any."""
    k_scale = 1.0
    if scaled_keys:
        k_scale = _load_scale(key_scale, page, row, head, valid, key_scale_page, key_scale_row, key_scale_head)
    v_scale = k_scale
    if scaled_values and not latent:
        v_scale = _load_scale(value_scale, page, row, head, valid, value_scale_page, value_scale_row, value_scale_head)
    return k_scale, v_scale


@triton.jit
def row_slopes(slopes, head, valid, has_slopes: tl.constexpr):
    """Slopes of ALiBi of the rows' heads, [block_m]; 0 where there are none."""
    slope = 0.0
    if has_slopes:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)
    return slope


@triton.jit
def tree_words(tree_mask, boundaries, sequence, token, row, first, mask_words: tl.constexpr):
    """Pointers to the rows' words, [block_m], and the position of the first new token of the tile's sequence.

    Args:
      tree_mask: [tokens, mask_words], bits of the new tokens of its sequence that a token sees.
      boundaries: [sequences + 1], the first token of each sequence in the query; absent like the mask.
      token, first: the tile's first token, and its position.
      row: [block_m], tokens of the rows counted from the first one.
    """
    words, first_new = tree_mask, 0
    if mask_words > 0:
        words = tree_mask + (token + row).to(tl.int64) * mask_words
        first_new = first - (token - tl.load(boundaries + sequence))
    return words, first_new
