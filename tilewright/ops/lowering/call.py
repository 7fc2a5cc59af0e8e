"""The call primitive: one equation per kernel call, whose config is chosen when the program is lowered.

The choice is made that late for three reasons. Every ``vmap`` around the call is known by then, also one applied to an
already traced function, so selection sees the whole problem and nothing is tuned for a problem that never runs. The
platform is the one that the program is lowered for. And the traced program does not depend on the choice.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec
from jaxlib.version import __version_info__ as jaxlib_version

from tilewright.errors import TargetDeviceError
from tilewright.ops.config.agreement import run_by
from tilewright.ops.config.chooser import ConfigChooser, Selection
from tilewright.ops.config.context import Overrides
from tilewright.ops.kernel.arrays import (
    Shaped,
    StaticLeaf,
    Structure,
    explicit_sharding,
    first_sharding,
    split,
    struct_of,
)
from tilewright.ops.kernel.kernel import Invocation, Kernel
from tilewright.ops.kernel.optional import gradient_form
from tilewright.ops.kernel.registry import record_if_enabled
from tilewright.ops.lowering.gradients import array_labels
from tilewright.ops.lowering.labels import call_label, call_name, labelled
from tilewright.ops.lowering.lowering import KnownProgram, results_of, run
from tilewright.ops.lowering.mlir_modules import Value
from tilewright.ops.lowering.programs import Programs, record
from tilewright.ops.lowering.stages import CHOOSING, Program, Results, Stage
from tilewright.ops.lowering.surroundings import is_automatic, operand_devices, program_devices
from tilewright.ops.types import Device, Direction, MappedAxis
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.device import current_device, devices_for_platforms
from tilewright.ops.utils.target import check_runs_here

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """The source of a call's configs: the chooser, the caller's explicit config, and the overrides in force at the
    call.
    """

    chooser: ConfigChooser
    cfg: StaticLeaf | None
    overrides: Overrides

    def choose(self, inv: Invocation[Any, Any]) -> Selection:
        return self.chooser.choose(inv, cfg=self.explicit, overrides=self.overrides)

    @property
    def explicit(self) -> Any:
        return None if self.cfg is None else self.cfg.value

    @property
    def only_inspects(self) -> bool:
        """True if programs are lowered to be read, not run, maybe without the packages that they would run with."""
        return self.overrides.token is not None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One stage of a call of a kernel, without its arrays.

    Attributes:
      structure: structure of ``(args, kwargs)`` after ``prepare``.
      shardings: for each array of the call, the sharding that an eager caller knew and the trace does not show.
      extra: backward only: the structure of ``(residuals, cotangents)``, whose arrays follow those of the call.
      wanted: backward only: for each array of the call, True if its gradient is needed.
      returned: forward only: indices of the stage's flat results that the call returns; empty for all of them.
      residuals_are_given: backward only: True if the residuals are the caller's, and not those of this call.
    """

    kernel: Kernel[Any, Any]
    selector: Selector
    structure: Structure
    shardings: tuple[Any, ...]
    stage: str = "run"
    extra: Structure | None = None
    wanted: tuple[bool, ...] = ()
    returned: tuple[int, ...] = ()
    residuals_are_given: bool = False

    def __repr__(self) -> str:
        # JAX prints it in jaxprs.
        return f"{self.kernel.name}.{self.stage}"

    @property
    def direction(self) -> Direction:
        return "backward" if self.stage in ("backward", "gradients") else "forward"

    @property
    def num_arrays(self) -> int:
        return sum(leaf is None for leaf in self.structure.leaves)

    def invocation(self, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device) -> Invocation[Any, Any]:
        """The invocation that selection sees, from all operands' abstract values with their mapped axes in front."""
        structs = [
            element_of(avals[i], sum(axis.mapped[i] for axis in mapped), known)
            for i, known in enumerate(self.shardings)
        ]
        args, kwargs = self.structure.join(structs)
        # The operands after the call's own arrays are mapped like those and the caller's cotangents: no new
        # information.
        axes = tuple(MappedAxis(axis.size, axis.mapped[: self.num_arrays]) for axis in mapped)
        return Invocation(self.kernel, args, kwargs, direction=self.direction, mapped=axes, device=device)

    @property
    def code(self) -> Stage:
        """The stage of the kernel that runs: for ``run`` the forward stage if both compute the same, so that they share
        code.
        """
        if self.stage == "run" and self.kernel.run_is_forward:
            return Stage(self.kernel, self.structure, "forward")
        return Stage(self.kernel, self.structure, self.stage, self.extra, self.wanted)

    def program(self, cfg: object, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device) -> Program:
        """The program of the stage for a config and for operands with these abstract values, mapped axes in front."""
        return Program(self.code, StaticLeaf(cfg), tuple(avals), mapped, device)

    def function(self, cfg: object, mapped: tuple[MappedAxis, ...], device: Device) -> Callable[..., list[Any]]:
        """The stage with a config as a function of the flat operands that JAX can differentiate."""
        stage = Stage(self.kernel, self.structure, self.stage, self.extra, self.wanted)
        function = stage.function(cfg, mapped, device)

        def flat(*operands: jax.Array) -> list[Any]:
            leaves = jax.tree.leaves(function(*operands))
            return [leaves[i] for i in self.returned] if self.returned else leaves

        return flat

    def tree(self, results: Results) -> Any:
        """The tree of the results that the call's stage returns, which may be a part of its code's results."""
        return results.tree if self.code.name == self.stage else results.tree.children()[0]

    def picked(self, results: Results) -> tuple[int, ...]:
        """Indices of the flat results of its code that the call returns."""
        return self.returned or tuple(range(self.tree(results).num_leaves))


