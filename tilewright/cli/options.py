"""The options that describe a call, defined once for all commands."""

import ast
import dataclasses
from typing import Annotated, Any

import typer

from tilewright.cli import completion
from tilewright.cli.choices import DTYPES, STORED_DTYPES, dtype_name

# The printer of help texts would take square brackets with a letter in them for markup; a test looks for them.
Target = Annotated[
    str,
    typer.Argument(
        help="An op, such as flash_attention, or a function of yours: module:function or path/to/file.py:function.",
        show_default=False,
        autocompletion=completion.targets,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="Sizes of the op's first argument: batch,length,heads,head_dim.", show_default=False),
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", help="A named case of the op; repeatable; 'all' for this device's.", show_default=False),
]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="Key/value heads, if fewer.", show_default=False)]
KvLength = Annotated[int | None, typer.Option("--kv-length", help="Key/value length, if another.", show_default=False)]
Causal = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Causal attention.", show_default=False)]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help=f"{', '.join(DTYPES)}; or short: f32, bf16, f16, f64.", show_default=False,
        autocompletion=completion.dtypes,
    ),
]  # fmt: skip
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Another field of the op's case, as name=value: sliding_window=511.", metavar="NAME=VALUE",
        show_default=False,
    ),
]  # fmt: skip
Shapes = Annotated[
    str | None,
    typer.Option(
        "--shapes", help="Arrays for a function, each a dtype and sizes: 'float32[1,1024,8,64] int32[16]'.",
        show_default=False,
    ),
]  # fmt: skip
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="A device that need not be present, by JAX's name, such as 'NVIDIA H200'.", show_default=False,
        autocompletion=completion.devices,
    ),
]  # fmt: skip
Backward = Annotated[bool, typer.Option("--backward/--no-backward", help="Include the gradients of an op.")]


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """The values of the options above; ``None`` if an option was not given."""

    shape: str | None = None
    cases: tuple[str, ...] = ()
    kv_heads: int | None = None
    kv_length: int | None = None
    causal: bool | None = None
    dtype: str | None = None
    extra: tuple[str, ...] = ()
    shapes: str | None = None
    backward: bool = True

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
