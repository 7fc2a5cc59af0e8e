"""The options that the serving ops share, grouped by the ops that have them; ``cfg`` goes to the executor only."""

from typing import Any, TypedDict

from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption


class StoredScales(TypedDict, total=False):
    """Scales of keys and values that are stored in fewer bits.

    Args:
      key_scale: factor by which stored keys are multiplied: a number, or broadcastable to ``[num_pages, page_size,
        kv_heads]`` (``[sequences, kv_length, kv_heads]`` of a dense cache) with rank 3. int8 needs it.
      value_scale: the same for the values.
    """

    key_scale: ArrayLike | None
    value_scale: ArrayLike | None


class SoftmaxScale(TypedDict, total=False):
    """The scale of the logits.

    Args:
      softmax_scale: 1/√head_dim by default; a JAX array is multiplied into the query.
    """

    softmax_scale: ArrayLike | None


class LogitOptions(TypedDict, total=False):
    """Options that change logits or mask keys.

    Args:
      sliding_window: ``(left, right)`` keys visible to either side of the query's position, both ends inclusive, None
        for no bound; ``w`` means ``(w, 0)``.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and slopes (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
    """

    sliding_window: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    softmax_aux: ArrayLike | None


class CallOptions(TypedDict, total=False):
    """Options of every attention op.

    Args:
      alibi_slopes: ``[heads]``; times (key position − query position) they are added to the logits (arXiv 2108.12409).
      page_offset: added to the pages of the table that are not negative: an integer or a scalar array, such as the
        first page of a layer in a pool of all layers' pages. Scales of pages are those of the whole pool.
      return_lse: also return the natural log-sum-exp of the logits, float32, in the query's shape without its last
        dimension.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.
    """

    alibi_slopes: ArrayLike | None
    page_offset: ArrayLike | None
    return_lse: bool
    platform: PlatformOption
    cfg: Any


class UnifiedOptions(SoftmaxScale, CallOptions, total=False):
    """The options of ``unified_attention``, which uses vLLM's names for the others."""


class LatentOptions(SoftmaxScale, LogitOptions, CallOptions, total=False):
    """The options of the ops over latents, whose elements have one scale."""


class ServingOptions(StoredScales, LatentOptions, total=False):
    """The options of all other ops."""
