"""Compile-only devices, made from a topology description."""

import contextlib
import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import jax

from tilewright.errors import TargetDeviceError
from tilewright.ops.utils.known_devices import SHARED_KB, KnownDevice

# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory in KB per
# multiprocessor, threads per multiprocessor; then float32 units per multiprocessor.
_MULTIPROCESSORS = MappingProxyType(
    {
        (7, 0): (96, 2048, 64),
        (7, 5): (64, 1024, 64),
        (8, 0): (164, 2048, 64),
        (8, 6): (100, 1536, 128),
        (8, 9): (100, 1536, 128),
        (9, 0): (228, 2048, 128),
        (10, 0): (228, 2048, 128),
        (10, 3): (228, 2048, 128),
        (11, 0): (228, 1536, 128),
        (12, 0): (100, 1536, 128),
        (12, 1): (100, 1536, 128),
    }
)
# Names of slices by number of chips, from Google Cloud's "TPU versions".
_FLAT = ("v2", "v3", "v5e", "v6e")
_FLAT_SLICES = MappingProxyType(
    {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
)
_CUBIC_SLICES = MappingProxyType({1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"})
_TWO_DEVICES_PER_CHIP = ("v2", "v3", "tpu7x")
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_PTXAS_FOLDERS = ("cu13/bin", "cuda_nvcc/bin")


def compile_only_devices(known: KnownDevice, count: int) -> tuple[jax.Device, ...]:
    """Makes devices for ``lowered.compile(device_assignment=...)`` or a ``jax.sharding.Mesh``.

    Raises:
      TargetDeviceError: the compiler is not installed; the message says what is missing.
    """
    missing = missing_compiler(known)
    if missing:
        raise TargetDeviceError(f"programs for {known.name} cannot be compiled here: {missing}")
    return _gpus(known, count) if known.kind == "gpu" else _tpus(known, count)


def target_config(known: KnownDevice) -> str:
    """XLA's description of a GPU (``stream_executor.GpuTargetConfigProto`` as text), from its specifications.

    XLA's cost model reads it; generated kernels depend only on compute capability and shared memory.
    """
    if known.capability is None:
        raise ValueError(f"{known.name} is no GPU")
    shared, threads, units = _MULTIPROCESSORS[known.capability]
    major, minor = known.capability
    shared_of_block = SHARED_KB[10 * major + minor]
    # Architecture-specific features exist from 9.0 on.
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {shared_of_block << 10}
  shared_memory_per_core: {shared << 10}
  threads_per_core_limit: {threads}
  core_count: {known.cores}
  fpus_per_core: {units}
  block_dim_limit_x: {(1 << 31) - 1}
  block_dim_limit_y: {(1 << 16) - 1}
  block_dim_limit_z: {(1 << 16) - 1}
  memory_bandwidth: {round(known.bandwidth_gbs * 1e9)}
  l2_cache_size: {round(known.chip.cache_mb * (1 << 20))}
  clock_rate_ghz: {known.clock_ghz}
  device_memory_size: {round(known.memory_gb * 1e9)}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{known.name}"
"""


@functools.cache
def _gpus(known: KnownDevice, count: int) -> tuple[jax.Device, ...]:
    from jax.experimental import topologies

    _put_ptxas_on_path()
    try:
        description = topologies.get_topology_desc(
            known.name, platform="cuda", target_config=target_config(known), topology=f"1x1x{count}"
        )
    except NotImplementedError as error:  # the plugin is installed, but a check at its initialisation failed
        raise TargetDeviceError(
            f"programs for {known.name} cannot be compiled here: JAX has not loaded its CUDA plugin, and has said why; "
            "with JAX_PLATFORMS=cpu it does not look for what only running needs"
        ) from error
    return tuple(description.devices)


@functools.cache
def _tpus(known: KnownDevice, count: int) -> tuple[jax.Device, ...]:
    from jax.experimental import topologies

    devices_per_chip = 2 if known.chip.name in _TWO_DEVICES_PER_CHIP else 1
    shapes = _FLAT_SLICES if known.chip.name in _FLAT else _CUBIC_SLICES
    sizes = {devices_per_chip * chips: shape for chips, shape in shapes.items()}
    # No slice is smaller than a chip, but a program may run on one of its devices.
    sizes = {1: shapes[1]} | sizes
    if count not in sizes:
        counts = ", ".join(map(str, sizes))
        raise TargetDeviceError(f"slices of {known.name} that can be compiled for have {counts} devices, got {count=}")
    with _beside_others():
        description = topologies.get_topology_desc(f"{known.chip.name}:{sizes[count]}", platform="tpu")
    cores = {device.num_cores for device in description.devices}  # type: ignore[attr-defined]
    if cores != {known.cores}:
        raise TargetDeviceError(
            f"libtpu describes {known.name} with {cores} cores a device, and a real one has {known.cores}: "
            "lower and explain programs for it here (jax.jit(f).lower(...), tilewright.explain), and compile them there"
        )
    return tuple(description.devices)[:count]


@contextlib.contextmanager
def _beside_others() -> Iterator[None]:
    """A context in which libtpu may be loaded while another process has it: no device is opened to describe some."""
    name = "ALLOW_MULTIPLE_LIBTPU_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def missing_compiler(known: KnownDevice) -> str:
    """Names the missing parts of the compiler for a device; empty if all are installed."""
    if known.kind == "tpu":
        return "" if _is_installed("libtpu") else "libtpu is not installed (pip install libtpu; it needs no TPU)"
    missing = []
    if not any(map(_is_installed, _PLUGINS)):
        missing.append("JAX's CUDA plugin is not installed (pip install 'jax[cuda13]'; it needs no GPU)")
    if shutil.which("ptxas") is None:
        folder = _packaged_ptxas()
        if folder is None:
            missing.append("there is no ptxas, on the path or in a package (pip install nvidia-cuda-nvcc)")
        elif not (folder.parent / "nvvm/libdevice/libdevice.10.bc").exists():
            missing.append("there is no libdevice beside the package's ptxas (pip install nvidia-nvvm)")
    return "; ".join(missing)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _packaged_ptxas() -> Path | None:
    """The folder of ptxas in NVIDIA's pip packages, which share one namespace."""
    nvidia = importlib.util.find_spec("nvidia")
    roots = [] if nvidia is None else list(nvidia.submodule_search_locations or ())
    folders = (Path(root, folder) for root in roots for folder in _PTXAS_FOLDERS)
    return next((folder for folder in folders if (folder / "ptxas").exists()), None)


def _put_ptxas_on_path() -> None:
    # Mosaic GPU and XLA look for ptxas on the path, not inside the packages.
    folder = _packaged_ptxas()
    if shutil.which("ptxas") is None and folder is not None:
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{folder}"
