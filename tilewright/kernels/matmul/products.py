"""Both ops with gradients, each by a kernel of its own where one serves the call, and else in parts.

The kernels are imported for calls that may take them: Pallas, which they import, takes a third of a second.
"""

import functools

import jax
from jax import lax

from tilewright.kernels.matmul.rings import (
    RingOptions,
    gathered_by_parts,
    gathered_rhs_gradient,
    scattered_by_parts,
    scattered_gradients,
)
from tilewright.kernels.op.roofline import peaks_of
from tilewright.ops.utils.device import current_device

_REMOTE_DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
"""Devices with NVLink between all of a host. Of two of the first one the kernels of ``remote.py`` were measured."""
_REMOTE_S = 80e-6
"""The time at its rated peak of the shortest matmul for which such a kernel was faster than collectives."""


def takes_remote(lhs: jax.Array, rhs: jax.Array, options: RingOptions, flops: float) -> bool:
    """True if a call takes a kernel of ``remote.py``, of so many operations on each device.

    "auto" takes it on a mesh of two devices, as more have not been measured.
    """
    if options.strategy != "auto":
        return options.strategy == "remote" and options.devices > 1
    device = current_device()
    peaks = peaks_of(device)
    two = options.devices == jax.sharding.get_abstract_mesh().size == 2
    if not two or device.name not in _REMOTE_DEVICES or peaks is None or flops < peaks.flops * _REMOTE_S:
        return False
    from tilewright.kernels.matmul.remote import remote_reasons

    return not remote_reasons(lhs, rhs, options)


def gathered_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``all_gather(lhs) · rhs``."""
    flops = 2.0 * lhs.size * rhs.shape[0 if options.transpose_rhs else 1]
    if takes_remote(lhs, rhs, options, options.devices * flops):
        from tilewright.kernels.matmul.remote import remote_gathered_product

        return remote_gathered_product(lhs, rhs, options)
    return gathered_by_parts(lhs, rhs, options)


def scattered_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``psum_scatter(lhs · rhs)``, summed in float32 (float64 for float64)."""
    if takes_remote(lhs, rhs, options, 2.0 * lhs.size * rhs.shape[0 if options.transpose_rhs else 1]):
        from tilewright.kernels.matmul.remote import remote_scattered_product

        return remote_scattered_product(lhs, rhs, options)
    return scattered_by_parts(lhs, rhs, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """`gathered_product` with gradients; the backward pass gathers lhs again."""
    return gathered_product(lhs, rhs, options)


def _all_gather_forward(
    lhs: jax.Array, rhs: jax.Array, options: RingOptions
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return gathered_product(lhs, rhs, options), (lhs, rhs)


def _all_gather_backward(
    options: RingOptions, operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Without a barrier XLA takes the gather of the forward pass for this one, and keeps its result for it.
    (lhs, rhs), d_out = lax.optimization_barrier((operands, d_out))
    d_lhs = reduce_scatter_product(d_out, rhs, options.backward(lhs.dtype))
    return d_lhs, gathered_rhs_gradient(lhs, rhs, d_out, options)


all_gather_product.defvjp(_all_gather_forward, _all_gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def reduce_scatter_product(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """`scattered_product` with gradients; the backward pass gathers the cotangents once for both."""
    return scattered_product(lhs, rhs, options)


def _reduce_scatter_forward(
    lhs: jax.Array, rhs: jax.Array, options: RingOptions
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return scattered_product(lhs, rhs, options), (lhs, rhs)


def _reduce_scatter_backward(
    options: RingOptions, operands: tuple[jax.Array, jax.Array], d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return scattered_gradients(*operands, d_out, options)


reduce_scatter_product.defvjp(_reduce_scatter_forward, _reduce_scatter_backward)
