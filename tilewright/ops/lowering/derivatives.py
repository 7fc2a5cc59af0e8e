"""Derivatives of a call: in reverse mode by the kernel's own gradients, otherwise by JAX.

Under differentiation a call becomes two equations: the call itself, which also returns its residuals, and an equation
that is linear in the tangents. Reverse mode transposes the second one, which runs the kernel's backward pass; forward
mode evaluates it directly, if the kernel has code for that. A pass that is itself differentiated becomes two equations
like that, too; the second one is transposed by the kernel's reference.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tilewright.ops.config.agreement import run_by
from tilewright.ops.kernel.arrays import StaticLeaf, explicit_sharding, split
from tilewright.ops.kernel.kernel import Invocation, Kernel
from tilewright.ops.kernel.optional import gradient_form
from tilewright.ops.lowering.call import (
    Call,
    batching_rule,
    call_p,
    decide,
    element_of,
    known_results,
    labelled_as,
    named,
    types_config,
)
from tilewright.ops.lowering.checkpoints import Derivation, Kept, keep
from tilewright.ops.lowering.gradients import array_labels, with_manual_axes
from tilewright.ops.lowering.mlir_modules import Value
from tilewright.ops.lowering.plain import plain_pass
from tilewright.ops.lowering.programs import MAX_PROGRAMS
from tilewright.ops.lowering.stages import CHOOSING, Results, map_axes
from tilewright.ops.lowering.surroundings import traced_devices
from tilewright.ops.types import Device, MappedAxis
from tilewright.ops.utils.device import current_device, devices_for_platforms
from tilewright.ops.utils.target import check_runs_here


def _jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, mapped: tuple[MappedAxis, ...]) -> Any:
    refusal = call.kernel.no_gradient()
    if refusal:
        raise TypeError(refusal)
    form = gradient_form(call.kernel)
    if form is not None and call.stage == "run":
        return _with_own_gradients(primals, tangents, call, mapped, form)
    is_pass = call.stage in ("forward", "backward") and not call.residuals_are_given
    if form is not None and is_pass and call.kernel.reference is not None:
        return _of_pass(primals, tangents, call, mapped)
    if not any(isinstance(x, jax.core.Tracer) for x in primals):
        check_runs_here()
    # JAX differentiates the chosen code itself, of kernels without gradients of their own, and for second derivatives
    # of those without a reference. The config must therefore be chosen now, and a vmap applied later is not seen.
    avals = [jax.typeof(x) for x in primals]
    device = current_device()
    with run_by(lambda: traced_devices(primals)):
        selection, label = decide(call, avals, mapped, device)
    chosen = _differentiable_code(call, StaticLeaf(selection.config), mapped, device, label)
    return _jvp_along(chosen, primals, tangents)


ad.primitive_jvps[call_p] = _jvp_rule


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _differentiable_code(
    call: Call, cfg: StaticLeaf, mapped: tuple[MappedAxis, ...], device: Device, label: str
) -> Callable[..., Any]:
    """The code of a call; the same function object each time, so that JAX compiles its derivatives once."""
    return labelled_as(call.function(cfg.value, mapped, device), label, cfg.value)


def _has_tangent(tangent: jax.Array | ad.Zero) -> bool:
    """True if an input is differentiated."""
    return not isinstance(tangent, ad.Zero) and tangent.dtype != jax.dtypes.float0


def _jvp_along(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """``jax.jvp`` of a function with respect to the operands that have a tangent."""
    differentiated = [i for i, t in enumerate(tangents) if _has_tangent(t)]

    def along(*values: jax.Array) -> list[Any]:
        operands = list(primals)
        for i, value in zip(differentiated, values, strict=True):
            operands[i] = value
        results: list[Any] = function(*operands)
        return results

    return jax.jvp(along, tuple(primals[i] for i in differentiated), tuple(tangents[i] for i in differentiated))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Linearised:
    """The derivative of a call, without its arrays.

    Its operands are the call's operands, its residuals and the tangents; its results are the tangents of the inexact
    outputs. That of a pass, whose stage is not "run", has no residuals.

    Attributes:
      out: the structure of the call's outputs.
      residuals_tree: the structure of the residuals.
      differentiated: for each operand of the call, True if it has a tangent.
      inexact: for each output, True if it has a tangent.
    """

    call: Call
    out: jax.tree_util.PyTreeDef
    residuals_tree: jax.tree_util.PyTreeDef
    differentiated: tuple[bool, ...]
    inexact: tuple[bool, ...]

    def __repr__(self) -> str:
        return f"{self.call.kernel.name}.tangents"

    @property
    def num_operands(self) -> int:
        """The number of the call's own operands."""
        return len(self.differentiated)

    @property
    def num_primal_operands(self) -> int:
        return self.num_operands + int(self.residuals_tree.num_leaves)


