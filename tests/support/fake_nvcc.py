"""A stand-in for nvcc that takes no time, for tests of what is around the compiler; and a table for it to compile.

It "compiles" by copying an object that the C compiler made once; for another table than `sample_table` the C compiler
makes one of the group's names. It logs each compilation, and does what `FakeNvcc.behave` tells it of a group, or else
the environment: ``FAKE_NVCC_SECONDS`` is what each takes, ``FAKE_NVCC_ERROR`` the message with which each fails.
"""

import dataclasses
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import pytest

from tests.support.plain_variant import PlainVariant
from tilewright.kernels.cuda import Compare, Fact, Field, MultipleOf, VariantTable, instance

HOST_COMPILER = shutil.which("g++")
NEEDED = "needs a C compiler: there is no g++ on PATH"

_SCRIPT = """\
#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 99.1, V99.1.0"; exit;;
  --list-gpu-arch) echo compute_80; echo compute_90; exit;;
  --dryrun) echo '#$ TOP=/nonesuch' >&2; exit;;
esac
echo "$$ $*" >> "{log}"
touch "$TMPDIR/scratch"
for each in "$@"; do
  case "$each" in *.cu) source="$each";; -DTILEWRIGHT_ARCH=*) architecture="$each";; esac
  if [ "$last" = -o ]; then output="$each"; fi
  last="$each"
done
ending=done
seconds="${{FAKE_NVCC_SECONDS:-0}}"
if [ -n "$FAKE_NVCC_ERROR" ]; then ending=fail; fi
while read -r pattern how long; do
  case "${{source%.cu}}" in $pattern) ending="$how"; seconds="$long";; esac
done < "{behaviours}"
sleep "$seconds"
case "$ending" in
  fail) echo "${{FAKE_NVCC_ERROR:-error: told to fail}}" >&2; exit 2;;
  die) kill -SEGV $$;;
  hang) trap '' HUP INT TERM; exec sleep 86400;;
esac
if grep -q '<Sample<' "$source"; then
  cp "{object}" "$output"
else
  {{
    echo 'static const char* const names[] = {{'
    sed -n 's/.*tilewright::entry<.*>("\\([A-Za-z0-9_]*\\)", \\([0-9]*\\), \\([0-9]*\\), .*/\\
#if TILEWRIGHT_ARCH >= \\2 \\&\\& TILEWRIGHT_ARCH < \\3\\
"\\1",\\
#endif/p' "$source"
    echo '}};'
    cat "{plain}"
  }} > "$TMPDIR/plain.c"
  "{compiler}" -x c -shared -fPIC "$architecture" "$TMPDIR/plain.c" -o "$output" || exit 1
fi
chmod 777 "$output"
"""

# What group.h exports, for the variants of `sample_table`: two in each group.
_OBJECT = r"""
#include <stdint.h>
int64_t tilewright_abi(void) { return 1; }
int64_t tilewright_variant_count(void) { return 4; }
static const char* const names[] = {"small_fast", "large_fast", "small_slow", "large_slow"};
const char* tilewright_variant_name(int64_t index) { return names[index]; }
void tilewright_facts(int64_t index, int64_t* out) {
  out[0] = 1024 * (index + 1); out[1] = 128; out[2] = index % 2 ? 4 : 2;
}
int64_t tilewright_workspace(int64_t index, const int64_t* problem) { return problem[0] * problem[1] + index; }
void* tilewright_call(void* frame) { return frame; }
"""

# The same for any other group, whose names come before it.
_PLAIN = r"""
#include <stdint.h>
int64_t tilewright_abi(void) { return 1; }
int64_t tilewright_variant_count(void) { return sizeof(names) / sizeof(*names); }
const char* tilewright_variant_name(int64_t index) { return names[index]; }
void tilewright_facts(int64_t index, int64_t* out) { out[0] = 1024; out[1] = 128; out[2] = 1; }
int64_t tilewright_workspace(int64_t index, const int64_t* problem) { return 0; }
void* tilewright_call(void* frame) { return frame; }
"""

type Ending = Literal["done", "fail", "die", "hang"]
"""The end of a compilation: well, with exit code 2, by a signal of its own, or never, deaf to all but SIGKILL."""


@dataclasses.dataclass(frozen=True)
class FakeNvcc:
    """An installed stand-in.

    Attributes:
      environment: what makes it the nvcc that is found.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_HOME": str(self.folder), "CUDA_PATH": ""}

    @property
    def log(self) -> Path:
        return self.folder / "compilations"

    def compilations(self) -> list[str]:
        """One line for each compilation that was started: its process and its arguments."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def behave(self, group: str, ending: Ending = "done", seconds: float = 0.0) -> None:
        """Says how compilations of groups end from now on, and after how long, to compilers in any process.

        Args:
          group: a shell pattern of groups' names, such as "f16_*"; what was said last of a group counts.
        """
        with open(self.behaviours, "a", encoding="ascii") as file:
            file.write(f"{group} {ending} {seconds}\n")

    @property
    def behaviours(self) -> Path:
        return self.folder / "behaviours"


@functools.cache
def _object() -> bytes:
    """What a compilation of `sample_table` gives; the C compiler makes it once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "object.c"), Path(folder, "object.so")
        source.write_text(_OBJECT)
        subprocess.run([str(HOST_COMPILER), "-x", "c", "-shared", "-fPIC", source, "-o", made], check=True)
        return made.read_bytes()


def install(folder: Path) -> FakeNvcc:
    """Makes a stand-in in a folder."""
    (folder / "bin").mkdir(parents=True)
    made = FakeNvcc(folder)
    (folder / "object.so").write_bytes(_object())
    (folder / "plain.c").write_text(_PLAIN)
    made.behaviours.touch()
    script = folder / "bin" / "nvcc"
    places = {"object": folder / "object.so", "plain": folder / "plain.c", "compiler": HOST_COMPILER}
    script.write_text(_SCRIPT.format(log=made.log, behaviours=made.behaviours, **places))
    os.chmod(script, 0o755)
    return made


def given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """For one test a stand-in and caches, in folders below one; skips the test where there is no C compiler."""
    if HOST_COMPILER is None:
        pytest.skip(NEEDED)
    made = install(folder / "cuda")
    for name, value in (made.environment | {"TILEWRIGHT_CACHE_DIR": str(folder / "cache")}).items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """The stand-in as the compiler that is found; a folder of tests takes the fixture into its conftest."""
    return given(tmp_path, monkeypatch)


def take_away(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leaves no compiler anywhere.

    Args:
      folder: one without programs.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))


def sample_variant(width: int, speed: str) -> PlainVariant:
    """A variant for rows of up to ``width``, fast or slow."""
    return PlainVariant(
        name=f"{'small' if width <= 64 else 'large'}_{speed}",
        group=speed,
        cpp_class=instance("Sample", width, speed == "fast"),
        sort_key=(speed, width),
        arch_range=(90, 100) if speed == "fast" else (70, 100),
        requirements=(Compare(Field("width"), "<=", width), MultipleOf(Field("width"), Fact("alignment"))),
    )


def sample_table(folder: Path, name: str = "sample") -> VariantTable:
    """A table whose header is written to a folder, unless it is there."""
    for file, text in (("sample.cuh", '#include "sample_part.h"\n'), ("sample_part.h", "// nothing\n")):
        if not (folder / file).exists():  # or another process might read it while it is written
            (folder / file).write_text(text)
    variants = tuple(sample_variant(width, speed) for width in (256, 64) for speed in ("slow", "fast"))
    return VariantTable(name, folder / "sample.cuh", ("rows", "width"), variants)
