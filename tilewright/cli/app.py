"""The commands of ``tilewright`` and how their errors end: one line on stderr, exit code 2."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tilewright._version import __version__
from tilewright.cli import bench, build, cache, explain, info, report, tune
from tilewright.cli.output import INTERRUPTED, USAGE, complain
from tilewright.errors import TilewrightError

app = typer.Typer(
    name="tilewright",
    help="JAX kernels that choose their own configuration, correctly.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("info")(info.info)
app.command("tune")(tune.tune)
app.command("bench")(bench.bench)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("build")(build.build)
app.add_typer(cache.app, name="cache")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process.

    What a user can get wrong is one line and exit code 2: bad arguments, a function that cannot be imported, a call
    that an op refuses. Anything else keeps its traceback, for it is ours.
    """
    try:
        code = app(None if arguments is None else list(arguments), standalone_mode=False)
    except (typer.TyperException, TilewrightError) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        # A group called without a command has printed its help and has nothing to add.
        if message.strip() and len(sys.argv if arguments is None else ["", *arguments]) > 1:
            complain(message)
        sys.exit(USAGE)
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
