"""The one table of accelerators, by JAX's device names: specifications, and rates that were measured.

Selection, bounds of times, limits of kernels and predictions of strategies read it, and so do programs that are lowered
while no such device is present.

Sources: NVIDIA's data sheets and architecture white papers for multiprocessors, memory, bandwidth, clocks, peaks and
NVLink, and where they name none (GH200's L2, multiprocessors of GB200 and GB300) the device descriptions that XLA
publishes under ``xla/backends/gpu/target_config/specs``, and for B300, GB10 and Thor what drivers tell CUDA's
``deviceQuery`` (XLA's description of B300 was not read from a card); the CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability", for what a multiprocessor has; Google Cloud's pages of each TPU version for
memory, bandwidth, peaks and links of TPUs, JAX's ``tpu_info`` for their on-chip memory, and for the links of v2 and v3
"A Domain Specific Supercomputer for Training Deep Neural Networks" (CACM 63(7), 2020).
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from tilewright.ops.types import Device

SHARED_KB = MappingProxyType(
    {
        50: 48, 52: 48, 53: 48,
        60: 48, 61: 48, 62: 48,
        70: 96, 72: 96, 75: 64,
        80: 163, 86: 99, 87: 163, 89: 99,
        90: 227,
        100: 227, 103: 227, 110: 227,
        120: 99, 121: 99,
    }
)  # fmt: skip
"""Maximum opt-in shared memory of a block in KB, by compute capability times ten."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Rates that kernels reached on a chip; models of time use them where rated ones are too good.

    Attributes:
      sm_flops: FLOP/s of the tensor cores of an SM at the clock that they keep under load; 800e12 for a whole H100.
      sm_l2: bytes/s that an SM gets from the L2 cache while all load tiles, many of them the same ones.
      read, write: bytes/s of global memory; written values are not all alike.
      link: bytes/s that a device sends while it receives as many: a hop of NCCL over NVLink.
      attention: FLOP/s of attention in bfloat16.
    """

    sm_flops: float
    sm_l2: float
    read: float
    write: float
    link: float
    attention: float


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """The numbers that all devices with one chip share; 0 where unknown.

    Attributes:
      name: the word that stands in the names of all devices with the chip, or Google's name of a TPU version.
      capability: compute capability of a GPU, else None.
      cache_mb: MiB of on-chip memory that may hold whole arrays between kernels: the L2 cache of a GPU, VMEM of all
        cores and CMEM of a TPU.
      flops, flops_8bit: FLOP/s of one ``jax.Device`` in dense matmuls of 16-bit and of 8-bit operands.
      peak_gbs: memory bandwidth of the fastest device with the chip, as rounded by its data sheet, in 10⁹ bytes a
        second.
      link_gbs: 10⁹ bytes a second that a device sends, and at the same time receives: over all links of NVLink, behind
        whose switches all of them reach one neighbour, but over one link of a TPU, which leads to one neighbour.
      vmem_mb: MiB of VMEM of a TPU's core.
      measured: rates that were measured; ``None`` if none were.
    """

    name: str
    capability: tuple[int, int] | None = None
    cache_mb: float = 0.0
    flops: float = 0.0
    flops_8bit: float = 0.0
    peak_gbs: float = 0.0
    link_gbs: float = 0.0
    vmem_mb: int = 0
    measured: MeasuredRates | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KnownDevice:
    """A model of device.

    Attributes:
      name: ``jax.Device.device_kind``, which is the driver's name of a GPU.
      kind: "gpu" or "tpu".
      cores: streaming multiprocessors, or cores of one ``jax.Device`` of a TPU.
      memory_gb: memory of one ``jax.Device``, in 10⁹ bytes.
      bandwidth_gbs: memory bandwidth of one ``jax.Device``, in 10⁹ bytes a second; 0 if unknown.
      clock_ghz: the maximum clock of a multiprocessor; 0 for TPUs.
    """

    name: str
    chip: Chip
    kind: Literal["gpu", "tpu"]
    cores: int
    memory_gb: float
    bandwidth_gbs: float
    clock_ghz: float = 0.0

    @property
    def platform(self) -> str:
        """The platform that programs are lowered for."""
        return "cuda" if self.kind == "gpu" else self.kind

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of a GPU, else None."""
        return self.chip.capability

    @property
    def device(self) -> Device:
        """The device as selection sees it, with the fingerprint of a real one, but not present."""
        suffix = "" if self.capability is None else ":{}.{}".format(*self.capability)
        fingerprint = f"{self.kind}:{self.name}{suffix}"
        return Device(self.kind, self.name, self.capability, self.cores, fingerprint, present=False)


