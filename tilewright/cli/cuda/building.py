"""What ``tilewright build`` does once its arguments are read."""

import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from tilewright.cli.choices import meant, one_of
from tilewright.cli.device import here, named_device
from tilewright.cli.functions import import_named
from tilewright.cli.output import FAILED, Interrupted, complain, counted, stderr, stdout, table
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

if TYPE_CHECKING:
    from rich.console import Console


def named_tables(names: Sequence[str]) -> list[VariantTable]:
    """The tables of these names, or all that there are.

    Raises:
      typer.BadParameter: there is no table of one of the names.
    """
    found = [_find_table(name) for name in names or cuda_tables()]
    if not found:
        raise typer.BadParameter("there are no tables here; name one of yours: module:NAME", param_hint="--table")
    return found


def named_groups(tables: Sequence[VariantTable], architectures: Sequence[str], names: Sequence[str]) -> list[Group]:
    """The groups of these names, or all that there are, for each architecture, or else this GPU's.

    Raises:
      typer.BadParameter: a name or an architecture names nothing.
    """
    wanted = capabilities(architectures)
    groups = [group for each in tables for capability in wanted for group in groups_of(each, capability)]
    chosen = only_named(groups, names, {group for each in tables for group in each.groups})
    if not chosen:
        said = ", ".join(architectures) or "this GPU"
        raise typer.BadParameter(f"none of these groups has anything for {said}", param_hint="--arch")
    return chosen


def only_named(groups: Sequence[Group], names: Sequence[str], known: Collection[str] | None = None) -> list[Group]:
    """The groups of these names, or all if there is no name; each once.

    Args:
      known: the names that there are; by default those of the groups.

    Raises:
      typer.BadParameter: there is no group of one of the names.
    """
    for name in names:
        one_of(name, sorted({group.name for group in groups} if known is None else known), "group", "--group")
    return [group for group in dict.fromkeys(groups) if not names or group.name in names]


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


def capabilities(architectures: Sequence[str]) -> list[int]:
    """The compute capabilities, times ten, of architectures such as "90a", or else of this GPU.

    Raises:
      typer.BadParameter: one is none, or none is named and this is no such GPU.
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
        hint = f"{meant(name, known)}there are {', '.join(known)}; one of yours is module:NAME"
        raise typer.BadParameter(f"no table {name!r}; {hint}", param_hint="--table")
    found = import_named(known.get(name, name), "NAME")
    if not isinstance(found, VariantTable):
        raise typer.BadParameter(f"{name} is {found!r}, not a VariantTable", param_hint="--table")
    return found


class BuildProgress:
    """Shows the events of a build, and keeps what was finished: a bar in a terminal, else a line for each event.

    Attributes:
      done: what was finished so far.
      failed: what could not be built.
    """

    def __init__(self, console: "Console", total: int):
        self.bar = event_bar(console, "{task.fields[running]}")
        self.done: dict[Group, GroupDone] = {}
        self.failed: dict[Group, BuildError] = {}
        self._total = total
        self._watched = is_interactive(sys.stderr)
        self._running: list[Group] = []
        self.bar.disable = not self._watched
        self._task = self.bar.add_task("building", total=total, running="")

    def on_event(self, event: Event) -> None:
        """Shows one event of a build."""
        if not isinstance(event, GroupStarted) and event.group in self._running:
            self._running.remove(event.group)
        match event:
            case GroupStarted():
                self._running.append(event.group)
                self._say(f"building {event.group}")
            case GroupDone():
                self.done[event.group] = event
                if event.seconds:
                    self._say(f"built {event.group} {_took(event)}")
            case GroupFailed():
                self.failed[event.group] = event.error
                self._say(f"failed: {event.error.message}")
        running = ", ".join(map(str, self._running))
        self.bar.update(self._task, completed=len(self.done) + len(self.failed), running=running)

    @property
    def seen(self) -> set[Group]:
        """The groups that were finished or failed."""
        return {*self.done, *self.failed}

    def expect(self, total: int) -> None:
        """Says of how many groups it is from now on."""
        self._total = total
        self.bar.update(self._task, total=total)

    def _say(self, what: str) -> None:
        if not self._watched:
            ended = len(self.done) + len(self.failed)
            print(f"{what} ({ended} of {self._total})", file=sys.stderr, flush=True)

    def report_failures(self) -> None:
        """Says of each group that could not be built why, with what the compiler printed, once for equal reasons."""
        outputs = dict.fromkeys(error.output for error in self.failed.values() if error.output)
        for output in outputs:
            print(output, file=sys.stderr)
        for message in dict.fromkeys(error.message for error in self.failed.values()):
            complain(message)


def build_and_report(needs: Callable[[], Sequence[Group]], jobs: int | None) -> int:
    """Builds, prints what was built, and returns the exit code: what fails does not keep the others from being built.

    Args:
      needs: what is to be built, as far as it can be told; asked again when all of that is built.

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
                fresh = any(done.seconds for done in progress.done.values())
                waiting = [group for group in needs() if group not in progress.seen] if fresh else []
                groups = groups + waiting
                progress.expect(len(groups))
        except KeyboardInterrupt:
            interrupted = True
    if progress.done:
        _print_groups(groups, {group: _took(done) for group, done in progress.done.items()})
    if not groups:
        typer.echo("nothing of it needs a kernel that nvcc compiles" + _as_far_as_can_be_told())
        return 0
    now = sum(1 for done in progress.done.values() if done.seconds)
    typer.echo(f"{now} of {len(groups)} built now, {len(progress.done) - now} were there, in {BuildCache().path}")
    if interrupted:
        kept = counted(len(progress.done), "finished group")
        raise Interrupted(f"interrupted; {kept} of {len(groups)} {'is' if len(progress.done) == 1 else 'are'} kept")
    progress.report_failures()
    return FAILED if progress.failed else 0


