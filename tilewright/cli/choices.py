"""Options whose value is one of a few words: their aliases, and the message for an unknown word."""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import typer

DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of queries, and of every array without a dtype option of its own."""

STORED_DTYPES: tuple[str, ...] = (*DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes in which a KV cache may be stored."""

ARRAY_DTYPES: tuple[str, ...] = (
    *STORED_DTYPES, "bool", "int4", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64",
    "complex64", "complex128",
)  # fmt: skip
"""Dtypes of the arrays that a user's function takes."""

DTYPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "f64": "float64", "fp64": "float64", "double": "float64",
        "f32": "float32", "fp32": "float32", "float": "float32", "single": "float32",
        "f16": "float16", "fp16": "float16", "half": "float16",
        "bf16": "bfloat16",
        "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
        "float8": "float8_e4m3fn", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
        "i4": "int4", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "int": "int32",
        "u4": "uint4", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
        "c64": "complex64", "c128": "complex128",
    }
)  # fmt: skip
"""Other spellings of dtypes; the short ones are those of JAX's jaxprs, and so of our own tables."""


def dtype_name(text: str, choices: Iterable[str], hint: str) -> str:
    """The full name of a dtype.

    Raises:
      typer.BadParameter: it is not one of the choices; the message lists them.
    """
    name = text.strip().lower()
    return one_of(DTYPE_ALIASES.get(name, name), tuple(choices), "dtype", hint, original=text)


def one_of(word: str, choices: Iterable[str], noun: str, hint: str | None = None, original: str | None = None) -> str:
    """Returns the word if it is one of the choices.

    Args:
      noun: the kind of choice, such as "dtype".
      hint: the option that the word was given to.
      original: the user's text, if it differs from ``word``.

    Raises:
      typer.BadParameter: the word is not a choice; the message names the nearest one and lists all.
    """
    known = tuple(choices)
    if word in known:
        return word
    message = f"{original or word!r} is no {noun}; {suggest(original or word, known)}choose from {', '.join(known)}"
    raise typer.BadParameter(message, param_hint=hint)


def suggest(word: str, choices: Iterable[str]) -> str:
    """Returns ``did you mean ...? `` with the nearest choice, or an empty string if none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"did you mean {by_lower[close[0]]}? " if close else ""
