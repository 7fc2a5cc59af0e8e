"""The optional methods of a kernel, which the base class does not define: code per platform, gradients, the oracle."""

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.ops.kernel.kernel import Kernel
from tilewright.ops.types import Device

PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "gpu": ("triton", "cuda", "pallas", "xla"),
    "tpu": ("pallas", "xla"),
    "cpu": ("xla",),
}
"""The platforms of each kind of device, most specific first."""


def optional_method(kernel: Kernel[Any, Any], name: str) -> Any:
    """The method of that name, or ``None`` if the kernel does not define it."""
    return getattr(kernel, name, None)


def platform_hook(kernel: Kernel[Any, Any], cfg: object, device: Device) -> Callable[..., Any]:
    """The most specific ``run_<platform>`` for the config's or else the device's platform; ``run`` if there is none."""
    platform = getattr(cfg, "platform", None)
    names = PLATFORMS.get(device.kind, ()) if platform in (None, "auto") else (str(platform),)
    for name in names:
        hook: Callable[..., Any] | None = optional_method(kernel, f"run_{name}")
        if hook is not None:
            return hook
    return kernel.run


def gradient_form(kernel: Kernel[Any, Any]) -> str | None:
    """Returns "residuals", "recomputing", or ``None`` if JAX differentiates ``run``.

    Raises:
      TypeError: the kernel defines only one of the pair.
    """
    forward, backward = (optional_method(kernel, name) is not None for name in ("forward_with_residuals", "backward"))
    if forward != backward:
        raise TypeError(f"{kernel!r} must define both forward_with_residuals and backward, or neither")
    if forward:
        return "residuals"
    return "recomputing" if optional_method(kernel, "custom_vjp") is not None else None
