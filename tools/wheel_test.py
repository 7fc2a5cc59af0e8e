"""Builds the sdist and the wheel, and uses the wheel as a stranger would: by itself, away from the repository.

python -m tools.wheel_test                                          # make wheel-test
python -m tools.wheel_test --python python3.13 --require jax==0.11.2
python -m tools.wheel_test --tests tests/ops                        # make sdist-test: the sdist's own tests instead
"""

import argparse
import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from tools.pages import ROOT, links

WORK = ROOT / ".make" / "wheel"

EXTRAS = ("flax", "equinox", "plot")
"""What the pages' examples may import, beyond the package's own requirements."""

PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")))

# What a build backend adds to an sdist.
_MADE = ("PKG-INFO", "setup.cfg", "tilewright.egg-info/")

# Package data as programs reach it, not as names of files: a table that is read, a header that is there.
_PROBE = """
import sys
from importlib.resources import files
from pathlib import Path
import tilewright, tilewright.modules
from tilewright.kernels import cuda_tables
from tilewright.kernels.cuda.toolchain import own_folders
from tilewright.ops.config.results import AutotuningResult
from tilewright.ops.utils.serialize import resolve

folder = Path(tilewright.__file__).parent
if not folder.is_relative_to(sys.prefix):
    sys.exit(f"imported from {folder}, not from the environment")
tables = [file for file in (files("tilewright") / "tables").iterdir() if file.name.endswith(".json")]
entries = sum(len(list(AutotuningResult.from_json(file.read_text()))) for file in tables)
headers = [path for name in cuda_tables().values() for path in (resolve(name).header, *resolve(name).include_folders)]
missing = [str(path) for path in (folder / "py.typed", own_folders()[0], *headers) if not path.exists()]
if missing or not entries:
    sys.exit(f"{entries} entries in {len(tables)} tables; missing: {missing}")
said = f"{entries} entries in {len(tables)} tables, {len(cuda_tables())} CUDA tables"
print(f"tilewright {tilewright.__version__}: {said}")
"""


class Failure(Exception):
    """What is wrong with what was built."""


def files_of(root: Path) -> set[str]:
    """The files of the repository, relative to its root: what git knows or does not ignore.

    In an unpacked sdist, without git: what the sdist says that it holds.
    """
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    else:
        names = (root / "tilewright.egg-info" / "SOURCES.txt").read_text().splitlines()
    return {name for name in names if (root / name).is_file() and not name.startswith(_MADE)}


def check_sdist(sdist: Path, files: Iterable[str]) -> None:
    """Compares an sdist with the files of the repository.

    Raises:
      Failure: one of them is missing, or it holds another.
    """
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    _same(sdist.name, {name for name in held if not name.startswith(_MADE)}, set(files))


def check_wheel(wheel: Path, files: Iterable[str]) -> None:
    """Compares a wheel with the package's files in the repository, and looks at the page that an index shows.

    Raises:
      Failure: a file is missing, or it holds another, or a link of the page leads nowhere outside of the repository.
    """
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = email.message_from_bytes(archive.read(metadata)).get_payload(decode=True)
    _same(wheel.name, held, {name for name in files if name.startswith("tilewright/")})
    text = page.decode() if isinstance(page, bytes) else ""
    relative = [target for target in links(text) if not target.startswith("https://")]
    if not text.strip() or relative:
        raise Failure(f"{wheel.name}: the description is empty or has relative links: {relative}")


def _same(name: str, held: set[str], wanted: set[str]) -> None:
    missing, further = sorted(wanted - held), sorted(held - wanted)
    if missing or further:
        raise Failure(f"{name} lacks {missing or 'nothing'} and holds {further or 'nothing'} beside what it should")


