"""What ``tilewright build`` does once its arguments are read."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.choices import meant, one_of
from tilewright.cli.device import here, named_device
from tilewright.cli.functions import import_named
from tilewright.cli.output import FAILED, Interrupted, complain, counted, stderr, stdout, table
from tilewright.errors import BuildError
from tilewright.kernels import CUDA_TABLES
from tilewright.kernels.cuda_build import (
    BuildCache,
    Group,
    GroupDone,
    GroupStarted,
    VariantTable,
    build,
    find,
    generate,
    groups_of,
)
from tilewright.kernels.cuda_build.devices import architecture, capability_of, parse_architecture
from tilewright.kernels.cuda_build.toolchain import missing
from tilewright.ops.utils.progress import event_bar, is_watched

if TYPE_CHECKING:
    from rich.console import Console


def named_tables(names: Sequence[str]) -> list[VariantTable]:
    """The tables of these names, or all that there are.

    Raises:
      typer.BadParameter: there is no table of one of the names.
    """
    found = [_find_table(name) for name in names or CUDA_TABLES]
    if not found:
        raise typer.BadParameter("there are no tables here; name one of yours: module:NAME", param_hint="--table")
    return found


def named_groups(tables: Sequence[VariantTable], architectures: Sequence[str], names: Sequence[str]) -> list[Group]:
    """The groups of these names, or all that there are, for each architecture, or else this GPU's.

    Raises:
      typer.BadParameter: a name or an architecture names nothing.
    """
    capabilities = _capabilities(architectures)
    known = {group for each in tables for group in each.groups}
    for name in names:
        one_of(name, sorted(known), "group", "--group")
    groups = [group for each in tables for capability in capabilities for group in groups_of(each, capability)]
    chosen = [group for group in groups if not names or group.name in names]
    if not chosen:
        wanted = ", ".join(architectures) or "this GPU"
        raise typer.BadParameter(f"none of these groups has anything for {wanted}", param_hint="--arch")
    return list(dict.fromkeys(chosen))


def architectures_of(devices: Sequence[str]) -> list[str]:
    """The architectures of GPUs by name.

    Raises:
      typer.BadParameter: a name is none of a GPU.
    """
    found = []
    for name in devices:
        capability = capability_of(named_device(name).device)
        if capability is None:
            raise typer.BadParameter(f"{name} is no NVIDIA GPU, and takes no CUDA kernels", param_hint="--device")
        found.append(architecture(capability))
    return found


def _capabilities(architectures: Sequence[str]) -> list[int]:
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
    if ":" not in name and name not in CUDA_TABLES:
        hint = f"{meant(name, CUDA_TABLES)}there are {', '.join(CUDA_TABLES)}; one of yours is module:NAME"
        raise typer.BadParameter(f"no table {name!r}; {hint}", param_hint="--table")
    found = import_named(CUDA_TABLES.get(name, name), "NAME")
    if not isinstance(found, VariantTable):
        raise typer.BadParameter(f"{name} is {found!r}, not a VariantTable", param_hint="--table")
    return found


class BuildProgress:
    """Shows the events of a build, and keeps what was finished.

    Attributes:
      done: what was finished so far.
    """

    def __init__(self, console: "Console", total: int):
        self.bar = event_bar(console, "{task.fields[running]}")
        self.bar.disable = not is_watched(sys.stderr)
        self.done: dict[Group, GroupDone] = {}
        self._running: list[Group] = []
        self._task = self.bar.add_task("building", total=total, running="")

    def on_event(self, event: Any) -> None:
        """Shows one event of a build."""
        match event:
            case GroupStarted():
                self._running.append(event.group)
            case GroupDone():
                self.done[event.group] = event
                if event.group in self._running:
                    self._running.remove(event.group)
        running = ", ".join(map(str, self._running))
        self.bar.update(self._task, completed=len(self.done), running=running)


def build_and_report(groups: Sequence[Group], jobs: int | None) -> int:
    """Builds, prints what was built, and returns the exit code.

    Raises:
      Interrupted: by Ctrl-C or SIGTERM.
    """
    trouble, interrupted = "", False
    progress = BuildProgress(stderr(), len(groups))
    with _terminated_as_interrupted(), progress.bar:
        try:
            build(groups, jobs=jobs, on_event=progress.on_event)
        except BuildError as error:
            trouble = error.message
            if error.output:
                print(error.output, file=sys.stderr)
        except KeyboardInterrupt:
            interrupted = True
    if progress.done:
        _print_groups(groups, {group: _took(done) for group, done in progress.done.items()})
    fresh = sum(1 for done in progress.done.values() if done.seconds)
    typer.echo(f"{fresh} of {len(groups)} built now, {len(progress.done) - fresh} were there, in {BuildCache().path}")
    if interrupted:
        kept = counted(len(progress.done), "finished group")
        raise Interrupted(f"interrupted; {kept} of {len(groups)} {'is' if len(progress.done) == 1 else 'are'} kept")
    if trouble:
        complain(trouble)
        return FAILED
    return 0


def write_sources(tables: Sequence[VariantTable], folder: Path) -> None:
    """Writes the generated sources of each table into a folder of its name, and says so."""
    for each in tables:
        files = generate(each)
        place = folder / each.name
        try:
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).write_text(text)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {str(place)!r}: {error.strerror}") from error
        typer.echo(f"{counted(len(files), 'file')} of {each.name} written to {place}")


def list_builds(groups: Sequence[Group]) -> int:
    """Prints of every group whether it is built, and if not, why it cannot be; returns the exit code."""
    found = {group: find(group) for group in groups}
    said = {}
    for group, library in found.items():
        why = "; ".join(missing(group.capability, group.table.packages))
        said[group] = _size(library) if library else f"no: {why}" if why else "no"
    _print_groups(groups, said)
    typer.echo(f"{sum(1 for library in found.values() if library)} of {len(groups)} built in {BuildCache().path}")
    return 0


def _print_groups(groups: Sequence[Group], said: dict[Group, str]) -> None:
    made = table("CUDA kernels", "table", "group", "architecture", "variants", "built", right=("variants",))
    for group in groups:
        variants = sum(1 for variant in group.table.in_group(group.name) if variant.runs_on(group.capability))
        made.add_row(group.table.name, group.name, f"sm_{group.target}", str(variants), said.get(group, "no"))
    stdout().print(made)


def _took(done: GroupDone) -> str:
    return f"in {done.seconds:.0f} s, {_size(done.library)}" if done.seconds else f"already, {_size(done.library)}"


def _size(library: Path) -> str:
    return f"{library.stat().st_size / 1e6:.1f} MB"


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Has SIGTERM end the build as Ctrl-C does, with its compilers, which are no children of a terminal."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
