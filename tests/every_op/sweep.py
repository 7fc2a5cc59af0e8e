"""Random calls of every op for GPUs that are not here, drawn from the fields of its cases.

A call is lowered, or refused with one error that `REFUSALS` expects for its fields; anything else is a defect. Where
nothing tells the values of a field, drawing is an error that says what to add.
"""

import dataclasses
import functools
import math
import random
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax

import tilewright
from tests.every_op.matrix import OpCall, without_builds
from tilewright.errors import UnsupportedError
from tilewright.kernels import OPS, kernel
from tilewright.kernels.numerics.activations import ACTIVATIONS, SWIGLU_OAI
from tilewright.kernels.op.cases import Case
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.ops import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.device import current_device

DEVICES = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB"}

SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 64, 96, 127, 128, 129, 192, 251, 255, 256, 257, 512, 1000)
"""Sizes at which tiles, vectors and loops end or begin, beside those of the declared cases."""

FEW = (1, 2, 3, 4, 5, 7, 8, 16, 127)
"""Sizes of what there are few of: heads, sequences and groups."""

DTYPES = ("float32", "bfloat16", "float16")
WINDOWS = (None, 0, 1, 64, 255, (0, 0), (128, 64), (None, 3), (7, None), (None, None))
BROADCAST = (None, "bhqk", "hqk", "bqk", "qk", "bk", "hk", "k", "q", "h", "")

