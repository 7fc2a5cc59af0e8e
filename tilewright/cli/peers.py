"""What an op is compared with: the nearest thing in JAX, where it can do the case at all."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

# The fields of an attention case that jax.nn.dot_product_attention has a place for.
_EXPRESSIBLE = {
    "name", "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "dtype", "causal", "sliding_window",
    "softmax_scale", "bias", "mask", "lengths",
}  # fmt: skip
_RENAMED = {"causal": "is_causal", "softmax_scale": "scale", "sliding_window": "local_window_size"}


def jax_attention(case: Any) -> tuple[Callable[..., Any], dict[str, str]] | str:
    """``jax.nn.dot_product_attention`` and its names for our keywords, or why it cannot do the case."""
    changed = [
        field.name
        for field in dataclasses.fields(case)
        if field.name not in _EXPRESSIBLE and getattr(case, field.name) != field.default
    ]
    if changed:
        return f"jax.nn.dot_product_attention has no {', '.join(changed)}"
    window = case.sliding_window
    if isinstance(window, tuple) and None in window:
        return "jax.nn.dot_product_attention has no window that is open to one side"
    return jax.nn.dot_product_attention, _RENAMED


PEERS: dict[str, dict[str, Callable[[Any], tuple[Callable[..., Any], dict[str, str]] | str]]] = {
    "flash_attention": {"jax.nn.dot_product_attention": jax_attention}
}