def build(files: Iterable[str], folder: Path) -> tuple[Path, Path]:
    """The sdist of the repository's files, and the wheel that is built from that sdist; twine has checked both.

    They are made from a copy: leftovers of earlier builds would hide what MANIFEST.in leaves out.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tilewright-build-") as place:
        source = Path(place)
        for name in files:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
        _run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=source, quiet=True)
        (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
        _run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", sdist, wheel, cwd=source)
    return sdist, wheel


def _run(
    *command: str | Path, cwd: Path, environment: Mapping[str, str] = MappingProxyType({}), quiet: bool = False
) -> None:
    """Runs a command without what would let it find the repository; its output is shown, if quiet only of a failure."""
    words = [str(word) for word in command]
    print("$", *(word if "\n" not in word else "..." for word in words), flush=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TILEWRIGHT_", "XLA_"))}
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**kept, **environment},
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failure(f"{done.stdout or ''}{words[0]} ended with exit code {done.returncode}")


class Environment:
    """A new virtual environment, in which a requirement is installed."""

    def __init__(self, folder: Path, interpreter: str) -> None:
        _run(interpreter, "-m", "venv", "--clear", folder, cwd=ROOT)
        self.bin = folder / "bin"

    def install(self, *requirements: str) -> None:
        """Installs what the requirements name."""
        flags = ("--quiet", "--disable-pip-version-check")
        _run(self.bin / "python", "-m", "pip", "install", *flags, *requirements, cwd=ROOT)


def use(environment: Environment, wheel: Path, requirements: list[str]) -> None:
    """What a stranger does with the wheel, in an empty folder: first with nothing beside it, then with the extras."""
    with tempfile.TemporaryDirectory(prefix="tilewright-wheel-") as place:
        folder = Path(place, "empty")
        folder.mkdir()
        base = {"JAX_PLATFORMS": "cpu", "TILEWRIGHT_CACHE_DIR": str(Path(place, "cache"))}
        environment.install(str(wheel), *requirements)
        python, command = environment.bin / "python", environment.bin / "tilewright"
        _run(python, "-c", "import tilewright", cwd=folder, environment=base)
        _run(python, "-c", _PROBE, cwd=folder, environment=base)
        _run(command, "--help", cwd=folder, environment=base, quiet=True)
        _run(command, "info", cwd=folder, environment=base)

        environment.install(f"{wheel}[{','.join(EXTRAS)}]", *requirements)
        # Nothing but the examples beside the packages that are installed: the repository itself cannot be imported.
        # Eight devices, as the tests have them, for some examples are sharded.
        beside = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT / "examples"), "PYTHONDONTWRITEBYTECODE": "1"}
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        for page in PAGES:
            _run(python, ROOT / "tools/pages.py", ROOT / page, cwd=folder, environment=base | beside | flags)


def run_tests_of(sdist: Path, environment: Environment, requirements: list[str], arguments: list[str]) -> None:
    """Unpacks an sdist where no repository is around it, installs it with its extra `test`, and runs pytest there."""
    with tempfile.TemporaryDirectory(prefix="tilewright-sdist-") as place:
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        (source,) = Path(place).iterdir()
        environment.install(f"{source}[test]", *requirements)
        command = ("-m", "pytest", "--suite", "quick", "-p", "no:cacheprovider", *arguments)
        settings = {"TILEWRIGHT_HYPOTHESIS_PROFILE": "ci", "JAX_PLATFORMS": "cpu"}
        _run(environment.bin / "python", *command, cwd=source, environment=settings)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel_test", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--require", action="append", default=[], help="a further requirement, such as jax==0.11.2")
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, help="run pytest in the unpacked sdist instead, with what follows"
    )
    arguments = parser.parse_args()
    try:
        files = files_of(ROOT)
        sdist, wheel = build(files, WORK / "dist")
        check_sdist(sdist, files)
        check_wheel(wheel, files)
        environment = Environment(WORK / "venv", arguments.python)
        if arguments.tests is None:
            use(environment, wheel, arguments.require)
        else:
            run_tests_of(sdist, environment, arguments.require, arguments.tests)
    except Failure as failure:
        print(f"wheel_test: {failure}", file=sys.stderr)
        return 1
    print("wheel_test: all is well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
