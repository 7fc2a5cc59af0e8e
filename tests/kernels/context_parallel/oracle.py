"""Attention and its gradients in NumPy and float64, from the definition, with every pair of positions in memory."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results of a whole call and the gradients for given cotangents."""

    out: np.ndarray
    lse: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    sinks: np.ndarray


def attention(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    visible: Any,
    d_out: Any,
    d_lse: Any,
    *,
    scale: float,
    cap: float | None,
) -> Expected:
    """``visible`` broadcasts to ``[batch, heads, q, kv]``; ``sinks`` are ``[heads]``, −inf for none."""
    q, k, v, s, d_out, d_lse = (np.asarray(x, np.float64) for x in (query, key, value, sinks, d_out, d_lse))
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, groups, axis=2) for x in (k, v))
    logits = scale * np.einsum("bqhd,bkhd->bhqk", q, wide_k)
    slope = np.ones_like(logits)
    if cap is not None:
        logits, slope = cap * np.tanh(logits / cap), 1 - np.tanh(logits / cap) ** 2
    logits = np.where(visible, logits, -np.inf)
    with_sinks = np.concatenate([logits, np.broadcast_to(s[None, :, None, None], (*logits.shape[:3], 1))], axis=-1)
    top = with_sinks.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(with_sinks - top).sum(-1)) + top[..., 0]
    finite = np.where(np.isfinite(lse), lse, 0.0)[..., None]
    p, p_sinks = np.exp(logits - finite), np.exp(s[None, :, None] - finite[..., 0])
    out = np.einsum("bhqk,bkhd->bqhd", p, wide_v)
    d_p = np.einsum("bqhd,bkhd->bhqk", d_out, wide_v)
    delta = np.einsum("bqhd,bqhd->bhq", out, d_out) - d_lse
    d_logits = p * (d_p - delta[..., None]) * slope * scale
    grouped = (k.shape[0], k.shape[1], k.shape[2], groups, -1)
    return Expected(
        out,
        lse,
        np.einsum("bhqk,bkhd->bqhd", d_logits, wide_k),
        np.einsum("bhqk,bqhd->bkhd", d_logits, q).reshape(grouped).sum(3),
        np.einsum("bhqk,bqhd->bkhd", p, d_out).reshape(grouped).sum(3),
        -np.where(np.isfinite(lse), p_sinks * delta, 0.0).sum((0, 2)),
    )
