"""The arguments and help of ``tilewright tune``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tilewright.cli import options


@options.takes_call_options
def tune(
    target: options.Target,
    *,
    call: options.CallOptions,
    budget: Annotated[
        float | None,
        options.option("--budget", "Seconds for the whole tuning, builds included; default: 120 for each call."),
    ] = None,
    call_budget: Annotated[float | None, options.option("--call-budget", "Seconds for one call.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what the cache holds.")] = False,
    isolation: Annotated[
        Literal["auto", "process", "none"], typer.Option(help="Run candidates in a separate process.")
    ] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds for one candidate in a separate process.")] = 120.0,
    json_file: Annotated[Path | None, options.option("--json", "Write every candidate's times to a file.")] = None,
    lock: Annotated[
        Path | None, options.option("--lock", "Pin the winners in a lock file, and keep its earlier decisions.")
    ] = None,
    device: options.Device = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Rank TPU kernels for --device by libtpu's simulator; run nothing.")
    ] = False,
) -> None:
    """Measure the candidates of every kernel call and keep the winners for later programs.

    Kernels in CUDA C++ are compiled while others are measured. Those that are not built in time are left out, named,
    and go on being compiled for the next time.

    Candidates run in a separate process: a crash or a hang is recorded, and the tuning goes on. Ctrl-C keeps all
    measurements, and the next run resumes a tuning that was killed.

    With --simulated nothing is measured: configs of TPU kernels are compiled for a TPU that is not here, and ranked by
    the cycles of libtpu's simulator. The best one decides calls on such a TPU until they are tuned there.
    """
    if simulated != (device is not None):
        raise typer.BadParameter("--simulated and --device belong together: measured is this process's device alone")
    for option, seconds in (("--budget", budget), ("--call-budget", call_budget)):
        if seconds is not None and not seconds > 0:
            raise typer.BadParameter(f"{seconds} is not a positive number of seconds", param_hint=option)
    if simulated and device is not None:
        from tilewright.cli.simulating import simulate_and_report

        raise typer.Exit(simulate_and_report(target, call, device))
    from tilewright.cli.mistakes import user_mistakes
    from tilewright.cli.tuning import tune_and_report
    from tilewright.ops import Tuner

    limits = {"budget_s": budget, "call_budget_s": call_budget}
    with user_mistakes("--timeout"):
        tuner = Tuner(isolation=isolation, timeout_s=timeout)
    raise typer.Exit(tune_and_report(target, call, tuner, again=again, json_file=json_file, lock_file=lock, **limits))
