"""Loads each backend and asks which devices it could serve."""

import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from tilewright.kernels import OPS, kernel
from tilewright.kernels.op.backend import Backend, Loaded, load_failure
from tilewright.kernels.op.inputs import OpInputs
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device, local_devices
from tilewright.ops.utils.known_devices import find_device

type AnyBackend = Backend[Any, Any, Any, Any]

STAND_IN = find_device("NVIDIA H100 80GB HBM3").device
"""The device to ask about if there is no GPU, so that other missing requirements can be installed beforehand."""

EXTRAS: Mapping[str, str] = MappingProxyType(
    {"triton": "triton", "flash_attn": "fa4", "quack": "fa4", "cutlass": "fa4", "matplotlib": "plot", "jinja2": "plot"}
)
"""Our extras, by the package that they install."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedBackend:
    """One backend of one op.

    Attributes:
      devices: names of the present devices that it serves in at least one case.
      why: one line with the reasons why it serves none of them, or not all.
    """

    op: str
    name: str
    devices: tuple[str, ...]
    why: str


def served_backends() -> list[ServedBackend]:
    """Probes every backend of every op. Takes seconds, since installed packages are imported."""
    present = present_devices()
    return [
        _served(op, loaded, calls, present)
        for op in OPS
        for calls in [list(calls_of(op)) if present else []]
        for loaded in kernel(op).backends
    ]


def present_devices() -> list[Device]:
    """One device of each kind and name, the default one first; empty if JAX finds none."""
    try:
        others = [each for platform in ("cuda", "rocm", "tpu", "cpu") for each in local_devices(platform)]
        found = [current_device(), *map(_device, others)]
    except RuntimeError:
        return []
    return list({(each.kind, each.name): each for each in found}.values())


def _device(device: jax.Device) -> Device:
    with jax.default_device(device):
        return current_device()


def calls_of(op: str) -> Iterator[OpInputs]:
    """The inputs of all of an op's cases with brief sizes: a backend that serves none of them serves nothing."""
    op_kernel = kernel(op)
    cases = {}
    for table in op_kernel.cases.by_device.values():
        for case in table.values():
            sizes = {name: size for name, size in op_kernel.cases.brief.items() if getattr(case, name) is not None}
            for dtype in (case.dtype, "bfloat16"):
                short = dataclasses.replace(case, name="probe", dtype=dtype, **sizes)
                cases[repr(short)] = short
    for case in cases.values():
        positional, keywords = case.arguments()
        inv, _ = prepared(op_kernel, positional, keywords, concrete=False)
        yield op_kernel.inputs_of(inv)


def _served(op: str, loaded: Loaded, calls: Sequence[OpInputs], present: Sequence[Device]) -> ServedBackend:
    name, backend = loaded.name, loaded.backend
    if backend is None:
        return ServedBackend(op, name, (), with_hint(loaded.error))
    if not calls:
        return ServedBackend(op, name, (), "it can be loaded, and there is no device to ask it about")
    reasons = {device.name: common_reasons(backend, calls, device) for device in present}
    serving = tuple(device for device, reasons_against in reasons.items() if not reasons_against)
    if serving:
        broken = _late_import_error(backend)
        return ServedBackend(op, name, () if broken else serving, broken)
    of_first = f", got {present[0].described}"  # which is shown above the table
    reasons_against = [reason.removesuffix(of_first) for reason in reasons[present[0].name]]
    if all(device.kind == "cpu" for device in present):
        reasons_against += common_reasons(backend, calls, STAND_IN)
    return ServedBackend(op, name, (), one_line(reasons_against))


def common_reasons(backend: AnyBackend, calls: Sequence[OpInputs], device: Device) -> list[str]:
    """The reasons that a backend gives for every call; empty as soon as it serves one."""
    common: list[str] | None = None
    for inputs in calls:
        reasons = backend.not_supported_reasons(inputs, device, "forward")
        if not reasons:
            return []
        common = reasons if common is None else [each for each in common if each in reasons] or common
    return common or []


def _late_import_error(backend: AnyBackend) -> str:
    module, _, function = backend.late_import.partition(":")
    try:
        found = importlib.import_module(module) if module else None
        if function:
            getattr(found, function)()
    except Exception as error:  # an import runs code of packages that may be broken in any way
        return with_hint(load_failure(error))
    return ""


def with_hint(why: str) -> str:
    """The reason why a backend cannot be loaded in one line, with what to install."""
    absent = _ABSENT.search(why)
    hint = f"; pip install 'tilewright[{EXTRAS[absent[1]]}]'" if absent and absent[1] in EXTRAS else ""
    return " ".join(why.split()) + hint


_ABSENT = re.compile(r"No module named '?(\w+)")


def one_line(reasons: Sequence[str]) -> str:
    """Reasons without repetition."""
    return "; ".join(" ".join(reason.split()) for reason in dict.fromkeys(reasons))
