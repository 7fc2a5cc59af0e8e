"""Requirements of the kernels for Hopper, in Pallas and in CUDA C++: the device, and the dtype of a call."""

from typing import Protocol

import numpy as np

from tilewright.kernels.hopper.limits import CAPABILITY, NUM_SMS
from tilewright.ops.types import Device


class HasDtype(Protocol):
    """The inputs of an op whose operands have one dtype."""

    @property
    def dtype(self) -> np.dtype: ...


def device_reasons(device: Device) -> list[str]:
    """Reasons why a device is no Hopper GPU; empty if it is one."""
    if device.kind == "gpu" and device.capability == CAPABILITY:
        return []
    return [f"needs a GPU of compute capability 9.0, got {device.described}"]


def dtype_reasons(inputs: HasDtype) -> list[str]:
    """Reasons why wgmma does not take the operands as they are; empty if it does."""
    if inputs.dtype.name in ("bfloat16", "float16"):
        return []
    return [f"computes in bfloat16 or float16, got dtype={inputs.dtype}"]


def num_sms(device: Device) -> int:
    """SMs of a device, those of an H100 where it does not say."""
    return device.cores or NUM_SMS
