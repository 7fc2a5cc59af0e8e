"""The text of a jaxpr that says all that decides what it computes, and nothing of names, places and modules.

Two jaxprs of one text are the same program. Left out are names of functions and of what is traced from them, debug
information, positions in sources, the modules of classes, and functions that stand in parameters (rules for ``vmap``
and for derivatives), which cannot be read: what they would trace is seen only where they are called.
"""

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core as jax_core

NAMES = frozenset({"debug_info", "kernel_name", "name_and_src_info", "source_info", "src_info"})
"""Parameters and fields that hold nothing but names."""

_JAXPRS = (jax_core.Jaxpr, jax_core.ClosedJaxpr)
_CHANGES = (
    (
        re.compile(r"<(?:function|bound method|built-in function|built-in method) (?:[^<>]|<locals>|<lambda>)*>"),
        "<function>",
    ),
    (re.compile(r" at 0x[0-9a-f]+"), ""),
    (re.compile(r"(?:/[\w.+@-]+)+\.py(?::\d+)*"), "<file>"),
    (re.compile(r"\b(?:tilewright|tests|tools)(?:\.\w+)*[.:](?=\w)"), ""),
)


def without_names(text: str) -> str:
    """A text without addresses, files, functions and the modules of what is ours."""
    for pattern, instead in _CHANGES:
        text = pattern.sub(instead, text)
    return text


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def program_text(jaxpr: Any) -> str:
    """The text of a jaxpr, a line for each equation; those of inner jaxprs stand indented below."""
    writer = _Writer()
    text = writer.jaxpr(jaxpr)
    return "\n\n".join([text, *(f"kernel#{name}:\n{source}" for name, source in sorted(writer.sources.items()))])


def value_text(value: Any) -> str:
    """The text of a parameter, a config or whatever else is made of plain values."""
    return _Writer().value(value)


