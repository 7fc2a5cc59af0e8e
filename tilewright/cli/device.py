"""The device of this process, if there is one, and devices by name."""

import contextlib
from typing import TYPE_CHECKING

import typer

from tilewright.cli.output import Failure

if TYPE_CHECKING:
    from tilewright.ops import Device
    from tilewright.ops.utils.known_devices import KnownDevice


def here() -> "Device":
    """The device that JAX computes on.

    Raises:
      Failure: JAX finds none, for example if ``JAX_PLATFORMS`` names a platform that is not available.
    """
    from tilewright.ops.utils.device import current_device

    try:
        return current_device()
    except RuntimeError as error:
        raise Failure(f"JAX finds no device to compute on: {error}") from error


def on_device(known: "KnownDevice | None") -> contextlib.AbstractContextManager[object]:
    """A context in which programs are traced and lowered for a named device, or else for this process's."""
    from tilewright.ops import target_device

    return contextlib.nullcontext() if known is None else target_device(known.name)


def named_device(name: str) -> "KnownDevice":
    """Finds a device by the name that ``tilewright.target_device`` takes.

    Raises:
      typer.BadParameter: no such device is known.
    """
    from tilewright.ops.utils.known_devices import find_device

    try:
        return find_device(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