VALUES: dict[str, tuple[Any, ...]] = {
    "AttentionCase.batch": (0, *FEW),
    "AttentionCase.bias": BROADCAST,
    "AttentionCase.bias_dtype": (None, "float32", "bfloat16"),
    "AttentionCase.heads": FEW,
    "AttentionCase.kv_heads": (None, *FEW),
    "AttentionCase.mask": BROADCAST,
    "AttentionCase.sinks": (0, 1, 2, 5),
    "AttentionCase.sliding_window": WINDOWS,
    "AttentionCase.softmax_scale": (None, 0.25, 1.0, -1.0),
    "Case.dtype": DTYPES,
    "ConvCase.batch": (0, *FEW),
    "ConvCase.sequences": FEW,
    "ConvCase.weight_dtype": (None, *DTYPES),
    "ConvCase.width": (1, 2, 3, 4, 8, 9),
    "ConvStepCase.batch": (0, *FEW),
    "ConvStepCase.pool_dtype": (None, *DTYPES),
    "ConvStepCase.slots": (None, *FEW),
    "ConvStepCase.tokens": (None, 1, 2, 5, 8),
    "ConvStepCase.weight_dtype": (None, *DTYPES),
    "ConvStepCase.width": (1, 2, 3, 4, 8, 9),
    "ChannelsCase.groups": (1, 2, 4),
    "ChannelsCase.state": (1, 3, 4, 16, 64),
    "DenseCase.leading": ((), (1,), (2,), (3, 2), (0,)),
    "ExpertsCase.activation": (*ACTIVATIONS, SWIGLU_OAI),
    "ExpertsCase.capacity": (None, 1, 7, 100),
    "ExpertsCase.k": (1, 2, 3, 8),
    "ExpertsCase.num_experts": (1, 8, 12, 64),
    "GroupedCase.group_offset": (None, 0, 1, 2),
    "GroupedCase.groups": (0, *FEW),
    "GroupedCase.matrices": (None, *FEW),
    "GroupedMatmulCase.preferred_element_type": (None, *DTYPES),
    "GroupedMatmulCase.rhs_dtype": (None, *DTYPES, "float8_e4m3fn"),
    "LinearCrossEntropyCase.weight_dtype": (None, *DTYPES),
    "LinearAttentionCase.batch": (0, *FEW),
    "LinearAttentionCase.heads": FEW,
    "LinearAttentionCase.value_heads": (None, *FEW),
    "LinearAttentionCase.key_dim": (1, 8, 16, 60, 64, 96, 128),
    "LinearAttentionCase.value_dim": (None, 1, 8, 64, 100, 128),
    "LinearAttentionCase.scale": (None, 0.25, 1.0),
    "MatmulCase.preferred_element_type": (None, *DTYPES),
    "MatmulCase.rhs_dtype": (None, *DTYPES),
    "NormCase.leading": ((), (1,), (2,), (3, 2), (0,)),
    "NormCase.weight_dtype": (None, *DTYPES),
    "PermuteCase.capacity": (None, 1, 7, 40),
    "PermuteCase.experts": (1, 8, 60, 128, 256),
    "QuantizeCase.axis": (-1, -2),
    "QuantizeCase.block": (None, (1, 128), (128, 128)),
    "QuantizeCase.leading": ((), (1,), (3, 2), (0,)),
    "RopeCase.batch": (0, *FEW),
    "RopeCase.fraction": (0.25, 0.4, 1.0),
    "RopeCase.heads": FEW,
    "RopeCase.head_dim": (2, 16, 30, 64, 80, 96, 128, 192, 256),
    "RopeUpdateCase.fraction": (0.25, 0.4, 1.0),
    "RouterCase.experts": (1, 8, 12, 60, 64, 128, 256),
    "RouterCase.k": (1, 2, 3, 6, 8),
    "RouterCase.num_groups": (1, 2, 4),
    "RouterCase.top_groups": (1, 2),
    "RowsCase.k": (1, 2, 3, 6, 8),
    "SelectiveScanCase.batch": (0, *FEW),
    "SelectiveScanCase.packed": (0, 0, 1, 3, 300),
    "SelectiveScanCase.segments": (0, 0, 1, 5),
    "SelectiveScanStepCase.slots": (0, 1, 5, 300),
    "ServingCase.heads": FEW,
    "ServingCase.kv_dtype": (None, "int8", "float8_e4m3fn", "float8_e5m2", "bfloat16"),
    "ServingCase.kv_heads": (None, *FEW),
    "ServingCase.page_size": (1, 7, 8, 16, 32, 64, 127, 128, 256),
    "ServingCase.q_lengths": ((1,), (2,), (5,), (0,), (40,), (1, 5), (0, 3), (1, 1, 129)),
    "ServingCase.sequences": (0, *FEW),
    "ServingCase.sinks": (0, 1, 2, 5),
    "ServingCase.sliding_window": WINDOWS,
    "ServingCase.softmax_scale": (None, 0.25, 1.0, -1.0),
    "ServingCase.value_dim": (None, 1, 64, 80, 128, 512),
    "WeightOnlyCase.group": (None, 1, 7, 32, 64, 100, 128),
    "WeightOnlyCase.preferred_element_type": (None, *DTYPES),
    "WeightOnlyCase.scale_dtype": DTYPES,
    "StepCase.batch": (0, *FEW),
    "StepCase.heads": FEW,
    "StepCase.key_dim": (0, 1, 8, 16, 60, 64, 96, 128, 256, 2049),
    "StepCase.pool_dtype": (None, "float32", "bfloat16"),
    "StepCase.scale": (None, 0.25, 1.0),
    "StepCase.slots": (None, 0, *FEW),
    "StepCase.tokens": (None, 0, 1, 2, 5, 8, 9),
    "StepCase.value_dim": (0, 1, 8, 64, 100, 128, 255),
    "StepCase.value_heads": (0, *FEW),
    "VocabularyCase.leading": ((), (1,), (2,), (3, 2), (0,)),
}  # fmt: skip
"""Values of a field, by the class that declares it: where its type does not tell them, or tells too many."""

WIDTHS = ("d", "head_dim", "k")
"""Fields of sizes that models have in multiples of 8; vocabularies, lengths and other widths may be any."""

OF_VALUES = ("name", "sizes", "ignored", "shift", "residual_shift", "VocabularyCase.scale", "ServingCase.ragged")
"""Fields that change only the values of arrays, which no lowering sees."""

MOST_ELEMENTS = 1 << 22
"""Elements of an array that a case draws on the host, such as a mask."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An error that a call shall raise if its case has a property, and only then; perhaps with all gradients alone."""

    error: type[Exception]
    message: str
    applies: Callable[[Any], bool]
    gradients: bool = False

    def of(self, call: "Call") -> bool:
        """True if the call shall be refused."""
        return (call.gradients == "all" or not self.gradients) and self.applies(call.case)


def _serving(c: Any) -> bool:
    return hasattr(c, "page_size")


def _is_mla(c: Any) -> bool:
    return type(c).__name__ in ("MlaCase", "MlaRaggedPageCase")


def _has_rows(c: Any) -> bool:
    """True for latents that are bytes in a format with sizes and scales of its own."""
    return getattr(c, "rows", False) and _is_mla(c)


