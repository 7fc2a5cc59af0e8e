"""The calls whose programs ``tools.programs`` compares: cases of every op, as kernels see them on devices not here.

Nothing runs and nothing is compiled. What nvcc would compile, cuDNN, and FlashAttention-4's kernels count as installed,
and a call of one becomes an equation that says all that it would be given.
"""

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.program_text import value_text

DEVICES = {
    "H100": "NVIDIA H100 80GB HBM3",
    "A100": "NVIDIA A100-SXM4-40GB",
    "TPU": "TPU v5 lite",
    "CPU": None,
}
"""By the name in keys; JAX's names of them, and ``None`` for a CPU of `CPU_CORES` cores."""

CPU_CORES = 8

FEATURE_DEVICES = ("H100", "CPU")
"""For which the calls with options are made."""

_SERVING = (
    "", "dtype=float32", "dtype=float16", "sliding_window=127", "logits_soft_cap=30.0", "sinks=1", "alibi=True",
    "return_lse=True", "kv_dtype=int8 scale=token", "kv_dtype=float8_e4m3fn scale=head", "scale=page page_size=64",
    "head_dim=128 kv_heads=8", "q_lengths=(1,)", "q_lengths=(128,)",
)  # fmt: skip
FEATURES: Mapping[str, tuple[str, ...]] = {
    "flash_attention": (
        "", "dtype=float32", "dtype=float16", "causal=False", "kv_heads=2 sliding_window=100", "logits_soft_cap=30.0",
        "softmax_scale=-0.5", "bias=hqk", "bias=bhqk causal=False", "mask=bhqk", "sinks=1", "segments=True",
        "lengths=True", "packed=True batch=1", "dropout_prob=0.1", "head_dim=128 value_dim=64", "head_dim=96",
        "head_dim=256", "q_length=1 kv_length=2048", "kv_length=512 causal_alignment=bottom_right",
        "position_bias=alibi", "position_bias=relative causal=False",
    ),
    "decode_attention": (*_SERVING[:-2], "paged=True"),
    "page_attention": _SERVING[:-2],
    "ragged_decode_attention": _SERVING[:-2],
    "ragged_page_attention": (*_SERVING, "write=True"),
    "mla_decode": ("", "dtype=float32", "logits_soft_cap=30.0", "return_lse=True", "head_dim=576 value_dim=512"),
    "mla_ragged_page_attention": ("", "dtype=float32", "q_lengths=(1, 5)", "head_dim=576 value_dim=512"),
    "update_pages": ("", "dtype=float32", "kv_dtype=int8 scale=token", "q_lengths=(1,)"),
}  # fmt: skip
"""Options of an op's smallest case, beside bfloat16, that its calls are made with too; `_SERVING` for the other ops."""

BASES = {"flash_attention": "causal_short"}
"""The case whose options these are; "batch_8" for the other ops."""

SHARDED = {"flash_attention": (0, -2), "mla_decode": (), "mla_ragged_page_attention": (), "update_pages": ()}
"""Which dimension of arrays of three or more is split over two devices, in a call for each; the heads' by default."""


def framework() -> Any:
    """What is used of Tilewright: the only imports from it, for modules move."""
    from tilewright.cli.options import CallOptions
    from tilewright.cli.targets import flat_call, op_cases
    from tilewright.kernels import OPS, function, kernel
    from tilewright.kernels.cuda.build import Group, shipped_key
    from tilewright.kernels.cuda.kernel import CudaKernel, recording_groups
    from tilewright.kernels.flash_attention.cudnn import jax_calls as cudnn_jax
    from tilewright.kernels.flash_attention.fa4 import cute as fa4_cute
    from tilewright.ops import ConfigSelectorChain, Device, find_invocations, target_device
    from tilewright.ops.kernel.arrays import StaticLeaf, split
    from tilewright.ops.kernel.optional import gradient_form
    from tilewright.ops.lowering.stages import Program, Stage, traced
    from tilewright.ops.types import MappedAxis
    from tilewright.ops.utils.known_devices import find_device

    return types.SimpleNamespace(
        CallOptions=CallOptions, OPS=OPS, flat_call=flat_call, op_cases=op_cases, function=function, kernel=kernel,
        Group=Group, shipped_key=shipped_key, CudaKernel=CudaKernel, recording_groups=recording_groups,
        cudnn_jax=cudnn_jax, fa4_cute=fa4_cute, ConfigSelectorChain=ConfigSelectorChain, Device=Device,
        find_invocations=find_invocations, target_device=target_device, StaticLeaf=StaticLeaf, split=split,
        gradient_form=gradient_form, Program=Program, Stage=Stage, traced=traced, MappedAxis=MappedAxis,
        find_device=find_device,
    )  # fmt: skip


