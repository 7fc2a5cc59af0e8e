"""The arguments and help of ``tilewright bench``."""

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import options


def bench(
    target: options.Target,
    shape: options.Shape = None,
    case: options.Cases = None,
    kv_heads: options.KvHeads = None,
    kv_length: options.KvLength = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    extra: options.Extra = None,
    shapes: options.Shapes = None,
    backward: options.Backward = True,
    iters: Annotated[int, typer.Option(help="Timed samples of each implementation.")] = 10,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all samples to a file.", show_default=False)
    ] = None,
) -> None:
    """Time an op's cases on the backends present, side by side with what JAX has; or a function of yours.

    An op without --shape and --case: all cases of this device.
    """
    from tilewright.cli.targets import is_function

    cases = tuple(case or ()) or (() if shape or is_function(target) or shapes is not None else ("all",))
    call = options.CallOptions(shape, cases, kv_heads, kv_length, causal, dtype, tuple(extra or ()), shapes, backward)
    if iters < 1:
        raise typer.BadParameter(f"{iters} is not at least 1", param_hint="--iters")
    from tilewright.cli.benching import bench_and_report

    bench_and_report(target, call, iters=iters, json_file=json_file)