def _with_own_gradients(
    primals: Sequence[Any], tangents: Sequence[Any], call: Call, mapped: tuple[MappedAxis, ...], form: str
) -> tuple[list[Any], list[Any]]:
    """The call with its residuals, and its linear part."""
    differentiated = tuple(_has_tangent(t) for t in tangents)
    out, residuals, structures = _forward(primals, call, mapped, form)
    linear = Linearised(call, *structures, differentiated, tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in out))
    given = [t for t, moves in zip(tangents, differentiated, strict=True) if moves]
    axes = _with_rest(mapped, len(residuals), differentiated)
    along = iter(linear_p.bind(*_read(primals, call), *residuals, *given, linear=linear, mapped=axes))
    return out, [
        next(along) if has else ad.Zero(jax.typeof(x).to_tangent_aval())
        for x, has in zip(out, linear.inexact, strict=True)
    ]


def _read(primals: Sequence[Any], call: Call) -> list[Any]:
    """The arrays of a call as its linear part gets them: zeros in place of those in which the call is linear."""
    if not call.kernel.linear:
        return list(primals)
    labels = array_labels(call.kernel, *call.structure.join(list(primals)))
    unread = (label in call.kernel.linear for label in labels)
    return [
        _materialised(ad.Zero(jax.typeof(x).to_tangent_aval())) if is_unread else x
        for x, is_unread in zip(primals, unread, strict=True)
    ]


def _of_pass(
    primals: Sequence[Any], tangents: Sequence[Any], call: Call, mapped: tuple[MappedAxis, ...]
) -> tuple[list[Any], list[Any]]:
    """A pass of a derivative, and its linear part."""
    differentiated = tuple(_has_tangent(t) for t in tangents)
    out = call_p.bind(*primals, call=call, mapped=mapped)
    inexact = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in out)
    linear = Linearised(call, jax.tree.structure(out), jax.tree.structure(()), differentiated, inexact)
    given = [t for t, moves in zip(tangents, differentiated, strict=True) if moves]
    along = iter(linear_p.bind(*primals, *given, linear=linear, mapped=_with_rest(mapped, 0, differentiated)))
    return out, [
        next(along) if has else ad.Zero(jax.typeof(x).to_tangent_aval()) for x, has in zip(out, inexact, strict=True)
    ]


def _with_rest(
    mapped: Sequence[MappedAxis], num_residuals: int, differentiated: Sequence[bool]
) -> tuple[MappedAxis, ...]:
    """The mapped axes of the linear part: residuals are mapped, a tangent is mapped as its array is."""
    indices = [i for i, moves in enumerate(differentiated) if moves]
    rest = (True,) * num_residuals
    return tuple(MappedAxis(axis.size, (*axis.mapped, *rest, *(axis.mapped[i] for i in indices))) for axis in mapped)


