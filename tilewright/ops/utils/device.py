"""The device that a call will run on, as selection sees it."""

import functools
import re
from collections.abc import Iterable

import jax

from tilewright.errors import TargetDeviceError
from tilewright.ops.types import Device
from tilewright.ops.utils.fingerprint import default_device, device_fingerprint
from tilewright.ops.utils.known_devices import KNOWN_DEVICES, capability_by_name
from tilewright.ops.utils.target import TargetDevice, active_target

_KINDS = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


def current_device() -> Device:
    """The device of ``target_device`` or else of the mesh in force, or else the default device."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if isinstance(abstract, TargetDevice):
        return abstract.selected
    target = active_target()
    if target is not None:  # also under a mesh of other devices, such as CPU devices that stand in for the target
        return target.device
    if abstract is not None:
        return _device_of_mesh(abstract.device_kind, abstract.platform, abstract.num_cores)
    return _device(default_device())


def devices_for_platforms(platforms: Iterable[str]) -> dict[str, Device]:
    """The device of each platform that a program is lowered for.

    Raises:
      TargetDeviceError: none of them is the platform of the ``target_device`` in force.
    """
    found = {platform: device_for_platform(platform) for platform in platforms}
    target = active_target()
    if target is not None and target.kind not in {device.kind for device in found.values()}:
        raise TargetDeviceError(
            f"inside of target_device({target.name!r}) a program with a call of a kernel is lowered for "
            f"{', '.join(found)}, as if it were to run here or on a mesh of devices that are here; nothing runs there: "
            "lower it (jax.jit(f).lower(...)), with meshes that Target.make_mesh makes"
        )
    return found


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


def local_devices(platform: str) -> list[jax.Device]:
    """The devices of a platform that this process has; none if it cannot use the platform."""
    try:
        found: list[jax.Device] = jax.local_devices(backend=platform)
    except RuntimeError:
        return []
    return found


def device_of_fingerprint(fingerprint: str) -> Device:
    """The device with this fingerprint (from a key or a lock): a local one, or else one that is not present."""
    kind, _, rest = fingerprint.partition(":")
    for each in local_devices(kind):
        if device_fingerprint(each) == fingerprint:
            return _device(each)
    match = re.fullmatch(r"(.*):(\d+)\.(\d+)", rest)
    name, capability = (rest, None) if match is None else (match[1], (int(match[2]), int(match[3])))
    known = KNOWN_DEVICES.get(name)
    cores = 0 if known is None else known.cores
    return Device(kind, name, capability, cores, fingerprint=fingerprint, present=False)


@functools.cache
def _device(device: jax.Device) -> Device:
    capability = None
    if "." in (text := getattr(device, "compute_capability", "")):  # only NVIDIA devices have one of the form "9.0"
        major, minor = text.split(".")
        capability = (int(major), int(minor))
    return Device(
        kind=_KINDS.get(device.platform, device.platform),
        name=device.device_kind,
        capability=capability,
        cores=int(getattr(device, "num_cores" if device.platform == "tpu" else "core_count", 0) or 0),
        fingerprint=device_fingerprint(device),
    )


@functools.cache
def _device_of_mesh(name: str, platform: str, cores: int | None) -> Device:
    """A device as a mesh describes it: a local one of that name if there is one, so that calls share configs."""
    local = next((device for device in local_devices(platform) if device.device_kind == name), None)
    if local is not None:
        return _device(local)
    kind = _KINDS.get(platform, platform)
    capability = capability_by_name(name)
    suffix = f":{capability[0]}.{capability[1]}" if capability else ""
    return Device(kind, name, capability, cores or 0, fingerprint=f"{kind}:{name}{suffix}", present=False)
