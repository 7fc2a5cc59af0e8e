"""The device of this process, if there is one, and devices by name."""

import contextlib
from collections.abc import Sequence
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


def on_device(known: "KnownDevice | None", extras: Sequence[str] = ()) -> contextlib.AbstractContextManager[object]:
    """A context in which programs are traced and lowered for a named device, or else for this process's.

    Raises:
      typer.BadParameter: one of the ``extras`` of ``tilewright.target_device`` is unknown, or no device is named.
    """
    from tilewright.ops import target_device

    if known is None:
        if extras:
            raise typer.BadParameter("they are packages of the device that --device names", param_hint="--extras")
        return contextlib.nullcontext()
    try:
        return target_device(known.name, extras=extras)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--extras") from error


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