def _as_far_as_can_be_told() -> str:
    """A remark for where a missing compiler may be why nothing is needed; else empty."""
    reasons = missing(None)
    return f"; but nothing could be compiled here: {'; '.join(reasons)}" if reasons else ""


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
    if not groups:
        typer.echo("nothing of it needs a kernel that nvcc compiles" + _as_far_as_can_be_told())
        return 0
    found = {group: locate(group) for group in groups}
    said = {}
    for group, place in found.items():
        why = "; ".join(missing(group.capability, group.table.packages))
        said[group] = _whence(place.path, place.shipped) if place else f"no: {why}" if why else "no"
    _print_groups(groups, said)
    shipped = sum(1 for place in found.values() if place and place.shipped)
    built = sum(1 for place in found.values() if place) - shipped
    typer.echo(f"{built} of {len(groups)} built in {BuildCache().path}")
    if shipped:
        typer.echo(f"{shipped} shipped in {', '.join(map(str, shipped_folders()))}")
    return 0


def _print_groups(groups: Sequence[Group], said: dict[Group, str]) -> None:
    made = table("CUDA kernels", "table", "group", "architecture", "variants", "built", right=("variants",))
    for group in groups:
        variants = sum(1 for variant in group.table.in_group(group.name) if variant.runs_on(group.capability))
        made.add_row(group.table.name, group.name, f"sm_{group.target}", str(variants), said.get(group, "no"))
    stdout().print(made)


def _took(done: GroupDone) -> str:
    if done.seconds:
        return f"in {done.seconds:.0f} s, {size_of(done.library)}"
    return _whence(done.library, done.shipped) if done.shipped else f"already, {size_of(done.library)}"


def _whence(library: Path, shipped: bool) -> str:
    return f"shipped, {size_of(library)}" if shipped else size_of(library)


def size_of(file: Path) -> str:
    """The size of a file, for people."""
    return f"{file.stat().st_size / 1e6:.1f} MB"


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Has SIGTERM end the build as Ctrl-C does, with its compilers, which are no children of a terminal."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
