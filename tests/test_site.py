"""The site, as far as it can be checked without Sphinx: `make docs` builds it."""

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import tilewright
from tilewright.kernels import OPS, function
from tools.pages import ROOT, contents

INDEX = ROOT / "docs" / "index.md"
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
NAMED = re.findall(r"^\.\. (?:auto|py:)?\w+:: (tilewright\.[\w.]+)$", REFERENCE, re.MULTILINE)
MODULES = (
    "tilewright.modules",
    "tilewright.modules.base",
    "tilewright.ops",
    "tilewright.errors",
    "tilewright.integrations.equinox",
    "tilewright.integrations.flax",
    "tilewright.integrations.jax_serving",
)


def public_names(module: ModuleType) -> set[str]:
    """What a module offers: its ``__all__``, else what it imports ``as`` itself, else what it defines."""
    if hasattr(module, "__all__"):
        return {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
    assert module.__file__ is not None
    exported = set(re.findall(r" import (\w+) as \1$", Path(module.__file__).read_text(), re.MULTILINE))
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    return exported or defined


def found(name: str) -> object:
    """What a dotted name stands for.

    Raises:
      ImportError, AttributeError: nothing.
    """
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_page_stands_once_in_the_table_of_contents() -> None:
    listed = [(INDEX.parent / page).resolve() for _, pages in contents(INDEX.read_text()) for page in pages]
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert [page for page, times in Counter(listed).items() if times > 1] == []
    assert {*listed, INDEX} == {page.resolve() for page in pages}


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_names_what_a_module_offers(module: str) -> None:
    names = public_names(importlib.import_module(module))
    assert names
    assert sorted(f"{module}.{name}" for name in names if f"{module}.{name}" not in NAMED) == []


def test_the_reference_names_what_the_package_offers() -> None:
    names = {name for name in dir(tilewright) if not name.startswith("_")} - {"errors", "modules", "ops"}
    offered = {name for name in names if not isinstance(getattr(tilewright, name), ModuleType)}
    listed = {name.rpartition(".")[2] for name in NAMED}
    assert {"explain", "target_device", "tune"} <= offered
    assert {
        name
        for name in offered - listed
        if str(getattr(getattr(tilewright, name), "__module__", "")).startswith("tilewright")
    } == set()


def test_what_the_reference_names_exists_and_is_documented() -> None:
    assert len(set(NAMED)) == len(NAMED)
    for name in NAMED:
        assert getattr(found(name), "__doc__", None), name


def test_the_signatures_of_the_public_functions_are_written_out() -> None:
    """Sphinx shows what ``inspect.signature`` does: an argument list, not ``*args, **kwargs``."""
    for op in OPS:
        kinds = {parameter.kind for parameter in inspect.signature(function(op)).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, op
