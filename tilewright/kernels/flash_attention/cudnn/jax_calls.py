"""Calls cuDNN's attention through JAX's private functions; no other module depends on those.

``jax.nn.dot_product_attention(implementation="cudnn", return_residual=True)`` rounds the log-sum-exp to the output's
dtype and does not expose its backward pass, and its custom partitioning cannot be lowered inside of our primitive. So
both directions call the function underneath, whose interface JAX does not promise to keep: if its arguments have
changed, importing this module raises an ``ImportError`` that says so.
"""

import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

FORWARD_OPERANDS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v",
)  # fmt: skip
"""The operands; those that a call lacks are passed as arrays without elements."""

OPERANDS = {
    "_dot_product_attention_fwd_p_wrapper": FORWARD_OPERANDS,
    "_dot_product_attention_bwd_p_wrapper": (*FORWARD_OPERANDS, "activation", "fwd_output", "grad_output"),
}
"""The operands of both directions' primitives, whose ``impl`` runs on each device."""

PARAMETERS = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "is_training",
    "score_mod",
)  # fmt: skip
"""All known parameters of a primitive besides the operands; ``score_mod`` exists only since JAX 0.12."""

type Lengths = tuple[Any, Any] | None


def known_parameters(module: ModuleType) -> dict[str, tuple[str, ...]]:
    """The ``PARAMETERS`` that each primitive takes.

    Raises:
      ImportError: the module's functions have changed.
    """
    found = {}
    try:
        _ = module.check_cudnn_version, module.cuda_versions, module.MaskType.PADDING_CAUSAL
        _ = module.AttentionLayout.BTNH
        for primitive in OPERANDS:
            parameters = inspect.signature(getattr(module, primitive).impl).parameters.values()
            found[primitive] = tuple(each.name for each in parameters if each.kind is not each.VAR_POSITIONAL)
    except (AttributeError, TypeError, ValueError) as error:
        raise ImportError(f"this JAX calls cuDNN's attention in another way: {error}") from error
    for primitive, operands in OPERANDS.items():
        names = found[primitive]
        found[primitive] = names[len(operands) :]
        if names[: len(operands)] != operands or not set(found[primitive]) <= set(PARAMETERS):
            raise ImportError(f"this JAX calls cuDNN's attention with other arguments: {names}")
    return found


_KNOWN = known_parameters(fused)


def cudnn_version() -> int | None:
    """The version, such as 91900 for 9.19.0; None if JAX finds no cuDNN."""
    return None if fused.cuda_versions is None else fused.check_cudnn_version()


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: Lengths,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Any, ...]:
    """``(out, lse)``: ``[batch, length, heads, head_dim]``, and the natural log-sum-exp ``[batch, heads, length]``.

    Args:
      lengths: of queries and of keys, int32 ``[batch]`` each; cuDNN's output beyond them is unspecified.
      causal: aligned top left.
      window: number of visible keys, ending with the query's own; only with ``causal``.
    """
    given = {"query": query, "key": key, "value": value}
    return _call("_dot_product_attention_fwd_p_wrapper", given, bias, lengths, scale, causal, window)


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, lengths: Lengths,
    out: jax.Array, lse: jax.Array, d_out: jax.Array,
    *, scale: float, causal: bool, window: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of query, key, value and of the bias if there is one, from the results of ``forward``."""
    given = {"query": query, "key": key, "value": value, "activation": lse, "fwd_output": out, "grad_output": d_out}
    return _call("_dot_product_attention_bwd_p_wrapper", given, bias, lengths, scale, causal, window)


def _call(
    primitive: str,
    given: dict[str, Any],
    bias: jax.Array | None,
    lengths: Lengths,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Any, ...]:
    kinds = fused.MaskType
    mask_type = kinds.CAUSAL if causal else kinds.NO_MASK
    if bias is not None:
        given = {**given, "bias": bias}
    if lengths is not None:
        mask_type = kinds.PADDING_CAUSAL if causal else kinds.PADDING
        given = {**given, "q_seqlen": lengths[0], "kv_seqlen": lengths[1]}
    parameters = {
        "scale": scale, "seed": 0, "dropout_rate": 0.0, "variadic_args": (bias is not None, bias is not None),
        "mask_type": mask_type, "layout": fused.AttentionLayout.BTNH.value, "sliding_window_length": window,
        # In training the forward pass returns the log-sum-exp, too.
        "is_training": True, "score_mod": None,
    }  # fmt: skip
    # The primitive has a fixed number of operands, and tells by ``variadic_args`` and the mask's type which it uses.
    absent = jnp.zeros(0, given["query"].dtype)
    operands = [given.get(name, absent) for name in OPERANDS[primitive]]
    known = {name: parameters[name] for name in _KNOWN[primitive]}
    return tuple(getattr(fused, primitive).impl(*operands, **known))