def _forward(
    primals: Sequence[Any], call: Call, mapped: tuple[MappedAxis, ...], form: str
) -> tuple[list[Any], list[Any], tuple[Any, Any]]:
    """The outputs and residuals of a call under their checkpoint names, and the structures of both.

    An array that is both an output and a residual is returned by the call once, so that ``jax.checkpoint`` saves it
    once.
    """
    avals, device = tuple(jax.typeof(x) for x in primals), current_device()
    name = call.kernel.name
    if form == "recomputing":
        tree = call.tree(known_results(call, avals, mapped, device))
        results = call_p.bind(*primals, call=call, mapped=mapped)
        return [named(x, f"{name}_out") for x in results], [], (tree, jax.tree.structure(()))
    forward_call = dataclasses.replace(call, stage="forward")
    known = known_results(forward_call, avals, mapped, device)
    out, residuals_tree = known.tree.children()
    sources = known.sources
    returned = tuple(sorted({index for index, _ in sources}))
    step = dataclasses.replace(forward_call, returned=returned)
    made = call_p.bind(*primals, call=step, mapped=mapped)
    results = dict(zip(returned, keep(_kept(call, avals, mapped, known), made), strict=True))
    leaves = [results[i] if reshaped is None else reshaped(results[i]) for i, reshaped in sources]
    return leaves[: out.num_leaves], leaves[out.num_leaves :], (out, residuals_tree)


def _kept(call: Call, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], known: Results) -> Kept:
    """The results of a call, each once, as policies of ``jax.checkpoint`` are told of them."""
    kernel, (out, residuals_tree) = call.kernel, known.tree.children()
    returned = sorted({index for index, _ in known.sources})
    of_outputs, of_residuals = known.sources[: out.num_leaves], known.sources[out.num_leaves :]
    outputs, kept = ({index for index, _ in sources} for sources in (of_outputs, of_residuals))
    names = tuple(f"{kernel.name}_{'out' if index in outputs else 'residuals'}" for index in returned)
    depth = len(mapped)
    structs = [element_of(aval, sum(axis.mapped[i] for axis in mapped), None) for i, aval in enumerate(avals)]
    args, kwargs = call.structure.join(structs)
    product = kernel.product(*args, **kwargs)
    if product is not None:
        labels = array_labels(kernel, args, kwargs)
        for axis in reversed(mapped):
            moving = {label for label, moves in zip(labels, axis.mapped, strict=True) if moves}
            product = product.mapped(axis.size, *(not moving.isdisjoint(names) for names in product.sources))
    derivation = None
    if kernel.outputs_of_residuals is not None and kept and outputs.isdisjoint(kept):
        positions = {index: i for i, index in enumerate(returned)}
        sources = tuple((positions[index], reshaped) for index, reshaped in of_residuals)
        derivation = Derivation(kernel, call.structure, tuple(structs), residuals_tree, sources, depth)
    return Kept(kernel.name, names, tuple(index not in kept for index in returned), product, derivation)


# The linear part.

linear_p = Primitive("tilewright_linear")
linear_p.multiple_results = True
CHOOSING.add(linear_p)


def _linear_abstract_eval(
    *avals: jax.core.ShapedArray, linear: Linearised, mapped: tuple[MappedAxis, ...]
) -> list[Any]:
    call, count, device = linear.call, linear.num_operands, current_device()
    own_axes = tuple(MappedAxis(axis.size, axis.mapped[:count]) for axis in mapped)
    arrays = tuple(avals[:count])
    if all(any(axis.mapped) for axis in own_axes):
        results = known_results(call, arrays, own_axes, device)
        along = [results.avals[i] for i in call.picked(results)]
    else:  # along some axis only the tangents are mapped
        function = call.function(types_config(call, arrays, own_axes, device), (), device)
        along = jax.make_jaxpr(map_axes(lambda *operands: function(*operands[:count]), mapped))(*avals).out_avals
    return [aval.to_tangent_aval() for aval, has in zip(along, linear.inexact, strict=True) if has]


linear_p.def_abstract_eval(_linear_abstract_eval)
batching.primitive_batchers[linear_p] = functools.partial(batching_rule, linear_p)