def _same_lengths(c: Any) -> bool:
    """True for an op whose sequences all have the same number of new tokens, which may be several."""
    return type(c).__name__ == "MlaCase"


def _kv_heads(c: Any) -> int:
    return c.kv_heads or c.heads


def _writes(c: Any) -> bool:
    return _serving(c) and (
        type(c).__name__ in ("UpdateCase", "RopeUpdateCase", "ChunkedCase") or getattr(c, "write", False)
    )


def _tokens(c: Any) -> int:
    return sum(c.q_lengths[s % len(c.q_lengths)] for s in range(c.sequences))


def _mixes_float8(a: str, b: str | None) -> bool:
    return b not in (None, a) and any(each is not None and each.startswith("float8") for each in (a, b))


def _packings(c: Any) -> int:
    """The ways in which a call says where its sequences are, if its op knows several."""
    return bool(c.packed) + bool(c.segments) + c.lengths if hasattr(c, "segments") else 0


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        ValueError,
        "batch must be 1",
        lambda c: getattr(c, "packing", None) == "cum_seqlens" and c.batch != 1,
    ),
    Refusal(
        ValueError,
        "describe the sequences by cum_seqlens",
        lambda c: getattr(c, "packing", None) == "segment_ids" and (c.initial_state or c.return_state),
    ),
    Refusal(
        ValueError,
        "number of query heads must be a multiple|key heads must divide",
        lambda c: hasattr(c, "kv_heads") and not _is_mla(c) and c.heads % _kv_heads(c) != 0,
    ),
    Refusal(ValueError, "one latent for all heads", lambda c: _is_mla(c) and _kv_heads(c) != 1),
    Refusal(
        ValueError,
        "must be from 1 to the head dim",
        lambda c: _same_lengths(c) and (c.value_dim or 0) > c.head_dim and not _has_rows(c),
    ),
    Refusal(
        ValueError,
        "hold latents of 512 and 64",
        lambda c: _has_rows(c) and (c.head_dim, c.value_dim) != (576, 512),
    ),
    Refusal(
        ValueError,
        "head_dim must be at least 1|at least one head and one element",
        lambda c: hasattr(c, "head_dim") and c.head_dim == 0,
    ),
    Refusal(
        TypeError,
        "int8 keys and values need scales",
        lambda c: _serving(c) and c.kv_dtype == "int8" and not c.scale and not _has_rows(c),
    ),
    Refusal(
        TypeError,
        "must have the query's dtype or be one of",
        lambda c: _serving(c) and c.kv_dtype in DTYPES and c.kv_dtype != c.dtype and not _has_rows(c),
    ),
    Refusal(
        ValueError,
        "an even number of elements to rotate",
        lambda c: hasattr(c, "fraction") and int(c.head_dim * c.fraction) % 2 + (c.head_dim * c.fraction < 2) > 0,
    ),
    Refusal(
        ValueError,
        "num_groups must divide the number of experts",
        lambda c: hasattr(c, "top_groups") and (c.experts % c.num_groups > 0 or c.top_groups > c.num_groups),
    ),
    Refusal(
        ValueError,
        "k must be from 1 to the",
        lambda c: hasattr(c, "top_groups") and c.k > c.experts // c.num_groups * c.top_groups,
    ),
    Refusal(ValueError, "must have a vocabulary", lambda c: getattr(c, "vocab", 1) == 0),
    Refusal(ValueError, "page table without columns", lambda c: _writes(c) and c.kv_length == 0 and _tokens(c) > 0),
    Refusal(ValueError, r"query must be \[sequences, heads", lambda c: _same_lengths(c) and len(c.q_lengths) > 1),
    Refusal(
        ValueError,
        "operands of .* need a preferred_element_type",
        lambda c: (
            hasattr(c, "rhs_dtype")
            and not c.preferred_element_type
            and getattr(c, "lhs_scale", "none") == getattr(c, "rhs_scale", "none") == "none"
            and _mixes_float8(c.dtype, c.rhs_dtype)
        ),
    ),
    Refusal(ValueError, "must have at most", lambda c: (getattr(c, "matrices", None) or 0) > getattr(c, "groups", 0)),
    Refusal(
        ValueError,
        "value_heads must be a multiple of heads",
        lambda c: hasattr(c, "value_heads") and (c.value_heads or c.heads) % c.heads != 0,
    ),
    Refusal(
        ValueError, "a step has up to 8 tokens", lambda c: hasattr(c, "slots") and (getattr(c, "tokens", 0) or 0) > 8
    ),
    Refusal(
        ValueError,
        "must have a matrix for each",
        lambda c: hasattr(c, "matrices") and c.group_offset is None and c.matrices not in (None, c.groups),
    ),
    Refusal(ValueError, "must divide the channels", lambda c: hasattr(c, "delta_softplus") and c.channels % c.groups),
    Refusal(
        ValueError, "block is for scaling", lambda c: getattr(c, "block", None) is not None and c.scaling != "block"
    ),
    Refusal(ValueError, "leave out axis", lambda c: hasattr(c, "transposed") and c.transposed and c.axis == -2),
    Refusal(ValueError, "in one way", lambda c: _packings(c) > 1),
    Refusal(ValueError, "packed into one row", lambda c: _packings(c) and c.packed and c.batch != 1),
    Refusal(ValueError, "no place", lambda c: _packings(c) and c.segments and (c.initial_state or c.return_state)),
    Refusal(
        TypeError,
        "returns no gradient for its argument '[lr]hs_scale'",
        lambda c: getattr(c, "lhs_scale", "none") != "none" or getattr(c, "rhs_scale", "none") != "none",
        gradients=True,
    ),
    Refusal(ValueError, "and 32 in mxfp4", lambda c: getattr(c, "format", "") == "mxfp4" and c.group != 32),
    Refusal(ValueError, "has no zero points", lambda c: getattr(c, "format", "") == "mxfp4" and c.zeros),
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that can be pasted and repeated: ``lower(Call(...))``.

    Attributes:
      fields: those of the op's case that differ from ``cases.small``.
      gradients: compute the gradients of the floating-point arrays, too, "positional" or "all"; ``None`` for none.
      pick: the number of a config among all that can serve the call, in order of preference; ``None`` for selection.
      platform: the platform that the caller wants.
      mapped: axis of every array that ``jax.vmap`` maps.
      wide: True with ``jax_enable_x64``.
    """

    op: str
    device: str
    fields: dict[str, Any]
    gradients: Literal["positional", "all"] | None = None
    pick: int | None = None
    platform: str | None = None
    mapped: int | None = None
    wide: bool = False

    @property
    def case(self) -> Case:
        return dataclasses.replace(kernel(self.op).cases.small, **self.fields)

    def __repr__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Call({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


# What is drawn.


def values_of(op: str, field: str) -> tuple[Any, ...]:
    """The values from which a field of an op's cases is drawn.

    Raises:
      LookupError: nothing tells more than one value.
    """
    return _values_of(op, kernel(op).cases.kind, field)


@functools.cache
def _values_of(op: str, kind: type[Case], field: str) -> tuple[Any, ...]:
    owner = next(each for each in reversed(kind.__mro__) if field in vars(each).get("__annotations__", {}))
    key = f"{owner.__name__}.{field}"
    declared = [getattr(case, field) for case in _declared(kind if owner is Case else owner)]
    given = VALUES.get(key) or _of_type(typing.get_type_hints(kind)[field], declared)
    found = tuple({repr(each): each for each in (*given, *declared)}.values())
    if len(found) < 2:
        raise LookupError(f"{op}: add values of {key!r} to VALUES of {__name__}, or name it in OF_VALUES")
    return found


def drawn_fields(op: str) -> list[dataclasses.Field[Any]]:
    """The fields of an op's cases that change what is lowered."""
    kind = kernel(op).cases.kind
    left_out = {name for each in kind.__mro__ for name in OF_VALUES if name.partition(".")[0] == each.__name__}
    names = {name.rpartition(".")[2] for name in left_out} | {name for name in OF_VALUES if "." not in name}
    return [field for field in dataclasses.fields(kind) if field.name not in names]


