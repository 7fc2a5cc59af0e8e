"""The arguments and help of ``tilewright bench``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import options


@options.takes_call_options
def bench(
    target: options.Target,
    *,
    call: options.CallOptions,
    iters: Annotated[int, typer.Option(min=1, help="Timed samples of each implementation.")] = 10,
    json_file: Annotated[Path | None, options.option("--json", "Write all samples to a file.")] = None,
) -> None:
    """Time an op's cases on the backends present, side by side with what JAX has; or a function of yours.

    An op without --shape and --case: all cases of this device.
    """
    from tilewright.cli.targets import is_function

    if not (call.cases or call.shape or is_function(target) or call.shapes is not None):
        call = dataclasses.replace(call, cases=("all",))
    from tilewright.cli.benching import bench_and_report

    bench_and_report(target, call, iters=iters, json_file=json_file)
