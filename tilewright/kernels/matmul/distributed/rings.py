"""Matmuls whose transfers overlap with their parts: rings of ``ppermute`` and, for small ones, plain collectives.

=========  ===================================================================  ==============  =====================
symbol     what                                                                 shape           where
=========  ===================================================================  ==============  =====================
x_j        the part of device j, which all others need                          [..., r, k]     travels, its own dtype
S_j        the sum for device j over the devices that it has passed             [..., r, n]     travels, float32
=========  ===================================================================  ==============  =====================

Device i of n gets part i − s from its left neighbour in step s = 1 ... h, and part i + s from its right neighbour in
step s = 1 ... g. A ring has h = n − 1 and g = 0. In both directions h = ⌊n/2⌋ and g = ⌊(n − 1)/2⌋: half the steps, if
the links to both neighbours are separate. Sums take the same ways back: S_j starts at the devices that are h steps to
one and g to the other side of j, each device on the way adds its partial product, and j adds both to its own. The
transfer of a step does not depend on the matmul beside it, so XLA can run both at the same time. Barriers keep it from
merging the matmuls of several parts, or one with the sum that its product is added to: either would wait.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.matmul.distributed.inputs import CollectiveInputs
from tilewright.kernels.matmul.ops.matmul import matmul
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.roofline import peaks_of
from tilewright.kernels.op.sharding import vary_over, varying_axes
from tilewright.kernels.op.xla_flags import permutes_by_copies
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.known_devices import chip_of

type PartsStrategy = Literal["collective", "ring", "bidirectional"]

_STEP_S = 10e-6
"""Assumed time that a step costs beside its transfer and its matmul: two launches and the wait for the neighbour."""


def best_parts(inputs: CollectiveInputs, device: Device, direction: Direction) -> PartsStrategy:
    """The strategy among those that multiply by parts for which the model predicts the least time."""
    if inputs.devices == 1:
        return "collective"
    lhs, flops = inputs.lhs, 2.0 * inputs.lhs.size * inputs.n
    moved = lhs.size * lhs.dtype.itemsize
    if inputs.scatters:
        flops /= inputs.devices
        of_result = math.prod(inputs.out_shape)
        # Partial sums travel forward, the cotangents of the result backward, for both gradients.
        item = wide_of(inputs).itemsize if direction == "forward" else jnp.dtype(inputs.out_dtype).itemsize
        moved, flops = of_result * item, flops if direction == "forward" else 2 * flops
    return strategy_of(device, inputs.devices, moved, flops)


def wide_of(inputs: CollectiveInputs) -> Any:
    """The dtype of sums."""
    return accumulator(inputs.lhs.dtype, inputs.rhs.dtype, jnp.dtype(inputs.out_dtype))


def strategy_of(device: Device, devices: int, moved_bytes: float, flops: float) -> PartsStrategy:
    """Predicts which strategy is fastest, from rated peaks and from the bytes and operations of a ring's step.

    Plain collectives take the time of the transfers and then that of the matmul. A ring takes the longer of both in
    each step, and 10 µs more. Behind NVLink switches a second direction adds nothing. On TPUs, and on GPUs whose links
    and peaks are not known, nothing is known to overlap, so it takes collectives. So it does between two devices whose
    transfers take SMs: there collectives were measured to be as fast or faster.
    """
    if devices == 2 and not permutes_by_copies():
        return "collective"
    peaks, chip = peaks_of(device), chip_of(device)
    # The time that a step costs is one of launches, which a TPU's program has none of between its steps.
    if device.kind != "gpu" or peaks is None or chip is None or not chip.link_gbs:
        return "collective"
    transfer, compute, steps = moved_bytes / (1e9 * chip.link_gbs), flops / peaks.flops, devices - 1
    one_by_one = steps * transfer + devices * compute
    overlapped = steps * (max(transfer, compute) + _STEP_S) + compute
    return "ring" if overlapped < one_by_one else "collective"


def _matmul(
    lhs: jax.Array, rhs: jax.Array, inputs: CollectiveInputs, dtype: DTypeLike, *, transposed: bool
) -> jax.Array:
    """``lhs · rhs``, of rhs in the layout of the call's or, ``transposed``, in the other one."""
    return matmul(
        lhs, rhs, transpose_rhs=inputs.transpose_rhs != transposed, precision=inputs.precision,
        preferred_element_type=dtype, platform=inputs.platform,
    )  # fmt: skip


