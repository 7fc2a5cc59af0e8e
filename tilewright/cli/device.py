"""The device of this process, where it has one, and those that can be named."""

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
      Failure: JAX finds none, such as where ``JAX_PLATFORMS`` names what is not there.
    """
    from tilewright.ops.utils.device import current_device

    try:
        return current_device()
    except RuntimeError as error:
        raise Failure(f"JAX finds no device to compute on: {error}") from error


def on_device(known: "KnownDevice | None") -> contextlib.AbstractContextManager[object]:
    """A context in which programs are traced and lowered for a device that was named, or else for this process's."""
    from tilewright.ops import target_device

    return contextlib.nullcontext() if known is None else target_device(known.name)


def named_device(name: str) -> "KnownDevice":
    """The device of a name, as ``tilewright.target_device`` takes it.

    Raises:
      typer.BadParameter: none is known by it.
    """
    from tilewright.ops.utils.known_devices import find_device

    try:
        return find_device(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
