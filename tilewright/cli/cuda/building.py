"""The work of ``tilewright build``, after its arguments are read."""

import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from tilewright.cli.choices import one_of, suggest
from tilewright.cli.device import here, named_device
from tilewright.cli.functions import import_named
from tilewright.cli.output import FAILED, Interrupted, complain, counted, stderr, stdout
from tilewright.errors import BuildError
from tilewright.kernels import cuda_tables
from tilewright.kernels.cuda import (
    BuildCache,
    Event,
    Group,
    GroupDone,
    GroupFailed,
    GroupStarted,
    VariantTable,
    build,
    generate,
    groups_of,
    locate,
)
from tilewright.kernels.cuda.devices import architecture, capability_of, parse_architecture
from tilewright.kernels.cuda.shipped import shipped_folders
from tilewright.kernels.cuda.toolchain import missing
from tilewright.ops.tuning.progress import event_bar, is_interactive
from tilewright.ops.utils.text import table

if TYPE_CHECKING:
    from rich.console import Console


def named_tables(names: Sequence[str]) -> list[VariantTable]:
    """The tables with these names, or all tables.

    Raises:
      typer.BadParameter: no table has one of the names.
    """
    found = [_find_table(name) for name in names or cuda_tables()]
    if not found:
        raise typer.BadParameter("there are no tables here; name one of yours: module:NAME", param_hint="--table")
    return found


def named_groups(tables: Sequence[VariantTable], architectures: Sequence[str], names: Sequence[str]) -> list[Group]:
    """The groups with these names, or all groups, for each architecture or else for this GPU.

    Raises:
      typer.BadParameter: a name or an architecture is unknown.
    """
    targets = capabilities(architectures)
    groups = [group for each in tables for capability in targets for group in groups_of(each, capability)]
    chosen = only_named(groups, names, {group for each in tables for group in each.groups})
    if not chosen:
        described = ", ".join(architectures) or "this GPU"
        raise typer.BadParameter(f"none of these groups has anything for {described}", param_hint="--arch")
    return chosen


def only_named(groups: Sequence[Group], names: Sequence[str], known: Collection[str] | None = None) -> list[Group]:
    """The groups with these names, or all if no name is given; each once.

    Args:
      known: the existing names; by default those of the groups.

    Raises:
      typer.BadParameter: no group has one of the names.
    """
    for name in names:
        one_of(name, sorted({group.name for group in groups} if known is None else known), "group", "--group")
    return [group for group in dict.fromkeys(groups) if not names or group.name in names]


def architectures_of(devices: Sequence[str]) -> list[str]:
    """The architectures of GPUs by name.

    Raises:
      typer.BadParameter: a name is not that of an NVIDIA GPU.
    """
    found = []
    for name in devices:
        capability = capability_of(named_device(name).device)
        if capability is None:
            raise typer.BadParameter(f"{name} is no NVIDIA GPU, and takes no CUDA kernels", param_hint="--device")
        found.append(architecture(capability))
    return found


def capabilities(architectures: Sequence[str]) -> list[int]:
    """Ten times the compute capabilities of architectures such as "90a", or else of this GPU.

    Raises:
      typer.BadParameter: an architecture is unknown, or none is given and there is no NVIDIA GPU here.
    """
    if not architectures:
        capability = capability_of(here())
        if capability is None:
            raise typer.BadParameter("there is no NVIDIA GPU here to build for; name one: 90a", param_hint="--arch")
        return [capability]
    try:
        return [parse_architecture(text) for text in architectures]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from error


def _find_table(name: str) -> VariantTable:
    known = cuda_tables()
    if ":" not in name and name not in known:
        hint = f"{suggest(name, known)}there are {', '.join(known)}; one of yours is module:NAME"
        raise typer.BadParameter(f"no table {name!r}; {hint}", param_hint="--table")
    found = import_named(known.get(name, name), "TABLE")
    if not isinstance(found, VariantTable):
        raise typer.BadParameter(f"{name} is {found!r}, not a VariantTable", param_hint="--table")
    return found


class BuildProgress:
    """Shows the events of a build, and keeps its results: a bar in a terminal, else a line for each event.

    Attributes:
      done: the groups finished so far.
      failed: the groups that could not be built.
    """

    def __init__(self, console: "Console", total: int):
        self.bar = event_bar(console, "{task.fields[running]}")
        self.done: dict[Group, GroupDone] = {}
        self.failed: dict[Group, BuildError] = {}
        self._running: list[Group] = []
        self.bar.disable = not is_interactive(sys.stderr)
        self._task = self.bar.add_task("building", total=total, running="")

    def on_event(self, event: Event) -> None:
        """Shows one event of a build."""
        if not isinstance(event, GroupStarted) and event.group in self._running:
            self._running.remove(event.group)
        match event:
            case GroupStarted():
                self._running.append(event.group)
                self._print(f"building {event.group}")
            case GroupDone():
                self.done[event.group] = event
                if event.seconds:
                    self._print(f"built {event.group} {_build_result(event)}")
            case GroupFailed():
                self.failed[event.group] = event.error
                self._print(f"failed: {event.error.message}")
        running = ", ".join(map(str, self._running))
        self.bar.update(self._task, completed=len(self.finished), running=running)

    @property
    def finished(self) -> set[Group]:
        """The groups that were finished or failed."""
        return {*self.done, *self.failed}

    def set_total(self, total: int) -> None:
        """Sets the number of groups."""
        self.bar.update(self._task, total=total)

    def _print(self, text: str) -> None:
        if self.bar.disable:
            (task,) = self.bar.tasks
            print(f"{text} ({len(self.finished)} of {task.total})", file=sys.stderr, flush=True)

    def report_failures(self) -> None:
        """Prints, for each group that failed, the compiler's output and the reason; equal ones once."""
        outputs = dict.fromkeys(error.output for error in self.failed.values() if error.output)
        for output in outputs:
            print(output, file=sys.stderr)
        for message in dict.fromkeys(error.message for error in self.failed.values()):
            complain(message)


