"""A stand-in for nvcc that takes no time, for tests of what is around the compiler; and a table for it to compile.

It "compiles" by copying an object that the C compiler made once, does what the environment tells it, and logs each
compilation.
"""

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tilewright.kernels.cuda_build import Compare, Fact, Field, MultipleOf, Predicate, Variant, VariantTable, instance

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
sleep "${{FAKE_NVCC_SECONDS:-0}}"
if [ -n "$FAKE_NVCC_ERROR" ]; then echo "$FAKE_NVCC_ERROR" >&2; exit 2; fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then cp "{object}" "$2"; chmod 777 "$2"; fi
  shift
done
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


def install(folder: Path) -> FakeNvcc:
    """Makes a stand-in in a folder."""
    (folder / "bin").mkdir(parents=True)
    source, made = folder / "object.c", FakeNvcc(folder)
    source.write_text(_OBJECT)
    subprocess.run([str(HOST_COMPILER), "-x", "c", "-shared", "-fPIC", source, "-o", folder / "object.so"], check=True)
    script = folder / "bin" / "nvcc"
    script.write_text(_SCRIPT.format(log=made.log, object=folder / "object.so"))
    os.chmod(script, 0o755)
    return made


@dataclasses.dataclass(frozen=True)
class SampleVariant(Variant):
    """A variant for rows of up to ``width``, fast or slow."""

    width: int
    speed: str

    @property
    def name(self) -> str:
        return f"{'small' if self.width <= 64 else 'large'}_{self.speed}"

    @property
    def group(self) -> str:
        return self.speed

    @property
    def cpp_class(self) -> str:
        return instance("Sample", self.width, self.speed == "fast")

    @property
    def sort_key(self) -> tuple[Any, ...]:
        return self.speed, self.width

    @property
    def arch_range(self) -> tuple[int, int]:
        return (90, 100) if self.speed == "fast" else (70, 100)

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return (Compare(Field("width"), "<=", self.width), MultipleOf(Field("width"), Fact("alignment")))


def sample_table(folder: Path, name: str = "sample") -> VariantTable:
    """A table whose header is written to a folder."""
    (folder / "sample.cuh").write_text('#include "sample_part.h"\n')
    (folder / "sample_part.h").write_text("// nothing\n")
    variants = tuple(SampleVariant(width, speed) for width in (256, 64) for speed in ("slow", "fast"))
    return VariantTable(name, folder / "sample.cuh", ("rows", "width"), variants)
