"""Labels that survive in the text of lowered and compiled programs, and their parsing.

A kernel call is a function in the program, ``tilewright.<op>.<direction>.<choice>.<digest>``, which is a scope in a
profile. Its label is ``tilewright.v1.<op>.<direction>.<payload>.``, whose payload holds everything from which the
invocation can be rebuilt; it stands once in the program, in an attribute of the module, and the digest is of it. A
label that a user gives is a name scope and an attribute of the operations under it.
"""

import base64
import binascii
import dataclasses
import functools
import hashlib
import json
import re
import urllib.parse
import zlib
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
from jax._src.lib.mlir import ir
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tilewright.ops.config.chooser import Selection
from tilewright.ops.config.selection import default_chain
from tilewright.ops.kernel.kernel import Invocation, Kernel, live_kernel
from tilewright.ops.utils.describe import describe_config
from tilewright.ops.utils.serialize import qualified_name, resolve, tagged, untagged

P = ParamSpec("P")
R = TypeVar("R")

_CALL = re.compile(r"tilewright\.v1\.\w+\.(?:forward|backward)\.[\w\-]+\.", re.ASCII)
_NAME = re.compile(r"tilewright\.\w+\.(?:forward|backward)\.\w+\.([0-9a-f]{10})", re.ASCII)
_USER = re.compile(r"tilewright\.label\.([\w%~\-]+)\.end\b", re.ASCII)
# XLA replaces all other characters in the names of functions; a dot ends a part of a label.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")

_ATTRIBUTES, _CALLS = "mhlo.frontend_attributes", "tilewright_calls"

# A compression dictionary of text found in most payloads. Part of the format: v1 means these bytes.
_DICTIONARY = (
    b'{"$callable":{"$dataclass":{"$enum":{"$tuple":["$dict":"weak_type":false"sharding":"op":"version":"0""kernel":'
    b'"float16""bfloat16""int32""uint32""bool"{"$array":{"dtype":"float32","shape":[1,1024,8,64],"weak_type":false}}'
    b'"direction":"forward","backward","mapped":[["args":[null,null],"kwargs":{"cfg":{"fields":{"step":"heuristic"'
)


@dataclasses.dataclass(frozen=True, slots=True)
class CallLabel:
    """The parsed label of a kernel call.

    Attributes:
      kernel: stable id or qualified name of the kernel's class.
      step: the step of the selection chain that gave the config.
      config: the config that the program was built with; ``None`` if it has no JSON form.
    """

    op: str
    version: str
    kernel: str
    direction: str
    arguments: dict[str, Any]
    step: str
    config: Any

    def invocation(self) -> Invocation[Any, Any]:
        """Rebuilds the invocation, on this process's live kernel of that name and version or else a new one of its
        class.

        Raises:
          ValueError: neither kernel can be found, or the call has symbolic dimensions.
        """
        symbolic = sorted(_symbolic_dimensions(self.arguments))
        if symbolic:
            raise ValueError(
                f"{self.op} was called with the symbolic dimensions {', '.join(symbolic)} of jax.export, for which it "
                f"runs by {describe_config(self.config)}; to explain or tune a call, give numbers in their place"
            )
        return Invocation.of_description(self._kernel(), self.arguments, self.direction)  # type: ignore[arg-type]

    def _kernel(self) -> Kernel[Any, Any]:
        living = live_kernel(self.op, self.version)
        if living is not None:
            return living
        new_kernel: Kernel[Any, Any] = resolve(self.kernel)()
        if (new_kernel.name, new_kernel.version) != (self.op, self.version):
            raise ValueError(f"{self.kernel} is now {new_kernel!r}, but the label is of {self.op=} {self.version=}")
        return new_kernel


def call_label(inv: Invocation[Any, Any], selection: Selection) -> str:
    """Makes the label of a kernel call."""
    try:
        config = tagged(selection.config)
    except TypeError:  # a config without a JSON form still runs, but cannot be read back from the program
        config = None
    payload_fields = {
        "op": inv.kernel.name,
        "version": inv.kernel.version,
        "kernel": qualified_name(type(inv.kernel)),
        **inv.description,
        "step": selection.step,
        "cfg": config,
    }
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_DICTIONARY)
    raw = (
        compressor.compress(json.dumps(payload_fields, separators=(",", ":"), sort_keys=True).encode())
        + compressor.flush()
    )
    payload = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return f"tilewright.v1.{_NOT_IN_NAMES.sub('_', inv.kernel.name)}.{inv.direction}.{payload}."