def build_and_report(needs: Callable[[], Sequence[Group]], jobs: int | None) -> int:
    """Builds, prints the results, and returns the exit code; a failure does not stop the other builds.

    Args:
      needs: returns the groups to build, as far as they are known; asked again when all of those are built.

    Raises:
      Interrupted: by Ctrl-C or SIGTERM.
    """
    groups = list(needs())
    interrupted = False
    progress = BuildProgress(stderr(), len(groups))
    with terminated_as_interrupted(), progress.bar:
        try:
            waiting = groups
            while waiting:
                build(waiting, jobs=jobs, on_event=progress.on_event, keep_going=True)
                any_built = any(done.seconds for done in progress.done.values())
                waiting = [group for group in needs() if group not in progress.finished] if any_built else []
                groups = groups + waiting
                progress.set_total(len(groups))
        except KeyboardInterrupt:
            interrupted = True
    if progress.done:
        _print_groups(groups, {group: _build_result(done) for group, done in progress.done.items()})
    if not groups:
        typer.echo("nothing of it needs a kernel that nvcc compiles" + _compiler_remark())
        return 0
    now = sum(1 for done in progress.done.values() if done.seconds)
    typer.echo(f"{now} of {len(groups)} built now, {len(progress.done) - now} were there, in {BuildCache().path}")
    if interrupted:
        kept = counted(len(progress.done), "finished group")
        raise Interrupted(f"interrupted; {kept} of {len(groups)} {'is' if len(progress.done) == 1 else 'are'} kept")
    progress.report_failures()
    return FAILED if progress.failed else 0


def _compiler_remark() -> str:
    """A remark for an empty list of groups if a missing compiler may be the reason; else empty."""
    reasons = missing(None)
    return f"; but nothing could be compiled here: {'; '.join(reasons)}" if reasons else ""


def write_sources(tables: Sequence[VariantTable], folder: Path) -> None:
    """Writes the generated sources of each table into a folder of its name, and reports it."""
    for each in tables:
        files = generate(each)
        table_folder = folder / each.name
        try:
            table_folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (table_folder / name).write_text(text)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {str(table_folder)!r}: {error.strerror}") from error
        typer.echo(f"{counted(len(files), 'file')} of {each.name} written to {table_folder}")


def list_builds(groups: Sequence[Group]) -> int:
    """Prints for every group whether it is built, or why it cannot be; returns the exit code."""
    if not groups:
        typer.echo("nothing of it needs a kernel that nvcc compiles" + _compiler_remark())
        return 0
    found = {group: locate(group) for group in groups}
    states = {}
    for group, library in found.items():
        why = "; ".join(missing(group.capability, group.table.packages))
        states[group] = _library_info(library.path, library.shipped) if library else f"no: {why}" if why else "no"
    _print_groups(groups, states)
    shipped = sum(1 for library in found.values() if library and library.shipped)
    built = sum(1 for library in found.values() if library) - shipped
    typer.echo(f"{built} of {len(groups)} built in {BuildCache().path}")
    if shipped:
        typer.echo(f"{shipped} shipped in {', '.join(map(str, shipped_folders()))}")
    return 0


def _print_groups(groups: Sequence[Group], states: dict[Group, str]) -> None:
    rows = table("CUDA kernels", "table", "group", "architecture", "variants", "built", right=("variants",))
    for group in groups:
        variants = sum(1 for variant in group.table.in_group(group.name) if variant.runs_on(group.capability))
        rows.add_row(group.table.name, group.name, f"sm_{group.target}", str(variants), states.get(group, "no"))
    stdout().print(rows)


def _build_result(done: GroupDone) -> str:
    if done.seconds:
        return f"in {done.seconds:.0f} s, {size_of(done.library)}"
    return _library_info(done.library, done.shipped) if done.shipped else f"already, {size_of(done.library)}"


def _library_info(library: Path, shipped: bool) -> str:
    return f"shipped, {size_of(library)}" if shipped else size_of(library)


def size_of(file: Path) -> str:
    """The size of a file, for people."""
    return f"{file.stat().st_size / 1e6:.1f} MB"


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM end the build as Ctrl-C does, including its compilers, which no terminal would signal."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