# What is not here.


@functools.cache
def _external_p() -> Any:
    """The primitive of calls of kernels that are not here."""
    from jax.extend.core import Primitive

    primitive = Primitive("external_kernel")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: list(results))
    return primitive


def _call_external(operands: Sequence[Any], outputs: Sequence[Any], **said: Any) -> list[Any]:
    import jax

    results = tuple(jax.core.ShapedArray(each.shape, each.dtype) for each in outputs)
    return _external_p().bind(*operands, results=results, **said)


def _cuda_call(
    self: Any,
    variant: Any,
    problem: Mapping[str, int],
    device: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
) -> list[Any]:
    """In place of ``CudaKernel.call``, which would have the variant compiled."""
    said = {"problem": value_text(problem), "attributes": value_text(attributes or {})}
    return _call_external(inputs, outputs, table=self.table.name, variant=variant.name, **said)


class _Recorder:
    """Stands for a class of FlashAttention-4's kernels, or a function that makes a part of one."""

    def __init__(self, name: str, record: list[str]) -> None:
        self._name, self._record = name, record

    def __call__(self, *args: Any, **kwargs: Any) -> "_Recorder":
        said = f"{self._name}(*{value_text(args)}, **{value_text(kwargs)})"
        self._record.append(said)
        return _Recorder(f"result {len(self._record)}", self._record)

    def __getattr__(self, name: str) -> "_Recorder":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(f"{self._name}.{name}", self._record)

    def __getitem__(self, key: Any) -> "_Recorder":
        return _Recorder(f"{self._name}[{value_text(key)}]", self._record)

    def __repr__(self) -> str:
        return self._name


def _fa4_kernels(*_: Any) -> Any:
    """In place of FlashAttention-4's kernels and of the bridge that launches them."""
    record: list[str] = []

    def call(launch: Any, *, output_shape_dtype: Any, input_output_aliases: Any, compile_key: Any) -> Any:
        def run(*operands: Any) -> Any:
            record.clear()
            aliased = set(input_output_aliases.values())
            inputs = [None if x is None else f"operand {i}" for i, x in enumerate(operands)]
            launch("stream", *inputs, *(f"output {i}" for i in range(len(output_shape_dtype)) if i not in aliased))
            said = {"aliases": value_text(input_output_aliases), "key": value_text(compile_key)}
            given = [x for x in operands if x is not None]
            return tuple(_call_external(given, output_shape_dtype, launch=tuple(record), **said))

        return run

    stand_ins = {name: _Recorder(name, record) for name in ("classes", "utils", "dtypes", "float32", "int32")}
    return types.SimpleNamespace(**stand_ins, call=call, versions=("any",))


