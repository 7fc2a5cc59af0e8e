"""Parses a user's functions and arrays: ``module:function``, ``file.py:function`` and ``float32[8,128]``."""

import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.choices import ARRAY_DTYPES, dtype_name, suggest
from tilewright.cli.device import on_device
from tilewright.cli.mistakes import raised_at, user_code
from tilewright.cli.options import parse_sizes
from tilewright.cli.output import counted

if TYPE_CHECKING:
    from tilewright.ops.utils.known_devices import KnownDevice


def user_function(
    target: str, shapes: str | None, known: "KnownDevice | None" = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a user's function with arrays of the given shapes, or with the arrays that it returns itself.

    A function without parameters that returns (function, arguments) stands for that call; one that returns arrays is
    called as it is.

    Args:
      known: the device that the call is traced for, as a check; this process's by default.

    Raises:
      typer.BadParameter: the target or the shapes are wrong, or the function refuses them.
      Failure: the user's module or function raised.
    """
    import jax

    function, arguments = import_function(target), () if shapes is None else parse_arrays(shapes)
    _check_parameters(target, function, arguments)
    if shapes is None:
        with user_code(f"{target}()"):
            returned = function()
        if _is_call(returned):
            function, arguments = returned[0], tuple(returned[1])
        elif not _is_arrays(returned):
            raise typer.BadParameter(
                f"{target}() returned {_short_repr(returned)}, neither arrays nor (function, arguments)"
            )
    with user_code(target), on_device(known):
        jax.eval_shape(function, *arguments)
    return function, arguments


def _is_call(returned: object) -> bool:
    return (
        isinstance(returned, tuple)
        and len(returned) == 2
        and callable(returned[0])
        and isinstance(returned[1], tuple | list)
    )


def _is_arrays(returned: object) -> bool:
    import jax
    import numpy as np

    leaves = jax.tree.leaves(returned)
    return bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)


def _short_repr(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"


def _check_parameters(target: str, function: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
    """Raises unless a function accepts this number of positional arguments."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions that are not written in Python have none
        return
    try:
        signature.bind(*arrays)
    except TypeError as error:
        if not arrays:
            raise typer.BadParameter(
                f"{target} takes {signature}: give its arrays with --shapes 'float32[8,128] int32[8]', or name a "
                "function without parameters that returns (function, arguments)"
            ) from error
        given = counted(len(arrays), "array")
        raise typer.BadParameter(f"{target} takes {signature}, got {given}: {error}", param_hint="--shapes") from error


def import_function(target: str) -> Callable[..., Any]:
    """The function that a target names; a class of kernels stands for an instance.

    Raises:
      typer.BadParameter: there is no such function.
      Failure: the user's module raised.
    """
    found = import_named(target, "function")
    from tilewright.ops import Kernel

    if isinstance(found, type) and issubclass(found, Kernel):
        with user_code(f"{target}()"):
            found = found()
    if not callable(found):
        raise typer.BadParameter(f"{target} is {_short_repr(found)}, which cannot be called")
    return found


def import_named(target: str, noun: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names; modules in the working directory are found too.

    Raises:
      typer.BadParameter: there is no such module or name.
    """
    module_name, _, path = target.rpartition(":")
    if not module_name or not path:
        raise typer.BadParameter(f"{target!r} is not of the form module:{noun} or path/to/file.py:{noun}")
    module = _imported(module_name)
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        hint = suggest(path, [name for name in dir(module) if not name.startswith("_")]).strip()
        raise typer.BadParameter(f"{module_name} has no {noun} {path!r}{'; ' if hint else ''}{hint}")
    return found


def _imported(name: str) -> types.ModuleType:
    """Imports a module by its name or its file."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    if name.endswith(".py") or os.sep in name:
        return _imported_file(Path(name))
    if not all(part.isidentifier() for part in name.split(".")):
        raise typer.BadParameter(f"{name!r} is neither a module's name nor a file that ends in .py")
    with user_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                near = suggest(name, [path.stem for path in Path().glob("*.py")])
                raise typer.BadParameter(
                    f"there is no module {name!r}; {near}looked in the working directory and on Python's path"
                ) from error
            raise typer.BadParameter(f"cannot import {name!r}: {error}{raised_at(error)}") from error
        except ImportError as error:
            raise typer.BadParameter(f"cannot import {name!r}: {error}{raised_at(error)}") from error


def _imported_file(file: Path) -> types.ModuleType:
    """Imports a file under its full module name, as seen from the folder above its outermost package.

    An importable name lets another process measure its kernels.
    """
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {str(file)!r}")
    file = file.resolve()
    parts, folder = ([] if file.stem == "__init__" else [file.stem]), file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    name = ".".join(parts)
    if file.suffix != ".py" or not all(part.isidentifier() for part in parts):
        raise typer.BadParameter(f"{str(file)!r} cannot be imported: {name!r} is no module's name")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = _imported(name)
    if not module.__file__ or not os.path.samefile(module.__file__, file):
        other = module.__file__ or "Python itself"
        raise typer.BadParameter(f"{str(file)!r} has the name of another module, {name!r} of {other}; rename it")
    return module


_ARRAY = re.compile(r"([A-Za-z]\w*)\[([\d,\s-]*)\]")


def parse_arrays(text: str) -> tuple[Any, ...]:
    """Parses abstract arrays such as ``float32[1,1024,8,64] int32[16]``, separated by spaces, commas or semicolons."""
    import jax
    import jax.numpy as jnp

    found = list(_ARRAY.finditer(text))
    if not found or re.sub(r"[\s,;]", "", _ARRAY.sub("", text)):
        message = f"{text!r} is not arrays such as 'float32[1,1024,8,64] int32[16]'"
        raise typer.BadParameter(message, param_hint="--shapes")
    arrays = []
    for match in found:
        dtype = dtype_name(match.group(1), ARRAY_DTYPES, "--shapes")
        if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise typer.BadParameter(f"{dtype} needs JAX_ENABLE_X64=1", param_hint="--shapes")
        arrays.append(jax.ShapeDtypeStruct(parse_sizes(match.group(2), "--shapes"), jnp.dtype(dtype)))
    return tuple(arrays)
