"""``tilewright cache``: the tuned configs that earlier tunings stored on disk."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.output import FAILED, Failure, complain, counted

app = typer.Typer(help="The tuned configs on disk: list, show, remove, export, import, clear.", no_args_is_help=True)

Folder = Annotated[
    Path | None, typer.Option("--path", help="The folder of a cache other than the user's.", show_default=False)
]


@app.command("list")
def list_(path: Folder = None) -> None:
    """Show one row for each entry: its id, the call, its config, its time."""
    from tilewright.cli.entries import entries_table, open_cache
    from tilewright.cli.output import stdout

    cache = open_cache(path)
    entries = cache.entries()
    if entries:
        stdout().print(entries_table(entries))
    typer.echo(f"{counted(len(entries), 'entry', 'entries')} in {cache.path}")


@app.command()
def show(
    entry: Annotated[
        str,
        typer.Argument(help="The id that 'cache list' shows, or its beginning.", autocompletion=completion.entry_ids),
    ],
    path: Folder = None,
) -> None:
    """Show everything about one entry: key, config, toolchain, and every candidate that was measured."""
    from tilewright.cli.entries import entry_text, find_entry, open_cache

    cache = open_cache(path)
    typer.echo(entry_text(find_entry(cache.entries(), entry, str(cache.path))))


@app.command()
def remove(
    entries: Annotated[
        list[str],
        typer.Argument(help="Ids that 'cache list' shows, or their beginnings.", autocompletion=completion.entry_ids),
    ],
    path: Folder = None,
) -> None:
    """Forget single entries: the next tuning measures their calls anew."""
    from tilewright.cli.entries import find_entry, open_cache

    cache = open_cache(path)
    known = cache.entries()
    found = {each.key: each for each in (find_entry(known, entry, str(cache.path)) for entry in entries)}
    removed = sum(cache.remove(key) for key in found)
    typer.echo(f"{counted(removed, 'entry', 'entries')} removed from {cache.path}")
    if removed < len(found):
        raise Failure(f"{counted(len(found) - removed, 'entry', 'entries')} could not be removed")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The file to write; an existing one is replaced.")], path: Folder = None
) -> None:
    """Write all entries into one file, which 'cache import' and 'report' read."""
    from tilewright.cli.entries import open_cache
    from tilewright.cli.files import check_new_file, writing

    check_new_file(file, "file")
    cache = open_cache(path)
    with writing(file, "file"):
        count = cache.export(file)
    typer.echo(f"{counted(count, 'entry', 'entries')} written to {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that 'cache export' wrote.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace newer entries too.")] = False,
    path: Folder = None,
) -> None:
    """Take over the entries of an exported file that are newer than those here."""
    from tilewright.cli.documents import Kind, document_of, kind_of
    from tilewright.cli.entries import open_cache

    try:
        kind = kind_of(document_of(file))
        if kind is not None and kind is not Kind.EXPORT:
            raise typer.BadParameter(f"{str(file)!r} is no export: it is {kind.value}")
        cache = open_cache(path)
        count = cache.import_(file, overwrite=overwrite)
    except ValueError as error:
        raise typer.BadParameter(f"{str(file)!r} is no export: {error}") from error
    typer.echo(f"{counted(count, 'entry', 'entries')} taken over into {cache.path}")


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    lowered: Annotated[bool, typer.Option("--lowered", help="Delete the lowered kernels, and no config.")] = False,
    path: Folder = None,
) -> None:
    """Delete all entries, and what unfinished tunings have measured."""
    from tilewright.cli.entries import open_cache
    from tilewright.ops.lowering.lowered_files import LoweredFiles
    from tilewright.ops.tuning.journal import unfinished

    if lowered:
        files = LoweredFiles(path)
        _delete(files.clear, lambda: files.usage()[0], ("file", "files"), files.path, yes)
        return
    cache = open_cache(path)

    def delete() -> int:
        unfinished(cache).clear()
        return cache.clear()

    _delete(delete, lambda: len(cache), ("entry", "entries"), cache.path, yes)


def _delete(
    delete: Callable[[], int], count: Callable[[], int], nouns: tuple[str, str], folder: Path, yes: bool
) -> None:
    if not yes and not _confirmed(f"Delete {counted(count(), *nouns)} of {folder}?"):
        complain("nothing was deleted")
        raise typer.Exit(FAILED)
    typer.echo(f"{counted(delete(), *nouns)} deleted from {folder}")
    if left := count():
        raise Failure(f"{counted(left, *nouns)} could not be deleted")


def _confirmed(question: str) -> bool:
    """Asks the user; returns True for yes. Without an answer it raises a usage error."""
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
        raise typer.BadParameter("there is nobody to ask; --yes deletes without asking")
    return answer.strip().lower() in ("y", "yes")
