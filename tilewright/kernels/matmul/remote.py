"""An `all_gather_matmul` in one kernel, whose devices send their rows to each other while they multiply."""

import dataclasses
from typing import cast

import jax

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.matmul.gathered import gathered_matmul, gathered_params
from tilewright.kernels.hopper.matmul.operands import operand_reasons
from tilewright.kernels.hopper.matmul.sending import MAX_DEVICES, Ring
from tilewright.kernels.matmul.rings import RingOptions, gathered_product
from tilewright.kernels.sharding import unvarying, vary_over, varying_axes
from tilewright.ops.utils.device import current_device


def remote_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``all_gather(lhs) · rhs`` by the Hopper kernel whose devices send their rows to each other.

    Under ``vmap`` of lhs alone its rows are those of a larger lhs; of rhs, too, a ring computes it.

    Raises:
      ValueError: the kernel does not take such a call.
    """
    reasons = remote_reasons(lhs, rhs, options)
    if reasons:
        raise ValueError(f"all_gather_matmul: strategy='remote' cannot serve this call: {'; '.join(reasons)}")

    axis = cast(str, options.axis_name)
    varying = varying_axes((lhs, rhs)) | {axis}

    @jax.custom_batching.custom_vmap
    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        (*leading, rows, k), sms = lhs.shape, num_sms(current_device())
        out = gathered_matmul(
            unvarying(lhs).reshape(-1, rows, k),
            unvarying(rhs),
            Ring(axis, options.devices, jax.sharding.get_abstract_mesh().axis_names),
            transpose_rhs=options.transpose_rhs,
            out_dtype=options.out_dtype,
            params=gathered_params(lhs, rhs, options.devices, options.out_dtype, options.transpose_rhs, sms),
            num_sms=sms,
        )
        return vary_over(varying, out.reshape(*leading, rows * options.devices, -1))

    # Pallas would add an axis to a grid whose devices wait for each other.
    @product.def_vmap
    def _(size: int, batched: list[bool], lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, bool]:
        if not batched[1]:
            return product(lhs, rhs), True
        ring = dataclasses.replace(options, strategy="ring")
        # Of each matrix the rows would have to be sent.
        axes = tuple(0 if each else None for each in batched)
        return jax.vmap(lambda x, y: gathered_product(x, y, ring), axes)(lhs, rhs), True

    return cast(jax.Array, product(lhs, rhs))


def remote_reasons(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> list[str]:
    """Reasons why the Hopper kernel that gathers rows itself cannot compute a product; empty if it can."""
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