def element_of(aval: Shaped, mapped: int, known: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    """The abstract value of one element, without the first axes, which are mapped.

    Of an array without mapped axes it has the sharding that its type carries or that the caller knew.
    """
    if mapped:
        struct = struct_of(aval)
        return jax.ShapeDtypeStruct(struct.shape[mapped:], struct.dtype, weak_type=struct.weak_type)
    sharding = explicit_sharding(aval) or known
    return struct_of(aval, sharding)


# The primitive.

call_p = Primitive("tilewright_call")
call_p.multiple_results = True
CHOOSING.add(call_p)


def known_results(call: Call, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device) -> Results:
    """The results' abstract values, known before a config is chosen, since they do not depend on it."""
    return results_of(call.program(types_config(call, avals, mapped, device), avals, mapped, device))


def types_config(call: Call, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device) -> Any:
    """A config whose code has the types of every config's results: the kernel's, the caller's own, or the heuristic."""
    declared = call.kernel.types_cfg(is_split=first_sharding(avals) is not None)
    if declared is not None:
        return declared
    inv = call.invocation(avals, mapped, device)
    explicit = call.selector.explicit
    resolved = None if explicit is None else call.kernel.resolve_config(explicit, inv)
    return call.kernel.heuristic_cfg(inv) if resolved is None else resolved


def _abstract_eval(*avals: jax.core.AbstractValue, call: Call, mapped: tuple[MappedAxis, ...]) -> Any:
    results = known_results(call, avals, mapped, current_device())
    return [results.avals[i] for i in call.picked(results)], set(results.effects)


call_p.def_effectful_abstract_eval(_abstract_eval)

_PROGRAMS = Programs()


def _impl(*operands: jax.Array, call: Call, mapped: tuple[MappedAxis, ...]) -> Any:
    """Runs a call that reaches the primitive outside of any trace, such as the passes of an eager ``jax.grad``."""
    check_runs_here()
    if jax.config.jax_disable_jit:
        with run_by(lambda: operand_devices(operands)):
            return select(call, [jax.typeof(x) for x in operands], mapped, current_device())(*operands)

    def bound() -> Callable[..., Any]:
        return lambda *values: call_p.bind(*values, call=dataclasses.replace(call), mapped=mapped)

    selector = call.selector
    with run_by(lambda: operand_devices(operands)):
        return _PROGRAMS.get((call, mapped), selector.chooser, selector.overrides, bound).run(*operands)


call_p.def_impl(_impl)


def batching_rule(
    primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], mapped: tuple[MappedAxis, ...], **params: object
) -> tuple[list[Any], list[int]]:
    """Binds a primitive with one more mapped axis; all its results are mapped along axis 0."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    moved = [x if d is None or d == 0 else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    axis = MappedAxis(size, tuple(d is not None for d in dims))
    out = primitive.bind(*_reshard_mapped_axes(moved, axis), mapped=(axis, *mapped), **params)
    return out, [0] * len(out)


batching.primitive_batchers[call_p] = functools.partial(batching_rule, call_p)


def _reshard_mapped_axes(operands: list[Any], axis: MappedAxis) -> list[Any]:
    """Gives the mapped axes of all operands the same sharding.

    A result of a mapped call that does not depend on mapped operands, such as a residual, is replicated along the axis.
    """
    shardings = [
        explicit_sharding(jax.typeof(x)) if mapped else None for x, mapped in zip(operands, axis.mapped, strict=True)
    ]
    first = next((s.spec[0] for s in shardings if s is not None and s.spec[0] is not None), None)
    if first is None:
        return operands
    resharded = list(operands)
    for i, (x, mapped) in enumerate(zip(operands, axis.mapped, strict=True)):
        spec = jax.typeof(x).sharding.spec
        if mapped and spec[0] is None:
            resharded[i] = jax.sharding.reshard(x, PartitionSpec(first, *spec[1:]))
    return resharded


def decide(call: Call, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device) -> tuple[Selection, str]:
    """Chooses the config of a call; returns it with the label that a program carries."""
    inv = call.invocation(avals, mapped, device)
    record_if_enabled(inv)
    selection = call.selector.choose(inv)
    record(inv, selection)
    if logger.isEnabledFor(logging.INFO) and not call.selector.only_inspects:
        origin = f"{selection.step}, {selection.detail}" if selection.detail else selection.step
        config = describe_config(selection.config)
        logger.info("%s %s %s: %s (%s)", inv.kernel.name, inv.direction, describe_key(inv.key), config, origin)
    return selection, call_label(inv, selection)


def select(
    call: Call, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device, *, is_whole: bool = False
) -> Callable[..., Any]:
    """Chooses the config of a call and returns its code under its label.

    Args:
      is_whole: True if XLA splits the program, and the kernel does not say how it is split.
    """
    selection, label = decide(call, avals, mapped, device)
    is_known_whole = is_whole and not call.selector.only_inspects
    if is_known_whole and results_of(call.program(selection.config, avals, mapped, device)).has_kernels:
        _warn_of_whole(f"{call.kernel.name} {call.direction}")
    return labelled_as(code_of(call, selection.config, avals, mapped, device), label, selection.config)


@functools.lru_cache(maxsize=1024)
def _warn_of_whole(call: str) -> None:
    """Says once that devices do the same work, and what to do."""
    logger.warning(
        "%s: every device gathers its operands and computes the whole call, since XLA cannot split a kernel; call it "
        "inside of jax.shard_map, or say how it is split (docs/splitting-an-op.md)",
        call,
    )


def code_of(
    call: Call, cfg: object, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device
) -> Callable[..., list[Any]]:
    """A call's stage with a config as a function of the flat operands, lowered once for all programs."""
    known = KnownProgram(call.program(cfg, avals, mapped, device))
    inspects = call.selector.only_inspects
    try:
        results = known.results
    except TargetDeviceError:  # its packages are on the target alone
        if not inspects:
            raise
        results = known_results(call, avals, mapped, device)
    picked = call.picked(results)
    # If the program is lowered only for inspection, only its labels are read. Lowering the call's code would take
    # seconds and may need packages that are not installed.
    only_inspected = inspects and _is_opaque(results)
    apart = frozenset[int]()
    if _RUNS_KERNELS_TWICE and device.kind == "gpu" and call.stage == "forward" and not only_inspected:
        apart = _outputs_of_kernels(results)

    def code(*operands: jax.Array) -> list[Any]:
        if only_inspected:
            return [jnp.zeros(results.avals[i].shape, results.avals[i].dtype) for i in picked]
        found = run(known, *operands)
        return [jax.lax.optimization_barrier(found[i]) if i in apart else found[i] for i in picked]

    return code


