"""Makes a wheel of compiled CUDA kernels, for machines without nvcc: what calls can come to without tuning.

python -m tools.kernels_wheel                               # make kernels-wheel
python -m tools.kernels_wheel --arch 90a --group bf16_k64   # make kernels-wheel KERNELS_ARGS='--arch 90a ...'
python -m tools.kernels_wheel --list

Groups are compiled into .kernels/builds, where the next run finds them: one that was ended goes on where it was.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tilewright.cli.cuda.building import BuildProgress, size_of, terminated_as_interrupted
from tilewright.cli.output import INTERRUPTED, stderr, stdout
from tilewright.kernels.cuda import BuildCache, Group, Values, build, library
from tilewright.kernels.cuda.build import build_key, shipped_key
from tilewright.kernels.cuda.cache import LIBRARY, RECORD
from tilewright.kernels.cuda.devices import device_values, parse_architecture
from tilewright.kernels.cuda.requirements import Field
from tilewright.kernels.cuda.shipped import SCHEMA, ShippedRecord, ffi_version
from tilewright.kernels.cuda.toolchain import Compiler, find_compiler, headers_version, missing
from tilewright.ops.types import Device
from tilewright.ops.utils.text import table
from tools.kernels_wheel.choosable import CAPABILITIES, choosable_groups
from tools.kernels_wheel.wheel import platform_tag, write_wheel
from tools.pages import ROOT

WORK = ROOT / ".kernels"

COMPILE_LIMIT_S = 7200.0

_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


class Failure(Exception):
    """Why there is no wheel."""


def chosen_groups(architectures: Sequence[str], names: Sequence[str], tables: Sequence[str]) -> list[Group]:
    """The groups that ship, or those of them that are named.

    Raises:
      Failure: nothing of what is named ships.
    """
    try:
        capabilities = [parse_architecture(text) for text in architectures] or list(CAPABILITIES)
    except ValueError as error:
        raise Failure(str(error)) from error
    every = [group for capability in dict.fromkeys(capabilities) for group in choosable_groups(capability)]
    for said, known in ((names, {group.name for group in every}), (tables, {group.table.name for group in every})):
        unknown = sorted(set(said) - known)
        if unknown:
            raise Failure(f"none that ships is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    of_tables = [group for group in every if not tables or group.table.name in tables]
    chosen = [group for group in of_tables if not names or group.name in names]
    if not chosen:
        raise Failure("no group that ships has all that was named")
    return chosen


def usable_compiler(groups: Sequence[Group]) -> tuple[Compiler, tuple[int, int]]:
    """The nvcc that compiles the groups, and the version of its CUDA runtime.

    Raises:
      Failure: one of the groups cannot be compiled here.
    """
    reasons = dict.fromkeys(reason for group in groups for reason in missing(group.capability, group.table.packages))
    compiler = find_compiler()
    runtime = None if compiler is None else headers_version(compiler.root)
    if compiler is None or reasons or runtime is None:
        raise Failure("; ".join(reasons) or "the version of the CUDA runtime beside nvcc cannot be told")
    return compiler, runtime


def record_of(group: Group, path: Path, cuda: tuple[int, int], shipped: Path | None = None) -> ShippedRecord:
    """The record in the wheel of a group that was just built.

    Args:
      shipped: the object that is in the wheel, if it is another form of what was built.
    """
    built = json.loads((path.parent / RECORD).read_text())
    return ShippedRecord(
        schema=SCHEMA,
        table=group.table.name,
        group=group.name,
        target=group.target,
        content=shipped_key(group).content,
        ffi=ffi_version(),  # a build with other headers of it would not have been found
        cuda=cuda,
        compiler=built["compiler"],
        packages=built["packages"],
        sha256=hashlib.sha256((shipped or path).read_bytes()).hexdigest(),
        seconds=built["seconds"],
    )


def check_facts(group: Group, cache: BuildCache, path: Path) -> None:
    """Holds a compiled group to what was assumed of it when it was chosen.

    Raises:
      Failure: no variant of it fits its device: calls would come to groups that are not in the wheel.
    """
    facts = library.load(group, cache, path).facts
    device = device_values(Device("gpu", group.target, divmod(group.capability, 10))) or {}
    for variant in group.table.in_group(group.name):
        asked = [each for each in variant.requirements if not any(isinstance(o, Field) for o in each.operands())]
        if variant.name in facts and all(each.holds(Values({}, device, facts[variant.name])) for each in asked):
            return
    raise Failure(f"no variant of {group} fits its device: {dict(facts)}")


def licenses(groups: Sequence[Group]) -> dict[str, Path]:
    """The licenses of all code that is compiled into the objects."""
    found = {"LICENSE": ROOT / "LICENSE"}
    for package in dict.fromkeys(package for group in groups for package in group.table.packages):
        files = importlib.metadata.files(package.distribution) or []
        for file in files:
            if file.name.startswith("LICENSE"):
                found[f"LICENSE-{package.distribution}.txt"] = Path(str(file.locate()))
    return found


def stripped(library: Path, place: Path) -> Path:
    """A copy of an object without the symbols that only debuggers read, a quarter of it.

    Raises:
      subprocess.CalledProcessError: it is not an object file.
      FileNotFoundError: there are no binutils.
    """
    subprocess.run(("strip", "--strip-all", "-o", str(place), str(library)), check=True)
    return place


def print_sizes(wheel: Path, records: Sequence[ShippedRecord]) -> None:
    """Prints of every group its size, in the wheel and as it is loaded, and what it took to compile; and of all."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [entry for entry in archive.infolist() if entry.filename.endswith(LIBRARY)]
    sizes = {Path(entry.filename).parent.name: (entry.file_size, entry.compress_size) for entry in libraries}
    figures = ("MB", "in the wheel", "compiled in")
    made = table("shipped kernels", "table", "group", "architecture", *figures, right=figures)
    for record in records:
        said = [f"{size / 1e6:.2f}" for size in sizes[record.folder]]
        made.add_row(record.table, record.group, f"sm_{record.target}", *said, f"{record.seconds:.0f} s")
    stdout().print(made)
    total = sum(installed for installed, _ in sizes.values()) / 1e6
    seconds = sum(record.seconds for record in records)
    print(f"{wheel}: {size_of(wheel)}; {len(records)} groups, {total:.1f} MB installed, {seconds:.0f} s of nvcc")


