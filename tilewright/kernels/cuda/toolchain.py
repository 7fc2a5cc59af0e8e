"""The CUDA compiler and the headers that kernels include; a missing one is a reason, never an error on import."""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax

_INCLUDE = Path(__file__).with_name("include")

# Folders of CUDA installations in wheels: the wheels for CUDA 13 share one folder, those for CUDA 12 have one each.
# NVIDIA's nvcc wheel for CUDA 12 holds ptxas without nvcc; others may hold both.
_WHEEL_ROOTS = ("nvidia/cu13", "nvidia/cuda_nvcc")

FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-shared",
    # Hidden: otherwise two groups' statics of the same template (which kernel has its attribute set) would be merged.
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    # Keeps the static CUDA runtime private to the object, whatever other runtime the process has loaded.
    "-Xlinker",
    "--exclude-libs=ALL",
    # Warnings from within XLA's FFI headers.
    "-diag-suppress",
    "940,2473",
)


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderPackage:
    """Headers from a wheel.

    Attributes:
      name: the common name.
      distribution: the distribution to install.
      roots: its possible folders, relative to the folders in which Python looks for modules.
      folders: include folders, relative to the root.
      probe: a header that must be in the first folder.
      in_cuda: True if it may also be among CUDA's own headers.
      includes_cccl: True if its headers include CUDA's C++ library, which requires nvcc of the same CUDA version.
    """

    name: str
    distribution: str
    roots: tuple[str, ...]
    folders: tuple[str, ...]
    probe: str
    in_cuda: bool = False
    includes_cccl: bool = False


CURAND = HeaderPackage(
    "cuRAND", "nvidia-curand", ("nvidia/cu13/include", "nvidia/curand/include"), (".",), "curand_kernel.h", in_cuda=True
)


