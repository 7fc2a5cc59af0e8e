"""Compiles groups: several at once, as far as cores and memory go."""

import concurrent.futures
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
from tilewright.kernels.cuda_build import toolchain
from tilewright.kernels.cuda_build.cache import LIBRARY, BuildCache, BuildKey
from tilewright.kernels.cuda_build.devices import architecture
from tilewright.kernels.cuda_build.headers import hash_headers
from tilewright.kernels.cuda_build.sources import dispatch_header, group_source
from tilewright.kernels.cuda_build.table import VariantTable
from tilewright.ops.core.builds import Build, Cancelled, parallel_compilers
from tilewright.ops.utils.serialize import canonical_json

_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Group(Build):
    """One group of a table for one compute capability (times ten): what is compiled into one shared object."""

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
        return False

    def make(self, cancelled: threading.Event) -> None:
        _build_one(self, BuildCache(), cancelled, lambda _: None)

    def __str__(self) -> str:
        return f"{self.table.name} {self.name} sm_{self.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStarted:
    """The compiler was started on a group."""

    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDone:
    """A group is built.

    Attributes:
      seconds: what it took to compile; 0 if it was there already, or another process built it.
    """

    group: Group
    library: Path
    seconds: float


type Event = GroupStarted | GroupDone


def groups_of(table: VariantTable, capability: int) -> list[Group]:
    """All groups with anything for a compute capability, such as 90."""
    return [Group(table, name, capability) for name in table.groups_for(capability)]


def find(group: Group, cache: BuildCache | None = None) -> Path | None:
    """The shared object of a group that is built already.

    Raises:
      BuildError: the cache is not ours alone.
    """
    return (cache or BuildCache()).find(build_key(group))


def build(
    groups: Iterable[Group],
    *,
    jobs: int | None = None,
    cache: BuildCache | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> dict[Group, Path]:
    """Builds what is not built yet and returns all shared objects.

    Args:
      jobs: compilers at once; by default as many as there are cores, and as many as fit into the free memory.
      on_event: called from several threads, one call at a time.

    Raises:
      BuildError: one cannot be built; the others are given up.
    """
    wanted = list(dict.fromkeys(groups))
    cache = cache or BuildCache()
    cancelled = threading.Event()
    reporting = threading.Lock()

    def report(event: Event) -> None:
        with reporting:
            if on_event is not None:
                on_event(event)

    limit = jobs or default_jobs(wanted)
    with concurrent.futures.ThreadPoolExecutor(max(1, limit), thread_name_prefix="nvcc") as pool:
        futures = {pool.submit(_build_one, group, cache, cancelled, report): group for group in wanted}
        try:
            done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
            return {group: future.result() for future, group in futures.items()}
        finally:  # also when interrupted: the compilers must not outlive the call
            cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)


def default_jobs(groups: Iterable[Group]) -> int:
    """As many compilers as there are cores, and as many of the largest groups as fit into the free memory."""
    return parallel_compilers(group.memory_bytes for group in groups)


def build_key(group: Group) -> BuildKey:
    """What a group's shared object is known by, here and now.

    Raises:
      OSError: the table's header cannot be read.
    """
    _, packages = hash_headers(group.table)
    compiler = None if toolchain.missing(group.capability, group.table.packages) else toolchain.find_compiler()
    identity = compiler.identity if compiler else ""
    return BuildKey(group.table.name, group.name, group.target, _content(group), packages, identity)


@functools.lru_cache(maxsize=1024)
def _content(group: Group) -> str:
    spec = {
        "sources": _sources(group),
        "headers": hash_headers(group.table)[0],
        "flags": [*toolchain.FLAGS, *group.table.flags],
        "target": group.target,
    }
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()


def _sources(group: Group) -> Mapping[str, str]:
    # Without the manifest: a group must not be built anew for a change to another one.
    return {"dispatch.h": dispatch_header(group.table), f"{group.name}.cu": group_source(group.table, group.name)}


def _build_one(group: Group, cache: BuildCache, cancelled: threading.Event, report: Callable[[Event], None]) -> Path:
    key = build_key(group)
    seconds = 0.0
    library = cache.find(key)
    if library is None:
        compiler = toolchain.find_compiler()
        reasons = toolchain.missing(group.capability, group.table.packages)
        if compiler is None or reasons:
            raise BuildError(f"{group} cannot be built: {'; '.join(reasons)}")
        try:
            with cache.lock(key, cancelled):
                library = cache.find(key)  # another process may have built it while this one waited
                if library is None:
                    report(GroupStarted(group))
                    started = time.perf_counter()
                    library = _compile(group, compiler, key, cache, cancelled)
                    seconds = time.perf_counter() - started
        except OSError as error:
            raise BuildError(f"{group} cannot be built in {cache.path}: {error}") from error
    report(GroupDone(group, library, seconds))
    return library


def _compile(
    group: Group, compiler: toolchain.Compiler, key: BuildKey, cache: BuildCache, cancelled: threading.Event
) -> Path:
    table = group.table
    folders = (table.header.parent, *table.include_folders)
    command = toolchain.command(compiler, group.target, folders, table.packages, table.flags)
    with cache.staging(key) as folder:
        for name, text in _sources(group).items():
            (folder / name).write_text(text)
        started = time.perf_counter()
        code, output = _run([*command, f"{group.name}.cu", "-o", LIBRARY], folder, cancelled)
        if code != 0 or not (folder / LIBRARY).is_file():
            raise BuildError(f"nvcc could not compile {group} (exit code {code}):", output)
        seconds = round(time.perf_counter() - started, 1)
        return cache.publish(key, folder, {"seconds": seconds, "created": time.time()})


def _run(command: list[str], folder: Path, cancelled: threading.Event) -> tuple[int, str]:
    """Exit code and output of a compiler that is killed, with all that it started, when the build is given up."""
    scratch = folder / "scratch"  # nvcc's own temporary files go where they are removed whatever happens
    scratch.mkdir()
    log = scratch / "output.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "TMPDIR": str(scratch)}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                if cancelled.wait(_POLL_S):
                    raise Cancelled
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its session's, which is there until it is waited for
            process.wait()
            raise
    output = log.read_text(errors="replace").strip()
    shutil.rmtree(scratch)
    return process.returncode, output
