"""The device of this process, where it has one."""

from typing import TYPE_CHECKING

from tilewright.cli.output import Failure

if TYPE_CHECKING:
    from tilewright.ops import Device


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
