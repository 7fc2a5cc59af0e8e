"""The optional methods of a kernel from which its code and its gradients are taken."""

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


def platform_hook(kernel: Kernel[Any, Any], cfg: object, device: Device) -> Callable[..., Any]:
    """The most specific ``run_<platform>`` for the config's or else the device's platform; ``run`` without any."""
    hooks = {
        "triton": kernel.run_triton,
        "pallas": kernel.run_pallas,
        "cuda": kernel.run_cuda,
        "xla": kernel.run_xla,
    }
    platform = getattr(cfg, "platform", None)
    names = PLATFORMS.get(device.kind, ()) if platform in (None, "auto") else (str(platform),)
    return next((hook for name in names if (hook := hooks.get(name)) is not None), kernel.run)


def backward_hook(kernel: Kernel[Any, Any]) -> Callable[..., Any]:
    """``backward``, or ``custom_vjp`` called in the same way, of a kernel that has a gradient form."""
    if kernel.backward is not None:
        return kernel.backward
    recompute = kernel.custom_vjp
    assert recompute is not None  # otherwise JAX differentiates the kernel, and there is no backward pass

    def recomputed(residuals: object, cotangents: object, /, *args: object, cfg: object, **kwargs: object) -> Any:
        return recompute(args, cfg, kwargs, cotangents)

    return recomputed


def gradient_form(kernel: Kernel[Any, Any]) -> str | None:
    """Returns "residuals", "recomputing", or ``None`` if JAX differentiates ``run``.

    Raises:
      TypeError: the kernel defines only one of the pair.
    """
    if (kernel.forward_with_residuals is None) != (kernel.backward is None):
        raise TypeError(f"{kernel!r} must define both forward_with_residuals and backward, or neither")
    if kernel.backward is not None:
        return "residuals"
    return None if kernel.custom_vjp is None else "recomputing"
