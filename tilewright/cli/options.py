"""The options that describe a call, defined once for all commands."""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer

from tilewright.cli import completion
from tilewright.cli.choices import DTYPES, STORED_DTYPES, dtype_name


def option(
    name: str,
    help: str,
    *more: str,
    metavar: str | None = None,
    autocompletion: Callable[[str], list[str]] | None = None,
    min: int | None = None,
) -> Any:
    """An option whose help says what holds without it; ``more`` are other names."""
    return typer.Option(
        name, *more, help=help, metavar=metavar, autocompletion=autocompletion, min=min, show_default=False
    )


# The printer of help texts would take square brackets with a letter in them for markup; a test looks for them.
Target = Annotated[
    str,
    typer.Argument(
        help="An op, such as flash_attention, or a function of yours: module:function or path/to/file.py:function.",
        show_default=False,
        autocompletion=completion.targets,
    ),
]
_DEVICE = "A device that need not be present, by JAX's name, such as 'NVIDIA H200'."
Device = Annotated[str | None, option("--device", help=_DEVICE, autocompletion=completion.devices)]
_DTYPE = f"{', '.join(DTYPES)}; or short: f32, bf16, f16, f64."
_SET = "Another field of the op's case, as name=value: sliding_window=511."
_SHAPES = "Arrays for a function, each a dtype and sizes: 'float32[1,1024,8,64] int32[16]'."


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """The options that describe a call, with their help; ``None`` if an option was not given."""

    shape: Annotated[
        str | None, option("--shape", help="Sizes of the op's first argument: batch,length,heads,head_dim.")
    ] = None
    cases: Annotated[
        tuple[str, ...], option("--case", help="A named case of the op; repeatable; 'all' for this device's.")
    ] = ()
    kv_heads: Annotated[int | None, option("--kv-heads", help="Key/value heads, if fewer.")] = None
    kv_length: Annotated[int | None, option("--kv-length", help="Key/value length, if another.")] = None
    causal: Annotated[bool | None, option("--causal/--no-causal", help="Causal attention.")] = None
    dtype: Annotated[str | None, option("--dtype", help=_DTYPE, autocompletion=completion.dtypes)] = None
    extra: Annotated[tuple[str, ...], option("--set", help=_SET, metavar="NAME=VALUE")] = ()
    shapes: Annotated[str | None, option("--shapes", help=_SHAPES)] = None
    backward: Annotated[bool, typer.Option("--backward/--no-backward", help="Include the gradients of an op.")] = True

    def fields(self) -> dict[str, Any]:
        """The fields of a case that were given."""
        given = {
            "kv_heads": self.kv_heads,
            "kv_length": self.kv_length,
            "causal": self.causal,
            "dtype": None if self.dtype is None else dtype_name(self.dtype, DTYPES, "--dtype"),
            **dict(parse_setting(text) for text in self.extra),
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def describes_op(self) -> bool:
        return bool(self.shape or self.cases or self.fields())

    @property
    def describes_call(self) -> bool:
        return self.describes_op or self.shapes is not None


def takes_call_options(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function: the options of ``CallOptions`` take the place of its parameter ``call``.

    Typer makes options of a function's own parameters only.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        parameters += map(_parameter, dataclasses.fields(CallOptions)) if parameter.name == "call" else [parameter]

    @functools.wraps(command)
    def run(**given: object) -> None:
        values: dict[str, Any] = {field.name: given.pop(field.name) for field in dataclasses.fields(CallOptions)}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        command(call=CallOptions(**values), **given)

    signature = inspect.Signature([each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind, option = get_args(field.type)
    kind = list[str] if kind == tuple[str, ...] else kind  # typer's type of an option that is repeated
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)


# Fields of cases that hold a dtype's name, and their choices.
_DTYPE_FIELDS = {"dtype": DTYPES, "kv_dtype": STORED_DTYPES}


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses ``name=value``, with the value as a Python literal or else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise typer.BadParameter(f"{text!r} is not of the form name=value", param_hint="--set")
    if name in _DTYPE_FIELDS:
        return name, None if value == "None" else dtype_name(value, _DTYPE_FIELDS[name], f"--set {name}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Parses non-negative sizes separated by commas."""
    try:
        sizes = tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        message = f"{text!r} is not a list of whole numbers such as 1,4096,8,64"
        raise typer.BadParameter(message, param_hint=option) from None
    if any(size < 0 for size in sizes):
        raise typer.BadParameter(f"{text!r} has a negative size", param_hint=option)
    return sizes
