"""Short stable strings for everything that a tuned config depends on: device, sharding, toolchain, source."""

import functools
import hashlib
import importlib.metadata
import inspect
import platform
import re
import types
import weakref
from typing import TYPE_CHECKING, Any, Literal

from tilewright.ops.utils.processes import usable_cores

if TYPE_CHECKING:
    import jax

_GPU_PLATFORMS = frozenset({"gpu", "cuda", "rocm"})

_TOOLCHAIN = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "libtpu",
    "triton",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cutlass-dsl",
    "flash-attn-4",
    "quack-kernels",
)


def default_device() -> "jax.Device":
    """The device that ``jax.default_device`` names, or else the first device of the default backend."""
    import jax

    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def device_kind() -> Literal["gpu", "tpu", "cpu"]:
    """The kind of device that computations run on now: that of ``target_device``, JAX's default device or its backend.

    A backend that is neither a GPU nor a TPU counts as "cpu", since only XLA compiles for it.
    """
    from tilewright.ops.utils.target import active_target  # imports jax

    if (target := active_target()) is not None:
        return target.kind
    name = default_device().platform
    if name in _GPU_PLATFORMS:
        return "gpu"
    return "tpu" if name == "tpu" else "cpu"


def get_device_platform() -> Literal["triton", "pallas", "xla"]:
    """The platform whose kernels are native to `device_kind`."""
    kind = device_kind()
    if kind == "gpu":
        return "triton"
    return "pallas" if kind == "tpu" else "xla"


def device_fingerprint(device: "jax.Device | None" = None) -> str:
    """Names a kind of device, such as ``"gpu:NVIDIA H100 80GB HBM3:9.0"``.

    Without an argument: the device in use, or that of ``target_device``. Two devices have the same fingerprint if a
    config tuned on one suits the other. A CPU's fingerprint holds architecture, model and the number of cores this
    process may use.
    """
    from tilewright.ops.utils.target import active_target  # imports jax

    if device is None and (target := active_target()) is not None:
        return target.device.fingerprint
    return _describe_device(default_device() if device is None else device)


@functools.cache
def _describe_device(device: "jax.Device") -> str:
    kind = "gpu" if device.platform in _GPU_PLATFORMS else device.platform
    if kind == "cpu":
        return f"cpu:{platform.machine()}:{_cpu_model()}:{usable_cores()}"
    # Only GPU clients define the attribute: "9.0" on CUDA, "gfx942" on ROCm.
    capability = getattr(device, "compute_capability", None)
    return f"{kind}:{device.device_kind}" + (f":{capability}" if capability else "")


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = dict(re.findall(r"^([\w ]+?)\s*: *(.*)$", file.read(1 << 16), flags=re.MULTILINE))
    except OSError:
        found = {}
    if found.get("model name"):
        return " ".join(found["model name"].split())
    if "CPU part" in found:  # Arm kernels print numbers only
        return f"{found.get('CPU implementer', '?')}-{found['CPU part']}"
    return platform.processor() or "unknown"


def sharding_fingerprint(array: Any) -> str:
    """Describes the partitioning of ``array``, such as ``"[a=4,b=2](a,-,b)"``; empty if unpartitioned or unknown.

    Reads the sharding of a concrete array, of a tracer as far as its type has it (mesh axes of explicit mode), and of a
    ``ShapeDtypeStruct``. Leaves out everything that does not change the work of one device: device ids, mesh axes of
    size one, axes that are manual here. Thus an eager and a traced call agree, except on automatic mesh axes, which
    only the eager call sees.
    """
    import jax

    described = jax.typeof(array) if isinstance(array, jax.core.Tracer) else array
    sharding = getattr(described, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _describe_named(sharding)
    return _describe_sharding(sharding, tuple(array.shape))


@functools.lru_cache(maxsize=1024)
def _describe_named(sharding: "jax.sharding.NamedSharding") -> str:
    from jax.sharding import AxisType

    mesh, spec = sharding.mesh, sharding.spec
    sizes = {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind != AxisType.Manual and size > 1
    }
    dimensions = []
    for partition in spec.partitions:
        names = partition if isinstance(partition, tuple) else (partition,)
        dimensions.append("+".join(str(name) for name in names if name in sizes) or "-")
    while dimensions and dimensions[-1] == "-":
        dimensions.pop()
    partial = "".join(
        f"{label}{{{','.join(sorted(map(str, names)))}}}"
        for label, names in (("unreduced", spec.unreduced), ("reduced", spec.reduced))
        if names
    )
    memory = f"@{sharding.memory_kind}" if sharding.memory_kind == "pinned_host" else ""
    if not dimensions and not partial:
        return memory
    axes = ",".join(f"{name}={size}" for name, size in sizes.items())
    return f"[{axes}]({','.join(dimensions)}){partial}{memory}"


@functools.lru_cache(maxsize=1024)
def _describe_sharding(sharding: "jax.sharding.Sharding", shape: tuple[int, ...]) -> str:
    # The repr of a sharding without a mesh lists device ids; only the shard shape on each device matters here.
    if sharding.num_devices == 1 or sharding.is_fully_replicated:
        return ""
    return f"{type(sharding).__name__}[{sharding.num_devices}]{sharding.shard_shape(shape)}".replace(" ", "")


def sharding_from_fingerprint(text: str) -> "jax.sharding.NamedSharding | None":
    """A sharding with this fingerprint over an abstract mesh of automatic axes; ``None`` if the text does not define
    one.
    """
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    match = re.fullmatch(r"\[((?:\w+=\d+,?)+)\]\(([\w+,-]+)\)", text)
    if match is None:
        return None
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in match[1].split(","))}
    partitions = [None if part == "-" else tuple(part.split("+")) for part in match[2].split(",")]
    if not {name for part in partitions if part for name in part} <= sizes.keys():
        return None
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return NamedSharding(mesh, PartitionSpec(*partitions))


@functools.cache
def _toolchain() -> tuple[tuple[str, str], ...]:
    versions = []
    for name in _TOOLCHAIN:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(versions)


def toolchain_fingerprint() -> dict[str, str]:
    """Versions of the installed packages that compile kernels, by distribution name. Imports none of them."""
    return dict(_toolchain())


_sources: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def source_fingerprint(obj: object) -> str:
    """A hash of the source of a class, function or module, or of an instance's class; empty without source."""
    if not isinstance(obj, type | types.FunctionType | types.ModuleType):
        obj = type(obj)
    if obj not in _sources:
        try:
            source = inspect.getsource(obj)
        except (OSError, TypeError):
            _sources[obj] = ""
        else:
            _sources[obj] = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return _sources[obj]
