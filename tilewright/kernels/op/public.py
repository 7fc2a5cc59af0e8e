"""Turns a kernel into a public function."""

import dataclasses
import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Concatenate, Unpack, get_args, get_origin, is_typeddict

from tilewright.kernels.op.signatures import readable, results_of

FLAX_ADAPTER = "tilewright.integrations.flax.dot_product_attention"

_FLAX_KEYWORDS = frozenset(
    {
        "broadcast_dropout", "deterministic", "dropout_rate", "dropout_rng", "dtype", "einsum_dot_general",
        "force_fp32_for_softmax", "module", "promote_dtype", "qk_attn_weights_einsum", "attn_weights_value_einsum",
    }
)  # fmt: skip
"""Keywords that Flax passes to an ``attention_fn`` and that none of our functions takes."""

_FOREIGN_NAMES = {
    "attention_bias": "bias",
    "attn_mask": "mask",
    "block_tables": "page_table",
    "context_lens": "lengths",
    "cu_seqlens": "cum_seqlens",
    "cu_seqlens_k": "cum_seqlens_k",
    "cu_seqlens_q": "cum_seqlens_q",
    "dropout_p": "dropout_prob",
    "implementation": "platform",
    "initial_states": "initial_state",
    "is_causal": "causal",
    "k": "key",
    "kv_seq_lens": "key_value_seq_lengths",
    "local_window_size": "sliding_window",
    "output_final_state": "return_state",
    "page_indices": "page_table",
    "q": "query",
    "q_seq_lens": "query_seq_lengths",
    "return_final_states": "return_state",
    "return_residual": "return_lse",
    "s_aux": "softmax_aux",
    "scale": "softmax_scale",
    "segment_ids": "q_segment_ids",
    "seq_idx": "segment_ids",
    "seq_lens": "lengths",
    "sinks": "softmax_aux",
    "sm_scale": "softmax_scale",
    "soft_cap": "logits_soft_cap",
    "softcap": "logits_soft_cap",
    "use_qk_l2norm_in_kernel": "qk_l2norm",
    "v": "value",
    "window": "sliding_window",
    "window_size": "sliding_window",
}
"""Names that other libraries use for our arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Default:
    """The default of an option of a ``TypedDict``, in an ``Annotated`` type, if it is neither None nor False."""

    value: object


def public_function[**P, R](
    prepare: Callable[Concatenate[Any, P], object], *, attention_fn: bool = False
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a function the argument list of a kernel's ``prepare``, so that it is written only once.

    Options that ``prepare`` takes as ``**options: Unpack[...]`` of a ``TypedDict`` become keyword arguments: ``None``
    by default, a flag ``False``, others what a ``Default`` in their annotation says. Their documentation comes from the
    ``TypedDict`` unless the function's docstring has it. A call with other arguments is a ``TypeError`` with the
    function's own name and a suggestion.

    Args:
      attention_fn: for a function that Flax Linen may be given as its ``attention_fn``. Linen passes only keywords that
        a signature names, and would silently drop its dropout: ``dropout_rng`` is named in order to be refused.
    """
    _, *parameters = _expanded(inspect.signature(prepare).parameters.values())  # without self
    refused = inspect.Parameter("dropout_rng", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=None)
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    min_args, max_args = sum(p.default is p.empty for p in positional), len(positional)
    known = frozenset(p.name for p in parameters)

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        signature = readable(inspect.Signature([*parameters, *[refused] * attention_fn]), results_of(function))
        name = function.__name__

        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> R:
            if not kwargs.keys() <= known:
                _refuse_keywords(name, kwargs, known)
                # What was not refused is Flax's ``dropout_rng=None``.
                kwargs = {key: value for key, value in kwargs.items() if key in known}
            # ``Signature.bind`` is slow, so it runs only to make the message of an error.
            if not min_args <= len(args) <= max_args:
                _bind(name, signature, args, kwargs)
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__doc__ = _with_options(function.__doc__, _documented(prepare))
        return checked

    return decorate


def with_defaults[Options](options: type[Options], given: Mapping[str, object]) -> Options:
    """Every option of a ``TypedDict``, with its given or default value.

    Raises:
      TypeError: an unknown option was given.
    """
    kind: type = options
    found: Any = {**_defaults(kind), **given}
    if len(found) > len(options.__annotations__):
        unknown = next(name for name in given if name not in options.__annotations__)
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    return found


@functools.cache
def _defaults(options: type) -> Mapping[str, object]:
    return {name: _default(kind) for name, kind in options.__annotations__.items()}


def _default(kind: Any) -> object:
    if get_origin(kind) is Annotated:
        return next(each.value for each in kind.__metadata__ if isinstance(each, Default))
    return False if kind is bool else None


def _options_of(parameter: inspect.Parameter) -> Any:
    """The ``TypedDict`` whose fields a parameter takes; ``None`` for any other parameter."""
    unpacked = parameter.kind is parameter.VAR_KEYWORD and get_origin(parameter.annotation) is Unpack
    return get_args(parameter.annotation)[0] if unpacked else None


def _expanded(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    """The parameters, with a ``TypedDict`` replaced by its fields."""
    for parameter in parameters:
        options = _options_of(parameter)
        if options is None:
            yield parameter
            continue
        defaults = _defaults(options)
        for name, kind in options.__annotations__.items():
            bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=bare)


def _documented(prepare: Callable[..., Any]) -> dict[str, str]:
    """The documentation of each option in the ``TypedDict`` of a ``prepare``, as lines of a section "Args"."""
    found: dict[str, str] = {}
    for parameter in inspect.signature(prepare).parameters.values():
        options = _options_of(parameter)
        if options is not None:
            for kind in (*_bases(options), options):
                found |= _entries(kind.__doc__ or "")
            found = {name: found[name] for name in options.__annotations__ if name in found}
    return found


def _bases(kind: type) -> Iterator[type]:
    """The ``TypedDict``s that one is made from, which are not in its ``__mro__``."""
    for base in types.get_original_bases(kind):
        if is_typeddict(base):
            yield from _bases(base)
            yield base


def _entries(doc: str) -> dict[str, str]:
    """The entries of a docstring's section "Args" by name, each with its indented lines."""
    _, _, section = inspect.cleandoc(doc).partition("Args:\n")
    entries = re.split(r"^  (?=\w+: )", section.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    return {entry.partition(":")[0]: f"  {entry.rstrip()}\n" for entry in entries}


def _with_options(doc: str | None, options: Mapping[str, str]) -> str | None:
    """Appends to a docstring's section "Args" the options that it does not document itself."""
    if not doc or not options:
        return doc
    doc = inspect.cleandoc(doc)
    before, heading, rest = doc.partition("Args:\n")
    section, gap, after = rest.partition("\n\n")
    missing = "".join(entry for name, entry in options.items() if name not in _entries(doc))
    return f"{before}{heading}{section.rstrip()}\n{missing.rstrip()}{gap}{after}"


def _bind(name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
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


def _refuse_keywords(name: str, kwargs: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises for keywords that a function does not have; Flax's ``dropout_rng=None`` is accepted."""
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
    """A suggestion for an unknown keyword, or the list of all."""
    known = list(known)
    near = (
        [_FOREIGN_NAMES.get(key, "")] if _FOREIGN_NAMES.get(key) in known else difflib.get_close_matches(key, known, 1)
    )
    return f"; did you mean {near[0]!r}?" if near else f" (it has {', '.join(sorted(known))})"
