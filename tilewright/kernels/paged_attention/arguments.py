"""Checks of the arguments that the serving ops share; they read only types, shapes and dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.arguments import (
    apply,
    as_array,
    has_arithmetic,
    is_floating,
    is_integer,
    reshape,
    to_int32,
    window,
)
from tilewright.kernels.paged_attention.debugging import report
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.paged_attention.latent_rows import FLASH_MLA, LATENT_DIM, RANK, ROW_BYTES

QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def query_array(query: object, ranks: tuple[int, ...], layout: str, name: str = "query") -> Any:
    query = as_array(name, query)
    if len(query.shape) not in ranks:
        raise ValueError(f"{name} must be {layout}, got {name}.shape={query.shape}")
    if not has_arithmetic(query.dtype):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {name}.dtype={query.dtype}")
    if query.shape[-1] == 0 or query.shape[-2] == 0:
        raise ValueError(f"{name} needs at least one head and one element in each, got {name}.shape={query.shape}")
    return query


def cache_arrays(
    key: object, value: object, layout: str, names: tuple[str, str] = ("key", "value"), *, rows: bool = False
) -> tuple[Any, Any]:
    """Keys and values of rank 4 with matching shapes; the values may be absent, and keys may be ``rows`` of bytes."""
    key = as_array(names[0], key)
    value = None if value is None else as_array(names[1], value)
    described = f"got {names[0]}.shape={key.shape}" + ("" if value is None else f", {names[1]}.shape={value.shape}")
    if len(key.shape) != 4 or (value is not None and len(value.shape) != 4):
        raise ValueError(f"{names[0]} and {names[1]} must be {layout}, {described}")
    if value is not None and value.shape[:3] != key.shape[:3]:
        raise ValueError(f"{names[0]} and {names[1]} must agree in all but the head dim, {described}")
    if 0 in key.shape[2:] or (value is not None and value.shape[3] == 0):
        raise ValueError(f"{names[0]} and {names[1]} need at least one head and one element in each, {described}")
    if value is not None and value.dtype != key.dtype:
        raise TypeError(f"{names[0]} and {names[1]} must have one dtype, got {key.dtype} and {value.dtype}")
    if rows and value is None and key.dtype == np.uint8:
        if key.shape[3] != ROW_BYTES:
            raise ValueError(f"{names[0]} of uint8 hold rows of {ROW_BYTES} bytes (quantize_latents), {described}")
    elif not is_floating(key.dtype) and key.dtype.name not in QUANTISED:
        raise TypeError(f"{names[0]} must be floating-point or one of {QUANTISED}, got {key.dtype}")
    return key, value


def check_heads(query: jax.Array, key: jax.Array) -> None:
    heads, head_dim = query.shape[-2:]
    kv_heads, key_dim = key.shape[2:]
    if key_dim != head_dim:
        raise ValueError(f"query and key must have the same head dim, got {query.shape=}, {key.shape=}")
    if heads % kv_heads:
        raise ValueError(f"the key heads must divide the query heads, got {query.shape=}, {key.shape=}")
    if key.dtype != query.dtype and key.dtype.name not in QUANTISED:
        raise TypeError(
            f"keys and values must have the query's dtype or be one of {QUANTISED}, got {query.dtype=}, {key.dtype=}"
        )


def integers(name: str, array: object, shape: tuple[int | None, ...], layout: str) -> Any:
    """An int32 array of a shape in which ``None`` stands for any size."""
    array = as_array(name, array)
    if not is_integer(array.dtype):
        raise TypeError(f"{name} must hold integers, got {name}.dtype={array.dtype}")
    fits = len(array.shape) == len(shape) and all(w in (None, n) for n, w in zip(array.shape, shape, strict=True))
    if not fits:
        raise ValueError(f"{name} must be {layout}, got {name}.shape={tuple(array.shape)}")
    return array if array.dtype == np.int32 else apply(to_int32, array)


def page_table_array(page_table: object, sequences: int, name: str = "page_table") -> Any:
    return integers(name, page_table, (sequences, None), f"[sequences, pages_per_sequence] with {sequences=}")


def places_to_write(
    op: str, page_table: object, page_offset: object, lengths: Any, cum_q_lens: object, pages: Any, tokens: int
) -> tuple[Any, Any]:
    """The table and the boundaries of an op that writes tokens into pages; without boundaries each sequence has one.

    Args:
      lengths: checked.
      pages: ``[num_pages, page_size, ...]``.
    """
    sequences = lengths.shape[0]
    table = moved_pages(page_table_array(page_table, sequences), page_offset)
    if table.shape[1] == 0 and tokens:
        raise ValueError(f"a page table without columns has no page to write to: {table.shape=}")
    cum = None if cum_q_lens is None else boundaries_array("cum_q_lens", cum_q_lens, sequences)
    num_pages, page_size = pages.shape[:2]
    report(op, table, lengths, cum, num_pages=num_pages, page_size=page_size, tokens=tokens, q_length=1, writes=True)
    return table, cum


def moved_pages(page_table: Any, page_offset: object) -> Any:
    """The table with an offset added to its pages; negative entries name no page and stay."""
    if page_offset is None:
        return page_table
    offset = integers("page_offset", page_offset, (), "an integer or a scalar array of integers")
    if page_table is None:
        raise ValueError("page_offset moves the pages of a table, and this call has none")
    if isinstance(offset, jax.ShapeDtypeStruct):
        return page_table
    return apply(lambda table: jnp.where(table < 0, table, table + offset), page_table)


def scale_array(name: str, scale: object, cache: jax.Array | None) -> Any:
    """Scales as float32 of rank 3, broadcastable to ``[num_pages, page_size, kv_heads]``; ``None`` without scales."""
    if scale is None:
        if cache is not None and cache.dtype.name == "int8":
            raise TypeError(f"int8 keys and values need scales, got {name}=None")
        return None
    if cache is not None and cache.dtype == np.uint8:
        raise TypeError(f"rows of bytes hold scales of their own: leave {name} away")
    if cache is None:
        raise TypeError(f"{name} belongs to values, of which there are none: give key_scale")
    array = as_array(name, scale)
    if not is_floating(array.dtype):
        raise TypeError(f"{name} must be floating-point, got {name}.dtype={array.dtype}")
    full = cache.shape[:3]
    if array.shape == ():
        array = reshape(array, (1, 1, 1))
    if len(array.shape) != 3 or any(n not in (1, f) for n, f in zip(array.shape, full, strict=True)):
        raise ValueError(
            f"{name} must be a number or broadcastable to [num_pages, page_size, kv_heads] = {list(full)} with rank 3, "
            f"got {name}.shape={tuple(array.shape)}"
        )
    return array if array.dtype == np.float32 else apply(lambda x: x.astype(jnp.float32), array)


def slopes_array(alibi_slopes: object, heads: int) -> Any:
    if alibi_slopes is None:
        return None
    array = as_array("alibi_slopes", alibi_slopes)
    if not is_floating(array.dtype):
        raise TypeError(f"alibi_slopes must be floating-point, got {array.dtype=}")
    if array.shape not in ((heads,), (1,)):
        raise ValueError(f"alibi_slopes must have the shape [heads] with {heads=}, or [1], got {array.shape=}")
    return array if array.shape == (heads,) else apply(lambda x: jnp.broadcast_to(x, (heads,)), array)


def window_sides(sliding_window: object, causal: bool) -> tuple[int | None, int | None]:
    # A bound beyond any position is wide enough, and sums of a bound and two positions stay in int32.
    left, right = window(sliding_window, causal)
    return (None if left is None else min(left, FAR)), (None if right is None else min(right, FAR))


def new_tokens(
    key: object, value: object, pages: jax.Array, value_pages: jax.Array | None, tokens: int | None
) -> tuple[Any, Any]:
    """New keys and values ``[tokens, kv_heads, head_dim]`` that fit the pages; the values may be absent."""
    key = as_array("key", key)
    if (value is None) != (value_pages is None):
        raise TypeError("new values and pages of values go together: give both or none")
    value = None if value is None else as_array("value", value)
    for name, new, cache in (("key", key, pages), ("value", value, value_pages)):
        if new is None or cache is None:
            continue
        expected = (key.shape[0] if tokens is None else tokens, *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(
                f"the new {name} must be [tokens, kv_heads, head_dim] = {list(expected)}, got shape {new.shape}"
            )
        if cache.dtype == np.uint8 and new.dtype != np.uint8:
            raise TypeError(
                f"the new {name} must be rows of bytes like the pages, of quantize_latents, got {new.dtype}"
            )
        if not is_floating(new.dtype) and cache.dtype != np.uint8:
            raise TypeError(f"the new {name} must be floating-point, got {new.dtype}")
    return key, value


def tree_mask_array(tree_mask: object, tokens: int) -> Any:
    """Words of bits for each token; the most new tokens of a sequence is data, so that their number is not checked."""
    if tree_mask is None:
        return None
    array = as_array("tree_mask", tree_mask)
    if array.dtype != np.uint32:
        raise TypeError(f"tree_mask must hold bits in words of uint32, got {array.dtype=}")
    if len(array.shape) != 2 or array.shape[0] != tokens or array.shape[1] == 0:
        raise ValueError(f"tree_mask must be [tokens, words] with {tokens=} and a word at least, got {array.shape=}")
    return array


def required(name: str, array: object) -> Any:
    if array is None:
        raise TypeError(f"{name} must be an array, got None")
    return array


def page_arrays(key_pages: object, value_pages: object) -> tuple[Any, Any]:
    layout = "[num_pages, page_size, kv_heads, head_dim]"
    return cache_arrays(key_pages, required("value_pages", value_pages), layout, ("key_pages", "value_pages"))


def latent_array(latent_pages: object) -> Any:
    """Pages of latents with a head of 1 before the last dimension, which the caller's need not have."""
    latents = as_array("latent_pages", latent_pages)
    if len(latents.shape) == 3:
        latents = reshape(latents, (*latents.shape[:2], 1, latents.shape[2]))
    latents, _ = cache_arrays(latents, None, "[num_pages, page_size, head_dim]", ("latent_pages", ""), rows=True)
    if latents.shape[2] != 1:
        raise ValueError(f"latent_pages hold one latent for all heads, got {latents.shape=}")
    return latents


def latent_format(latents: Any, head_dim: int, kv_lora_rank: int) -> str | None:
    """The ``row_format`` of checked pages of latents for queries of these sizes."""
    if latents.dtype != np.uint8:
        return None
    if (head_dim, kv_lora_rank) != (LATENT_DIM, RANK):
        raise ValueError(
            f"latent_pages of uint8 hold latents of {RANK} and {LATENT_DIM - RANK} elements, got a query of "
            f"{head_dim}, of which kv_lora_rank={kv_lora_rank}"
        )
    return FLASH_MLA


def block_arrays(key_cache: object, value_cache: object) -> tuple[Any, Any]:
    """Pages by vLLM's argument names."""
    layout = "[num_blocks, block_size, kv_heads, head_dim]"
    return cache_arrays(key_cache, required("value_cache", value_cache), layout, ("key_cache", "value_cache"))


def lengths_array(name: str, lengths: object, sequences: int | None) -> Any:
    return integers(name, lengths, (sequences,), "[sequences]" + ("" if sequences is None else f" with {sequences=}"))


def boundaries_array(name: str, boundaries: object, sequences: int) -> Any:
    return integers(name, boundaries, (sequences + 1,), f"[sequences + 1] with {sequences=}")
