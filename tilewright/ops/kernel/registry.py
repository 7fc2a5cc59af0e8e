"""The invocations of a program, recorded without their arrays."""

import threading
from typing import Any

from tilewright.ops.kernel.kernel import Invocation, Kernel

_LOCK = threading.Lock()
_RECORDED: dict[str, Invocation[Any, Any]] = {}
_KERNELS: set[tuple[str, str]] = set()


def record_invocation(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Records an invocation, and from then on every further one of the same kernel.

    Raises:
      TypeError: ``inv`` is not an invocation.
      ValueError: the invocation is of another kernel.
    """
    if not isinstance(inv, Invocation):
        raise TypeError(f"{inv=} must be an Invocation")
    if inv.kernel is not kernel:
        raise ValueError(f"the invocation is of {inv.kernel!r}, not of {kernel=}")
    with _LOCK:
        _KERNELS.add((kernel.name, kernel.version))
        _RECORDED[inv.key] = inv.abstract()


def record_if_enabled(inv: Invocation[Any, Any]) -> None:
    """Records an invocation if its kernel is being recorded."""
    if (inv.kernel.name, inv.kernel.version) in _KERNELS:
        with _LOCK:
            _RECORDED.setdefault(inv.key, inv.abstract())


def get_invocations() -> list[Invocation[Any, Any]]:
    """The recorded invocations in the order of their first call, each once."""
    with _LOCK:
        return list(_RECORDED.values())


def clear_invocations() -> None:
    """Forgets all invocations and stops recording."""
    with _LOCK:
        _RECORDED.clear()
        _KERNELS.clear()
