"""The arguments and help of ``tilewright build``."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion, options


@options.takes_call_options
def build(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Build only what this needs: an op (everything of it without --shape and --case), or a function of "
            "yours: module:function.",
            show_default=False,
            autocompletion=completion.targets,
        ),
    ] = None,
    arch: Annotated[
        list[str] | None, options.option("--arch", "A GPU architecture, such as 90a; repeatable; default: this GPU's.")
    ] = None,
    device: Annotated[
        list[str] | None,
        options.option(
            "--device",
            "A GPU that need not be present, by JAX's name: 'NVIDIA H200'; repeatable.",
            autocompletion=completion.devices,
        ),
    ] = None,
    table: Annotated[
        list[str] | None, options.option("--table", "A table's name, or module:NAME; repeatable; default: all.")
    ] = None,
    group: Annotated[list[str] | None, options.option("--group", "Only this group; repeatable.")] = None,
    lock: Annotated[
        Path | None, options.option("--lock", "Build only what the decisions of a lock file need, on its device.")
    ] = None,
    *,
    call: options.CallOptions,
    jobs: Annotated[
        int | None, options.option("--jobs", "Compilers at once; default: by cores and memory.", "-j", min=1)
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Build nothing, show what is built.")] = False,
    sources: Annotated[
        Path | None, options.option("--sources", "Build nothing, write the generated C++ to a folder.")
    ] = None,
) -> None:
    """Compile CUDA kernels ahead of their first use: all, or what an op, a program or a lock file needs.

    Groups that are built or shipped already are kept. Ctrl-C keeps finished groups, and a group that fails does not
    stop the others.
    """
    from tilewright.cli.cuda.building import build_and_report, list_builds, named_tables, write_sources
    from tilewright.cli.cuda.needing import needs_of

    if sources is not None:
        write_sources(named_tables(table or []), sources)
        raise typer.Exit
    needs = needs_of(target, call, lock, table or [], arch or [], group or [], device or [])
    raise typer.Exit(list_builds(needs()) if list_only else build_and_report(needs, jobs))
