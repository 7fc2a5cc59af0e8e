"""The work of ``tilewright tune --simulated``, after its arguments are read."""

import dataclasses

import typer

from tilewright.cli.device import here, named_device, on_device
from tilewright.cli.options import CallOptions
from tilewright.cli.output import FAILED, Failure, complain, counted
from tilewright.cli.targets import find_op, named_calls
from tilewright.kernels.op.choice import Choice, Platform
from tilewright.ops import Invocation
from tilewright.ops.program import find_invocations
from tilewright.ops.tuning import simulated
from tilewright.ops.tuning.libtpu import flops_per_cycle
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.topology import missing_compiler


def simulate_and_report(target: str, options: CallOptions, device: str) -> int:
    """Ranks the TPU kernels' configs of every call, prints and stores them; returns the exit code.

    Raises:
      typer.BadParameter: the device is no TPU that is simulated.
      Failure: libtpu is not installed.
    """
    here()
    known = named_device(device)
    try:
        flops_per_cycle(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    if missing := missing_compiler(known):
        raise Failure(f"nothing can be simulated here: {missing}")
    calls = named_calls(target, options, known)
    with on_device(known):
        each = [inv for call in calls for inv in find_invocations(call.function, *call.args)]
        found = {inv.key: dataclasses.replace(inv, device=known.device) for inv in each}
        spaces = {key: _of_kernels(inv) for key, inv in found.items()}
    if not any(spaces.values()):
        complain(f"{target} calls no kernel for TPUs that serves it on {known.name}; there is nothing to simulate")
        return FAILED
    stored = sum(_ranked(inv, spaces[key]) for key, inv in found.items())
    typer.echo(f"{counted(stored, 'call')} of {len(found)} decided by simulation, until tuned on a {known.name}")
    return 0 if stored else FAILED


def _of_kernels(inv: Invocation[Choice, object]) -> list[Choice]:
    """The configs of a call's kernels for TPUs, the preferred one first."""
    backends = find_op(inv.kernel.name).backends
    space = inv.kernel.config_space(inv)
    return list(dict.fromkeys(each for each in space if backends.of(each).platform is Platform.PALLAS))


def _ranked(inv: Invocation[Choice, object], configs: list[Choice]) -> bool:
    """Prints the configs of a call with their times; True if the best one is stored."""
    typer.echo(f"{inv.kernel.name} {inv.direction} {describe_key(inv.key)}")
    if not configs:
        typer.echo("  no kernel for TPUs serves it")
        return False
    cost = find_op(inv.kernel.name).cost(inv)
    found = simulated.ranked(inv, configs, flops=cost.flops, bytes_accessed=cost.bytes)
    for each in found:
        time = each.why_not if each.seconds is None else f"{each.seconds * 1e3:.4g} ms, {each.report.spills} spills"
        typer.echo(f"  {describe_config(each.config)}: {time}")
    return simulated.store(inv, found)
