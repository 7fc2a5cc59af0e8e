"""The oracles: attention token by token over a dense copy of its cache, and writing token by token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.paged_attention.inputs import FAR, PagedInputs
from tilewright.kernels.paged_attention.latent_rows import dequantized
from tilewright.kernels.paged_attention.results import Results
from tilewright.kernels.paged_attention.writing import Cache, WriteInputs
from tilewright.ops.kernel.parts import OraclePart

DENSE_BYTES = 1 << 28
"""Maximum bytes of the dense copies of keys and values processed at once."""

MAX_DENSE_BYTES = 8 << 30
"""Bytes of these copies for all tokens up to which the whole call is computed to check candidates."""

PART_HEADS = 8
"""Query heads of a part of a call, at most."""


def oracle_parts(inputs: PagedInputs) -> list[OraclePart]:
    """The first query heads of the first key head and the last of the last one; empty for small calls."""
    if inputs.tokens * _dense_bytes(inputs) <= MAX_DENSE_BYTES:
        return []
    count = min(inputs.groups, PART_HEADS)
    chosen = dict.fromkeys([(0, 0), (inputs.kv_heads - 1, inputs.heads - count)])
    return [_oracle_part(inputs, kv_head, slice(first, first + count)) for kv_head, first in chosen]


def _dense_bytes(inputs: PagedInputs) -> int:
    """Bytes of the dense copies of one token's keys and values."""
    return inputs.capacity * inputs.kv_heads * (inputs.head_dim + inputs.value_dim) * 4


def _oracle_part(inputs: PagedInputs, kv_head: int, heads: slice) -> OraclePart:
    """Some query heads of one key head, as a call of its own."""
    returns_lse, writes = inputs.return_lse, inputs.writes

    def stored(array: Any, axis: int) -> Any:
        """The key head in an array of the cache; scales may have one for all heads."""
        if array is None or array.shape[axis] == 1:
            return array
        return array[(..., slice(kv_head, kv_head + 1), *(slice(None),) * (-1 - axis))]

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (call,) = args
        own = {"query": call.query[:, heads]}
        for name in ("alibi_slopes", "softmax_aux"):
            array = getattr(call, name)
            own[name] = None if array is None else array[heads]
        for name in ("key", "value", "new_key", "new_value"):
            own[name] = stored(getattr(call, name), -2)
        for name in ("key_scale", "value_scale"):
            own[name] = stored(getattr(call, name), -1)
        return (call.replace(**own),), kwargs

    def results(returned: Any) -> Any:
        out, *others = returned if isinstance(returned, tuple) else (returned,)
        found = [out[..., heads, :]]
        if returns_lse:
            found.append(others.pop(0)[..., heads])
        if writes:
            found += [stored(array, -2 if array.ndim == 4 else -1) for array in others]
        return tuple(found) if len(found) > 1 else found[0]

    return OraclePart(arguments, results)


