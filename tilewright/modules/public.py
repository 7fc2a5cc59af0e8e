"""How a kernel becomes a function."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

FLAX_ADAPTER = "tilewright.integrations.flax.dot_product_attention"

_FLAX_KEYWORDS = frozenset(
    {
        "broadcast_dropout", "deterministic", "dropout_rate", "dropout_rng", "dtype", "einsum_dot_general",
        "force_fp32_for_softmax", "module", "promote_dtype", "qk_attn_weights_einsum", "attn_weights_value_einsum",
    }
)  # fmt: skip
"""What Flax passes to an ``attention_fn`` and no function of ours takes."""

_ELSEWHERE = {
    "attention_bias": "bias",
    "attn_mask": "mask",
    "block_tables": "page_table",
    "context_lens": "lengths",
    "cu_seqlens_k": "cum_seqlens_k",
    "cu_seqlens_q": "cum_seqlens_q",
    "dropout_p": "dropout_prob",
    "implementation": "platform",
    "is_causal": "causal",
    "k": "key",
    "kv_seq_lens": "key_value_seq_lengths",
    "local_window_size": "sliding_window",
    "page_indices": "page_table",
    "q": "query",
    "q_seq_lens": "query_seq_lengths",
    "return_residual": "return_lse",
    "s_aux": "softmax_aux",
    "scale": "softmax_scale",
    "segment_ids": "q_segment_ids",
    "seq_lens": "lengths",
    "sinks": "softmax_aux",
    "sm_scale": "softmax_scale",
    "soft_cap": "logits_soft_cap",
    "softcap": "logits_soft_cap",
    "v": "value",
    "window": "sliding_window",
    "window_size": "sliding_window",
}
"""Names that other libraries have for an argument of ours."""


def public_function[F: Callable[..., Any]](
    prepare: Callable[..., Any], *, attention_fn: bool = False
) -> Callable[[F], F]:
    """Gives a function the argument list of a kernel's ``prepare``, and ``cfg``: the list is written once, there.

    A call with other arguments is a ``TypeError`` of the function's own name, with a suggestion.

    Args:
      attention_fn: for a function that Flax Linen may get as its ``attention_fn``. Linen passes only those keywords
        that a signature names, and would drop its dropout in silence: ``dropout_rng`` is named so that it is refused.
    """

    def decorate(function: F) -> F:
        _, *parameters = inspect.signature(prepare).parameters.values()  # without self
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        refused = inspect.Parameter("dropout_rng", inspect.Parameter.KEYWORD_ONLY, default=None)
        returns = inspect.signature(function).return_annotation
        signature = inspect.Signature([*parameters, cfg, *[refused] * attention_fn], return_annotation=returns)
        known = frozenset(signature.parameters) - {"dropout_rng"}
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        least, most = sum(p.default is p.empty for p in positional), len(positional)
        name = function.__name__

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                _refuse_keywords(name, kwargs, known)
                kwargs = {key: value for key, value in kwargs.items() if key in known}
            if not least <= len(args) <= most:
                _bind(name, signature, args, kwargs)
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def _bind(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises if arguments are missing or too many."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}; it is {name}{_short(signature)}") from None


def _short(signature: inspect.Signature) -> str:
    """The positional part of a signature, without types."""
    shown = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in signature.parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return f"({', '.join([*shown, '...'])})"


def _refuse_keywords(name: str, kwargs: dict[str, Any], known: frozenset[str]) -> None:
    """Raises for the keywords that a function does not have; Flax's generator of nothing is let through."""
    unknown = [key for key in kwargs if key not in known and not (key == "dropout_rng" and kwargs[key] is None)]
    if not unknown:
        return
    if any(key in _FLAX_KEYWORDS for key in unknown) and "dropout_prob" in known:
        raise TypeError(
            f"{name}() is no attention_fn for Flax, which passes it {', '.join(unknown)}; use {FLAX_ADAPTER}, which "
            "takes all of it, dropout included"
        )
    hints = [f"{key!r}{_did_you_mean(key, known)}" for key in unknown]
    raise TypeError(f"{name}() has no argument {', '.join(hints)}")


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown keyword; empty if none is near."""
    known = list(known)
    near = [_ELSEWHERE.get(key, "")] if _ELSEWHERE.get(key) in known else difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f" (it has {', '.join(sorted(known))})"
