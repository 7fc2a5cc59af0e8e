"""From what the command line names to functions and arrays: an op with a shape or a case, or a user's function."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.choices import meant
from tilewright.cli.device import on_device
from tilewright.cli.functions import user_function
from tilewright.cli.mistakes import user_mistakes
from tilewright.cli.options import CallOptions, parse_sizes

if TYPE_CHECKING:
    from tilewright.ops.utils.known_devices import KnownDevice


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
        cases=f"tilewright.kernels.paged_attention.ops.{name}_cases",
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
      args: arrays, or ``jax.ShapeDtypeStruct`` in their places.
      case: the op's case behind it, if it is an op's.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    case: Any = None


def is_function(target: str) -> bool:
    """Whether a target names a function of the user's rather than an op."""
    return ":" in target


def named_calls(target: str, options: CallOptions, known: "KnownDevice | None" = None) -> list[NamedCall]:
    """What a command shall work on.

    Args:
      known: the device that it is for, whose cases are meant by "all"; this process's by default.

    Raises:
      typer.BadParameter: the target or its options are wrong.
      Failure: the user's module or function raised.
    """
    if is_function(target):
        if options.describes_op:
            raise typer.BadParameter(f"{target} is a function: it takes --shapes, not an op's options")
        return [NamedCall(target, *user_function(target, options.shapes, known))]
    if options.shapes is not None:
        raise typer.BadParameter(f"{target} is an op: it takes --shape or --case, not --shapes")
    cases = op_cases(target, options, None if known is None else known.kind)
    return [op_call(target, case, backward=options.backward, known=known) for case in cases]


def find_op(name: str) -> Op:
    """The op of a name."""
    if name not in OPS:
        hint = meant(name, OPS) or f"the ops are {', '.join(OPS)}; "
        raise typer.BadParameter(f"no op is called {name!r}; {hint}a function is module:function")
    return OPS[name]


def op_cases(name: str, options: CallOptions, kind: str | None = None) -> list[Any]:
    """The cases that the options describe: a shape, or named ones with fields replaced."""
    op = find_op(name)
    module = importlib.import_module(op.cases)
    case_type = getattr(module, op.case)
    fields = options.fields()
    known = [f.name for f in dataclasses.fields(case_type) if f.name != "name"]
    unknown = next((field for field in fields if field not in known), None)
    if unknown is not None:
        raise typer.BadParameter(f"{name} has no option {unknown!r}; {meant(unknown, known)}it has {', '.join(known)}")
    _check_float64(fields.get("dtype"))
    if bool(options.shape) == bool(options.cases):
        raise typer.BadParameter(f"{name} needs either --shape {','.join(op.shape)} or --case NAME")
    with user_mistakes():
        if not options.shape:
            named = _named_cases(name, op, module, options.cases, kind)
            return [dataclasses.replace(case, **fields) for case in named]
        sizes = parse_sizes(options.shape, "--shape")
        if len(sizes) != len(op.shape):
            raise typer.BadParameter(f"{options.shape!r} is not {','.join(op.shape)}", param_hint="--shape")
        return [case_type(name=options.shape, **dict(zip(op.shape, sizes, strict=True)), **fields)]


def _check_float64(dtype: str | None) -> None:
    import jax

    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise typer.BadParameter("float64 needs JAX_ENABLE_X64=1; JAX would compute in float32", param_hint="--dtype")


def _named_cases(name: str, op: Op, module: Any, wanted: tuple[str, ...], kind: str | None) -> list[Any]:
    here = device_cases(name, kind)
    every = {case: made for table in op.device_cases.values() for case, made in getattr(module, table).items()}
    found: list[Any] = []
    for case in wanted:
        if case == "all":
            found += here.values()
        elif case in every:
            found.append(every[case])
        else:
            known = ["all", *every]
            message = f"{name} has no case {case!r}; {meant(case, known)}it has {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="--case")
    return found


def device_cases(name: str, kind: str | None = None) -> dict[str, Any]:
    """The op's named cases for a kind of device, or else for the device of this process."""
    from tilewright.ops.utils.device import current_device

    op = find_op(name)
    table = op.device_cases.get(kind or current_device().kind, op.device_cases["cpu"])
    return getattr(importlib.import_module(op.cases), table)


def op_function(name: str) -> Callable[..., Any]:
    """The public function of an op."""
    return getattr(importlib.import_module("tilewright.modules"), find_op(name).function)


def op_call(name: str, case: Any, *, backward: bool, known: "KnownDevice | None" = None) -> NamedCall:
    """One case of an op as a function of arrays alone; with ``backward`` it also returns the gradients."""
    with user_mistakes():
        positional, keywords = case.arguments()
    backward = backward and find_op(name).gradients
    call = NamedCall(f"{name} {case.name}", *flat_call(op_function(name), positional, keywords, backward), case=case)
    check_call(call, known)
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


def check_call(call: NamedCall, known: "KnownDevice | None" = None) -> None:
    """Traces a call for a device, so that what its op or its author refuses is said before any work starts."""
    import jax

    with user_mistakes(call.name), on_device(known):
        jax.eval_shape(call.function, *call.args)
