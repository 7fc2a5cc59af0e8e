"""The device that a call will run on."""

import functools
import re
from typing import Any

import jax

from tilewright.ops.core.types import Device
from tilewright.ops.utils.fingerprint import default_device, device_fingerprint

_KINDS = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}

# Programs are lowered for cards that are not there, so the capability is known by name too.
_CAPABILITIES = {"A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "GH200": (9, 0), "H20": (9, 0), "B200": (10, 0)}


def current_device() -> Device:
    """The device of the mesh in force, or else the default device."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return _device_of_mesh(abstract.device_kind, abstract.platform, abstract.num_cores)
    return _device(default_device())


def device_for_platform(platform: str) -> Device:
    """The first local device of a platform that a program is lowered for, or a stand-in that is not present."""
    device = current_device()
    if _KINDS.get(platform) == device.kind:
        return device
    local = local_devices(platform)
    if local:
        return _device(local[0])
    kind = _KINDS.get(platform, platform)
    return Device(kind, "unknown", fingerprint=f"{kind}:unknown", present=False)


def local_devices(platform: str) -> list[Any]:
    """The devices of a platform that this process has; none if it cannot use the platform."""
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:
        return []


def device_of_fingerprint(fingerprint: str) -> Device:
    """The device that a fingerprint, of a key or a lock, stands for: this process's, or one that is not present."""
    kind, _, rest = fingerprint.partition(":")
    for each in local_devices(kind):
        if device_fingerprint(each) == fingerprint:
            return _device(each)
    said = re.fullmatch(r"(.*):(\d+)\.(\d+)", rest)
    name, capability = (rest, None) if said is None else (said[1], (int(said[2]), int(said[3])))
    return Device(kind, name, capability, fingerprint=fingerprint, present=False)


@functools.cache
def _device(device: Any) -> Device:
    capability = None
    if "." in (said := getattr(device, "compute_capability", "")):  # only NVIDIA's have one, such as "9.0"
        major, minor = said.split(".")
        capability = (int(major), int(minor))
    return Device(
        kind=_KINDS.get(device.platform, device.platform),
        name=device.device_kind,
        capability=capability,
        cores=int(getattr(device, "core_count", 0) or 0),
        fingerprint=device_fingerprint(device),
    )


@functools.cache
def _device_of_mesh(name: str, platform: str, cores: int | None) -> Device:
    """A device as a mesh describes it: one of ours, if there is such, so that all calls on it share their configs."""
    here = next((device for device in local_devices(platform) if device.device_kind == name), None)
    if here is not None:
        return _device(here)
    kind = _KINDS.get(platform, platform)
    capability = next((c for model, c in _CAPABILITIES.items() if model in name.replace("-", " ").split()), None)
    suffix = f":{capability[0]}.{capability[1]}" if capability else ""
    return Device(kind, name, capability, cores or 0, fingerprint=f"{kind}:{name}{suffix}", present=False)