def make_wheel(
    groups: Sequence[Group], jobs: int | None, cache: BuildCache, folder: Path
) -> tuple[Path, list[ShippedRecord]]:
    """Compiles what is not compiled yet, and writes the wheel into a folder.

    Args:
      cache: one to which no wheel brings anything.

    Raises:
      Failure: there is no wheel.
      KeyboardInterrupt: the build was interrupted; what was finished is kept.
    """
    compiler, cuda = usable_compiler(groups)
    for name in _FLAGS:
        os.environ.pop(name, None)  # what ships is compiled only with our flags
    progress = BuildProgress(stderr(), len(groups))
    print(
        f"{len(groups)} groups by nvcc {compiler.version}, for XLA's FFI {'.'.join(map(str, ffi_version()))} and later"
    )
    with terminated_as_interrupted(), progress.bar:
        built = build(
            groups, jobs=jobs, cache=cache, on_event=progress.on_event, timeout_s=COMPILE_LIMIT_S, keep_going=True
        )
    progress.report_failures()
    if progress.failed:
        raise Failure(f"{len(progress.failed)} of {len(groups)} groups failed; those that were built are kept")
    for group, path in built.items():
        check_facts(group, cache, path)
    tag = platform_tag(built.values(), platform.machine())
    with tempfile.TemporaryDirectory(prefix="tilewright-kernels-") as place:
        lean = {group: stripped(path, Path(place, f"{i}.so")) for i, (group, path) in enumerate(built.items())}
        shipped = [(record_of(group, path, cuda, lean[group]), lean[group]) for group, path in built.items()]
        wheel = write_wheel(folder, shipped, cuda[0], tag, licenses(groups))
    return wheel, [record for record, _ in shipped]


def list_groups(groups: Sequence[Group], cache: BuildCache) -> None:
    """Prints every group that ships, and whether it is compiled."""
    for group in groups:
        path = cache.find(build_key(group))
        print(group, size_of(path) if path else "not compiled")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernels_wheel", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--arch", action="append", default=[], help="only this architecture, such as 90a; repeatable")
    parser.add_argument("--table", action="append", default=[], help="only this table; repeatable")
    parser.add_argument("--group", action="append", default=[], help="only groups of this name; repeatable")
    parser.add_argument("--jobs", "-j", type=int, help="compilers at once; by default as cores and memory allow")
    parser.add_argument("--list", action="store_true", help="build nothing, show what ships and is compiled")
    parser.add_argument("--work", type=Path, default=WORK, help="where builds and the wheel go; .kernels by default")
    options = parser.parse_args(arguments)
    try:
        groups = chosen_groups(options.arch, options.group, options.table)
        cache = BuildCache(options.work / "builds", shipped=False)
        if options.list:
            list_groups(groups, cache)
        else:
            print_sizes(*make_wheel(groups, options.jobs, cache, options.work / "dist"))
    except Failure as failure:
        print(f"kernels_wheel: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kernels_wheel: interrupted; what was compiled is kept", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
