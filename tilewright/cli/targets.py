"""Resolves a command's target to functions and arrays: an op with a shape or a case, or a user's function."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.choices import suggest
from tilewright.cli.device import on_device
from tilewright.cli.functions import user_function
from tilewright.cli.mistakes import user_mistakes
from tilewright.cli.options import CallOptions, parse_sizes
from tilewright.kernels import OPS, function, kernel

if TYPE_CHECKING:
    from tilewright.kernels.op.cases import OpCases
    from tilewright.kernels.op.portfolio import Portfolio
    from tilewright.ops.utils.known_devices import KnownDevice


@dataclasses.dataclass(frozen=True, slots=True)
class NamedCall:
    """A function with arrays to call it with.

    Attributes:
      args: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      case: the op's case, if the function is an op's.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    case: Any = None


def is_function(target: str) -> bool:
    """True if a target names a user's function rather than an op."""
    return ":" in target


def named_calls(target: str, options: CallOptions, known: "KnownDevice | None" = None) -> list[NamedCall]:
    """Resolves a target to the calls that a command works on.

    Args:
      known: the device that the calls are for, which selects the cases of "all"; this process's by default.

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


def find_op(name: str) -> "Portfolio":
    """Finds the kernel of an op by name.

    Raises:
      typer.BadParameter: there is no such op.
    """
    if name not in OPS:
        hint = suggest(name, OPS) or f"the ops are {', '.join(OPS)}; "
        raise typer.BadParameter(f"no op is called {name!r}; {hint}a function is module:function")
    return kernel(name)


def op_cases(name: str, options: CallOptions, kind: str | None = None) -> list[Any]:
    """The cases that the options describe: one by shape, or named ones with fields replaced.

    Args:
      kind: the kind of device that selects the cases of "all"; this process's by default.
    """
    cases = find_op(name).cases
    fields = options.fields()
    known = [f.name for f in dataclasses.fields(cases.kind) if f.name != "name"]
    unknown = next((field for field in fields if field not in known), None)
    if unknown is not None:
        raise typer.BadParameter(
            f"{name} has no option {unknown!r}; {suggest(unknown, known)}it has {', '.join(known)}"
        )
    _check_float64(fields.get("dtype"))
    if bool(options.shape) == bool(options.cases):
        raise typer.BadParameter(f"{name} needs either --shape {','.join(cases.shape)} or --case NAME")
    with user_mistakes():
        if not options.shape:
            named = _named_cases(name, cases, options.cases, kind)
            return [dataclasses.replace(case, **fields) for case in named]
        sizes = parse_sizes(options.shape, "--shape")
        if len(sizes) != len(cases.shape):
            raise typer.BadParameter(f"{options.shape!r} is not {','.join(cases.shape)}", param_hint="--shape")
        return [cases.kind(name=options.shape, **dict(zip(cases.shape, sizes, strict=True)), **fields)]


def _check_float64(dtype: str | None) -> None:
    import jax

    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise typer.BadParameter("float64 needs JAX_ENABLE_X64=1; JAX would compute in float32", param_hint="--dtype")


def _named_cases(name: str, cases: "OpCases[Any]", names: tuple[str, ...], kind: str | None) -> list[Any]:
    from tilewright.ops.utils.device import current_device

    every = cases.every
    found: list[Any] = []
    for case in names:
        if case == "all":
            found += cases.of_device(kind or current_device().kind).values()
        elif case in every:
            found.append(every[case])
        else:
            known = ["all", *every]
            message = f"{name} has no case {case!r}; {suggest(case, known)}it has {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="--case")
    return found


def op_call(name: str, case: Any, *, backward: bool, known: "KnownDevice | None" = None) -> NamedCall:
    """One case of an op as a function of only arrays; with ``backward`` it also returns the gradients."""
    with user_mistakes():
        positional, keywords = case.abstract_arguments()
    backward = backward and find_op(name).differentiable
    call = NamedCall(f"{name} {case.name}", *flat_call(function(name), positional, keywords, backward), case=case)
    check_call(call, known)
    return call


def flat_call(
    function: Callable[..., Any], positional: tuple[Any, ...], keywords: dict[str, Any], backward: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call as a function of its floating-point arrays and of the tuple of its other arrays.

    Arrays in keywords become arguments too, since constants would fill the program's text. An array that occurs twice
    stays one array.
    """
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten((positional, keywords))
    unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)}
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
    """Traces a call for a device, so that errors of its op or its author are reported before any work starts."""
    import jax

    with user_mistakes(call.name), on_device(known):
        jax.eval_shape(call.function, *call.args)