_RUNS_KERNELS_TWICE = jaxlib_version < (0, 12)
"""Before 0.12 XLA makes one operation of a kernel and the write of its result into the array of all steps of a loop. If
the step uses the result itself, too, the kernel then runs once for each. A barrier keeps it from that."""


def _outputs_of_kernels(results: Results) -> frozenset[int]:
    """The results of a forward pass by kernels that are outputs, which the rest of a program uses."""
    outputs = results.tree.children()[0].num_leaves
    return frozenset(index for index, _ in results.sources[:outputs]) if results.has_kernels else frozenset()


def _is_opaque(results: Results) -> bool:
    """True if the code has no effects and calls no other kernel, so that zeros of the right shapes can replace it."""
    keys = any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in results.avals)
    return not (results.effects or results.chooses or keys)


def labelled_as(function: Callable[..., Any], text: str, cfg: object) -> Callable[..., Any]:
    """The jitted code of a call with a config, named for people, in a program that carries the call's label."""

    def code(*operands: jax.Array) -> list[Any]:
        first, *others = function(*operands)
        return [labelled(first, text), *others]

    # The name of a jitted function appears in the text of lowered and compiled programs, with and without debug
    # information; a name scope appears only with it.
    choice = getattr(cfg, "backend", None) or type(cfg).__name__
    code.__name__ = code.__qualname__ = call_name(text, str(choice))
    return jax.jit(code)


