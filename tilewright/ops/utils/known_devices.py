"""Accelerators by JAX's device names, with the specifications that are needed when no such device is present.

Sources: NVIDIA's data sheets and architecture white papers for multiprocessors, memory, bandwidth and clocks, and where
they name none (GH200's L2, GB200's multiprocessors) the device descriptions that XLA publishes under
``xla/backends/gpu/target_config/specs``; the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability", for what a multiprocessor has; Google Cloud's "TPU versions" for memory of TPUs.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from tilewright.ops.types import Device


@dataclasses.dataclass(frozen=True, slots=True)
class KnownDevice:
    """A model of device.

    Attributes:
      name: ``jax.Device.device_kind``, which is the driver's name of a GPU.
      model: the word of ``name`` that names the chip; it stands in the names of all its variants.
      kind: "gpu" or "tpu".
      capability: compute capability of a GPU, else None.
      cores: streaming multiprocessors, or cores of one ``jax.Device`` of a TPU.
      memory_gb: memory of one ``jax.Device``, in 10⁹ bytes.
      bandwidth_gbs: memory bandwidth, in 10⁹ bytes a second; 0 for TPUs.
      l2_mb: last-level cache, in MiB; 0 for TPUs.
      clock_ghz: the maximum clock of a multiprocessor; 0 for TPUs.
    """

    name: str
    model: str
    kind: Literal["gpu", "tpu"]
    capability: tuple[int, int] | None
    cores: int
    memory_gb: float
    bandwidth_gbs: float = 0.0
    l2_mb: float = 0.0
    clock_ghz: float = 0.0

    @property
    def platform(self) -> str:
        """The platform that programs are lowered for."""
        return "cuda" if self.kind == "gpu" else self.kind

    @property
    def device(self) -> Device:
        """The device as selection sees it, with the fingerprint of a real one, but not present."""
        suffix = "" if self.capability is None else ":{}.{}".format(*self.capability)
        fingerprint = f"{self.kind}:{self.name}{suffix}"
        return Device(self.kind, self.name, self.capability, self.cores, fingerprint, present=False)


def _gpu(
    name: str,
    model: str,
    capability: tuple[int, int],
    cores: int,
    memory: float,
    bandwidth: float,
    l2: float,
    ghz: float,
) -> KnownDevice:
    return KnownDevice(name, model, "gpu", capability, cores, memory, bandwidth, l2, ghz)


def _tpu(name: str, model: str, cores: int, memory: float) -> KnownDevice:
    return KnownDevice(name, model, "tpu", None, cores, memory)


_ROWS = (
    _gpu("Tesla V100-SXM2-16GB", "V100", (7, 0), 80, 16, 900, 6, 1.53),
    _gpu("Tesla V100-SXM2-32GB", "V100", (7, 0), 80, 32, 900, 6, 1.53),
    _gpu("Tesla V100-PCIE-16GB", "V100", (7, 0), 80, 16, 900, 6, 1.38),
    _gpu("Tesla V100-PCIE-32GB", "V100", (7, 0), 80, 32, 900, 6, 1.38),
    _gpu("Tesla T4", "T4", (7, 5), 40, 16, 320, 4, 1.59),
    _gpu("NVIDIA A100-SXM4-40GB", "A100", (8, 0), 108, 40, 1555, 40, 1.41),
    _gpu("NVIDIA A100-SXM4-80GB", "A100", (8, 0), 108, 80, 2039, 40, 1.41),
    _gpu("NVIDIA A100-PCIE-40GB", "A100", (8, 0), 108, 40, 1555, 40, 1.41),
    _gpu("NVIDIA A100 80GB PCIe", "A100", (8, 0), 108, 80, 1935, 40, 1.41),
    _gpu("NVIDIA A10", "A10", (8, 6), 72, 24, 600, 6, 1.695),
    _gpu("NVIDIA A10G", "A10G", (8, 6), 80, 24, 600, 6, 1.71),
    _gpu("NVIDIA A40", "A40", (8, 6), 84, 48, 696, 6, 1.74),
    _gpu("NVIDIA RTX A6000", "A6000", (8, 6), 84, 48, 768, 6, 1.8),
    _gpu("NVIDIA GeForce RTX 3090", "3090", (8, 6), 82, 24, 936, 6, 1.695),
    _gpu("NVIDIA L4", "L4", (8, 9), 58, 24, 300, 48, 2.04),
    _gpu("NVIDIA L40", "L40", (8, 9), 142, 48, 864, 96, 2.49),
    _gpu("NVIDIA L40S", "L40S", (8, 9), 142, 48, 864, 96, 2.52),
    _gpu("NVIDIA GeForce RTX 4090", "4090", (8, 9), 128, 24, 1008, 72, 2.52),
    _gpu("NVIDIA RTX 6000 Ada Generation", "Ada", (8, 9), 142, 48, 960, 96, 2.505),
    _gpu("NVIDIA H100 80GB HBM3", "H100", (9, 0), 132, 80, 3352, 50, 1.98),
    _gpu("NVIDIA H100 PCIe", "H100", (9, 0), 114, 80, 2039, 50, 1.755),
    _gpu("NVIDIA H100 NVL", "H100", (9, 0), 132, 94, 3938, 50, 1.785),
    _gpu("NVIDIA H800", "H800", (9, 0), 132, 80, 3352, 50, 1.98),
    _gpu("NVIDIA H20", "H20", (9, 0), 78, 96, 4000, 60, 1.98),
    _gpu("NVIDIA H200", "H200", (9, 0), 132, 141, 4800, 50, 1.98),
    _gpu("NVIDIA H200 NVL", "H200", (9, 0), 132, 141, 4800, 50, 1.785),
    _gpu("NVIDIA GH200 480GB", "GH200", (9, 0), 132, 96, 4000, 60, 1.98),
    _gpu("NVIDIA GH200 144G HBM3e", "GH200", (9, 0), 132, 144, 4900, 60, 1.98),
    _gpu("NVIDIA B200", "B200", (10, 0), 148, 180, 7672, 126.5, 1.965),
    _gpu("NVIDIA GB200", "GB200", (10, 0), 152, 186, 7928, 129.25, 2.062),
    _gpu("NVIDIA GeForce RTX 5090", "5090", (12, 0), 170, 32, 1792, 96, 2.407),
    _tpu("TPU v2", "v2", 1, 8),
    _tpu("TPU v3", "v3", 1, 17.2),
    _tpu("TPU v4", "v4", 2, 34.4),
    _tpu("TPU v5 lite", "v5e", 1, 17.2),
    _tpu("TPU v5", "v5p", 2, 102),
    _tpu("TPU v6 lite", "v6e", 1, 34.4),
    _tpu("TPU7x", "tpu7x", 1, 103),
)

KNOWN_DEVICES: Mapping[str, KnownDevice] = MappingProxyType({row.name: row for row in _ROWS})
"""Known devices by name."""

_ALIASES = MappingProxyType(
    {"TPU v5e": "TPU v5 lite", "TPU v5p": "TPU v5", "TPU v6e": "TPU v6 lite", "TPU v7x": "TPU7x"}
)
"""Google's names where JAX's differ."""

_CAPABILITIES = {row.model: row.capability for row in _ROWS if row.capability is not None}


def find_device(name: str) -> KnownDevice:
    """Finds a device by its JAX or Google name.

    Raises:
      TypeError: ``name`` is no string.
      ValueError: no such device is known; the message lists the known names, likely ones first.
    """
    if not isinstance(name, str):
        raise TypeError(f"{name=} must be the name of a device, such as 'NVIDIA H200'")
    found = KNOWN_DEVICES.get(_ALIASES.get(name, name))
    if found is None:
        likely = _similar_names(name)
        hint = f"did you mean {' or '.join(map(repr, likely))}? " if likely else ""
        known = ", ".join(map(repr, [*KNOWN_DEVICES, *_ALIASES]))
        raise ValueError(f"no device is known by {name=}; {hint}known, by their jax.Device.device_kind, are {known}")
    return found


def _similar_names(name: str) -> list[str]:
    """The known names that contain every word of ``name``, or else those with similar spelling."""
    words = name.lower().replace("-", " ").split()
    names = [*KNOWN_DEVICES, *_ALIASES]
    holding = [each for each in names if words and set(words) <= set(each.lower().replace("-", " ").split())]
    return holding or difflib.get_close_matches(name, names, n=3, cutoff=0.7)


def capability_by_name(name: str) -> tuple[int, int] | None:
    """The compute capability of a GPU whose name contains a known model, as the name of a MIG partition does."""
    known = KNOWN_DEVICES.get(name)
    if known is not None:
        return known.capability
    words = name.replace("-", " ").split()
    return next((_CAPABILITIES[word] for word in words if word in _CAPABILITIES), None)
