"""Compiles groups of variants, several at once within the limits of cores and memory."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tilewright.errors import BuildError
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.cuda.cache import LIBRARY, BuildCache, BuildKey, Limit, TimedOut
from tilewright.kernels.cuda.devices import architecture
from tilewright.kernels.cuda.headers import hash_headers, hash_own_headers
from tilewright.kernels.cuda.shipped import ShippedKey, find_shipped
from tilewright.kernels.cuda.sources import dispatch_header, group_source
from tilewright.kernels.cuda.table import VariantTable
from tilewright.ops.kernel.builds import Build, parallel_compilers
from tilewright.ops.utils.serialize import canonical_json

COMPILE_LIMIT_S = 3600.0
"""Maximum time of a compiler for one group: many times that of the slowest group on a busy machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group(Build):
    """One group of a table for one compute capability (times ten), compiled into one shared object."""

    table: VariantTable
    name: str
    capability: int

    @property
    def target(self) -> str:
        return architecture(self.capability)

    @property
    def memory_bytes(self) -> int:
        return self.table.memory_per_job

    def is_made(self) -> bool:
        return find(self) is not None

    def is_installed(self) -> bool:
        found = locate(self)
        return found is not None and found.shipped

    def make(self, cancelled: threading.Event) -> None:
        _build_one(self, BuildCache(), Limit(cancelled, COMPILE_LIMIT_S), lambda _: None)

    def command(self, op: str) -> str:
        return f"tilewright build {op} --group {self.name} --arch {self.target}"

    def __str__(self) -> str:
        return f"{self.table.name} {self.name} sm_{self.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class SharedObject:
    """The location of a group's shared object.

    Attributes:
      shipped: True if it is part of an installed wheel; otherwise it was built here.
    """

    path: Path
    shipped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStarted:
    """The compiler was started on a group."""

    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDone:
    """A group's shared object is available.

    Attributes:
      seconds: compile time; 0 if it existed already, or another process built it.
      shipped: True if it is part of an installed wheel.
    """

    group: Group
    library: Path
    seconds: float
    shipped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group could not be built."""

    group: Group
    error: BuildError


type Event = GroupStarted | GroupDone | GroupFailed


def groups_of(table: VariantTable, capability: int) -> list[Group]:
    """All groups with variants for a compute capability, such as 90."""
    return [Group(table, name, capability) for name in table.groups_for(capability)]


def locate(group: Group, cache: BuildCache | None = None) -> SharedObject | None:
    """Locates the shared object of a group; every use of one goes through here.

    Shipped objects come first, so that all processes of a job run the same ones, whatever was built locally.

    Raises:
      BuildError: the cache may be written by others.
    """
    cache = cache or BuildCache()
    shipped = find_shipped(shipped_key(group)) if cache.shipped else None
    if shipped is not None:
        return SharedObject(shipped, shipped=True)
    built = cache.find(build_key(group))
    return None if built is None else SharedObject(built)


def find(group: Group, cache: BuildCache | None = None) -> Path | None:
    """The shared object of a group that is built or shipped.

    Raises:
      BuildError: the cache may be written by others.
    """
    found = locate(group, cache)
    return None if found is None else found.path


def build(
    groups: Iterable[Group],
    *,
    jobs: int | None = None,
    cache: BuildCache | None = None,
    on_event: Callable[[Event], None] | None = None,
    timeout_s: float = COMPILE_LIMIT_S,
    keep_going: bool = False,
) -> dict[Group, Path]:
    """Builds the groups that are missing and returns all shared objects.

    Args:
      jobs: number of compilers at once; by default limited by cores and free memory.
      on_event: called from several threads, one call at a time.
      timeout_s: limit for one group's compiler, and for waiting for another process that builds the group.
      keep_going: continue after a failure; failed groups are missing in the result.

    Raises:
      BuildError: a group could not be built in time; the others are cancelled. Not raised with ``keep_going``.
    """
    distinct = list(dict.fromkeys(groups))
    cache = cache or BuildCache()
    limit = Limit(threading.Event(), timeout_s)
    report_lock = threading.Lock()

    def report(event: Event) -> None:
        with report_lock:
            if on_event is not None:
                on_event(event)

    def build_one(group: Group) -> Path | None:
        try:
            return _build_one(group, cache, limit, report)
        except BuildError as error:
            report(GroupFailed(group, error))
            if not keep_going:
                raise
            return None

    with concurrent.futures.ThreadPoolExecutor(jobs or default_jobs(distinct), thread_name_prefix="nvcc") as pool:
        futures = {pool.submit(build_one, group): group for group in distinct}
        try:
            # Raises the first failure as soon as it happens; the compilers that still run are then cancelled.
            done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
            built = {group: future.result() for future, group in futures.items()}
            return {group: library for group, library in built.items() if library is not None}
        finally:  # also when interrupted: the compilers must not outlive the call
            limit.cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)


def default_jobs(groups: Iterable[Group]) -> int:
    """The number of compilers: one per core, limited by how many of the largest groups fit into free memory."""
    return parallel_compilers(group.memory_bytes for group in groups)


def build_key(group: Group) -> BuildKey:
    """The key of a group's shared object in the cache of this machine.

    Raises:
      OSError: the table's header cannot be read.
    """
    _, packages = hash_headers(group.table)
    # If nothing can be compiled here, any compiler's build is used, such as that of a machine which shares the cache.
    compiler = None if toolchain.missing(group.capability, group.table.packages) else toolchain.find_compiler()
    identity = compiler.identity if compiler else ""
    return BuildKey(group.table.name, group.name, group.target, _content(group), packages, identity)


def shipped_key(group: Group) -> ShippedKey:
    """The key of a group's shared object in a wheel.

    Raises:
      OSError: the table's header cannot be read.
    """
    return ShippedKey(group.table.name, group.name, group.target, _shipped_content(group))


@functools.lru_cache(maxsize=1024)
def _shipped_content(group: Group) -> str:
    return _hash_content(group, hash_own_headers(group.table))


@functools.lru_cache(maxsize=1024)
def _content(group: Group) -> str:
    return _hash_content(group, hash_headers(group.table)[0])


def _hash_content(group: Group, headers: str) -> str:
    spec = {
        "sources": _sources(group),
        "headers": headers,
        "flags": [*toolchain.FLAGS, *group.table.flags],
        "target": group.target,
    }
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()


def _sources(group: Group) -> Mapping[str, str]:
    # Without the manifest, which changes with other groups and must not trigger a rebuild.
    return {"dispatch.h": dispatch_header(group.table), f"{group.name}.cu": group_source(group.table, group.name)}


def _build_one(group: Group, cache: BuildCache, limit: Limit, report: Callable[[Event], None]) -> Path:
    found, seconds = locate(group, cache), 0.0
    if found is None:
        compiler = toolchain.find_compiler()
        reasons = toolchain.missing(group.capability, group.table.packages)
        if compiler is None or reasons:
            raise BuildError(f"{group} cannot be built: {'; '.join(reasons)}")
        key = build_key(group)
        try:
            with cache.lock(key, limit):
                found = locate(group, cache)  # another process may have built it in the meantime
                if found is None:
                    report(GroupStarted(group))
                    started = time.perf_counter()
                    found = SharedObject(_compile(group, compiler, key, cache, limit))
                    seconds = time.perf_counter() - started
        except TimedOut as error:
            raise BuildError(f"{group} was not built within {limit.timeout_s:g} s: {error}") from None
        except OSError as error:
            raise BuildError(f"{group} cannot be built in {cache.path}: {error}") from error
    report(GroupDone(group, found.path, seconds, found.shipped))
    return found.path


def _compile(group: Group, compiler: toolchain.Compiler, key: BuildKey, cache: BuildCache, limit: Limit) -> Path:
    table = group.table
    folders = (table.header.parent, *table.include_folders)
    command = toolchain.command(compiler, group.target, folders, table.packages, table.flags)
    with cache.staging(key) as folder:
        for name, text in _sources(group).items():
            (folder / name).write_text(text)
        started = time.perf_counter()
        code, output = _run([*command, f"{group.name}.cu", "-o", LIBRARY], folder, limit)
        if code != 0 or not (folder / LIBRARY).is_file():
            raise BuildError(f"nvcc could not compile {group} ({_ended(code)}):", output)
        seconds = round(time.perf_counter() - started, 1)
        return cache.publish(key, folder, {"seconds": seconds, "created": time.time()})


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"ended by signal {-code}"


def _run(command: list[str], folder: Path, limit: Limit) -> tuple[int, str]:
    """Runs a compiler, which is killed with its children when the build is cancelled; returns exit code and output.

    Raises:
      Cancelled: the build was cancelled.
      TimedOut: it exceeded its time limit.
    """
    scratch = folder / "scratch"  # nvcc's temporary files, removed in any case
    scratch.mkdir()
    log_file = scratch / "output.txt"
    # The time limit starts again: waiting for another process's lock does not count.
    wait = limit.waiting("nvcc was still running, and was ended")
    with open(log_file, "wb") as file:
        process = subprocess.Popen(
            # A session of its own: nvcc starts further processes, which are ended as one group.
            command, cwd=folder, env={**os.environ, "TMPDIR": str(scratch)}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # kills the process group, which exists until it is waited for
            process.wait()
            raise
    output = log_file.read_text(errors="replace").strip()
    shutil.rmtree(scratch)
    return process.returncode, output
