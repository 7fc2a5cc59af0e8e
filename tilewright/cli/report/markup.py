"""HTML that is escaped by construction, except for text that is markup already."""

import html
import re
import unicodedata

# HTML and SVG elements without content, which are closed at once.
_VOID = frozenset({"meta", "circle", "line", "path", "rect"})
_SUSPECT = re.compile(r"[^\n\t -~]")
# Control and invisible format characters (including those that change the writing direction), lone surrogates,
# separators.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class Markup(str):
    """Text that is HTML; created only by `element` and `joined`."""

    __slots__ = ()


def element(tag: str, /, *children: object, **attributes: object) -> Markup:
    """One element with its content.

    Args:
      children: markup, or other values, which are escaped.
      attributes: ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; those that are ``None`` are left
        out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{joined(*children)}</{tag}>")


def joined(*children: object, between: str = "") -> Markup:
    """Concatenates children."""
    return Markup(escaped(between).join(escaped(child) for child in children))


def escaped(value: object) -> Markup:
    """Escapes text for HTML; returns markup unchanged."""
    return value if isinstance(value, Markup) else Markup(html.escape(visible(str(value))))


def visible(text: str) -> str:
    """Spells out characters that a page cannot hold or a reader cannot see: ``\\x1b``, ``\\u202e``, ``\\ud800``."""
    return _SUSPECT.sub(_spell, text.replace("\r\n", "\n"))


def _spell(found: re.Match[str]) -> str:
    code = ord(found[0])
    if unicodedata.category(found[0]) not in _INVISIBLE and code & 0xFFFE != 0xFFFE and not 0xFDD0 <= code <= 0xFDEF:
        return found[0]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def word(value: object, limit: int = 400) -> str:
    """A value as one line of at most ``limit`` characters; a cut is marked."""
    text = str(value)
    return " ".join(text[:limit].split()) + (f"… ({len(text) - limit:,} more characters)" if len(text) > limit else "")
