"""HTML in which whatever is not markup already is escaped, by construction."""

import html
import re
import unicodedata

# Without content, so that they are closed at once: of HTML, and of SVG.
_VOID = frozenset({"meta", "circle", "line", "path", "rect"})
_SUSPECT = re.compile(r"[^\n\t -~]")
# Controls, invisible format characters (which also turn the direction of writing), lone surrogates, separators.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class Markup(str):
    """Text that is HTML; made by `element` and `joined` alone."""

    __slots__ = ()


def element(tag: str, /, *children: object, **attributes: object) -> Markup:
    """One element with its content.

    Args:
      children: markup, or anything else as text.
      attributes: ``class_`` is ``class``, ``aria_label`` is ``aria-label``; those that are ``None`` are left out.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{said}/>")
    return Markup(f"<{tag}{said}>{joined(*children)}</{tag}>")


def joined(*children: object, between: str = "") -> Markup:
    """Children one after the other."""
    return Markup(escaped(between).join(escaped(child) for child in children))


def escaped(value: object) -> Markup:
    """Text as HTML that shows it, markup as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(visible(str(value))))


def visible(text: str) -> str:
    """Text that spells out what a page cannot hold or a reader cannot see: ``\\x1b``, ``\\u202e``, ``\\ud800``."""
    return _SUSPECT.sub(_spell, text.replace("\r\n", "\n"))


def _spell(found: re.Match[str]) -> str:
    code = ord(found[0])
    if unicodedata.category(found[0]) not in _INVISIBLE and code & 0xFFFE != 0xFFFE and not 0xFDD0 <= code <= 0xFDEF:
        return found[0]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def word(value: object, limit: int = 400) -> str:
    """A value as one line of at most ``limit`` characters; said where it is cut."""
    text = str(value)
    return " ".join(text[:limit].split()) + (f"… ({len(text) - limit:,} more characters)" if len(text) > limit else "")
