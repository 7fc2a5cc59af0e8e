"""Which rooms of ``tilewright/kernels`` import one another: backends stand alone, and platforms know no op."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright.kernels

KERNELS = Path(tilewright.kernels.__file__).parent
PREFIX = "tilewright.kernels."
PLATFORMS = frozenset({"hopper", "triton", "cuda", "tpu"})
BACKENDS = PLATFORMS | {"xla", "cudnn", "fa4"}
SHARED = frozenset({"op", "numerics"})
"""What every op is made with, and what ops and platforms share."""


def imported(text: str, folder: str) -> Iterator[tuple[str, ...]]:
    """What a module of a folder imports of ``tilewright.kernels``, in functions and for types alone too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["tilewright", "kernels", *folder.split("/")]
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(PREFIX):
                yield tuple(name.removeprefix(PREFIX).split("."))


def backend_of(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The backend's room that a module lies in, such as ``("flash_attention", "xla")``."""
    return path[:2] if len(path) > 1 and path[0] not in PLATFORMS and path[1] in BACKENDS else None


def trespass(importer: tuple[str, ...], other: tuple[str, ...]) -> str:
    """The rule that an import breaks; empty if it breaks none."""
    if importer[0] in PLATFORMS:
        is_op = other[0] not in PLATFORMS | SHARED and (KERNELS / other[0]).is_dir()
        return "a platform imports an op" if is_op else ""
    theirs = backend_of(other)
    if theirs is None or theirs == backend_of(importer):
        return ""
    if backend_of(importer) is not None:
        return "a backend imports another"
    return "an op imports another op's backend" if theirs[0] != importer[0] else ""


def modules() -> list[Path]:
    return sorted(KERNELS.rglob("*.py"))


def test_no_room_imports_what_is_not_below_it():
    found = []
    for path in modules():
        parts = path.relative_to(KERNELS).with_suffix("").parts
        for other in imported(path.read_text(encoding="utf-8"), "/".join(parts[:-1])):
            if rule := trespass(parts, other):
                found.append(f"{'/'.join(parts)} imports {'.'.join(other)}: {rule}")
    assert found == []


def test_the_rooms_are_there():
    """What the rules speak of exists, or they would hold of nothing."""
    rooms = {backend_of(path.relative_to(KERNELS).parts) for path in modules()} - {None}
    assert {("flash_attention", "hopper"), ("flash_attention", "xla"), ("paged_attention", "triton")} <= rooms
    assert {"hopper", "triton", "cuda"} <= {path.relative_to(KERNELS).parts[0] for path in modules()}


@pytest.mark.parametrize(
    ("importer", "text", "rule"),
    [
        ("flash_attention/triton/backend", "from tilewright.kernels.flash_attention.xla import tiles", "another"),
        ("flash_attention/triton/backend", "from ..xla.tiles import Tiling", "another"),
        (
            "flash_attention/fa4/backend",
            "def f():\n    import tilewright.kernels.paged_attention.xla.forward",
            "another",
        ),
        ("paged_attention/packed", "from tilewright.kernels.flash_attention.hopper import scores", "another op's"),
        ("hopper/ring", "from tilewright.kernels.flash_attention.masking import FAR", "imports an op"),
        ("flash_attention/op", "from tilewright.kernels.flash_attention.xla import backend", ""),
        ("flash_attention/hopper/backend", "from tilewright.kernels.hopper.ring import Ring", ""),
        ("flash_attention/hopper/backend", "from tilewright.kernels.flash_attention.hopper import d_query", ""),
        ("hopper/ring", "from tilewright.kernels.op.footprint import Footprint", ""),
    ],
)
def test_the_rules(importer: str, text: str, rule: str):
    parts = tuple(importer.split("/"))
    (other,) = imported(text, "/".join(parts[:-1]))
    assert rule in trespass(parts, other)
    assert bool(rule) == bool(trespass(parts, other))