@contextlib.contextmanager
def stubs(known: Any) -> Iterator[None]:
    """A context in which nvcc, cuDNN and FlashAttention-4 count as installed, and nothing as compiled."""
    fused = known.cudnn_jax.fused
    places = [
        (known.CudaKernel, "_missing", lambda self, values: []),
        (known.CudaKernel, "call", _cuda_call),
        (known.fa4_cute, "package_reasons", list),
        (known.fa4_cute, "kernels", _fa4_kernels),
        (fused, "cuda_versions", object()),
        (fused, "check_cudnn_version", lambda: 91900),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, value in places:
            setattr(place, name, value)
        with known.recording_groups():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


# Calls.


@dataclasses.dataclass(frozen=True, slots=True)
class OpCall:
    """One case of an op, as a function of abstract arrays.

    Attributes:
      name: of the case, and of the options that it is made with.
      is_feature: whether it is one of `FEATURES`; there are more of these, and less is written about each.
      sharded: the dimension of its arrays that is split over two devices.
    """

    op: str
    name: str
    function: Any
    args: Any
    is_feature: bool = False
    sharded: int | None = None


def named_calls(known: Any, op: str, kind: str) -> list[OpCall]:
    """The named cases of an op for a kind of device."""
    options = known.CallOptions(cases=("all",))
    return [_call_of(known, op, case.name, case) for case in known.op_cases(op, options, kind)]


def feature_calls(known: Any, op: str, device: str) -> list[OpCall]:
    """The calls of an op with one option each, and those that two devices share."""
    base = BASES.get(op, "batch_8")
    if base not in known.kernel(op).cases.every:
        return []  # an op without options listed above
    found = []
    for settings in FEATURES.get(op, _SERVING):
        options = known.CallOptions(cases=(base,), extra=("dtype=bfloat16", *settings.split()))
        (case,) = known.op_cases(op, options, None)
        found.append(_call_of(known, op, f"{base} {settings}".strip(), case, is_feature=True))
    whole = next(call for call in found if call.name == base)
    if DEVICES[device] is not None:
        found += [
            dataclasses.replace(whole, name=f"{base} sharded={axis}", sharded=axis) for axis in SHARDED.get(op, (-2,))
        ]
    return found


def _call_of(known: Any, op: str, name: str, case: Any, *, is_feature: bool = False) -> OpCall:
    """A case as a call of abstract arrays."""
    given = case.abstract_arguments()
    function, args = known.flat_call(known.function(op), *given, known.kernel(op).differentiable)
    return OpCall(op, name, function, args, is_feature)


@contextlib.contextmanager
def on_device(known: Any, device: str, call: OpCall) -> Iterator[Any]:
    """A context in which a call is lowered for a device; gives the mesh that splits its arrays, if one does."""
    import jax

    name = DEVICES[device]
    if name is None:
        yield None
    elif call.sharded is None:
        with known.target_device(name):
            yield None
    else:
        with known.target_device(name, count=2) as target:
            mesh = target.make_mesh((2,), ("shards",), (jax.sharding.AxisType.Explicit,))
            with jax.sharding.use_abstract_mesh(mesh):
                yield mesh


def sharded(call: OpCall, mesh: Any, array: Any) -> Any:
    """An array's struct, split as the call's arrays are."""
    import jax

    if mesh is None:
        return array
    if len(array.shape) < 3:
        return jax.ShapeDtypeStruct(array.shape, array.dtype)
    axes: list[str | None] = [None] * len(array.shape)
    axes[call.sharded or 0] = "shards"
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _sharded_leaf(call: OpCall, mesh: Any, leaf: Any) -> Any:
    import jax

    return sharded(call, mesh, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def invocations_of(known: Any, call: OpCall, device: str, mesh: Any) -> list[tuple[str, Any]]:
    """What kernels are called with, and its name in keys; in the context of `on_device`."""
    import jax

    found = known.find_invocations(call.function, *jax.tree.map(lambda x: sharded(call, mesh, x), call.args))
    if DEVICES[device] is None:
        cpu = known.Device("cpu", "cpu", None, CPU_CORES, f"cpu:any:{CPU_CORES}", present=False)
        found = [dataclasses.replace(inv, device=cpu) for inv in found]
    if mesh is not None:  # what was read from the program has lost that the mesh's axes are explicit
        split = [jax.tree.map(lambda x: _sharded_leaf(call, mesh, x), (inv.args, dict(inv.kwargs))) for inv in found]
        found = [
            dataclasses.replace(inv, args=args, kwargs=kwargs) for inv, (args, kwargs) in zip(found, split, strict=True)
        ]
    counts: collections.Counter[str] = collections.Counter()
    named = []
    for inv in found:
        kernel = "" if inv.kernel.name == call.op else f"{inv.kernel.name} "
        name = f"{call.op}/{call.name}/{device}/{kernel}{inv.direction}"
        counts[name] += 1
        named.append((name if counts[name] == 1 else f"{name} {counts[name]}", inv))
    return named


# Programs.


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """What programs of one invocation are traced with.

    Attributes:
      call: that it was found in.
      mesh: that its arrays are split over.
      mapped: which of its arrays have a further axis in front; none where there is no ``vmap``.
    """

    known: Any
    inv: Any
    call: OpCall
    mesh: Any = None
    mapped: tuple[bool, ...] = ()

    @property
    def arrays(self) -> list[Any]:
        """The arrays, abstract."""
        return self._split[0]

    @property
    def arrangement(self) -> Any:
        """The direction, and which of the arguments are arrays."""
        structure = self._split[1]
        return self.inv.direction, structure.tree, tuple(leaf is None for leaf in structure.leaves)

    @property
    def _split(self) -> tuple[list[Any], Any]:
        arrays, structure = self.known.split((self.inv.abstract_args, self.inv.abstract_kwargs))
        flags = self.mapped or (False,) * len(arrays)
        return [_stacked(array) if flag else array for array, flag in zip(arrays, flags, strict=True)], structure

    def program(self, config: Any) -> Any:
        """The jaxpr that runs with a config."""
        arrays, structure = self._split
        if self.inv.direction == "forward":
            return self._traced(self._forward_stage(structure), config, arrays)[0]
        rest, extra = self._residuals_and_cotangents(arrays, structure)
        wanted = tuple(map(_is_inexact, arrays))
        stage = self.known.Stage(self.inv.kernel, structure, "backward", extra, wanted)
        return self._traced(stage, config, [*arrays, *rest])[0]

    def reference(self) -> Any:
        """The jaxpr of the oracle."""
        import jax

        arrays, structure = self._split

        def flat(*operands: Any) -> Any:
            args, kwargs = structure.join(operands)
            return self.inv.kernel.reference(*args, **kwargs)

        return jax.make_jaxpr(flat)(*arrays)

    def _traced(self, stage: Any, config: Any, operands: Sequence[Any]) -> Any:
        known = self.known
        axes: tuple[Any, ...] = ()
        if self.mapped:  # what follows the call's own arrays is mapped, all of it
            axes = (known.MappedAxis(2, (*self.mapped, *(True,) * (len(operands) - len(self.mapped)))),)
        return known.traced(known.Program(stage, known.StaticLeaf(config), tuple(operands), axes, self.inv.target))

    def _forward_stage(self, structure: Any) -> Any:
        kernel = self.inv.kernel
        return self.known.Stage(
            kernel, structure, "forward" if self.known.gradient_form(kernel) == "residuals" else "run"
        )

    def _residuals_and_cotangents(self, arrays: Sequence[Any], structure: Any) -> tuple[list[Any], Any]:
        """What a backward stage takes after the arrays of the call, and its structure."""
        import jax

        forward = dataclasses.replace(self.inv, direction="forward")
        stage = self._forward_stage(structure)
        results = self._traced(stage, self.inv.kernel.heuristic_cfg(forward), arrays)[1]
        split = self.mesh is not None
        structs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if split else None) for x in results.avals
        ]
        whole = results.tree.unflatten(structs)
        out, residuals = whole if stage.name == "forward" else (whole, ())
        cotangents = jax.tree.map(lambda x: x if _is_inexact(x) else None, out)
        per_output = tuple(cotangents) if isinstance(cotangents, tuple | list) else (cotangents,)
        return self.known.split((residuals, per_output))


def _stacked(array: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct((2, *array.shape), array.dtype)


def _is_inexact(array: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
