"""Finds the compiled groups that an op, a program or a lock file needs."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

from tilewright.cli.cuda.building import architectures_of, capabilities, named_groups, named_tables, only_named
from tilewright.cli.device import here, named_device, on_device
from tilewright.cli.mistakes import first_line
from tilewright.cli.options import CallOptions
from tilewright.cli.output import complain, counted
from tilewright.cli.targets import find_op, is_function, named_calls
from tilewright.errors import UnsupportedError
from tilewright.kernels import OPS, kernel
from tilewright.kernels.cuda import Group
from tilewright.kernels.cuda.devices import architecture
from tilewright.kernels.cuda.kernel import recording_groups
from tilewright.ops import Lock, default_executor
from tilewright.ops.config.context import inspection_only
from tilewright.ops.config.lockfile import Decision, key_fields
from tilewright.ops.config.persistent import REBUILD_ERRORS, rebuild_config
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.kernel.builds import Build
from tilewright.ops.kernel.kernel import Invocation, live_kernel
from tilewright.ops.lowering.programs import Decisions
from tilewright.ops.program import lower
from tilewright.ops.types import Device
from tilewright.ops.utils.device import device_of_fingerprint

type Needs = Callable[[], list[Group]]
"""Returns the groups known to be needed; once some are built, their facts may call for others."""


def needs_of(
    target: str | None,
    options: CallOptions,
    lock: Path | None,
    tables: Sequence[str],
    architectures: Sequence[str],
    names: Sequence[str],
    devices: Sequence[str] = (),
) -> Needs:
    """Translates the arguments of ``tilewright build`` into the groups to build.

    Raises:
      typer.BadParameter: the arguments exclude each other, or name something unknown.
    """
    if sum((target is not None, lock is not None, bool(tables))) > 1:
        raise typer.BadParameter("give one of a target, --lock and --table")
    if target is None and options.describes_call:
        raise typer.BadParameter("a shape or a case is that of an op, which must be named")
    is_call = target is not None and (is_function(target) or options.describes_call)
    if not is_call:
        architectures = [*architectures, *architectures_of(devices)]
    if target is None and lock is None:
        groups = named_groups(named_tables(tables), architectures, names)
        return lambda: groups
    if target is not None and not is_call:
        groups = only_named(groups_of_op(target, architectures), names)
        return lambda: groups
    if architectures:
        reason = (
            "a lock file is of one device" if target is None else "what a call needs depends on the device (--device)"
        )
        raise typer.BadParameter(f"{reason}: --arch is for tables and whole ops", param_hint="--arch")
    if len(devices) > 1:
        raise typer.BadParameter("what a call needs depends on the device: give one", param_hint="--device")
    if lock is not None:
        return lambda: only_named(groups_of_lock(lock), names)
    return lambda: only_named(groups_of_calls(target or "", options, devices[0] if devices else None), names)


def groups_of_op(name: str, architectures: Sequence[str]) -> list[Group]:
    """Every group of an op, for each architecture or else for this GPU.

    Raises:
      typer.BadParameter: the op or an architecture is unknown.
    """
    op = find_op(name)
    devices = [
        Device("gpu", f"sm_{architecture(capability)}", divmod(capability, 10), present=False)
        for capability in capabilities(architectures)
    ]
    return _groups(build for device in devices for build in op.all_builds(device))


def groups_of_calls(target: str, options: CallOptions, device: str | None = None) -> list[Group]:
    """The groups that a program's calls would run by if everything were built; the program is lowered, not run.

    Args:
      device: the name of a device that is not present; this process's device by default.

    Raises:
      typer.BadParameter: the target or its options are wrong.
      Failure: the user's module or function raised.
    """
    here()
    known = None if device is None else named_device(device)
    chooser, instead = default_executor().chooser, []
    # Both also apply while named_calls traces the calls to check them.
    with inspection_only(), recording_groups() as noted:
        calls = named_calls(target, options, known)
        with on_device(known), Decisions() as decisions:
            for call in calls:
                lower(call.function, call.args, {})
            if isinstance(chooser, ConfigSelectorChain):
                instead = [found for decision in decisions if (found := chooser.not_built(*decision)) is not None]
    return _groups([*noted, *(build for _, builds in instead for build in builds)])


def groups_of_lock(file: Path) -> list[Group]:
    """The groups that the decisions of a lock file need on its device, which need not be present.

    Decisions on foreign ops, or on other versions of ours, are skipped, with a line that says so.

    Raises:
      LockError: the file cannot be used.
    """
    lock = Lock.load(file)
    device = device_of_fingerprint(lock.device)
    found: list[Build] = []
    skipped: dict[str, int] = {}
    for decision in lock.decisions:
        try:
            found += _builds_of(decision, device)
        except (LookupError, UnsupportedError, *REBUILD_ERRORS) as error:
            why = f"{decision.op}: {first_line(error)}"
            skipped[why] = skipped.get(why, 0) + 1
    for why, number in skipped.items():
        complain(f"{counted(number, 'decision')} of {file} passed over, on {why}")
    return _groups(found)


def _builds_of(decision: Decision, device: Device) -> Sequence[Build]:
    """The builds that one decision needs.

    Raises:
      LookupError, UnsupportedError, or one of ``REBUILD_ERRORS``: its op, implementation or config is unknown here.
    """
    fields = key_fields(decision.key)
    known = live_kernel(decision.op, fields["version"])
    if known is None and decision.op not in OPS:
        raise LookupError("there is no such op here")
    op = kernel(decision.op) if known is None else known
    if op.version != fields["version"]:
        raise LookupError(f"its version here is {op.version}, not {fields['version']}")
    inv = Invocation.of_description(op, fields, "forward" if decision.direction == "forward" else "backward", device)
    config = rebuild_config(decision.config, op.config_type(inv))
    return op.config_builds(inv, config)


def _groups(builds: Iterable[Build]) -> list[Group]:
    return list(dict.fromkeys(build for build in builds if isinstance(build, Group)))
