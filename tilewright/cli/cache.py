"""``tilewright cache``: what earlier tunings left on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tilewright.ops.config.persistent import Entry, PersistentCache

app = typer.Typer(help="The tuned configs on disk: list, show, export, import, clear.", no_args_is_help=True)

Folder = Annotated[
    Path | None, typer.Option("--path", help="The folder of another cache than the user's.", show_default=False)
]


def _cache(folder: Path | None) -> "PersistentCache":
    import tilewright.modules  # noqa: F401  the types of the configs: the cache rebuilds only those that are loaded
    from tilewright.ops.config.persistent import PersistentCache

    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"{str(folder)!r} is no directory", param_hint="--path")
    return PersistentCache(folder)


@app.command("list")
def list_(path: Folder = None) -> None:
    """One line for each entry: the call, its config, its time."""
    from tilewright.cli.entries import entries_table
    from tilewright.cli.output import stdout

    cache = _cache(path)
    entries = cache.entries()
    if entries:
        stdout().print(entries_table(entries))
    typer.echo(f"{len(entries)} entries in {cache.path}")


@app.command()
def show(
    entry: Annotated[str, typer.Argument(help="The id that 'cache list' shows, or its beginning.")], path: Folder = None
) -> None:
    """Everything about one entry: key, config, toolchain, and every candidate that was measured."""
    from tilewright.cli.entries import entry_text

    typer.echo(entry_text(_find(_cache(path), entry)))


def _find(cache: "PersistentCache", wanted: str) -> "Entry":
    from tilewright.cli.entries import entry_id

    found = [entry for entry in cache.entries() if entry_id(entry).startswith(wanted.lower())]
    if not wanted or len(found) != 1:
        how_many = "no entry" if not found or not wanted else f"{len(found)} entries"
        raise typer.BadParameter(f"{how_many} of {cache.path} begins with {wanted!r}", param_hint="entry")
    return found[0]


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    path: Folder = None,
) -> None:
    """Write all entries into one file."""
    cache = _cache(path)
    try:
        count = cache.export(file)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(file)!r}: {error.strerror}") from error
    typer.echo(f"{count} entries written to {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What 'cache export' wrote.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace newer entries too.")] = False,
    path: Folder = None,
) -> None:
    """Take over the entries of an exported file that are newer than those here."""
    cache = _cache(path)
    try:
        count = cache.import_(file, overwrite=overwrite)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(f"{str(file)!r} is no export: {error}") from error
    typer.echo(f"{count} entries taken over into {cache.path}")


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    path: Folder = None,
) -> None:
    """Delete all entries, and what unfinished tunings have measured."""
    from tilewright.ops.execution.journal import unfinished

    cache = _cache(path)
    count = len(cache)
    if not yes:
        typer.confirm(f"Delete {count} entries of {cache.path}?", abort=True)
    unfinished(cache).clear()
    typer.echo(f"{cache.clear()} entries deleted from {cache.path}")
