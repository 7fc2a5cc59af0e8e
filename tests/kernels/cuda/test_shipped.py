"""Kernels that an installed wheel brings: when they are used, and why not; with a stand-in for nvcc."""

import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import msgspec
import pytest
from cuda_rms_norm.rms_norm import TABLE as RMS_NORM

from tests.kernels.conftest import H100, needs_nvcc
from tests.support import fake_nvcc
from tilewright.errors import BuildError
from tilewright.kernels.cuda import BuildCache, CudaKernel, Group, HeaderPackage, build, library, locate, shipped
from tilewright.kernels.cuda.build import shipped_key
from tilewright.kernels.cuda.headers import hash_headers, hash_own_headers
from tilewright.kernels.cuda.shipped import ffi_version
from tilewright.kernels.cuda.toolchain import missing
from tools.kernels_wheel.__main__ import make_wheel, record_of
from tools.kernels_wheel.wheel import write_wheel

ROOT = Path(__file__).parents[3]
PROBLEM = {"rows": 1, "width": 8}

VERSION = """
#include "xla/ffi/api/c_api.h"
#include <cstdio>
int main() { printf("%d %d", XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which Python looks for modules, and a user's build cache of the test's own."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(shipped, "driver_version", lambda: None)
    return folder


def ship(groups, site, cuda=(13, 0), **replaced):
    """Builds groups, and unpacks a wheel of them as pip does; returns the folder of each."""
    cache = BuildCache(site.parent / "builds")
    records = [(record_of(group, path, cuda), path) for group, path in build(groups, cache=cache).items()]
    changed = [(msgspec.structs.replace(record, **replaced), path) for record, path in records]
    wheel = write_wheel(site.parent / "dist", changed, cuda[0], "linux_x86_64", {})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    forget()
    return [site / "tilewright_kernels" / f"cu{cuda[0]}" / record.folder for record, _ in changed]


def forget():
    """Makes this process look again, as a new one would."""
    for cached in (shipped._folders, shipped._entries, shipped._find, hash_headers, hash_own_headers):
        cached.cache_clear()
    for name in ("_content", "_shipped_content"):
        getattr(sys.modules[shipped_key.__module__], name).cache_clear()
    importlib.invalidate_caches()


def test_a_shipped_kernel_is_used_where_nothing_can_be_compiled(nvcc, table, site, monkeypatch, tmp_path):
    (folder,) = ship([Group(table, "fast", 90)], site)
    fake_nvcc.take_away(monkeypatch, tmp_path)
    group = Group(table, "fast", 90)
    found = locate(group)
    assert (found.path, found.shipped) == (folder / "library.so", True)
    assert group.is_installed()
    ours = CudaKernel(table)
    assert ours.reasons(PROBLEM, H100) == []
    variant, _ = ours.select(PROBLEM, H100)
    assert variant.name == "small_fast"
    assert ours.facts(variant, H100)["alignment"] == 2
    assert library.loaded(group, ours.cache).target == f"tilewright_{folder.name}".replace("-", "_")
    assert not ours.cache.path.exists()


def test_a_shipped_kernel_comes_before_what_was_built_here(nvcc, table, site):
    group = Group(table, "fast", 90)
    (before,) = build([group]).values()
    assert locate(group).path == before
    (folder,) = ship([group], site)
    events = []
    assert build([group], on_event=events.append) == {group: folder / "library.so"}
    assert [(event.seconds, event.shipped) for event in events] == [(0, True)]
    assert not locate(group, BuildCache(before.parents[1])).shipped  # a cache that is named is all that is asked


def test_what_does_not_ship_is_built(nvcc, table, site, caplog):
    ship([Group(table, "fast", 90)], site)
    (path,) = build([Group(table, "slow", 90)]).values()
    assert path.is_relative_to(BuildCache().path)
    assert caplog.messages == []


def alter_bytes(folder):
    data = bytearray((folder / "library.so").read_bytes())
    data[-1] ^= 1
    (folder / "library.so").write_bytes(data)


def lose_object(folder):
    (folder / "library.so").unlink()


def garble_record(folder):
    (folder / "record.json").write_text("[" * 100000)


def another_record(folder):
    said = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(said | {"group": "slow"}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (alter_bytes, "its bytes are not those that were compiled"),
        (lose_object, "it cannot be loaded"),
        (garble_record, "its record cannot be read"),
        (another_record, "its record is that of another object"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_damaged_is_a_miss_that_is_said_once(change, reason, nvcc, table, site, caplog):
    group = Group(table, "fast", 90)
    (folder,) = ship([group], site)
    change(folder)
    assert [locate(group), locate(group)] == [None, None]
    (message,) = caplog.messages
    assert message.startswith(f"the shipped kernel {folder} is not used: {reason}")
    (path,) = build([group]).values()
    assert path.is_relative_to(BuildCache().path)


@pytest.mark.parametrize(
    ("replaced", "reason"),
    [
        ({"content": "0" * 64}, "it was compiled from other sources"),
        ({"ffi": (ffi_version()[0], ffi_version()[1] + 1)}, "of XLA's FFI, and jaxlib has"),
        ({"ffi": (ffi_version()[0] + 1, 0)}, "of XLA's FFI, and jaxlib has"),
        ({"schema": 2}, "its record is that of another object"),
    ],
)
def test_what_was_compiled_for_something_else_is_a_miss(replaced, reason, nvcc, table, site, caplog):
    ship([Group(table, "fast", 90)], site, **replaced)
    assert locate(Group(table, "fast", 90)) is None
    (message,) = caplog.messages
    assert reason in message


def test_older_versions_of_the_ffi_are_taken(nvcc, table, site):
    ship([Group(table, "fast", 90)], site, ffi=(ffi_version()[0], 0))
    assert locate(Group(table, "fast", 90)).shipped


def test_the_version_of_the_ffi_is_that_which_handlers_tell_xla(nvcc, tmp_path):
    """Of a handler that a C++ compiler makes with jaxlib's headers."""
    source = tmp_path / "version.cc"
    source.write_text(VERSION)
    command = [fake_nvcc.HOST_COMPILER, f"-I{jax.ffi.include_dir()}", source, "-o", tmp_path / "version"]
    subprocess.run(command, check=True)
    said = subprocess.run([tmp_path / "version"], capture_output=True, text=True, check=True).stdout
    assert tuple(map(int, said.split())) == ffi_version()