def _declared(owner: type) -> Iterator[Case]:
    """The cases of all ops that have the fields of a class."""
    for op in OPS:
        cases = kernel(op).cases
        if issubclass(cases.kind, owner):
            yield from (cases.small, cases.large, *cases.every.values(), *cases.options.values())


def _of_type(hint: Any, declared: list[Any]) -> Iterable[Any]:
    """The values that a type tells."""
    if isinstance(hint, typing.TypeAliasType):
        return _of_type(hint.__value__, declared)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [value for each in typing.get_args(hint) for value in _of_type(each, declared)]
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if hint is float:
        return [value + 0.25 for value in declared if isinstance(value, float)][:1]
    return {bool: (False, True), int: SIZES, types.NoneType: (None,)}.get(hint, ())


def as_in_models(fields: dict[str, Any]) -> dict[str, Any]:
    """In one dtype of 16 bits and with widths of whole 16 bytes: kernels for these calls serve few others."""
    kept = {name: value for name, value in fields.items() if not name.endswith("_dtype")}
    widths = {name: -(-kept[name] // 8) * 8 for name in WIDTHS if name in kept}
    return {**kept, **widths, "dtype": "bfloat16"}


def draw(op: str, device: str, seed: int) -> Call:
    """The call of a seed: half of them as models have it, with the choice that it gets by default."""
    rng = random.Random(f"{op}-{seed}")
    small = kernel(op).cases.small
    share = rng.choice((0.15, 0.4, 0.8))
    fields: dict[str, Any] = {}
    for field in drawn_fields(op):
        is_number_or_flag = isinstance(getattr(small, field.name), int)
        if rng.random() < (0.7 if is_number_or_flag else share):
            fields[field.name] = rng.choice(values_of(op, field.name))
    is_default = rng.random() < 0.5
    if is_default:
        fields = as_in_models(fields)
    fields = repaired(small, fields, rng)
    fields = {name: value for name, value in fields.items() if value != getattr(small, name)}
    backends = [each.name for each in kernel(op).backends.usable]
    platforms = sorted({str(each.platform) for each in kernel(op).backends.usable})
    pick, platform = None, None
    if not is_default and rng.random() < 0.15:
        platform = rng.choice(platforms)
    elif not is_default and rng.random() < 0.75:
        pick = rng.randrange(len(backends)) if rng.random() < 0.6 else rng.randrange(1000)
    gradients = rng.choice((None, "positional", "all")) if kernel(op).differentiable else None
    mapped = rng.choice((0, -1)) if rng.random() < 0.1 else None
    return Call(op, device, fields, gradients, pick, platform, mapped, wide=rng.random() < 0.15)


def repaired(small: Case, fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The fields, most of the time such that they fit together."""

    def get(name: str) -> Any:
        return fields.get(name, getattr(small, name, None))

    if get("packed"):
        fields |= {"batch": 1, "segments": False, "lengths": False}
    if get("sequences") == "cum_seqlens":
        fields["batch"] = 1
    if get("position_bias") is not None:
        fields["bias"] = None
    if rng.random() < 0.02:
        return _small_enough(small, fields)
    if get("value_heads"):
        fields["value_heads"] = get("heads") * rng.choice((1, 2, 3, 8))
    if get("kv_heads"):
        fields["heads"] = get("kv_heads") * rng.choice((1, 1, 2, 3, 4, 5, 8, 16))
    for name in ("head_dim", "value_dim"):
        if get(name) == 0:
            fields[name] = 1
    if _is_mla(small):
        fields |= {"kv_heads": rng.choice((1,) * 15 + (2,)), "value_dim": min(get("value_dim") or 512, get("head_dim"))}
        fields |= {"head_dim": 576, "value_dim": 512} if get("rows") else {}
        fields["q_lengths"] = get("q_lengths")[:1] if _same_lengths(small) else get("q_lengths")
    if hasattr(small, "kv_dtype"):
        if get("kv_dtype") == "int8" and get("scale") is None:
            fields["scale"] = "token"
        if get("kv_dtype") == "bfloat16":
            fields["dtype"] = "bfloat16"
    if hasattr(small, "matrices"):
        matrices = get("matrices") or 0
        if get("group_offset") is None or matrices + get("group_offset") > get("groups"):
            fields |= {"matrices": None, "group_offset": None}
    if get("vocab") == 0:
        fields["vocab"] = 1
    return _small_enough(small, fields)


def _small_enough(small: Case, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with short sequences where a case draws much on the host."""
    case = dataclasses.replace(small, **fields)
    if hasattr(case, "mask") and case.mask is not None and math.prod(case.score_shape) > MOST_ELEMENTS:
        return fields | {"q_length": 129, "kv_length": 257, "batch": min(case.batch, 3), "heads": 3, "kv_heads": 3}
    if _serving(case) and case.sequences * case.kv_length * (case.kv_heads or case.heads) > MOST_ELEMENTS:
        return fields | {"kv_length": 257}
    return fields


# What is done with a call.


class Defect(AssertionError):
    """A call that neither becomes a program nor raises the error that it should.

    ``kind`` is the same for calls that fail alike.
    """

    def __init__(self, call: Call, what: str, trace: str = "") -> None:
        self.kind = re.sub(r"\d+", "0", what)
        super().__init__(f"{call!r} {what}\n{trace}".rstrip())


def failures(calls: Iterable[Call]) -> list[str]:
    """The defect of each call that has one, `simplified`."""
    found = []
    for call in calls:
        try:
            lower(call)
        except Defect as defect:
            found.append(str(simplified(call, defect)))
    return found


def lower(call: Call, then: Callable[[jax.stages.Lowered], object] = id) -> Literal["lowered", "refused"]:
    """Lowers a call, and does with the program what ``then`` says; returns what became of it.

    Raises:
      Defect: that is not what it should be.
    """
    with without_builds(), jax.enable_x64(call.wide), tilewright.target_device(DEVICES[call.device]):
        expected = [each for each in REFUSALS if each.of(call)]
        config = None
        try:
            op_call = OpCall(call.op, *call.case.abstract_arguments())
            config = _config(call, op_call)
            then(_lowered(call, op_call, config))
        # Exception: what is an error at all is the question.
        except Exception as error:
            if any(isinstance(error, each.error) and re.search(each.message, str(error)) for each in expected):
                return "refused"
            if isinstance(error, UnsupportedError) and _declined(call):
                return "refused"
            trace = "".join(traceback.format_exception(error)[-12:])
            raise Defect(call, f"with {config}: {type(error).__name__}: {error}", trace) from None
        if expected:
            raise Defect(call, f"was lowered, instead of {expected[0].error.__name__}: {expected[0].message}")
    return "lowered"


def _lowered(call: Call, op_call: OpCall, config: PerDirection | None) -> jax.stages.Lowered:
    options = {"cfg": config} if config else {"platform": call.platform} if call.platform else {}
    if call.gradients:
        function, structs = op_call.training(of_keywords=call.gradients == "all", **options)
    else:
        function, structs = op_call.on_arrays(**options)
    if call.mapped is not None:
        function = jax.vmap(function, in_axes=call.mapped)
        structs = [_with_axis(x, call.mapped) for x in structs]
    return jax.jit(function).lower(*structs)


def _with_axis(x: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, *x.shape) if axis == 0 else (*x.shape, 2), x.dtype)


def _invocations(call: Call, op_call: OpCall) -> Iterator[Invocation]:
    """Those of both directions, or of the forward pass alone."""
    inv, _ = prepared(op_call.kernel, op_call.args, op_call.kwargs, concrete=False)
    for direction in ("forward", "backward") if call.gradients else ("forward",):
        yield dataclasses.replace(inv, direction=direction, device=current_device())


def _config(call: Call, op_call: OpCall) -> PerDirection | None:
    """The config that the call picks for each direction; no backend's reasons may come from an error of its own."""
    picked: list[Choice] = []
    for inv in _invocations(call, op_call):
        for name, why in op_call.kernel.reasons(inv).items():
            if broken := [each for each in why if "its probe failed" in each]:
                raise RuntimeError(f"{name}, {inv.direction}: {broken}")
        if call.pick is not None:
            space = list(op_call.kernel.config_space(inv))
            picked.append(space[call.pick % len(space)])
    return PerDirection(*picked) if picked else None


def _declined(call: Call) -> bool:
    """True if no backend of the platform that the caller wants can serve the call."""
    if call.platform is None:
        return False
    op_call = OpCall(call.op, *call.case.abstract_arguments())
    there = [each.name for each in op_call.kernel.backends.usable if each.platform == call.platform]
    reasons = [op_call.kernel.reasons(inv) for inv in _invocations(call, op_call)]
    return any(all(of_direction[name] for name in there) for of_direction in reasons)


def simplified(call: Call, defect: Defect) -> Defect:
    """The same defect of a call with fewer fields and options."""
    plain: list[dict[str, Any]] = [{name: None} for name in ("pick", "platform", "mapped", "gradients")]
    for name in [*call.fields, None, None]:
        fewer = [{"fields": {k: v for k, v in call.fields.items() if k != name}}] if name else [*plain, {"wide": False}]
        for fields in fewer:
            other = dataclasses.replace(call, **fields)
            try:
                lower(other)
            except Defect as found:
                if found.kind == defect.kind:
                    call, defect = other, found
    return defect
