"""The file format of the wheel: a folder for each group, and the metadata that pip reads."""

import base64
import csv
import hashlib
import io
import re
import subprocess
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tilewright._version import __version__
from tilewright.kernels.cuda.cache import LIBRARY, RECORD
from tilewright.kernels.cuda.shipped import NAMESPACE, ShippedRecord

EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file: the same groups give the same bytes."""

# For each wheel policy the maximum symbol versions that its oldest systems have.
_POLICIES = {
    "manylinux_2_17": {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)},
    "manylinux_2_28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    "manylinux_2_31": {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    "manylinux_2_34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    "manylinux_2_35": {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    "manylinux_2_39": {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}

_SYMBOL = re.compile(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)*)\b")

type Shipped = tuple[ShippedRecord, Path]
"""The record of a group, and the place of its object."""


def distribution(cuda: int) -> str:
    """The name under which pip knows the wheel for a CUDA, such as 13."""
    return f"tilewright-kernels-cu{cuda}"


def platform_tag(libraries: Iterable[Path], machine: str) -> str:
    """The most general platform on which all objects can be loaded, such as "manylinux_2_34_x86_64".

    Raises:
      subprocess.CalledProcessError: one is not a shared object.
      FileNotFoundError: there are no binutils.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        command = ("readelf", "--version-info", "--wide", str(library))
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, version in _SYMBOL.findall(text):
            numbers = tuple(map(int, version.split(".")))
            needed[name] = max(needed.get(name, ()), numbers)
    for policy, limits in _POLICIES.items():
        if all(version <= limits[name] for name, version in needed.items()):
            return f"{policy}_{machine}"
    return f"linux_{machine}"


def write_wheel(
    folder: Path, groups: Sequence[Shipped], cuda: int, platform: str, licenses: Mapping[str, Path]
) -> Path:
    """Writes the wheel of groups that were compiled by one CUDA.

    Args:
      licenses: of all that is compiled into the objects, by the names of their files in the wheel.
    """
    name = distribution(cuda).replace("-", "_")
    tag = f"py3-none-{platform}"
    info = f"{name}-{__version__}.dist-info"
    wheel = folder / f"{name}-{__version__}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str]] = []
    part = wheel.with_suffix(".part")  # a run that is killed leaves the old wheel or the new one
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(place: str, data: bytes, mode: int = 0o644) -> None:
            entry = zipfile.ZipInfo(place, EPOCH)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((place, f"sha256={digest}", str(len(data))))

        for record, library in sorted(groups, key=lambda each: each[0].folder):
            place = f"{NAMESPACE}/cu{cuda}/{record.folder}"
            add(f"{place}/{LIBRARY}", library.read_bytes(), 0o755)
            add(f"{place}/{RECORD}", msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        for file, text in sorted(licenses.items()):
            add(f"{info}/licenses/{file}", text.read_bytes())
        add(f"{info}/METADATA", _metadata(groups, cuda, licenses).encode())
        add(f"{info}/WHEEL", _wheel(tag).encode())
        said = io.StringIO()
        csv.writer(said, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", EPOCH), said.getvalue())
    part.replace(wheel)
    return wheel


def _wheel(tag: str) -> str:
    return f"Wheel-Version: 1.0\nGenerator: tools.kernels_wheel\nRoot-Is-Purelib: false\nTag: {tag}\n"


def _metadata(groups: Sequence[Shipped], cuda: int, licenses: Iterable[str]) -> str:
    targets = sorted({record.target for record, _ in groups})
    listed = sorted(f"- {record.table} {record.group}, sm_{record.target}" for record, _ in groups)
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {distribution(cuda)}",
        f"Version: {__version__}",
        f"Summary: Compiled CUDA kernels of tilewright: CUDA {cuda}, {', '.join(f'sm_{target}' for target in targets)}",
        "License-Expression: Apache-2.0 AND BSD-3-Clause",  # the second is CUTLASS's
        *(f"License-File: {file}" for file in sorted(licenses)),
        "Requires-Python: >=3.12",
        f"Requires-Dist: tilewright=={__version__}",
        f"Classifier: Environment :: GPU :: NVIDIA CUDA :: {cuda}",
        "Classifier: Operating System :: POSIX :: Linux",
        "Description-Content-Type: text/markdown",
        "",
        f"What `tilewright build` would compile, for machines without nvcc. A driver for CUDA {cuda} is needed.",
        "",
        *listed,
        "",
    ]
    return "\n".join(lines)