def test_another_architecture_is_a_miss_that_says_which_there_are(nvcc, table, site, caplog):
    ship([Group(table, "slow", 90)], site)
    assert locate(Group(table, "slow", 80)) is None
    (message,) = caplog.messages
    assert message.endswith("ships sample slow for sm_90a, not for sm_80")


def test_changed_sources_headers_and_flags_are_a_miss(nvcc, table, site, caplog):
    group = Group(table, "fast", 90)
    ship([group], site)
    for changed in (
        dataclasses.replace(table, flags=("-DX",)),
        dataclasses.replace(table, fields=("width", "rows")),
        dataclasses.replace(table, variants=tuple(v for v in table.variants if v.name != "large_fast")),
    ):
        assert locate(Group(changed, "fast", 90)) is None
    (table.header.parent / "sample_part.h").write_text("// something")
    forget()
    assert locate(group) is None
    assert all("it was compiled from other sources" in message for message in caplog.messages)


def test_neither_compiler_nor_xlas_headers_nor_packages_matter(nvcc, table, site, tmp_path, monkeypatch):
    """A wheel is compiled by one nvcc beside one jaxlib and one CUTLASS, and used beside others or none."""
    place = site / "somewhere" / "include"
    place.mkdir(parents=True)
    (place / "theirs.h").write_text('#include "only_theirs.h"\n')
    ours = tmp_path / "further"
    ours.mkdir()
    (ours / "only_theirs.h").write_text("// of ours, which their header alone includes\n")
    (table.header.parent / "sample_part.h").write_text("#include <theirs.h>\n")
    package = HeaderPackage("Theirs", "theirs", ("somewhere",), ("include",), "theirs.h")
    group = Group(dataclasses.replace(table, packages=(package,), include_folders=(ours,)), "fast", 90)
    ship([group], site)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    headers = tmp_path / "jaxlib"
    (headers / "xla" / "ffi" / "api").mkdir(parents=True)
    for name in ("c_api.h", "ffi.h"):
        text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", name).read_text()
        (headers / "xla" / "ffi" / "api" / name).write_text(f"{text}// of another jaxlib\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(headers))
    (place / "theirs.h").write_text("// of another version\n")
    forget()
    assert locate(group).shipped
    (place / "theirs.h").unlink()
    forget()
    assert locate(group).shipped
    (ours / "only_theirs.h").write_text("// changed\n")
    forget()
    assert locate(group) is None


@pytest.mark.parametrize(("driver", "used"), [((12, 8), False), ((13, 0), True), ((14, 0), True), (None, True)])
def test_a_driver_of_an_older_cuda_is_a_miss_with_the_driver_that_is_needed(
    driver, used, nvcc, table, site, monkeypatch, caplog
):
    ship([Group(table, "fast", 90)], site, cuda=(13, 2))
    monkeypatch.setattr(shipped, "driver_version", lambda: driver)
    assert (locate(Group(table, "fast", 90)) is not None) == used
    if not used:
        (message,) = caplog.messages
        assert message.endswith(
            "it needs a driver for CUDA 13, which comes with driver 580; this machine's is for CUDA 12.8"
        )


def test_the_driver_is_asked(tmp_path):
    """A library of the driver's name that says 12.8."""
    if fake_nvcc.HOST_COMPILER is None:
        pytest.skip(fake_nvcc.NEEDED)
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int* version) { *version = 12080; return 0; }\n")
    command = [fake_nvcc.HOST_COMPILER, "-x", "c", "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(command, check=True)
    program = "from tilewright.kernels.cuda.shipped import driver_version; print(driver_version())"
    environment = {**os.environ, "PYTHONPATH": ".", "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(12, 8)"


def test_of_two_cudas_the_newest_that_the_driver_runs(nvcc, table, site, monkeypatch):
    group = Group(table, "fast", 90)
    (older,) = ship([group], site, cuda=(12, 8))
    (newer,) = ship([group], site, cuda=(13, 0))
    for driver, folder in (((12, 9), older), ((13, 0), newer), (None, newer)):
        monkeypatch.setattr(shipped, "driver_version", lambda driver=driver: driver)
        forget()
        assert locate(group).path.parent == folder


def test_what_the_machine_cannot_load_is_a_miss(nvcc, table, site, caplog):
    """The right bytes, for another kind of processor."""
    nvcc.folder.joinpath("object.so").write_bytes(b"\x7fELF of no machine")
    ship([Group(table, "fast", 90)], site)
    assert locate(Group(table, "fast", 90)) is None
    (message,) = caplog.messages
    assert "it cannot be loaded" in message


def test_no_module_is_imported_to_find_them(nvcc, table, site):
    ship([Group(table, "fast", 90)], site)
    (site / "tilewright_kernels" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    forget()
    assert locate(Group(table, "fast", 90)).shipped
    assert "tilewright_kernels" not in sys.modules


def test_two_versions_in_one_folder_leave_each_its_own(nvcc, table, site, caplog):
    """pip leaves nothing behind, but copies may."""
    (first,) = ship([Group(table, "fast", 90)], site)
    (table.header.parent / "sample_part.h").write_text("// the next version")
    forget()
    (second,) = ship([Group(table, "fast", 90)], site)
    assert first != second
    assert locate(Group(table, "fast", 90)).path.parent == second
    assert caplog.messages == []


def test_a_cache_of_somebody_else_does_not_keep_from_what_ships(nvcc, table, site, monkeypatch):
    group = Group(table, "fast", 90)
    (folder,) = ship([group], site)
    BuildCache().path.mkdir(parents=True)
    os.chmod(BuildCache().path, 0o777)
    assert locate(group).path.parent == folder
    with pytest.raises(BuildError, match="writable by others"):
        locate(Group(table, "slow", 90))


USER = """
from cuda_rms_norm.rms_norm import KERNEL, TABLE
from tilewright.kernels.cuda import Group, locate
from tilewright.kernels.cuda.toolchain import missing
from tilewright.ops.types import Device

found = locate(Group(TABLE, "float32", 90))
variant, _ = KERNEL.select({"rows": 5, "width": 1024, "dtype": 0}, Device("gpu", "NVIDIA H100", (9, 0), 132))
print(bool(missing(90)), found.shipped, found.path.is_relative_to(SITE), variant.name)
"""


@needs_nvcc(missing(90))
def test_a_wheel_is_compiled_installed_and_used_where_there_is_no_nvcc(real_cache, tmp_path):
    """One group of the example, by the real nvcc; installed by pip; used in a process without a compiler."""
    wheel, (record,) = make_wheel([Group(RMS_NORM, "float32", 90)], 1, real_cache, tmp_path / "dist")
    assert record.ffi == ffi_version()
    assert wheel.stem.endswith(platform.machine())
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(pip, check=True)
    environment = {
        "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples", site))),
        "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path),
    }  # fmt: skip
    program = f"SITE = {str(site)!r}\n{USER}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True", "float32_1024_pack4"]
    assert not (tmp_path / "cache").exists()
