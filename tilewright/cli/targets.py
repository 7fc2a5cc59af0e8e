"""From what the command line names to functions and arrays: an op with a shape or a case, or a user's function."""

import dataclasses
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from tilewright.cli.options import CallOptions, parse_sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """Where an op's function and cases are.

    Attributes:
      function: its name in ``tilewright.modules``.
      cases: the module of its cases.
      case: the dataclass of one case there; ``arguments()`` gives positional and keyword arguments of ``function``.
      shape: the fields that ``--shape`` gives, in order.
      device_cases: the table of cases for each kind of device.
      gradients: whether it has any.
    """

    function: str
    cases: str
    case: str
    shape: tuple[str, ...]
    device_cases: Mapping[str, str]
    gradients: bool = True


def _serving(name: str, case: str) -> Op:
    return Op(
        function=name,
        cases=f"tilewright.kernels.{name}.cases",
        case=case,
        shape=("sequences", "kv_length", "heads", "head_dim"),
        device_cases={"cpu": "CPU_CASES", "gpu": "GPU_CASES"},
        gradients=False,
    )


OPS: dict[str, Op] = {
    "flash_attention": Op(
        function="flash_attention",
        cases="tilewright.kernels.flash_attention.cases",
        case="AttentionCase",
        shape=("batch", "q_length", "heads", "head_dim"),
        device_cases={"cpu": "CPU_CASES", "gpu": "HOPPER_CASES"},
    ),
    "decode_attention": _serving("decode_attention", "DecodeCase"),
    "page_attention": _serving("page_attention", "PageCase"),
    "ragged_decode_attention": _serving("ragged_decode_attention", "RaggedDecodeCase"),
    "ragged_page_attention": _serving("ragged_page_attention", "RaggedPageCase"),
    "unified_attention": _serving("unified_attention", "UnifiedCase"),
    "chunked_prefill_paged_decode": _serving("chunked_prefill_paged_decode", "ChunkedCase"),
    "mla_decode": _serving("mla_decode", "MlaCase"),
    "update_pages": _serving("update_pages", "UpdateCase"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class NamedCall:
    """A function with arrays to call it with.

    Attributes:
      case: the op's case behind it, if it is an op's.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    case: Any = None


def named_calls(target: str, options: CallOptions) -> list[NamedCall]:
    """What a command shall work on.

    Raises:
      typer.BadParameter: the target or its options are wrong.
    """
    if ":" in target:
        if options.describes_op:
            raise typer.BadParameter(f"{target} is a function: it takes --shapes, not an op's options")
        return [user_call(target, options.shapes)]
    if options.shapes is not None:
        raise typer.BadParameter(f"{target} is an op: it takes --shape or --case, not --shapes")
    return [op_call(target, case, backward=options.backward) for case in op_cases(target, options)]


def find_op(name: str) -> Op:
    """The op of a name."""
    if name not in OPS:
        close = difflib.get_close_matches(name, OPS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the ops are {', '.join(OPS)}; a function is module:function"
        raise typer.BadParameter(f"no op is called {name!r}; {hint}")
    return OPS[name]


def op_cases(name: str, options: CallOptions) -> list[Any]:
    """The cases that the options describe: a shape, or named ones with fields replaced."""
    op = find_op(name)
    module = importlib.import_module(op.cases)
    case_type = getattr(module, op.case)
    fields = options.fields()
    unknown = [field for field in fields if field not in {f.name for f in dataclasses.fields(case_type)}]
    if unknown:
        known = ", ".join(f.name for f in dataclasses.fields(case_type) if f.name != "name")
        raise typer.BadParameter(f"{name} has no option {unknown[0]!r}; it has {known}")
    if bool(options.shape) == bool(options.cases):
        raise typer.BadParameter(f"{name} needs either --shape {','.join(op.shape)} or --case NAME")
    with user_mistakes():
        if not options.shape:
            return [dataclasses.replace(case, **fields) for case in _named_cases(name, op, module, options.cases)]
        sizes = parse_sizes(options.shape, "--shape")
        if len(sizes) != len(op.shape):
            raise typer.BadParameter(f"{options.shape!r} is not {','.join(op.shape)}", param_hint="--shape")
        return [case_type(name=options.shape, **dict(zip(op.shape, sizes, strict=True)), **fields)]


def _named_cases(name: str, op: Op, module: Any, wanted: tuple[str, ...]) -> list[Any]:
    here = device_cases(name)
    every = {case: made for table in op.device_cases.values() for case, made in getattr(module, table).items()}
    found: list[Any] = []
    for case in wanted:
        if case == "all":
            found += here.values()
        elif case in every:
            found.append(every[case])
        else:
            known = ", ".join(["all", *every])
            raise typer.BadParameter(f"{name} has no case {case!r}; it has {known}", param_hint="--case")
    return found


def device_cases(name: str) -> dict[str, Any]:
    """The op's named cases for the device of this process."""
    from tilewright.ops.utils.device import current_device

    op = find_op(name)
    table = op.device_cases.get(current_device().kind, op.device_cases["cpu"])
    return getattr(importlib.import_module(op.cases), table)


def op_function(name: str) -> Callable[..., Any]:
    """The public function of an op."""
    return getattr(importlib.import_module("tilewright.modules"), find_op(name).function)


def op_call(name: str, case: Any, *, backward: bool) -> NamedCall:
    """One case of an op as a function of arrays alone; with ``backward`` it also returns the gradients."""
    with user_mistakes():
        positional, keywords = case.arguments()
    backward = backward and find_op(name).gradients
    call = NamedCall(f"{name} {case.name}", *flat_call(op_function(name), positional, keywords, backward), case=case)
    check_call(call)
    return call


def flat_call(
    function: Callable[..., Any], positional: tuple[Any, ...], keywords: dict[str, Any], backward: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call as a function of its floating-point arrays and of the tuple of its other arrays.

    Arrays in keywords become arguments too, for as constants they would fill the program's text. An array that stands
    in two places stays one array.
    """
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten((positional, keywords))
    unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
    floats = {i: leaf for i, leaf in unique.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    others = {i: leaf for i, leaf in unique.items() if i not in floats}

    def forward(differentiable: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        known = dict(zip(floats, differentiable, strict=True)) | dict(zip(others, rest, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [known.get(id(leaf), leaf) for leaf in leaves])
        return function(*args, **kwargs)

    def with_gradients(differentiable: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        out, pullback = jax.vjp(lambda arrays: forward(arrays, rest), differentiable)
        return out, pullback(jax.tree.map(jnp.ones_like, out))

    return (with_gradients if backward else forward), (tuple(floats.values()), tuple(others.values()))


def check_call(call: NamedCall) -> None:
    """Traces a call, so that what its op or its author refuses is said before any work starts."""
    import jax

    with user_mistakes(call.name):
        jax.eval_shape(call.function, *call.args)


@contextmanager
def user_mistakes(place: str = "") -> Iterator[None]:
    """Turns a ``ValueError`` or ``TypeError`` about what the user gave into a usage error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise typer.BadParameter(f"{place}: {first_line}" if place else first_line) from error


def user_call(target: str, shapes: str | None) -> NamedCall:
    """``module:function`` with arrays of the shapes given, or with those that it returns itself beside a function."""
    function = import_function(target)
    if shapes is None:
        with user_mistakes(f"{target}()"):
            made = function()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
            raise typer.BadParameter(f"{target}() returned no (function, arguments); or give its arrays with --shapes")
        call = NamedCall(target, made[0], tuple(made[1]))
    else:
        call = NamedCall(target, function, parse_arrays(shapes))
    check_call(call)
    return call


def import_function(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    found = import_named(target, "function")
    if not callable(found):
        raise typer.BadParameter("{} has no function {!r}".format(*target.split(":", 1)))
    return found


def import_named(target: str, what: str) -> Any:
    """What ``module:name`` names, ``None`` if the module has no such; modules in the working directory are found."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise typer.BadParameter(f"{target!r} is not of the form module:{what}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise typer.BadParameter(f"cannot import {module_name!r}: {error}") from error
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_ARRAY = re.compile(r"([A-Za-z]\w*)\[([\d,\s-]*)\]")


def parse_arrays(text: str) -> tuple[Any, ...]:
    """Abstract arrays from ``float32[1,1024,8,64] int32[16]``; separators are spaces, commas or semicolons."""
    import jax
    import jax.numpy as jnp

    found = list(_ARRAY.finditer(text))
    if not found or re.sub(r"[\s,;]", "", _ARRAY.sub("", text)):
        message = f"{text!r} is not arrays such as 'float32[1,1024,8,64] int32[16]'"
        raise typer.BadParameter(message, param_hint="--shapes")
    arrays = []
    for match in found:
        try:
            dtype = jnp.dtype(match.group(1))
        except TypeError:
            raise typer.BadParameter(f"{match.group(1)!r} is no dtype", param_hint="--shapes") from None
        arrays.append(jax.ShapeDtypeStruct(parse_sizes(match.group(2), "--shapes"), dtype))
    return tuple(arrays)