def _transpose(
    cotangents: Sequence[Any], *operands: jax.Array, linear: Linearised, mapped: tuple[MappedAxis, ...]
) -> list[Any]:
    """Computes the gradients by the kernel's backward pass; those of a pass by the kernel's reference."""
    count, num_primal_operands = linear.num_operands, linear.num_primal_operands
    if linear.call.stage != "run":
        return _transpose_pass(cotangents, operands, linear, mapped)
    residuals_tree, tangents = operands[:num_primal_operands], operands[num_primal_operands:]
    given = iter(cotangents)
    leaves = [_materialised(next(given)) if has else None for has in linear.inexact]
    outputs = linear.out.unflatten(leaves)
    per_output = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    rest, extra = split((linear.residuals_tree.unflatten(residuals_tree[count:]), per_output))
    step = dataclasses.replace(linear.call, stage="backward", extra=extra, wanted=linear.differentiated)
    axes = tuple(
        MappedAxis(
            axis.size, (*axis.mapped[:num_primal_operands], *(True,) * (len(rest) - num_primal_operands + count))
        )
        for axis in mapped
    )
    gradients = call_p.bind(*residuals_tree[:count], *rest, call=step, mapped=axes)
    found = []
    for i, (gradient, tangent) in enumerate(zip(gradients, tangents, strict=True)):
        shared = tuple(depth for depth, axis in enumerate(mapped) if not axis.mapped[num_primal_operands + i])
        summed = gradient.sum(shared) if shared else gradient
        found.append(with_manual_axes(summed, tangent.aval) if ad.is_undefined_primal(tangent) else None)
    return [None] * num_primal_operands + found


ad.primitive_transposes[linear_p] = _transpose


def _transpose_pass(
    cotangents: Sequence[Any], operands: Sequence[Any], linear: Linearised, mapped: tuple[MappedAxis, ...]
) -> list[Any]:
    """Transposes the linear part of a pass as JAX does that of the kernel's reference."""
    primals, tangents = operands[: linear.num_operands], operands[linear.num_operands :]
    along = _plain_linear(linear, [jax.typeof(x) for x in primals], mapped)
    needed = [i for i, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    unknown = [i for i, tangent in enumerate(tangents) if ad.is_undefined_primal(tangent)]

    def of_unknown(*values: jax.Array) -> list[Any]:
        complete = list(tangents)
        for i, value in zip(unknown, values, strict=True):
            complete[i] = value
        results = along(*primals, *complete)
        return [results[i] for i in needed]

    zeros = [_materialised(ad.Zero(tangents[i].aval)) for i in unknown]
    gradients = jax.vjp(of_unknown, *zeros)[1]([cotangents[i] for i in needed])
    found: list[Any] = [None] * len(operands)
    for i, gradient in zip(unknown, gradients, strict=True):
        found[linear.num_operands + i] = gradient
    return found


def _plain_linear(linear: Linearised, avals: Sequence[Any], mapped: tuple[MappedAxis, ...]) -> Callable[..., list[Any]]:
    """The linear part as a function that JAX can differentiate in both modes, by the kernel's reference."""
    call, count, device = linear.call, linear.num_operands, current_device()
    elements = [element_of(x, sum(axis.mapped[i] for axis in mapped), None) for i, x in enumerate(avals[:count])]
    known = known_results(call, elements, (), device)
    code, indices = plain_pass(call, known), [i for i, moves in enumerate(linear.differentiated) if moves]

    def element(*operands: jax.Array) -> list[Any]:
        tangents: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in operands[:count]]
        for i, tangent in zip(indices, operands[linear.num_primal_operands :], strict=True):
            tangents[i] = tangent
        _, along = _jvp_along(code, operands[:count], tangents)
        return [t for t, has in zip(along, linear.inexact, strict=True) if has]

    def every(*operands: jax.Array) -> list[Any]:
        types = _linear_abstract_eval(*map(jax.typeof, operands), linear=linear, mapped=mapped)
        results = zip(map_axes(element, mapped)(*operands), types, strict=True)
        return [_materialised(ad.Zero(aval)) if x is None else x for x, aval in results]

    return every


