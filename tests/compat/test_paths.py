"""The module paths of earlier systems."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright
from tilewright.compat.paths import MODULES, PACKAGES
from tilewright.ops import Kernel

FOLDER = Path(tilewright.__file__).parent.parent


@pytest.mark.parametrize("path", MODULES)
def test_a_path_is_another_name_of_a_module(path: str) -> None:
    module = importlib.import_module(MODULES[path])
    assert importlib.import_module(path) is module
    assert (module.__name__, module.__spec__.name) == (MODULES[path],) * 2  # type: ignore[union-attr]
    package, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(package), name) is module
    assert importlib.util.find_spec(path) is module.__spec__


@pytest.mark.parametrize("path", [*MODULES, *sorted(PACKAGES)])
def test_no_file_has_its_place(path: str) -> None:
    file = FOLDER.joinpath(*path.split("."))
    assert not file.exists()
    assert not file.with_suffix(".py").exists()


def test_a_module_that_never_was_is_none_now() -> None:
    for path in ("tilewright.ops.core.cache", "tilewright.ops.execution.none", "tilewright.cores"):
        with pytest.raises(ModuleNotFoundError, match=path):
            importlib.import_module(path)


def test_a_class_is_unpickled_by_its_former_path() -> None:
    assert pickle.loads(b"ctilewright.ops.core.kernel\nKernel\n.") is Kernel


def test_each_can_be_the_first_import_of_a_program() -> None:
    forget = "for name in [name for name in sys.modules if name.startswith('tilewright')]: del sys.modules[name]"
    lines = [line for path in MODULES for line in (f"import {path}", f"assert {path} is {MODULES[path]}", forget)]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], cwd=FOLDER, check=True)


def test_nothing_is_imported_before_it_is_used() -> None:
    program = "import sys, tilewright; print([m for m in ('jax', 'inspect', 'tilewright.ops') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