class _Writer:
    """Writes the jaxprs of one program; an inner one that occurs several times is written once."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self._known: dict[int, str] = {}

    def jaxpr(self, jaxpr: Any) -> str:
        if id(jaxpr) not in self._known:  # all of them live as long as the outermost does
            self._known[id(jaxpr)] = self._jaxpr(jaxpr)
        return self._known[id(jaxpr)]

    def _jaxpr(self, closed: Any) -> str:
        jaxpr = getattr(closed, "jaxpr", closed)
        names: dict[Any, str] = {}

        def named(variable: Any) -> str:
            if isinstance(variable, jax_core.Literal):
                return f"{self.value(variable.val)}:{self.value(variable.aval)}"
            return names.setdefault(variable, f"%{len(names)}")

        def typed(variables: Iterable[Any]) -> str:
            return " ".join(f"{named(each)}:{self.value(each.aval)}" for each in variables)

        constants = zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False)
        lines = [f"({typed(jaxpr.invars)})", *(f"{typed([each])} = {self.value(value)}" for each, value in constants)]
        for eqn in jaxpr.eqns:
            operands = " ".join(map(named, eqn.invars))
            results = typed(eqn.outvars)
            lines.append(f"{results} = {eqn.primitive.name} {operands}{self._parameters(eqn)}")
        lines.append(f"return {' '.join(map(named, jaxpr.outvars))}")
        return "\n".join(lines)

    def _parameters(self, eqn: Any) -> str:
        """The parameters of an equation, with the jaxprs among them below it."""
        holds_code = any(isinstance(leaf, _JAXPRS) for value in eqn.params.values() for leaf in _items(value))
        skipped = NAMES | {"name"} if holds_code else NAMES
        said, below = [], []
        around = {"compute_type": eqn.ctx.compute_type, "metadata": eqn.ctx.xla_metadata}
        given = {name: value for name, value in eqn.params.items() if name not in skipped}
        given |= {name: value for name, value in around.items() if value}
        for name, value in sorted(given.items()):
            if any(isinstance(leaf, _JAXPRS) for leaf in _items(value)):
                for leaf in _items(value):
                    text = self.jaxpr(leaf) if isinstance(leaf, _JAXPRS) else self.value(leaf)
                    below.append(_indented(f"  {name}: {text}"))
            else:
                said.append(f"{name}={self.value(value)}")
        return "\n".join([f" [{' '.join(said)}]" if said else "", *below])

    def value(self, value: Any) -> str:
        """The text of a value."""
        kind: Any = type(value)
        return _writer_of(kind)(self, value)

    def fields(self, value: Any, fields: Mapping[str, Any]) -> str:
        given = (f"{name}={self.value(field)}" for name, field in fields.items() if name not in NAMES)
        return f"{type(value).__name__}({', '.join(given)})"

    def triton(self, kernel: Any) -> str:
        source = triton_source(kernel)
        self.sources[digest(source)] = source
        return f"kernel#{digest(source)}"

    def sequence(self, value: Iterable[Any]) -> str:
        names = getattr(value, "_fields", None)
        if names:
            return self.fields(value, {name: getattr(value, name) for name in names})
        return f"({', '.join(map(self.value, value))})"

    def mapping(self, value: Mapping[Any, Any]) -> str:
        return f"{{{', '.join(sorted(f'{self.value(key)}: {self.value(item)}' for key, item in value.items()))}}}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _items(value: Any) -> list[Any]:
    """What a parameter holds: itself, or the items of a tuple or list."""
    return list(value) if isinstance(value, tuple | list) else [value]


def _array(writer: _Writer, value: Any) -> str:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return f"{value.dtype.name}{value.shape}"
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.dtype.name}({array.item()!r})"
    return f"{array.dtype.name}{array.shape}#{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


@functools.lru_cache(maxsize=1 << 14)
def _printed(value: Any) -> str:
    return without_names(str(value))


def _aval(writer: _Writer, value: Any) -> str:
    return _printed(value) + ("~" if getattr(value, "weak_type", False) else "")


def _dataclass(writer: _Writer, value: Any) -> str:
    return writer.fields(value, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def _object(writer: _Writer, value: Any) -> str:
    return writer.fields(value, getattr(value, "__dict__", {}))


_WRITERS: list[tuple[Any, Callable[[_Writer, Any], str]]] = [
    (jax.core.Tracer, lambda writer, value: "<operand>"),  # of the program around, which gives it as an operand
    (enum.Enum, lambda writer, value: f"{type(value).__name__}.{value.name}"),
    (str, lambda writer, value: without_names(repr(str(value)))),
    ((int, float, complex, bytes, type(None), type(Ellipsis), slice), lambda writer, value: repr(value)),
    (np.dtype, lambda writer, value: value.name),
    ((np.ndarray, np.generic, jax.Array), _array),
    (_JAXPRS, lambda writer, value: f"{{{_indented(chr(10) + writer.jaxpr(value))}\n}}"),
    ((jax.core.AbstractValue, jax.ShapeDtypeStruct), _aval),
    (jax.tree_util.PyTreeDef, lambda writer, value: _printed(value)),
    (type, lambda writer, value: value.__name__),
    (
        functools.partial,
        lambda writer, value: f"<function>({writer.value(value.args)}, {writer.value(value.keywords)})",
    ),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType), lambda writer, value: "<function>"),
    (Mapping, _Writer.mapping),
    ((set, frozenset), lambda writer, value: f"{{{', '.join(sorted(map(writer.value, value)))}}}"),
    ((tuple, list), _Writer.sequence),
]
"""How values are written: by the first type that they are of."""


@functools.cache
def _writer_of(kind: Any) -> Callable[[_Writer, Any], str]:
    """How values of a type are written."""
    for kinds, write in _WRITERS:
        if issubclass(kind, kinds):
            return write
    if dataclasses.is_dataclass(kind):
        return _dataclass
    if kind.__name__ == "JITFunction":
        return _Writer.triton
    if kind.__repr__ is not object.__repr__:
        return lambda writer, value: without_names(repr(value))
    return (lambda writer, value: "<function>") if "__call__" in dir(kind) else _object


def triton_source(kernel: Any) -> str:
    """The source of a ``@triton.jit`` function and of all that it calls, without names of functions and modules."""
    return _triton_source(kernel, ())


@functools.lru_cache(maxsize=1024)
def _triton_source(kernel: Any, around: tuple[Any, ...]) -> str:
    function = kernel.fn
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    options = [
        ast.unparse(each) for call in tree.decorator_list if isinstance(call, ast.Call) for each in call.keywords
    ]
    tree.name, tree.decorator_list, tree.returns = "kernel", [], None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    resolved = _Resolved(function, (*around, kernel))
    text = ast.unparse(resolved.visit(tree))
    called = (f"{name}:\n{source}" for name, source in sorted(resolved.called.items()))
    return "\n\n".join([*options, text, *called])


class _Resolved(ast.NodeTransformer):
    """Puts what global names stand for in their places."""

    def __init__(self, function: Any, around: tuple[Any, ...]) -> None:
        self.called: dict[str, str] = {}
        self._globals, self._locals = function.__globals__, {*function.__code__.co_varnames}
        self._around = around

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id in self._locals or node.id not in self._globals:
            return node
        return self._written(self._globals[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id not in self._locals:
            module = self._globals.get(node.value.id)
            if isinstance(module, types.ModuleType) and not module.__name__.startswith("triton"):
                return self._written(getattr(module, node.attr))
        return self.generic_visit(node)

    def _written(self, value: Any) -> ast.AST:
        if value in self._around:
            return ast.Name(f"kernel_{self._around.index(value)}")
        if type(value).__name__ == "JITFunction" and not value.__module__.startswith("triton"):
            source = _triton_source(value, self._around)
            name = f"kernel_{digest(source)}"
            self.called[name] = source
            return ast.Name(name)
        if isinstance(value, types.ModuleType):
            return ast.Name(value.__name__)
        if type(value).__name__ == "constexpr":
            value = value.value
        return ast.Name(getattr(value, "__name__", None) or value_text(value))