def call_name(text: str, choice: str) -> str:
    """The name in programs of a call with a label: short, for people.

    Args:
      text: the label.
      choice: what runs it.
    """
    _, _, op, direction, _, _ = text.split(".")
    return "tilewright.{}.{}.{}.{}".format(op, direction, _NOT_IN_NAMES.sub("_", choice), _digest(text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def name_in(text: str) -> str:
    """The name of a call at the beginning of a text, such as a symbol that MLIR made unique; empty without one."""
    match = _NAME.match(text)
    return "" if match is None else match.group()


def is_name_of(name: str, text: str) -> bool:
    """True if it is the name of the call with this label."""
    return name.endswith(f".{_digest(text)}")


# The attribute.

labelled_p = Primitive("tilewright_label")


def labelled(array: jax.Array, text: str) -> jax.Array:
    """The array; a program that it is in carries the label."""
    marked: jax.Array = labelled_p.bind(array, text=text)
    return marked


def attach(module: Any, text: str) -> None:
    """Writes a label into the attribute of a module, unless it is there."""
    attributes = module.operation.attributes
    held = {each.name: each.attr for each in attributes[_ATTRIBUTES]} if _ATTRIBUTES in attributes else {}
    texts = held[_CALLS].value.split() if _CALLS in held else []
    if text not in texts:
        held[_CALLS] = ir.StringAttr.get(" ".join([*texts, text]))
        attributes[_ATTRIBUTES] = ir.DictAttr.get(held)


def _lowering(ctx: mlir.LoweringRuleContext, operand: Any, *, text: str) -> list[Any]:
    attach(ctx.module_context.module, text)
    return [operand]


labelled_p.def_impl(lambda array, text: array)
labelled_p.def_abstract_eval(lambda aval, text: aval)
mlir.register_lowering(labelled_p, _lowering)
# Linear, so that the code of a derivative, which may be all that is left of a call, carries the label, too.
ad.deflinear2(labelled_p, lambda cotangent, array, text: [labelled(cotangent, text)])
batching.primitive_batchers[labelled_p] = lambda arrays, dims, text: (labelled(arrays[0], text), dims[0])


def is_call_label(text: str) -> bool:
    """True if the text has the form of a kernel call's label."""
    return _CALL.fullmatch(text) is not None


def parse_label(text: str) -> CallLabel:
    """Reads a label of a kernel call.

    Raises:
      ValueError: the text is not such a label, or it is damaged.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        raise ValueError(f"not the label of a kernel call: {text!r}")
    *_, direction, payload, _ = text.split(".")
    try:
        raw = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        parsed = json.loads(zlib.decompressobj(-15, zdict=_DICTIONARY).decompress(raw))
        arguments = {name: parsed[name] for name in ("args", "kwargs", "mapped") if name in parsed}
        return CallLabel(
            parsed["op"],
            parsed["version"],
            parsed["kernel"],
            direction,
            arguments,
            parsed["step"],
            _config(parsed["cfg"]),
        )
    except (binascii.Error, zlib.error, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the label of a kernel call is damaged: {text!r}") from error


def _config(data: object) -> Any:
    try:
        return untagged(data)
    except ValueError:  # its type is defined in another program; the selection chain can still be asked
        return None


def _symbolic_dimensions(data: object) -> set[str]:
    """The dimensions of arrays in tagged JSON that are expressions."""
    if isinstance(data, list):
        return {name for part in data for name in _symbolic_dimensions(part)}
    if not isinstance(data, dict):
        return set()
    array = data.get("$array")
    if isinstance(array, dict):
        return {size for size in array["shape"] if isinstance(size, str)}
    return {name for part in data.values() for name in _symbolic_dimensions(part)}


def _quoted(name: str) -> str:
    """Escapes a name so that no printer of programs changes it in a scope, and so that it has no dots."""
    return urllib.parse.quote(name, safe="").replace(".", "%2E")


def label(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that its operations carry a name in lowered and compiled programs.

    Args:
      name: any text.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name=} must be a non-empty string")
    text = f"tilewright.label.{_quoted(name)}.end"

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def labelled(*args: P.args, **kwargs: P.kwargs) -> R:
            with jax.named_scope(text), set_xla_metadata(tilewright_label=text):
                return function(*args, **kwargs)

        return labelled

    return decorate


def extract_labels_from_hlo_text(text: str) -> list[str]:
    """Returns the labels in the text of a program, StableHLO or HLO, in order of appearance, each once.

    A user's label is returned as the name that was given, a kernel call's label as a whole. Calls of a program that was
    exported are in the text of that alone.
    """
    if not isinstance(text, str):
        raise TypeError(f"{text=} must be the text of a program")
    labels = {_digest(label): label for label in set(_CALL.findall(text))}
    names = {match.group(1): match.start() for match in reversed([*_NAME.finditer(text)])}
    found = [(start, labels[digest]) for digest, start in names.items() if digest in labels]
    found += [(match.start(), urllib.parse.unquote(match.group(1))) for match in _USER.finditer(text)]
    return list(dict.fromkeys(name for _, name in sorted(found)))


def find_labels_in_lowered(lowered: object) -> list[str]:
    """Returns the labels in the result of ``jax.jit(f).lower(...)``, or of ``.compile()`` after it."""
    if isinstance(lowered, jax.stages.Lowered):
        return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))
    if not isinstance(lowered, jax.stages.Compiled):
        raise TypeError(f"{lowered=} must be a jax.stages.Lowered or Compiled")
    return extract_labels_from_hlo_text(lowered.as_text() or "")


def labels_to_configs(labels: Iterable[str]) -> dict[str, Any]:
    """The config of each labelled kernel call: the one the program was built with, or else the one chosen now.

    Users' labels are ignored.

    Raises:
      ValueError: the label of a kernel call is damaged.
    """
    if isinstance(labels, str):
        raise TypeError(f"{labels=} must be several labels, not one")
    return {text: _config_of(text) for text in labels if is_call_label(text)}


def _config_of(text: str) -> Any:
    parsed = parse_label(text)
    if parsed.config is not None:
        return parsed.config
    return default_chain().lookup(parsed.invocation()).config