def paged_reference(inputs: PagedInputs, compute_dtype: DTypeLike | None = None) -> Results:
    """``(out, lse)`` by the definition, in ``compute_dtype``: float32 by default, float64 if the query is.

    Stored elements are dequantised in float32 first. Matmuls have JAX's default precision; use "highest" around the
    call if that is not exact.
    """
    dtype = jnp.dtype(compute_dtype or jnp.promote_types(inputs.query.dtype, jnp.float32))
    tokens, heads, _ = inputs.query.shape
    if inputs.is_empty:
        sinks = jnp.zeros((heads, 0)) if inputs.softmax_aux is None else inputs.softmax_aux
        lse = jax.nn.logsumexp(sinks.astype(dtype), axis=1) if sinks.shape[1] else jnp.full(heads, -jnp.inf, dtype)
        return jnp.zeros((tokens, heads, inputs.value_dim), dtype), jnp.broadcast_to(lse, (tokens, heads))
    at_once = max(DENSE_BYTES // _dense_bytes(inputs), 1)  # neither is zero: the call is not empty
    return lax.map(lambda token: token_reference(inputs, dtype, token), jnp.arange(tokens), batch_size=at_once)


def token_reference(inputs: PagedInputs, dtype: DTypeLike, token: jax.Array) -> tuple[Any, Any]:
    """The results of one token, computed in ``dtype``: ``[heads, value_dim]`` and ``[heads]``."""
    sequence, index, count, owned = _owner(inputs, token)
    key, exists = _dense(inputs, inputs.key, inputs.key_scale, sequence, dtype)
    if inputs.value is None:
        value = key[..., : inputs.value_dim]
    else:
        value, _ = _dense(inputs, inputs.value, inputs.value_scale, sequence, dtype)
    length = jnp.clip(inputs.kv_lengths[sequence], 0, FAR)
    query_position, position = length - count + index, jnp.arange(inputs.capacity)
    visible = exists & (position < length) & owned
    if inputs.kv_starts is not None:
        visible &= position >= inputs.kv_starts[sequence]
    if inputs.left is not None:
        visible &= position >= query_position - inputs.left
    if inputs.right is not None:
        visible &= position <= query_position + inputs.right

    if inputs.tree_mask is not None:
        new, words = position - (length - count), inputs.tree_mask[token]
        bit = (words[jnp.clip(new // 32, 0, words.shape[0] - 1)] >> (new % 32).astype(jnp.uint32)) & 1
        visible &= (new < 0) | ((new < 32 * words.shape[0]) & (bit == 1))

    groups = inputs.groups
    query = inputs.query[token].astype(dtype)
    scores = jnp.stack([key[:, head // groups] @ query[head] for head in range(query.shape[0])])
    scores = scores * jnp.asarray(inputs.softmax_scale, dtype)
    if inputs.alibi_slopes is not None:
        distance = (position - query_position).astype(jnp.float32)
        scores = scores + (inputs.alibi_slopes.astype(jnp.float32)[:, None] * distance).astype(dtype)
    if inputs.logits_soft_cap is not None:
        scores = inputs.logits_soft_cap * jnp.tanh(scores / inputs.logits_soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    with_sinks = scores
    if inputs.softmax_aux is not None:
        with_sinks = jnp.concatenate([scores, inputs.softmax_aux.astype(dtype)], axis=1)
    row_max = jnp.max(with_sinks, axis=1, keepdims=True)
    shift = jnp.where(jnp.isneginf(row_max), 0.0, row_max).astype(dtype)
    total = jnp.sum(jnp.exp(with_sinks - shift), axis=1, keepdims=True)
    probabilities = (jnp.exp(scores - shift) / jnp.where(total == 0.0, 1.0, total)).astype(dtype)
    # Masked elements may hold anything, NaN included.
    value = jnp.where(visible[:, None, None], value, 0.0).astype(dtype)
    out = jnp.stack([probabilities[head] @ value[:, head // groups] for head in range(query.shape[0])])
    return out, jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(total))[:, 0]


def _owner(inputs: PagedInputs, token: jax.Array) -> tuple[Any, Any, Any, Any]:
    """A token's sequence, its index among that sequence's new tokens, their number, and True if it has a sequence."""
    if inputs.q_length is not None:
        count = inputs.q_length
        return token // count, token % count, count, True
    return _sequence_of(inputs.cum_q_lens, token, inputs.query.shape[0])


def _sequence_of(cum: Any, token: jax.Array, tokens: int) -> tuple[Any, Any, Any, Any]:
    first, sequences = cum[0], cum.shape[0] - 1

    def look(at: jax.Array, state: Any) -> Any:
        low, found = state
        high = jnp.clip(cum[at + 1], low, tokens)
        is_inside = (token >= low) & (token < high)
        return high, jax.tree.map(lambda new, old: jnp.where(is_inside, new, old), (at, low, high, True), found)

    initial = (0, 0, 0, False)
    start = jnp.clip(first, 0, tokens)
    state = jax.tree.map(jnp.asarray, (start, initial))
    _, (sequence, low, high, owned) = lax.fori_loop(0, sequences, look, state)
    return sequence, token - low, high - low, owned


def _dense(
    inputs: PagedInputs, pages: jax.Array, scale: jax.Array | None, sequence: jax.Array, dtype: DTypeLike
) -> tuple[Any, Any]:
    """A sequence's tokens as ``[capacity, kv_heads, head_dim]``, and a flag for each that exists."""
    num_pages, page_size = pages.shape[:2]
    page_numbers = jnp.asarray(sequence)[None] if inputs.page_table is None else inputs.page_table[sequence]
    exists = (page_numbers >= 0) & (page_numbers < num_pages)
    page_numbers = jnp.where(exists, page_numbers, 0)
    tokens = pages[page_numbers]
    if inputs.row_format is not None:
        tokens = dequantized(tokens, dtype)
    if scale is not None:
        scales = jnp.broadcast_to(scale, (*pages.shape[:2], scale.shape[2]))[page_numbers]
        tokens = tokens.astype(jnp.promote_types(dtype, jnp.float32)) * scales[..., None]
    return tokens.astype(dtype).reshape(-1, *tokens.shape[2:]), jnp.repeat(exists, page_size)


def write_reference(inputs: WriteInputs) -> Cache:
    """The cache after writing one token after the other."""
    cache = inputs.cache
    tokens, columns = inputs.key.shape[0], inputs.page_table.shape[1]
    num_pages, page_size = inputs.key_pages.shape[:2]
    if 0 in (tokens, columns, num_pages, page_size, inputs.page_table.shape[0]):
        return cache

    def write(token: jax.Array, cache: Cache) -> Cache:
        if inputs.cum_q_lens is None:
            sequence, index, count, owned = token, 0, 1, True
        else:
            sequence, index, count, owned = _sequence_of(inputs.cum_q_lens, token, tokens)
        position = jnp.clip(inputs.kv_lengths[sequence], 0, FAR) - count + index
        inside = owned & (position >= 0) & (position < columns * page_size)
        position = jnp.where(inside, position, 0)
        page, row = inputs.page_table[sequence, position // page_size], position % page_size
        inside = inside & (page >= 0) & (page < num_pages)
        coordinate = jnp.where(inside, page, 0), row
        key_pages, value_pages, key_scale, value_scale = cache
        key_pages, key_scale = _put(key_pages, key_scale, inputs.key[token], coordinate, inside, inputs.kv_dtype)
        if inputs.value is not None:
            new = inputs.value[token]
            value_pages, value_scale = _put(value_pages, value_scale, new, coordinate, inside, inputs.kv_dtype)
        return key_pages, value_pages, key_scale, value_scale

    return lax.fori_loop(0, tokens, write, cache)


def _put(
    pages: jax.Array, scale: jax.Array | None, new: jax.Array, coordinate: Any, inside: jax.Array, dtype: str
) -> tuple[Any, Any]:
    """Writes one token ``[kv_heads, head_dim]`` at its coordinate, if it has one."""
    limit = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(dtype)
    element = new.astype(jnp.float32) if limit is not None or scale is not None else new
    if scale is not None and scale.shape[:2] == pages.shape[:2]:
        max_abs = jnp.abs(element).max(axis=(1,) if scale.shape[2] > 1 else (0, 1)).reshape(scale.shape[2])
        token_scale = jnp.where(max_abs > 0, max_abs / (limit or float(jnp.finfo(dtype).max)), 1.0)
        scale = scale.at[coordinate].set(jnp.where(inside, token_scale, scale[coordinate]))
        element = element / token_scale[:, None]
    elif scale is not None:
        element = element / jnp.broadcast_to(scale, (*pages.shape[:2], scale.shape[2]))[coordinate][:, None]
    if limit is not None:
        element = jnp.clip(element, -limit, limit)
    if dtype == "int8":
        element = jnp.round(element)
    return pages.at[coordinate].set(jnp.where(inside, element.astype(pages.dtype), pages[coordinate])), scale