# Times have a lower bound on chips whose peaks are given, so the larger of two published numbers is used, of GeForce
# cards that of sums in float16. No dense peaks are published for GB10 and Thor. Peaks of TPUs are those of one
# jax.Device, half a chip of v2, v3 and v7x. A chip of v4, v5p and v7x has six links, one of the others has four.
_H100_RATES = MeasuredRates(sm_flops=6.1e12, sm_l2=70e9, read=2.9e12, write=2.5e12, link=220e9, attention=630e12)
_CHIPS = {
    chip.name: chip
    for chip in (  # name, capability, cache_mb, flops, flops_8bit, peak_gbs, link_gbs
        Chip("V100", (7, 0), 6),
        Chip("T4", (7, 5), 4),
        Chip("A100", (8, 0), 40, 312e12, 624e12, 2040, 300),
        Chip("A10", (8, 6), 6),
        Chip("A10G", (8, 6), 6),
        Chip("A40", (8, 6), 6),
        Chip("A6000", (8, 6), 6),
        Chip("3090", (8, 6), 6),
        Chip("L4", (8, 9), 48),
        Chip("L40", (8, 9), 96),
        Chip("L40S", (8, 9), 96),
        Chip("4090", (8, 9), 72),
        Chip("Ada", (8, 9), 96),
        Chip("H100", (9, 0), 50, 989.4e12, 1978.9e12, 3900, 450, measured=_H100_RATES),
        Chip("H800", (9, 0), 50),
        Chip("H20", (9, 0), 60),
        Chip("H200", (9, 0), 50, 989.4e12, 1978.9e12, 4800, 450),
        Chip("GH200", (9, 0), 60, 989.4e12, 1978.9e12, 4900, 450),
        Chip("B200", (10, 0), 126.5, 2250e12, 4500e12, 7700, 900),
        Chip("GB200", (10, 0), 129.25, 2500e12, 5000e12, 8000, 900),
        Chip("B300", (10, 3), 126.5, 2500e12, 5000e12, 8000, 900),
        Chip("GB300", (10, 3), 129.25, 2500e12, 5000e12, 8000, 900),
        Chip("Thor", (11, 0), 32),
        Chip("5090", (12, 0), 96, 419e12, 838e12, 1792),
        Chip("RTX PRO 6000", (12, 0), 128, 503.8e12, 1007.6e12, 1792),
        Chip("GB10", (12, 1), 24),
        Chip("v2", None, 16, 23e12, 23e12, 358, 62, vmem_mb=16),
        Chip("v3", None, 16, 70e12, 70e12, 450, 82, vmem_mb=16),
        Chip("v4", None, 160, 275e12, 275e12, 1228, 50, vmem_mb=16),
        Chip("v5e", None, 128, 197e12, 394e12, 819, 50, vmem_mb=128),
        Chip("v5p", None, 128, 459e12, 918e12, 2765, 100, vmem_mb=64),
        Chip("v6e", None, 128, 918e12, 1836e12, 1640, 100, vmem_mb=128),
        Chip("tpu7x", None, 64, 1153.5e12, 2307e12, 3690, 100, vmem_mb=64),
    )
}


def _gpu(name: str, chip: str, cores: int, memory: float, bandwidth: float, ghz: float) -> KnownDevice:
    return KnownDevice(name, _CHIPS[chip], "gpu", cores, memory, bandwidth, ghz)


def _tpu(name: str, chip: str, cores: int, memory: float) -> KnownDevice:
    return KnownDevice(name, _CHIPS[chip], "tpu", cores, memory, _CHIPS[chip].peak_gbs)