CUTLASS_TYPES = {"f32": "float", "f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}
"""Element types as arguments of CUTLASS's templates, by short name."""


def cutlass(*folders: str) -> HeaderPackage:
    """CUTLASS's headers, with further folders of its source tree, such as "examples/41_fused_multi_head_attention"."""
    included = ("include", "tools/util/include", *folders)
    roots = ("cutlass_library/source",)
    return HeaderPackage("CUTLASS", "nvidia-cutlass", roots, included, "cutlass/cutlass.h", includes_cccl=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Compiler:
    """An nvcc that runs here.

    Attributes:
      root: the folder of its CUDA installation.
      version: the version, such as "13.0.88".
      capabilities: the compute capabilities, times ten, for which it compiles.
      host: the first line of the host compiler's version.
    """

    nvcc: Path
    root: Path
    version: str
    capabilities: frozenset[int]
    host: str

    @property
    def identity(self) -> str:
        """Everything about the compiler that the compiled code depends on."""
        further = (os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))
        return "; ".join(part for part in (f"nvcc {self.version}", self.host, *further) if part)


def find_compiler() -> Compiler | None:
    """The nvcc of CUDA_HOME or CUDA_PATH, on PATH, or in a wheel; ``None`` if none of them runs."""
    names = ("CUDA_HOME", "CUDA_PATH", "PATH", "NVCC_CCBIN")
    # Cached by what the search depends on: a running process may change its environment.
    return _find_compiler(tuple(os.environ.get(name, "") for name in names), tuple(sys.path))


@functools.cache
def _find_compiler(environment: tuple[str, ...], path: tuple[str, ...]) -> Compiler | None:
    host = _host_compiler(environment[-1])
    for nvcc in _candidates(environment[:2]):
        compiler = _query(nvcc, host)
        if compiler is not None:
            return compiler
    return None


def _candidates(homes: Iterable[str]) -> Iterator[Path]:
    yield from (Path(home, "bin", "nvcc") for home in homes if home)
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield from (folder / "bin" / "nvcc" for folder in _on_python_path(_WHEEL_ROOTS))


def _on_python_path(relative: Iterable[str]) -> Iterator[Path]:
    yield from (Path(entry, part) for part in relative for entry in sys.path if entry and Path(entry, part).is_dir())


def _query(nvcc: Path, host: str) -> Compiler | None:
    version = re.search(r"\bV(\d+(?:\.\d+)+)", _output(nvcc, "--version"))
    if version is None:
        return None
    known = re.findall(r"compute_(\d+)\b", _output(nvcc, "--list-gpu-arch"))
    # nvcc prints its own location, which finds the installation even if a script only calls nvcc.
    top = re.search(r"^#\$ TOP=(.*)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    root = Path(top[1]) if top else nvcc.resolve().parent.parent
    return Compiler(nvcc, Path(os.path.normpath(root)), version[1], frozenset(map(int, known)), host)


def _output(*command: str | Path) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _host_compiler(given: str) -> str:
    """The first line of the host compiler's version; empty without a host compiler."""
    name = given or "g++"
    if os.path.isdir(name):  # nvcc accepts a folder too
        name = os.path.join(name, "g++")
    return _output(name, "--version").partition("\n")[0].strip() if shutil.which(name) else ""


def missing(capability: int | None, packages: Sequence[HeaderPackage] = ()) -> list[str]:
    """Every reason why nothing can be compiled here, for a compute capability (times ten) if one is given."""
    if not sys.platform.startswith("linux"):
        return ["CUDA kernels are built on Linux only"]
    compiler = find_compiler()
    if compiler is None:
        return [
            "there is no nvcc: neither in CUDA_HOME or CUDA_PATH, nor on PATH, nor in the wheel nvidia-cuda-nvcc (the "
            "wheels of CUDA 12 hold none)"
        ]
    reasons = []
    if not compiler.host:
        reasons.append("nvcc needs a host compiler, and there is no g++ on PATH (nor does NVCC_CCBIN name one)")
    if capability is not None and capability not in compiler.capabilities:
        known = ", ".join(str(each) for each in sorted(compiler.capabilities))
        reasons.append(f"nvcc {compiler.version} compiles for {known}, not for {capability}")
    for package in packages:
        if package_folders(package, compiler) is None:
            reasons.append(f"the headers of {package.name} are missing: pip install {package.distribution}")
    headers = headers_version(compiler.root)
    compiler_release = tuple(map(int, compiler.version.split(".")[:2]))
    if headers and headers != compiler_release and any(package.includes_cccl for package in packages):
        release = f"{headers[0]}.{headers[1]}"
        reasons.append(
            f"nvcc {compiler.version} and the CUDA headers beside it ({release}) are of two releases, which CUTLASS "
            f"refuses: pip install 'cuda-toolkit[nvcc,cudart,cccl]=={release}.*'"
        )
    return reasons


@functools.cache
def headers_version(root: Path) -> tuple[int, int] | None:
    """The version of the CUDA headers, and so of the runtime, in an installation, such as (13, 2); None if unknown."""
    try:
        text = (root / "include" / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^#define CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None


def package_folders(package: HeaderPackage, compiler: Compiler | None = None) -> tuple[Path, ...] | None:
    """The include folders of an installed package, an empty tuple if they are CUDA's own, ``None`` if it is missing."""
    for root in _on_python_path(package.roots):
        folders = tuple(Path(os.path.normpath(root / folder)) for folder in package.folders)
        if (folders[0] / package.probe).is_file() and all(folder.is_dir() for folder in folders):
            return folders
    if package.in_cuda and compiler is not None and (compiler.root / "include" / package.probe).is_file():
        return ()
    return None


def own_folders() -> tuple[Path, ...]:
    """The include folders of ``tilewright/variant.h`` and of XLA's FFI."""
    return _INCLUDE, Path(jax.ffi.include_dir())


def command(
    compiler: Compiler, target: str, folders: Iterable[Path], packages: Iterable[HeaderPackage], flags: Iterable[str]
) -> list[str]:
    """nvcc's command line for a target such as "90a", without source and output."""
    digits = target.rstrip("a")
    # No PTX: nothing is left to the driver's compiler when an object is loaded.
    line = [str(compiler.nvcc), *FLAGS, "-gencode", f"arch=compute_{target},code=sm_{target}"]
    line += [f"-DTILEWRIGHT_ARCH={digits}", *flags]
    line += [f"-I{folder}" for folder in (*own_folders(), *folders)]
    for package in packages:
        # After nvcc's own headers, since a wheel's folder may also hold those of another CUDA.
        line += [part for folder in package_folders(package, compiler) or () for part in ("-isystem", str(folder))]
    line += [f"-L{folder}" for folder in [compiler.root / "lib"] if folder.is_dir()]  # a wheel has no lib64
    return line
