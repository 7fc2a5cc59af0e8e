"""The commands of ``tilewright``, and how they end: every error is one line on stderr."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tilewright._version import __version__
from tilewright.cli.commands import bench, build, cache, explain, info, report, tune
from tilewright.cli.output import FAILED, INTERRUPTED, USAGE, Failure, Interrupted, complain
from tilewright.errors import LockError, TilewrightError, UnsupportedError

NAME = "tilewright"

app = typer.Typer(
    name=NAME,
    help="JAX kernels that choose their own configuration, correctly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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

    Exit code 2: the arguments are wrong, or describe a call that an op refuses. 1: the arguments are right, but the
    command failed. 130: Ctrl-C. Each prints one line on stderr. Any other exception is a bug of ours and keeps its
    traceback.
    """
    try:
        code = app(None if arguments is None else list(arguments), prog_name=NAME, standalone_mode=False)
    except (Failure, Interrupted) as ended:
        complain(ended.message)
        sys.exit(ended.exit_code)
    except typer.TyperException as error:
        message = error.format_message()
        # A group called without a command has printed its help and has nothing to add.
        if message.strip() and len(sys.argv if arguments is None else ["", *arguments]) > 1:
            complain(message)
        sys.exit(USAGE)
    except TilewrightError as error:
        complain(str(error))
        sys.exit(USAGE if isinstance(error, UnsupportedError | LockError) else FAILED)
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        sys.exit(INTERRUPTED)
    if code == INTERRUPTED:  # typer's code for a KeyboardInterrupt that no command handled
        complain("interrupted")
    sys.exit(code if isinstance(code, int) else 0)