def _lowering_rule(ctx: mlir.LoweringRuleContext, *operands: Value, call: Call, mapped: tuple[MappedAxis, ...]) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    devices = devices_for_platforms(platforms)
    is_split = is_automatic(ctx)
    if is_split and (automatic := call.kernel.automatic_cfg(call.selector)) is not None:
        (device,) = devices.values()
        if device.kind != "tpu":
            split_by_xla = code_of(call, automatic, ctx.avals_in, mapped, device)
            return mlir.lower_fun(split_by_xla)(ctx, *operands)
        if call.selector.cfg is None:
            # libtpu lacks PJRT's extension for partitioners: it would refuse the operation (jax-ml/jax#38196).
            cfg = call.kernel.xla_split_cfg(call.invocation(ctx.avals_in, mapped, device))
            selector = dataclasses.replace(call.selector, cfg=StaticLeaf(cfg))
            call = dataclasses.replace(call, selector=selector)
    with run_by(lambda: program_devices(ctx)):
        branches = {p: select(call, ctx.avals_in, mapped, device, is_whole=is_split) for p, device in devices.items()}
    if len(branches) == 1:
        chosen = next(iter(branches.values()))
    else:
        chosen = functools.partial(jax.lax.platform_dependent, **branches)
    checked = functools.partial(_with_checked_shapes, call, chosen, ctx.avals_out)
    return mlir.lower_fun(checked)(ctx, *operands)


def _with_checked_shapes(
    call: Call, chosen: Callable[..., Any], expected: Sequence[Any], *operands: jax.Array
) -> list[Any]:
    results: list[Any] = chosen(*operands)
    actual_shapes = [(x.shape, x.dtype) for x in results]
    expected_shapes = [(x.shape, x.dtype) for x in expected]
    if actual_shapes != expected_shapes:
        raise TypeError(
            f"the outputs or residuals of {call.kernel!r} depend on its config: {actual_shapes} with the chosen one, "
            f"{expected_shapes} as declared or with the heuristic one; they must not"
        )
    return results


mlir.register_lowering(call_p, _lowering_rule)


# From a prepared call to its results.


def apply(
    kernel: Kernel[Any, Any],
    selector: Selector,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known_shardings: Mapping[int, jax.sharding.Sharding],
) -> Any:
    """Runs a prepared call on traced or concrete arrays, with the kernel's own gradients."""
    arrays, structure = split((args, kwargs))
    shardings = tuple(known_shardings.get(id(array)) for array in arrays)
    call = Call(kernel, selector, structure, shardings)
    tree = call.tree(known_results(call, [jax.typeof(x) for x in arrays], (), current_device()))
    results = call_p.bind(*arrays, call=call, mapped=())
    if gradient_form(kernel) is None:  # with own gradients, the results are named where the call is differentiated
        results = [named(x, f"{kernel.name}_out") for x in results]
    return tree.unflatten(results)


def apply_backward(
    kernel: Kernel[Any, Any],
    selector: Selector,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    residuals: object,
    cotangents: tuple[Any, ...],
    wanted: Sequence[str],
) -> list[Any]:
    """Runs the backward stage of a prepared call on given residuals; the gradients of the arguments ``wanted``."""
    arrays, structure = split(arguments)
    rest, extra = split((residuals, cotangents))
    chosen = tuple(label in wanted for label in array_labels(kernel, *arguments))
    shardings = (None,) * len(arrays)
    call = Call(kernel, selector, structure, shardings, "backward", extra, chosen, residuals_are_given=True)
    return list(call_p.bind(*arrays, *rest, call=call, mapped=()))


def apply_stage(kernel: Kernel[Any, Any], selector: Selector, stage: str, inputs: Any, *rest: Any) -> Any:
    """Runs a stage of a call with one argument, on given residuals and cotangents if it is "gradients"."""
    arrays, structure = split(((inputs,), {}))
    others, extra = split(rest)
    call = Call(kernel, selector, structure, (None,) * len(arrays), stage, extra if rest else None)
    tree = call.tree(known_results(call, [jax.typeof(x) for x in (*arrays, *others)], (), current_device()))
    return tree.unflatten(call_p.bind(*arrays, *others, call=call, mapped=()))


def named(array: jax.Array, name: str) -> Any:
    """The array under a ``checkpoint_name``, by which a policy of ``jax.checkpoint`` can save it."""
    return array if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended) else checkpoint_name(array, name)
