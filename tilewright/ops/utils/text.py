"""Text for people: times, tables, and the console that prints them."""

import io
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich takes a while to import
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

FILE_WIDTH = 200
"""Columns of output that no terminal limits: enough not to cut tables when a program reads them."""


def milliseconds(time_ms: float | None) -> str:
    """Formats a time with three significant digits; a dash if there is none."""
    if time_ms is None:
        return "–"
    return f"{time_ms:.3g} ms" if time_ms < 100 else f"{time_ms:.0f} ms"


def plain_console(**options: Any) -> "Console":
    """A console that prints text verbatim: the brackets of shapes and paths are not markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def output_width() -> int | None:
    """Columns of what is printed to the standard output; ``None`` for those of the terminal."""
    return None if plain_console(file=sys.stdout).is_terminal else FILE_WIDTH


def table(title: str, *columns: str, right: tuple[str, ...] = (), unwrapped: tuple[str, ...] = ()) -> "Table":
    """An empty table. Columns named in ``right`` hold figures; these and those in ``unwrapped`` do not wrap."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    new_table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        figures = column in right
        new_table.add_column(
            Text(column),
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures or column in unwrapped,
        )
    return new_table


def lines(*parts: tuple[str, str]) -> "Text":
    """Lines of text, each with its style, such as "dim"; none is parsed as markup."""
    from rich.text import Text

    return Text("\n").join([Text(text, style=style) for text, style in parts])


def as_text(shown: "Table") -> str:
    """A table as text, without styles, as wide as the standard output."""
    width = output_width() or plain_console(file=sys.stdout).width
    console = plain_console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