def _materialised(cotangent: jax.Array | ad.Zero) -> jax.Array:
    """A cotangent as an array, zeros if it is symbolic."""
    if not isinstance(cotangent, ad.Zero):
        return cotangent
    aval: Any = cotangent.aval
    return with_manual_axes(jnp.zeros(aval.shape, aval.dtype, device=explicit_sharding(aval)), aval)


def _forward_mode(
    linear: Linearised, avals: Sequence[Any], mapped: tuple[MappedAxis, ...], device: Device
) -> Callable[..., list[Any]]:
    """The linear part as a function: JAX differentiates the code of the config that the kernel provides for that.

    Without one it is by the kernel's reference.

    Raises:
      TypeError: the kernel provides neither.
    """
    call = linear.call
    inv = call.invocation(avals, mapped, device)
    if call.kernel.reference is not None and call.kernel.forward_mode_cfg(inv) is None:
        return _plain_linear(linear, avals, mapped)
    cfg = forward_mode_config(call.kernel, inv)
    function = call.function(cfg, (), device)
    differentiated = [i for i, moves in enumerate(linear.differentiated) if moves]

    def element(*operands: jax.Array) -> list[Any]:
        arrays, tangents = operands[: linear.num_operands], operands[linear.num_primal_operands :]

        def along(*values: jax.Array) -> list[Any]:
            complete = list(arrays)
            for i, value in zip(differentiated, values, strict=True):
                complete[i] = value
            return function(*complete)

        _, results = jax.jvp(along, tuple(arrays[i] for i in differentiated), tuple(tangents))
        return [t for t, has in zip(results, linear.inexact, strict=True) if has]

    return map_axes(element, mapped)


def forward_mode_config(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Any:
    """The config whose code JAX shall differentiate in forward mode.

    Raises:
      TypeError: the kernel provides none.
    """
    cfg = kernel.forward_mode_cfg(inv)
    if cfg is None:
        raise TypeError(
            f"{kernel.name} has gradients of its own for reverse mode (jax.grad, jax.vjp, jax.jacrev) and none for "
            "forward mode (jax.jvp, jax.linearize, jax.jacfwd, jax.hessian); use reverse mode, or give the kernel a "
            "forward_mode_cfg or a reference"
        )
    return cfg


def _linear_impl(*operands: jax.Array, linear: Linearised, mapped: tuple[MappedAxis, ...]) -> list[Any]:
    check_runs_here()
    code = _compiled(linear, tuple(jax.typeof(x) for x in operands), mapped, current_device())
    results: list[Any] = code(*operands)
    return results


linear_p.def_impl(_linear_impl)


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _compiled(
    linear: Linearised, avals: tuple[Any, ...], mapped: tuple[MappedAxis, ...], device: Device
) -> Callable[..., Any]:
    return jax.jit(_forward_mode(linear, avals, mapped, device))


def _linear_lowering(
    ctx: mlir.LoweringRuleContext, *operands: Value, linear: Linearised, mapped: tuple[MappedAxis, ...]
) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    devices = devices_for_platforms(platforms)
    branches = {p: _forward_mode(linear, ctx.avals_in, mapped, device) for p, device in devices.items()}
    chosen = next(iter(branches.values()))
    if len(branches) > 1:
        chosen = functools.partial(jax.lax.platform_dependent, **branches)
    return mlir.lower_fun(chosen)(ctx, *operands)


mlir.register_lowering(linear_p, _linear_lowering)


def _linear_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linearised, mapped: tuple[MappedAxis, ...]
) -> Any:
    avals = [jax.typeof(x) for x in primals]
    if linear.call.kernel.reference is None:
        return _jvp_along(_forward_mode(linear, avals, mapped, current_device()), primals, tangents)
    _, along = _jvp_along(_plain_linear(linear, avals, mapped), primals, tangents)
    return linear_p.bind(*primals, linear=linear, mapped=mapped), along


ad.primitive_jvps[linear_p] = _linear_jvp
