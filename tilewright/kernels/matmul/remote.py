"""Both ops in one kernel each, whose devices send their rows or their products to each other while they multiply."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.matmul.gathered import gathered_matmul, gathered_params
from tilewright.kernels.hopper.matmul.operands import operand_reasons
from tilewright.kernels.hopper.matmul.scattered import scattered_matmul, scattered_params
from tilewright.kernels.hopper.matmul.sending import MAX_DEVICES, Ring
from tilewright.kernels.matmul.rings import RingOptions, gathered_by_parts, scattered_by_parts
from tilewright.kernels.op.sharding import unvarying, vary_over, varying_axes
from tilewright.ops.utils.device import current_device

type Product = Callable[[jax.Array, jax.Array, RingOptions], jax.Array]


def remote_gathered_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``all_gather(lhs) · rhs``.

    Raises:
      ValueError: the kernel does not take such a call.
    """
    check("all_gather_matmul", lhs, rhs, options)

    def product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
        (*leading, rows, k), sms = lhs.shape, num_sms(current_device())
        out = gathered_matmul(
            lhs.reshape(-1, rows, k),
            rhs,
            ring_of(options),
            transpose_rhs=options.transpose_rhs,
            out_dtype=options.out_dtype,
            params=gathered_params(lhs, rhs, options.devices, options.out_dtype, options.transpose_rhs, sms),
            num_sms=sms,
        )
        return out.reshape(*leading, rows * options.devices, -1)

    return over_devices(product, gathered_by_parts, lhs, rhs, options)


def remote_scattered_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``psum_scatter(lhs · rhs)``, summed in float32.

    Raises:
      ValueError: the kernel does not take such a call.
    """
    check("matmul_reduce_scatter", lhs, rhs, options)

    def product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
        (*leading, rows, k), sms = lhs.shape, num_sms(current_device())
        out = scattered_matmul(
            lhs.reshape(-1, rows, k),
            rhs,
            ring_of(options),
            transpose_rhs=options.transpose_rhs,
            out_dtype=options.out_dtype,
            params=scattered_params(lhs, rhs, options.out_dtype, options.transpose_rhs, sms),
            num_sms=sms,
        )
        return out.reshape(*leading, rows // options.devices, -1)

    return over_devices(product, scattered_by_parts, lhs, rhs, options)


def over_devices(kernel: Product, parts: Product, lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """Runs a kernel in a ``shard_map`` that may check types, and under ``vmap``.

    There the rows of several lhs are those of a larger one; several rhs are for ``parts``, and so is a mesh that Mosaic
    does not take, unless the kernel was asked for.
    """
    varying = varying_axes((lhs, rhs)) | {cast(str, options.axis_name)}
    in_parts = dataclasses.replace(options, strategy="ring") if options.strategy == "remote" else options

    def by_kernel(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return vary_over(varying, kernel(unvarying(lhs), unvarying(rhs), options))

    @jax.custom_batching.custom_vmap
    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if options.strategy == "remote":
            return by_kernel(lhs, rhs)
        return if_in_order(by_kernel, lambda x, y: parts(x, y, in_parts), lhs, rhs)

    # Pallas would add an axis to a grid whose devices wait for each other.
    @product.def_vmap
    def _(size: int, batched: list[bool], lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, bool]:
        if not batched[1]:
            return product(lhs, rhs), True
        axes = tuple(0 if each else None for each in batched)
        return jax.vmap(lambda x, y: parts(x, y, in_parts), axes)(lhs, rhs), True

    return cast(jax.Array, product(lhs, rhs))


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


def ring_of(options: RingOptions) -> Ring:
    """The devices of a call."""
    return Ring(cast(str, options.axis_name), options.devices, jax.sharding.get_abstract_mesh().axis_names)


def check(name: str, lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> None:
    """Raises a ``ValueError`` that says why the kernel of an op cannot serve a call."""
    reasons = remote_reasons(lhs, rhs, options)
    if reasons:
        raise ValueError(f"{name}: strategy='remote' cannot serve this call: {'; '.join(reasons)}")


def remote_reasons(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> list[str]:
    """Reasons why the kernels cannot serve a call; empty if they can."""
    k, n = lhs.shape[-1], rhs.shape[0 if options.transpose_rhs else 1]
    reasons = device_reasons(current_device())
    reasons += operand_reasons({"lhs": lhs.dtype, "rhs": rhs.dtype}, options.out_dtype, {"k": k, "n": n})
    if 0 in (*lhs.shape, n):
        reasons.append(f"there is nothing to compute, got {lhs.shape=}, {rhs.shape=}")
    platforms = (options.platform,) if isinstance(options.platform, str) else options.platform
    if platforms is not None and "pallas" not in platforms:
        reasons.append(f"its kernel is one of 'pallas', got platform={options.platform!r}")
    if not isinstance(options.axis_name, str):
        reasons.append(f"the axis must be a single one, got axis_name={options.axis_name!r}")
    mesh = jax.sharding.get_abstract_mesh()
    others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if others:
        reasons.append(f"the shard_map must be over all axes of the mesh, and leaves out {', '.join(others)}")
    if mesh.size > MAX_DEVICES or jax.process_count() > 1:
        reasons.append(
            f"the devices must be up to {MAX_DEVICES} of one process, got {mesh.size} and {jax.process_count()=}"
        )
    return reasons