_ROWS = (
    _gpu("Tesla V100-SXM2-16GB", "V100", 80, 16, 900, 1.53),
    _gpu("Tesla V100-SXM2-32GB", "V100", 80, 32, 900, 1.53),
    _gpu("Tesla V100-PCIE-16GB", "V100", 80, 16, 900, 1.38),
    _gpu("Tesla V100-PCIE-32GB", "V100", 80, 32, 900, 1.38),
    _gpu("Tesla T4", "T4", 40, 16, 320, 1.59),
    _gpu("NVIDIA A100-SXM4-40GB", "A100", 108, 40, 1555, 1.41),
    _gpu("NVIDIA A100-SXM4-80GB", "A100", 108, 80, 2039, 1.41),
    _gpu("NVIDIA A100-PCIE-40GB", "A100", 108, 40, 1555, 1.41),
    _gpu("NVIDIA A100 80GB PCIe", "A100", 108, 80, 1935, 1.41),
    _gpu("NVIDIA A10", "A10", 72, 24, 600, 1.695),
    _gpu("NVIDIA A10G", "A10G", 80, 24, 600, 1.71),
    _gpu("NVIDIA A40", "A40", 84, 48, 696, 1.74),
    _gpu("NVIDIA RTX A6000", "A6000", 84, 48, 768, 1.8),
    _gpu("NVIDIA GeForce RTX 3090", "3090", 82, 24, 936, 1.695),
    _gpu("NVIDIA L4", "L4", 58, 24, 300, 2.04),
    _gpu("NVIDIA L40", "L40", 142, 48, 864, 2.49),
    _gpu("NVIDIA L40S", "L40S", 142, 48, 864, 2.52),
    _gpu("NVIDIA GeForce RTX 4090", "4090", 128, 24, 1008, 2.52),
    _gpu("NVIDIA RTX 6000 Ada Generation", "Ada", 142, 48, 960, 2.505),
    _gpu("NVIDIA H100 80GB HBM3", "H100", 132, 80, 3352, 1.98),
    _gpu("NVIDIA H100 PCIe", "H100", 114, 80, 2039, 1.755),
    _gpu("NVIDIA H100 NVL", "H100", 132, 94, 3938, 1.785),
    _gpu("NVIDIA H800", "H800", 132, 80, 3352, 1.98),
    _gpu("NVIDIA H20", "H20", 78, 96, 4000, 1.98),
    _gpu("NVIDIA H200", "H200", 132, 141, 4800, 1.98),
    _gpu("NVIDIA H200 NVL", "H200", 132, 141, 4800, 1.785),
    _gpu("NVIDIA GH200 480GB", "GH200", 132, 96, 4000, 1.98),
    _gpu("NVIDIA GH200 144G HBM3e", "GH200", 132, 144, 4900, 1.98),
    _gpu("NVIDIA B200", "B200", 148, 180, 7672, 1.965),
    _gpu("NVIDIA GB200", "GB200", 152, 186, 7928, 2.062),
    _gpu("NVIDIA B300 SXM6 AC", "B300", 148, 288, 7936, 2.032),
    _gpu("NVIDIA GB300", "GB300", 152, 288, 7928, 2.07),
    _gpu("NVIDIA Thor", "Thor", 20, 128, 273, 1.575),
    _gpu("NVIDIA GeForce RTX 5090", "5090", 170, 32, 1792, 2.407),
    _gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 188, 96, 1792, 2.617),
    _gpu("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000", 188, 96, 1792, 2.28),
    _gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 188, 96, 1597, 2.617),
    _gpu("NVIDIA GB10", "GB10", 48, 128, 273, 2.418),
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

# A longer name first, for "L4" is in "L40"; no digit may follow, for "T4" is in "T400".
_GPU_CHIPS = re.compile(
    "|".join(
        rf"(?<![A-Z0-9]){name}(?!\d)"
        for name in sorted({row.chip.name for row in _ROWS if row.kind == "gpu"}, key=len)[::-1]
    )
)


def find_device(name: str) -> KnownDevice:
    """Finds a device by its JAX or Google name.

    Raises:
      TypeError: ``name`` is not a string.
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


def chip_by_name(name: str) -> Chip | None:
    """The chip of a known device, or of a GPU whose name contains a chip's, as the name of a MIG partition does."""
    known = KNOWN_DEVICES.get(_ALIASES.get(name, name))
    if known is not None:
        return known.chip
    match = _GPU_CHIPS.search(name)
    return None if match is None else _CHIPS[match[0]]


def chip_of(device: Device) -> Chip | None:
    """The chip of a GPU or TPU; ``None`` if it is unknown."""
    return chip_by_name(device.name) if device.kind in ("gpu", "tpu") else None


def capability_by_name(name: str) -> tuple[int, int] | None:
    """The compute capability of a GPU whose name contains a known chip's."""
    chip = chip_by_name(name)
    return None if chip is None else chip.capability


def measured_rates(chip: str) -> MeasuredRates:
    """The rates that were measured on a chip.

    Raises:
      ValueError: none were.
    """
    found = _CHIPS[chip].measured
    if found is None:
        raise ValueError(f"no rates were measured on {chip=}")
    return found
