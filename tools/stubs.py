"""Writes the stub of tilewright.modules, from which mypy, pyright and editors read the functions' types.

python -m tools.stubs   # after a change of a public argument list, or of what a function returns

A function has the argument list of its signature, and an overload for each entry of its ``results``.
"""

import inspect
import itertools
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAliasType, Union, get_args, get_origin

import jax.typing

from tilewright import modules
from tilewright.kernels.op.signatures import results_by_given, results_of, short
from tools.pages import ROOT

STUB = ROOT / "tilewright/modules/__init__.pyi"

_HEAD = '"""The functions that most users call, and their kernels, for type checkers. Written by tools/stubs.py."""'


class _Imports:
    """The names that a stub uses, by module."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()

    def add(self, module: str | None, name: str) -> str:
        if module and module != "builtins":
            self.names.add((module, name))
        return name

    def lines(self) -> Iterator[str]:
        for module, names in itertools.groupby(sorted(self.names), key=lambda each: each[0]):
            yield f"from {module} import {', '.join(name for _, name in names)}"


def stub() -> str:
    """The text of the stub, formatted."""
    imports = _Imports()
    found = [_declaration(name, getattr(modules, name), imports) for name in modules.__all__]
    # Assigned names come after what they are assigned.
    found.sort(key=lambda text: " = " in text.partition("\n")[0])
    names = ", ".join(repr(name) for name in modules.__all__)
    text = "\n".join([_HEAD, "", *imports.lines(), "", f"__all__ = [{names}]", "", *filter(None, found), ""])
    for command in (["check", "--fix-only", "--select", "I"], ["format"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(STUB), "-"],
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
    return text


def _declaration(name: str, found: Any, imports: _Imports) -> str:
    """The declaration of a name; empty for what is only imported."""
    if isinstance(found, types.ModuleType):
        package, _, module = found.__name__.rpartition(".")
        imports.add(package, module)
        return ""
    if found.__name__ != name:
        return f"{name} = {found.__name__}"
    if isinstance(found, type):
        imports.add(found.__module__, name)
        return ""
    return "\n".join(_function(name, found, imports))


def _function(name: str, function: Callable[..., Any], imports: _Imports) -> Iterator[str]:
    parameters = inspect.signature(function).parameters
    declared = results_by_given(function)
    # Results that no argument changes need no overload.
    entries = [(_given(names, declared, parameters), kind) for names, kind in declared.items() if any(declared)]
    for given, kind in [*entries, ({}, results_of(function))]:
        if entries:
            yield f"@{imports.add('typing', 'overload')}"
        shown = _parameters(parameters, given, imports)
        yield f"def {name}({', '.join(shown)}) -> {_type(kind, imports)}: ..."


def _given(names: str, declared: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, bool]:
    """For each parameter that an overload restricts, True if it is given."""
    every = {name.removeprefix("?") for entry in declared for name in entry.split()}
    if not every <= parameters.keys():
        raise ValueError(f"results of arguments that do not exist: {sorted(every - parameters.keys())}")
    here = set(names.split())
    return {name: name in here for name in sorted(every) if f"?{name}" not in here}


def _parameters(
    parameters: Mapping[str, inspect.Parameter], given: Mapping[str, bool], imports: _Imports
) -> Iterator[str]:
    keywords = False
    for parameter in parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            yield "*"
        kind, default = _type(parameter.annotation, imports), parameter.default
        is_given = given.get(parameter.name)
        if is_given is not None:
            kind = _restricted(parameter, is_given, imports)
            default = parameter.empty if is_given else default
        yield f"{parameter.name}: {kind}" + ("" if default is parameter.empty else f" = {default!r}")


def _restricted(parameter: inspect.Parameter, is_given: bool, imports: _Imports) -> str:
    """The type of an argument that is given, or is not."""
    if parameter.annotation is bool:
        return f"{imports.add('typing', 'Literal')}[{is_given}]"
    members = get_args(parameter.annotation)
    if types.NoneType not in members:
        raise ValueError(f"results depend on flags, and on arguments that may be None, not on {parameter}")
    return _union([each for each in members if each is not types.NoneType], imports) if is_given else "None"


def _type(annotation: Any, imports: _Imports) -> str:
    """A type as a stub writes it."""
    annotation = short(annotation)
    origin, members = get_origin(annotation), get_args(annotation)
    if annotation in (None, types.NoneType):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, TypeAliasType):
        public = getattr(jax.typing, annotation.__name__, None) is annotation.__value__
        return imports.add("jax.typing" if public else annotation.__module__, annotation.__name__)
    if origin in (Union, types.UnionType):
        return _union(members, imports)
    if origin is Literal:
        return f"{imports.add('typing', 'Literal')}[{', '.join(map(repr, members))}]"
    if origin is not None:
        return f"{imports.add(origin.__module__, origin.__name__)}[{', '.join(_type(x, imports) for x in members)}]"
    if annotation is inspect.Parameter.empty or not hasattr(annotation, "__name__"):
        raise ValueError(f"the stub cannot write the type {annotation!r}")
    return imports.add(annotation.__module__, annotation.__name__)


def _union(members: Any, imports: _Imports) -> str:
    return " | ".join(_type(each, imports) for each in members)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
