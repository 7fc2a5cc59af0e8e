"""Both ops in one kernel each, whose devices send their rows or their products to each other while they multiply."""

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.matmul.gathered import gathered_matmul, gathered_params
from tilewright.kernels.hopper.matmul.operands import operand_reasons
from tilewright.kernels.hopper.matmul.scattered import scattered_matmul, scattered_params
from tilewright.kernels.hopper.matmul.sending import MAX_DEVICES, DeviceRing
from tilewright.kernels.matmul.distributed.inputs import CollectiveInputs
from tilewright.kernels.matmul.distributed.rings import PartsStrategy, gathered_by_parts, scattered_by_parts
from tilewright.kernels.op.choice import Platform, platform_of
from tilewright.kernels.op.sharding import unvarying, vary_over, varying_axes
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device

type Product = Callable[[CollectiveInputs], jax.Array]


def remote_product(inputs: CollectiveInputs, otherwise: PartsStrategy) -> jax.Array:
    """The product in one kernel, with sums in float32; by parts where Mosaic does not take the mesh."""

    def product(inputs: CollectiveInputs) -> jax.Array:
        lhs, rhs, sms = inputs.lhs, inputs.rhs, num_sms(current_device())
        rows, layout = lhs.reshape(-1, *lhs.shape[-2:]), (inputs.out_dtype, inputs.transpose_rhs, sms)
        options: dict[str, Any] = {"transpose_rhs": inputs.transpose_rhs, "out_dtype": inputs.out_dtype, "num_sms": sms}
        if inputs.scatters:
            out = scattered_matmul(rows, rhs, ring_of(inputs), params=scattered_params(lhs, rhs, *layout), **options)
        else:
            params = gathered_params(lhs, rhs, inputs.devices, *layout)
            out = gathered_matmul(rows, rhs, ring_of(inputs), params=params, **options)
        return out.reshape(inputs.out_shape)

    parts = scattered_by_parts if inputs.scatters else gathered_by_parts
    return over_devices(product, lambda inputs: parts(inputs, otherwise), inputs)


def over_devices(kernel: Product, parts: Product, inputs: CollectiveInputs) -> jax.Array:
    """Runs a kernel in a ``shard_map`` that may check types, and under ``vmap``.

    There the rows of several lhs are those of a larger one; several rhs are for ``parts``, and so is a mesh that Mosaic
    does not take, unless the kernel was asked for.
    """
    varying = varying_axes(inputs) | {cast(str, inputs.axis)}

    def by_kernel(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return vary_over(varying, kernel(inputs.replace(lhs=unvarying(lhs), rhs=unvarying(rhs))))

    def by_parts(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return parts(inputs.replace(lhs=lhs, rhs=rhs))

    @jax.custom_batching.custom_vmap
    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return by_kernel(lhs, rhs) if inputs.strategy == "remote" else if_in_order(by_kernel, by_parts, lhs, rhs)

    # Pallas would add an axis to a grid whose devices wait for each other.
    @product.def_vmap
    def _(size: int, batched: list[bool], lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, bool]:
        if not batched[1]:
            return product(lhs, rhs), True
        axes = tuple(0 if each else None for each in batched)
        return jax.vmap(by_parts, axes)(lhs, rhs), True

    return cast(jax.Array, product(inputs.lhs, inputs.rhs))


def if_in_order(first: Callable[..., Any], second: Callable[..., Any], *operands: jax.Array) -> jax.Array:
    """The first function in a program for devices in the order of their ids, as Mosaic wants them; else the second.

    Which devices a program has is known when it is lowered.
    """
    in_order, otherwise = (jax.make_jaxpr(function)(*operands) for function in (first, second))
    (out,) = _if_in_order_p.bind(*operands, in_order=in_order, otherwise=otherwise)
    return cast(jax.Array, out)


_if_in_order_p = Primitive("tilewright_if_in_order")
_if_in_order_p.multiple_results = True


@_if_in_order_p.def_effectful_abstract_eval
def _types(*_: Any, in_order: ClosedJaxpr, otherwise: ClosedJaxpr) -> tuple[list[Any], Any]:
    return in_order.out_avals, in_order.effects | otherwise.effects


def _lowered(ctx: Any, *operands: Any, in_order: ClosedJaxpr, otherwise: ClosedJaxpr) -> Any:
    chosen = in_order if devices_in_order(ctx) else otherwise
    return mlir.lower_fun(jaxpr_as_fun(chosen))(ctx, *operands)


mlir.register_lowering(_if_in_order_p, _lowered)


def devices_in_order(ctx: mlir.LoweringRuleContext) -> bool:
    """True if the devices of the mesh around a call have the order of their ids, or are not known."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, jax.sharding.Mesh) else []
    return ids == list(range(len(ids)))


def ring_of(inputs: CollectiveInputs) -> DeviceRing:
    """The devices of a call."""
    return DeviceRing(cast(str, inputs.axis), inputs.devices, jax.sharding.get_abstract_mesh().axis_names)


def remote_reasons(inputs: CollectiveInputs, device: Device) -> list[str]:
    """Reasons why the kernels cannot serve a call; empty if they can."""
    lhs, rhs = inputs.lhs, inputs.rhs
    reasons = device_reasons(device)
    reasons += operand_reasons({"lhs": lhs.dtype, "rhs": rhs.dtype}, inputs.out_dtype, {"k": inputs.k, "n": inputs.n})
    if 0 in (*lhs.shape, inputs.n):
        reasons.append(f"there is nothing to compute, got {lhs.shape=}, {rhs.shape=}")
    if inputs.platform is not None and Platform.PALLAS not in map(platform_of, inputs.platform):
        reasons.append(f"its kernel is one of 'pallas', got platform={', '.join(map(repr, map(str, inputs.platform)))}")
    if not isinstance(inputs.axis, str):
        reasons.append(f"the axis must be a single one, got axis_name={inputs.axis!r}")
    if inputs.other_axes:
        left = ", ".join(inputs.other_axes)
        reasons.append(f"the shard_map must be over all axes of the mesh, and leaves out {left}")
    if inputs.mesh_size > MAX_DEVICES or jax.process_count() > 1:
        reasons.append(
            f"the devices must be up to {MAX_DEVICES} of one process, got {inputs.mesh_size} and {jax.process_count()=}"
        )
    return reasons
