"""The arguments and help of ``tilewright explain``."""

from typing import Annotated

from tilewright.cli import options

_EXTRAS = "What is installed beside --device though it may not be here: triton,cudnn,fa4,nvcc, or the extra cuda13."


@options.takes_call_options
def explain(
    target: options.Target,
    *,
    call: options.CallOptions,
    device: options.Device = None,
    extras: Annotated[str, options.option("--extras", _EXTRAS)] = "",
) -> None:
    """Show which config every kernel call would run with, where it comes from, and why no other. Measures nothing."""
    from tilewright.cli.explaining import explain_and_print

    explain_and_print(target, call, device, tuple(filter(None, extras.split(","))))
