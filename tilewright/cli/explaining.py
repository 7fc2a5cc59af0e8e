"""The work of ``tilewright explain``, after its arguments are read."""

from collections.abc import Sequence

import typer

from tilewright.cli.device import here, named_device, on_device
from tilewright.cli.options import CallOptions
from tilewright.cli.output import complain
from tilewright.cli.targets import named_calls
from tilewright.ops import explain


def explain_and_print(target: str, options: CallOptions, device: str | None, extras: Sequence[str] = ()) -> None:
    """Prints what ``tilewright.explain`` says of each call of the target, on this device or on a named one.

    Args:
      extras: what is taken for installed on the named device.
    """
    here()
    known = None if device is None else named_device(device)
    on_device(known, extras)  # wrong extras are an error before any call is made
    for call in named_calls(target, options, known):
        with on_device(known, extras):
            explained = explain(call.function, *call.args)
        if explained:
            typer.echo(f"{call.name} {explained}\n")
        else:
            complain(f"{call.name} calls no kernel of tilewright; there is nothing to explain")
