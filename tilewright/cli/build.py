"""``tilewright build``."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion


def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", help="A GPU architecture, such as 90a; repeatable; else this GPU's.", show_default=False
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            help="A GPU that is not here, by JAX's name: 'NVIDIA H200'; repeatable.",
            show_default=False,
            autocompletion=completion.devices,
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="A table's name, or module:NAME; repeatable; else all.", show_default=False),
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Only this group; repeatable.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Compilers at once; else by cores and memory.", show_default=False),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Build nothing, show what is built.")] = False,
    sources: Annotated[
        Path | None,
        typer.Option("--sources", help="Build nothing, write the generated C++ to a folder.", show_default=False),
    ] = None,
) -> None:
    """Compile CUDA kernels ahead of their first use.

    What is built already is left alone. Ctrl-C keeps what was finished.
    """
    from tilewright.cli.building import (
        architectures_of,
        build_and_report,
        list_builds,
        named_groups,
        named_tables,
        write_sources,
    )

    tables = named_tables(table or [])
    if sources is not None:
        write_sources(tables, sources)
        raise typer.Exit
    groups = named_groups(tables, [*(arch or []), *architectures_of(device or [])], group or [])
    raise typer.Exit(list_builds(groups) if list_only else build_and_report(groups, jobs))