def _part_matmul(
    part: jax.Array, rhs: jax.Array, inputs: CollectiveInputs, dtype: DTypeLike, *, transposed: bool = False
) -> jax.Array:
    """``part · rhs`` as a matmul of its own."""
    part, rhs = lax.optimization_barrier((part, rhs))
    product: jax.Array = lax.optimization_barrier(_matmul(part, rhs, inputs, dtype, transposed=transposed))
    return product


def _moved(x: jax.Array, inputs: CollectiveInputs, by: int) -> jax.Array:
    """The array of the device that is ``by`` places before this one along the ring."""
    n = inputs.devices
    return lax.ppermute(x, inputs.axis, [(i, (i + by) % n) for i in range(n)])


def _steps(inputs: CollectiveInputs, strategy: PartsStrategy) -> tuple[int, int]:
    """The steps to the right and to the left."""
    n = inputs.devices
    return (n // 2, (n - 1) // 2) if strategy == "bidirectional" else (n - 1, 0)


def _gather_visiting[Carry](
    x: jax.Array,
    inputs: CollectiveInputs,
    strategy: PartsStrategy,
    carry: Carry,
    visit: Callable[[Carry, jax.Array, jax.Array], Carry],
) -> Carry:
    """Visits the parts of all devices, each with its index, while the next ones travel."""
    n, (to_right, to_left) = inputs.devices, _steps(inputs, strategy)
    here = lax.axis_index(inputs.axis)
    arrived, right, left = [(x, here)], x, x
    for step in range(1, to_right + 1):
        travelling = []
        right = _moved(right, inputs, 1)
        travelling.append((right, (here - step) % n))
        if step <= to_left:
            left = _moved(left, inputs, -1)
            travelling.append((left, (here + step) % n))
        # The parts of the last step, while those of this one travel: no visit depends on them.
        for part, index in arrived:
            carry = visit(carry, part, index)
        arrived = travelling
    for part, index in arrived:
        carry = visit(carry, part, index)
    return carry


def _rows_of(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
    """The rows that belong to a device."""
    return lax.dynamic_slice_in_dim(x, index * rows, rows, axis=x.ndim - 2)


def _unwritten(shape: tuple[int, ...], dtype: DTypeLike, *operands: jax.Array) -> jax.Array:
    """An uninitialised array, whose type varies as that of the operands: the caller writes every row."""
    return vary_over(varying_axes(operands), lax.empty(shape, dtype))


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, *operands: jax.Array) -> jax.Array:
    """Zeros whose type varies as that of the operands."""
    return vary_over(varying_axes(operands), jnp.zeros(shape, dtype))


def gathered_by_parts(inputs: CollectiveInputs, strategy: PartsStrategy) -> jax.Array:
    """``all_gather(lhs) · rhs``."""
    lhs, rhs, rows = inputs.lhs, inputs.rhs, inputs.lhs.shape[-2]
    if strategy == "collective":
        return _matmul(_gathered(lhs, inputs), rhs, inputs, inputs.out_dtype, transposed=False)

    def visit(out: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        product = _part_matmul(part, rhs, inputs, inputs.out_dtype)
        return lax.dynamic_update_slice_in_dim(out, product, index * rows, axis=out.ndim - 2)

    out = _unwritten(inputs.out_shape, inputs.out_dtype, lhs, rhs)
    return _gather_visiting(lhs, inputs, strategy, out, visit)


def scattered_by_parts(inputs: CollectiveInputs, strategy: PartsStrategy) -> jax.Array:
    """``psum_scatter(lhs · rhs)``, summed in float32 (float64 for float64)."""
    lhs, rhs, devices, wide = inputs.lhs, inputs.rhs, inputs.devices, wide_of(inputs)
    if strategy == "collective":
        whole = _matmul(lhs, rhs, inputs, wide, transposed=False)
        summed = lax.psum_scatter(whole, inputs.axis, scatter_dimension=whole.ndim - 2, tiled=True)
        return summed.astype(inputs.out_dtype)
    here, rows = lax.axis_index(inputs.axis), lhs.shape[-2] // devices

    def partial(index: jax.Array) -> jax.Array:
        return _part_matmul(_rows_of(lhs, index % devices, rows), rhs, inputs, wide)

    to_right, to_left = _steps(inputs, strategy)
    total_right = total_left = None
    for step in range(to_right):
        # The sum that comes from the left is for the same device: there the index is one less, and so is the step.
        right = partial(here + to_right - step)
        total_right = _moved(right if total_right is None else total_right + right, inputs, 1)
        if step < to_left:
            left = partial(here - to_left + step)
            total_left = _moved(left if total_left is None else total_left + left, inputs, -1)
    total = partial(here)
    # One order of additions for each device, so that results repeat bit for bit.
    for each in (total_right, total_left):
        total = total if each is None else total + each
    return total.astype(inputs.out_dtype)


def _gathered(x: jax.Array, inputs: CollectiveInputs) -> jax.Array:
    whole: jax.Array = lax.all_gather(x, inputs.axis, axis=x.ndim - 2, tiled=True)
    return whole


def _of_rhs(rows: jax.Array, columns: jax.Array, inputs: CollectiveInputs, wide: DTypeLike) -> jax.Array:
    """The gradient of rhs in its layout, from rows of lhs and of the cotangents."""
    first, second = (columns, rows) if inputs.transpose_rhs else (rows, columns)
    # Leading dimensions of lhs are rows as well: the gradient of rhs sums over all of them.
    first, second = (x.reshape(-1, x.shape[-1]) for x in (first, second))
    return matmul(
        first, second, transpose_lhs=True, precision=inputs.precision, preferred_element_type=wide,
        platform=inputs.platform,
    )  # fmt: skip


def gathered_rhs_gradient(inputs: CollectiveInputs, d_out: jax.Array, strategy: PartsStrategy) -> jax.Array:
    """The gradient of rhs in ``all_gather(lhs) · rhs``, for which lhs is gathered again."""
    lhs, rhs, rows = inputs.lhs, inputs.rhs, inputs.lhs.shape[-2]
    wide = accumulator(lhs.dtype, rhs.dtype, d_out.dtype)
    if strategy == "collective":
        return _of_rhs(_gathered(lhs, inputs), d_out, inputs, wide).astype(rhs.dtype)

    def visit(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        return total + _of_rhs(part, _rows_of(d_out, index, rows), inputs, wide)

    # The sum over the parts stays in the dtype of the accumulator, and is rounded once.
    d_rhs = _gather_visiting(lhs, inputs, strategy, _zeros(rhs.shape, wide, lhs, d_out), visit)
    return d_rhs.astype(rhs.dtype)


def scattered_gradients(
    inputs: CollectiveInputs, d_out: jax.Array, strategy: PartsStrategy
) -> tuple[jax.Array, jax.Array]:
    """The gradients of ``psum_scatter(lhs · rhs)``, for both of which the cotangents are gathered once."""
    lhs, rhs, rows = inputs.lhs, inputs.rhs, d_out.shape[-2]
    wide = accumulator(lhs.dtype, rhs.dtype, d_out.dtype)
    if strategy == "collective":
        whole = _gathered(d_out, inputs)
        d_lhs = _matmul(whole, rhs, inputs, lhs.dtype, transposed=True)
        return d_lhs, _of_rhs(lhs, whole, inputs, wide).astype(rhs.dtype)

    def visit(totals: tuple[jax.Array, jax.Array], part: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_lhs, d_rhs = totals
        product = _part_matmul(part, rhs, inputs, lhs.dtype, transposed=True)
        d_lhs = lax.dynamic_update_slice_in_dim(d_lhs, product, index * rows, axis=d_lhs.ndim - 2)
        return d_lhs, d_rhs + _of_rhs(_rows_of(lhs, index, rows), part, inputs, wide)

    # Each visit writes other rows of the gradient of lhs, and adds to that of rhs: only the latter begins from zeros.
    totals = _unwritten(lhs.shape, lhs.dtype, d_out, rhs), _zeros(rhs.shape, wide, lhs, d_out)
    d_lhs, d_rhs = _gather_visiting(d_out, inputs, strategy, totals, visit)
    return d_lhs, d_rhs.astype(rhs.dtype)
