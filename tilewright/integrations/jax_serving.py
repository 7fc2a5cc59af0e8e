"""JAX's own serving functions, by their names, arguments and layouts, on any platform.

JAX has these for TPUs, under ``jax.experimental.pallas.ops.tpu``. Here the library's own paged attention computes them,
and reads their caches in place: no call copies one.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformLike, as_array, has_arithmetic, integer, number
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel

__all__ = ["DEFAULT_MASK_VALUE", "PagedAttention", "RaggedPagedAttention", "paged_attention", "ragged_paged_attention"]

DEFAULT_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""JAX's default; here the probability of a masked key is exactly zero."""

WEAKEST_MASK_VALUE = -1e4
"""A larger mask value may leave masked keys some probability in JAX's kernel."""


class RaggedPagedAttention(PagedAttentionKernel):
    """Packed queries over pages in which keys and values lie side by side, read as latents are.

    The key and the value of a head of a token are adjacent in memory, so ``[..., 2 · kv_heads, head_dim]`` is also
    ``[..., kv_heads, 2 · head_dim]``. A query padded with zeros is multiplied only with the key, and the second half of
    the weighted sum is the output: bytes are read once, and each of the two matmuls has twice the FLOPs.
    """

    def __init__(self) -> None:
        super().__init__("ragged_paged_attention")

    def prepare(
        self,
        q: jax.Array,
        kv_pages: jax.Array,
        kv_lens: jax.Array,
        page_indices: jax.Array,
        cu_q_lens: jax.Array,
        num_seqs: jax.Array,
        *,
        sm_scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float | None,
        v_scale: float | None,
        platform: Any,
    ) -> PagedInputs:
        """The core's inputs of a call that `ragged_paged_attention` has checked, traced."""
        pages, page_size, combined, head_dim = kv_pages.shape
        # In two steps: if the heads are split over devices, the result of the first step is split too.
        halves = kv_pages.reshape(pages, page_size, combined // 2, 2, head_dim)
        # Sequences from num_seqs on have neither tokens nor keys, whatever the arrays hold there. If num_seqs is out of
        # bounds, JAX reads the nearest entry.
        sequence, count = jnp.arange(kv_lens.shape[0] + 1, dtype=jnp.int32), num_seqs[0]
        # Stored elements are keys and values, so they have one scale: that of values. Logits get the rest.
        return self.canonical(
            jnp.pad(q, ((0, 0), (0, 0), (0, head_dim))),
            halves.reshape(pages, page_size, combined // 2, 2 * head_dim),
            None,
            jnp.where(sequence[:-1] < count, kv_lens, 0),
            page_table=page_indices,
            cum_q_lens=jnp.where(sequence < count, cu_q_lens, cu_q_lens[count]),
            q_length=None,
            key_scale=v_scale,
            sliding_window=None if sliding_window is None else (sliding_window - 1, 0),
            softmax_scale=sm_scale * (1.0 if k_scale is None else k_scale) / (1.0 if v_scale is None else v_scale),
            logits_soft_cap=soft_cap,
            latent_dim=2 * head_dim,
            platform=platform,
        )


_RAGGED_PAGED_ATTENTION = RaggedPagedAttention()


def ragged_paged_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    platform: PlatformLike | Sequence[PlatformLike] | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Attention of packed queries over pages of keys and values, as JAX's function of this name for TPUs has it.

    The signature is that of ``jax.experimental.pallas.ops.tpu.ragged_paged_attention``, followed by ``platform`` and
    ``cfg``. The cache is read where it lies, without a copy; see docs/integrations/ragged_paged_attention.md.

    Args:
      q: ``[max_num_batched_tokens, num_q_heads, head_dim]``, float16, bfloat16, float32 or float64: the new tokens of
        all sequences, one sequence after the other. Any head dim.
      kv_pages: ``[total_num_pages, page_size, num_combined_kv_heads, head_dim]`` in q's dtype, int8, float8_e4m3fn or
        float8_e5m2: head ``2 · h`` holds the keys of head ``h``, ``2 · h + 1`` its values.
      kv_lens: ``[max_num_seqs]`` integers: tokens in the cache, the new ones included, which are the last of them.
      page_indices: ``[max_num_seqs, pages_per_seq]`` integers; a page that does not exist holds nothing.
      cu_q_lens: ``[max_num_seqs + 1]`` integers: where the sequences' tokens begin and end.
      num_seqs: ``[1]`` integer: of ``kv_lens`` and ``page_indices`` only so many are read, of ``cu_q_lens`` one more.
      sm_scale: what query · key is multiplied by: 1, not 1/√head_dim.
      sliding_window: keys that a query sees, its own included.
      soft_cap: ``c · tanh(logits / c)`` after ``sm_scale``.
      mask_value: taken, and not needed: masked keys have no weight. Above −1e4 it is refused, for JAX's kernel adds it
        to logits, and what it adds must hide them.
      k_scale: what stored keys are multiplied by. int8 needs both scales.
      v_scale: what stored values are multiplied by.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: not used: they tune JAX's TPU kernel.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[max_num_batched_tokens, num_q_heads, head_dim]`` in q's dtype; zeros for tokens behind the last sequence's.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    with _named("ragged_paged_attention"):
        arrays = _ragged_arrays(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
        static: dict[str, Any] = {
            "sm_scale": number("sm_scale", sm_scale),
            "soft_cap": _soft_cap("soft_cap", soft_cap),
            "k_scale": _scale("k_scale", k_scale, arrays[1].dtype),
            "v_scale": _scale("v_scale", v_scale, arrays[1].dtype),
            "sliding_window": _window(sliding_window),
            "platform": _RAGGED_PAGED_ATTENTION.backends.allowed(platform),
        }
        _check_mask_value(mask_value)
    return _ragged(*arrays, **static, cfg=cfg)


@functools.partial(
    jax.jit, static_argnames=("sm_scale", "sliding_window", "soft_cap", "k_scale", "v_scale", "platform", "cfg")
)
def _ragged(q: jax.Array, kv_pages: jax.Array, *arrays: Any, cfg: Any, **static: Any) -> Any:
    """A program of its own: called eagerly, the change of the cache's shape would be a copy of it."""
    return _RAGGED_PAGED_ATTENTION(q, kv_pages, *arrays, **static, cfg=cfg)[..., q.shape[2] :]


def _ragged_arrays(
    q: ArrayLike,
    kv_pages: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
) -> list[Any]:
    """The arrays of a call, checked, the integers int32."""
    q, kv_pages = as_array("q", q), as_array("kv_pages", kv_pages)
    layout = "[total_num_pages, page_size, num_combined_kv_heads, head_dim]"
    _check_cache(q, "[max_num_batched_tokens, num_q_heads, head_dim]", {"kv_pages": kv_pages}, layout)
    combined = kv_pages.shape[2]
    if combined == 0 or combined % 2:
        raise ValueError(f"kv_pages must have an even number of heads, keys and values in turn, got {kv_pages.shape=}")
    _check_heads(q, combined // 2)
    table = arguments.integers("page_indices", page_indices, (None, None), "[max_num_seqs, pages_per_seq]")
    n = table.shape[0]
    where = f"with max_num_seqs={n}, as page_indices has it"
    return [
        q,
        kv_pages,
        arguments.integers("kv_lens", kv_lens, (n,), f"[max_num_seqs] {where}"),
        table,
        arguments.integers("cu_q_lens", cu_q_lens, (n + 1,), f"[max_num_seqs + 1] {where}"),
        arguments.integers("num_seqs", num_seqs, (1,), "[1]"),
    ]


class PagedAttention(PagedAttentionKernel):
    """One query token of each sequence over pages of one key head each, as JAX's kernels for decoding have them.

    Key heads do not share pages, so each key head of each sequence is a sequence of its own, with one key head that all
    of its query heads share.
    """

    def __init__(self) -> None:
        super().__init__("paged_attention")

    def prepare(
        self,
        q: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        lengths: jax.Array,
        page_indices: jax.Array,
        k_scale: jax.Array | None,
        v_scale: jax.Array | None,
        *,
        soft_cap: float | None,
        platform: Any,
    ) -> PagedInputs:
        """The core's inputs of a call that `paged_attention` has checked, traced."""
        kv_heads, num_pages, page_size, head_dim = k_pages.shape
        sequences = q.shape[0] * kv_heads
        there = (page_indices >= 0) & (page_indices < num_pages)
        first = num_pages * jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
        table = jnp.where(there[:, None], page_indices[:, None] + first, -1)
        key, value = (pages.reshape(-1, page_size, 1, head_dim) for pages in (k_pages, v_pages))
        scales = (None if each is None else each.reshape(-1, page_size, 1) for each in (k_scale, v_scale))
        key_scale, value_scale = scales
        return self.canonical(
            q.reshape(sequences, -1, head_dim),
            key,
            value,
            jnp.repeat(lengths, kv_heads),
            page_table=table.reshape(sequences, -1),
            key_scale=key_scale,
            value_scale=value_scale,
            softmax_scale=1.0,
            logits_soft_cap=soft_cap,
            platform=platform,
        )


_PAGED_ATTENTION = PagedAttention()

MAX_INT8 = 127.5
"""JAX's constant by which the scales of its quantised tensors are divided."""


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike | tuple[ArrayLike, ArrayLike],
    v_pages: ArrayLike | tuple[ArrayLike, ArrayLike],
    lengths: ArrayLike,
    page_indices: ArrayLike,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
    platform: PlatformLike | Sequence[PlatformLike] | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Attention of one query token of each sequence over pages, as JAX's function of this name for TPUs has it.

    The signature is that of ``jax.experimental.pallas.ops.tpu.paged_attention``, followed by ``platform`` and ``cfg``.

    Args:
      q: ``[batch_size, num_q_heads, head_dim]``, float16, bfloat16, float32 or float64, scaled by the caller: logits
        are q · key as it is.
      k_pages: ``[num_kv_heads, total_num_pages, page_size, head_dim]`` in q's dtype, or JAX's ``QuantizedTensor``: int8
        and ``[num_kv_heads, total_num_pages, page_size, 1]``, the greatest magnitude of each token.
      v_pages: likewise.
      lengths: ``[batch_size]`` integers: tokens in the cache, the query's own included.
      page_indices: ``[batch_size, pages_per_sequence]`` integers; a page that does not exist holds nothing.
      mask_value: taken, and not needed, as in `ragged_paged_attention`.
      attn_logits_soft_cap: ``c · tanh(logits / c)``.
      pages_per_compute_block, megacore_mode, inline_seq_dim: not used: they tune JAX's TPU kernel.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[batch_size, num_q_heads, head_dim]`` in q's dtype; zeros for a sequence of length 0.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    with _named("paged_attention"):
        _check_mask_value(mask_value)
        keys, key_scale = _tensor("k_pages", k_pages)
        values, value_scale = _tensor("v_pages", v_pages)
        arrays = _decoding_arrays(q, keys, values, lengths, page_indices)
        static = {
            "soft_cap": _soft_cap("attn_logits_soft_cap", attn_logits_soft_cap),
            "platform": _PAGED_ATTENTION.backends.allowed(platform),
        }
    return _decoding(*arrays, key_scale, value_scale, **static, cfg=cfg)


@functools.partial(jax.jit, static_argnames=("soft_cap", "platform", "cfg"))
def _decoding(q: jax.Array, *arrays: Any, cfg: Any, **static: Any) -> Any:
    """A program of its own: called eagerly, the change of the cache's shape would be a copy of it."""
    return _PAGED_ATTENTION(q, *arrays, **static, cfg=cfg).reshape(q.shape)


def _tensor(name: str, pages: ArrayLike | tuple[ArrayLike, ArrayLike]) -> tuple[Any, Any]:
    """The array of pages, and its scale if it is quantised."""
    if not isinstance(pages, tuple):
        return as_array(name, pages), None
    if len(pages) != 2:
        raise TypeError(f"{name} must be an array or a pair of int8 pages and their scales, got {len(pages)} parts")
    weight, scales = as_array(f"{name}.weight", pages[0]), as_array(f"{name}.scales", pages[1])
    if not arguments.is_floating(scales.dtype) or scales.shape != (*weight.shape[:-1], 1):
        raise ValueError(
            f"the scales of {name} must be floating-point and [num_kv_heads, total_num_pages, page_size, 1] as its "
            f"weight, got {weight.shape=}, {scales.shape=}, {scales.dtype=}"
        )
    return weight, scales / MAX_INT8


def _decoding_arrays(
    q: ArrayLike, k_pages: jax.Array, v_pages: jax.Array, lengths: ArrayLike, page_indices: ArrayLike
) -> list[Any]:
    """The arrays of a call, checked, the integers int32."""
    q = as_array("q", q)
    layout = "[num_kv_heads, total_num_pages, page_size, head_dim]"
    _check_cache(q, "[batch_size, num_q_heads, head_dim]", {"k_pages": k_pages, "v_pages": v_pages}, layout)
    _check_heads(q, k_pages.shape[0])
    n = q.shape[0]
    lengths = arguments.integers("lengths", lengths, (n,), f"[batch_size] with batch_size={n}, as q has it")
    layout = f"[batch_size, pages_per_sequence] with batch_size={n}, as q has it"
    return [q, k_pages, v_pages, lengths, arguments.integers("page_indices", page_indices, (n, None), layout)]


@contextlib.contextmanager
def _named(function: str) -> Iterator[None]:
    """Puts a function's name in front of messages about its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{function}: {error}") from None


def _check_cache(q: jax.Array, q_layout: str, caches: dict[str, Any], layout: str) -> None:
    names = " and ".join(caches)
    said = ", ".join([f"got {q.shape=}", *(f"{name}.shape={cache.shape}" for name, cache in caches.items())])
    if len(q.shape) != 3:
        raise ValueError(f"q must be {q_layout}, {said}")
    if any(len(cache.shape) != 4 for cache in caches.values()) or len({cache.shape for cache in caches.values()}) > 1:
        raise ValueError(f"{names} must be {layout}, {said}")
    if 0 in q.shape[1:]:
        raise ValueError(f"q needs at least one head and one element in each, {said}")
    if any(cache.shape[3] != q.shape[2] for cache in caches.values()):
        raise ValueError(f"q and {names} must have the same head dim, {said}")
    if not has_arithmetic(q.dtype):
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype=}")
    for name, cache in caches.items():
        if cache.dtype != q.dtype and cache.dtype.name not in arguments.QUANTISED:
            said = f"got {q.dtype=}, {name}.dtype={cache.dtype}"
            raise TypeError(f"{name} must have q's dtype or one of {arguments.QUANTISED}, {said}")
    if len({cache.dtype for cache in caches.values()}) > 1:
        raise TypeError(f"{names} must have one dtype, got {[cache.dtype.name for cache in caches.values()]}")


def _check_heads(q: jax.Array, kv_heads: int) -> None:
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"the {kv_heads} key heads of the pages must divide the {q.shape[1]} heads of q")


def _soft_cap(name: str, given: Any) -> float | None:
    cap = None if given is None else number(name, given)
    if cap is not None and cap <= 0.0:
        raise ValueError(f"{name} must be positive (None for no cap), got {name}={cap}")
    return cap


def _scale(name: str, given: Any, dtype: Any) -> float | None:
    if given is None:
        if dtype.name == "int8":
            raise TypeError(f"int8 kv_pages need k_scale and v_scale, got {name}=None")
        return None
    scale = number(name, given)
    if scale == 0.0:
        raise ValueError(f"{name} must not be 0, got {name}={scale}")
    return scale


def _check_mask_value(mask_value: Any) -> None:
    if mask_value is None or (isinstance(mask_value, float) and mask_value == -math.inf):
        return
    if number("mask_value", mask_value) > WEAKEST_MASK_VALUE:
        raise ValueError(f"mask_value must hide keys: at most {WEAKEST_MASK_VALUE}, or None, got {mask_value=}")


def _window(sliding_window: int | None) -> int | None:
    if sliding_window is None:
        return None
    window = integer("sliding_window", sliding_window)
    if window <= 0:
        raise ValueError(f"sliding_window must be positive, got {sliding_window=}")
    return window
