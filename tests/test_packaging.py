"""What the package is as a whole: its layers, what importing it does, its metadata."""

import ast
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tilewright"

# For each layer what of ours it may import, beside itself.
LAYERS = {
    "tilewright.ops": ("tilewright.errors",),
    "tilewright.kernels": ("tilewright.errors", "tilewright.ops.core", "tilewright.ops.utils"),
    "tilewright.modules": ("tilewright.errors", "tilewright.ops", "tilewright.kernels"),
    "tilewright.errors": (),
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, inside functions and under ``TYPE_CHECKING`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_the_layers_below_it(layer):
    files = [file for file in PACKAGE.rglob("*.py") if within(module_name(file), layer)]
    assert files
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported_names(ast.parse(file.read_text()))
        if within(name, "tilewright") and not any(within(name, allowed) for allowed in (layer, *LAYERS[layer]))
    ]
    assert wrong == []


def test_imports_are_absolute():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file.relative_to(ROOT)}:{node.lineno}"


def run_alone(program: str, **environment: str) -> str:
    """The output of a program in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_importing_touches_no_device():
    # Any use of a device would initialise a backend, and there is none of this name.
    run_alone("import tilewright, tilewright.modules, tilewright.modules.base", JAX_PLATFORMS="nonesuch")


@pytest.mark.slow
def test_importing_opens_nothing_but_code(tmp_path):
    program = """
import jax, sys
opened = []
def audit(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"):
        opened.append(f"{event} {arguments[0]}")
sys.addaudithook(audit)
import tilewright.ops
print(*(line for line in opened if not line.endswith((".py", ".pyc", ".so"))), sep="\\n")
"""
    folder = tmp_path / "cache"
    # Without bytecode to write: that is the interpreter's doing, not ours.
    output = run_alone(program, TILEWRIGHT_CACHE_DIR=str(folder), PYTHONDONTWRITEBYTECODE="1")
    # The import system looks into the standard library's zip, jaxtyping reads its own version.
    ours = [line for line in output.splitlines() if line and not line.endswith((".zip", "dist-info/METADATA"))]
    assert ours == []
    assert not folder.exists()


@pytest.mark.slow
def test_importing_loads_nothing_heavy():
    heavy = (
        "msgspec",
        "platformdirs",
        "rich",
        "typer",
        "matplotlib",
        "scipy",
        "tilewright.cli",
        "tilewright.kernels.cuda_build",
    )
    program = f"""
import sys
import jax
before = set(sys.modules)
import tilewright.ops
print([name for name in {heavy} if name in sys.modules and name not in before])
"""
    assert run_alone(program).strip() == "[]"


def test_one_version_everywhere():
    assert importlib.metadata.version("tilewright") == tilewright.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(tilewright.__version__)}\b", changelog, re.MULTILINE)


def test_the_command_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tilewright")
    assert script.value == "tilewright.cli:main"


def test_requirements_are_those_of_the_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.12"
    assert "jax>=0.11.2,<0.13" in project["dependencies"]
    assert (ROOT / ".python-version").read_text().strip() == "3.12"


def test_the_sources_that_are_compiled_later_are_package_data():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tilewright"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    sources = {path for kind in ("*.h", "*.hpp", "*.cuh", "*.cu") for path in PACKAGE.rglob(kind)}
    assert sources
    assert sources <= packaged


def test_every_table_of_cuda_variants_can_be_found():
    from tilewright.kernels import CUDA_TABLES
    from tilewright.kernels.cuda_build import VariantTable
    from tilewright.ops.utils.serialize import resolve

    for name, where in CUDA_TABLES.items():
        table = resolve(where)
        assert isinstance(table, VariantTable)
        assert table.name == name


def test_the_command_line_knows_every_op():
    from tilewright.cli.targets import OPS
    from tilewright.kernels import OPS as KERNELS

    assert set(OPS) == set(KERNELS)


@pytest.mark.slow
def test_the_readme_shows_what_the_backends_declare():
    made = runpy.run_path(str(ROOT / "docs" / "capability_table.py"))
    readme = (ROOT / "README.md").read_text()
    assert made["with_table"](readme, made["capability_table"]()) == readme, "run make table"
