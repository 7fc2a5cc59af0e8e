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

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.matmul.op import matmul
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.roofline import peaks_of
from tilewright.kernels.op.sharding import AxisName, vary_over, varying_axes
from tilewright.kernels.op.xla_flags import permutes_by_copies
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.known_devices import chip_of

type Strategy = Literal["auto", "collective", "ring", "bidirectional", "remote"]

STRATEGIES = get_args(Strategy.__value__)

_STEP_S = 10e-6
"""Assumed time that a step costs beside its transfer and its matmul: two launches and the wait for the neighbour."""


@dataclasses.dataclass(frozen=True, slots=True)
class RingOptions:
    """The static part of a call of either op.

    Attributes:
      devices: the number of devices along the axis.
      out_dtype: the name of the dtype of the result.
    """

    axis_name: AxisName
    devices: int
    strategy: Strategy
    out_dtype: str
    transpose_rhs: bool
    precision: jax.lax.Precision | jax.lax.DotAlgorithmPreset | None
    platform: PlatformOption

    def steps(self, strategy: Strategy) -> tuple[int, int]:
        """The steps to the right and to the left."""
        n = self.devices
        return (n // 2, (n - 1) // 2) if strategy == "bidirectional" else (n - 1, 0)

    def moved(self, x: jax.Array, by: int) -> jax.Array:
        """The array of the device that is ``by`` places before this one along the ring."""
        n = self.devices
        return lax.ppermute(x, self.axis_name, [(i, (i + by) % n) for i in range(n)])

    def backward(self, out_dtype: jax.typing.DTypeLike) -> "RingOptions":
        """The options of the op that computes the gradient of lhs."""
        name, strategy = jnp.dtype(out_dtype).name, self.strategy
        if strategy == "remote":  # of a gradient's dtypes or sizes there may be no kernel
            strategy = "auto"
        return dataclasses.replace(self, out_dtype=name, transpose_rhs=not self.transpose_rhs, strategy=strategy)

    def chosen(self, moved_bytes: float, flops: float) -> Strategy:
        """The strategy of what has no kernel of its own, by the model if it is "auto" or "remote".

        Args:
          moved_bytes: the bytes that a step of a ring sends.
          flops: those of a step's matmul.
        """
        if self.devices == 1:
            return "collective"
        if self.strategy not in ("auto", "remote"):
            return self.strategy
        return strategy_of(current_device(), self.devices, moved_bytes, flops)


def strategy_of(device: Device, devices: int, moved_bytes: float, flops: float) -> Strategy:
    """Predicts which strategy is fastest, from rated peaks.

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
    lhs: jax.Array, rhs: jax.Array, options: RingOptions, dtype: jax.typing.DTypeLike, *, rows: bool = False
) -> jax.Array:
    """``lhs · rhs``; with ``rows`` the sum over all rows of ``lhsᵀ · rhs``."""
    transposed = False if rows else options.transpose_rhs
    if rows:
        lhs, rhs = (x.reshape(-1, x.shape[-1]) for x in (lhs, rhs))
    return matmul(
        lhs, rhs, transpose_lhs=rows, transpose_rhs=transposed, precision=options.precision,
        preferred_element_type=dtype, platform=options.platform,
    )  # fmt: skip


def _part_matmul(part: jax.Array, rhs: jax.Array, options: RingOptions, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``part · rhs`` as a matmul of its own."""
    part, rhs = lax.optimization_barrier((part, rhs))
    product: jax.Array = lax.optimization_barrier(_matmul(part, rhs, options, dtype))
    return product


def _gather_visiting[Carry](
    x: jax.Array,
    options: RingOptions,
    strategy: Strategy,
    carry: Carry,
    visit: Callable[[Carry, jax.Array, jax.Array], Carry],
) -> Carry:
    """Visits the parts of all devices, each with its index, while the next ones travel."""
    n, (to_right, to_left) = options.devices, options.steps(strategy)
    here = lax.axis_index(options.axis_name)
    arrived, right, left = [(x, here)], x, x
    for step in range(1, to_right + 1):
        travelling = []
        right = options.moved(right, 1)
        travelling.append((right, (here - step) % n))
        if step <= to_left:
            left = options.moved(left, -1)
            travelling.append((left, (here + step) % n))
        for part, index in arrived:
            carry = visit(carry, part, index)
        arrived = travelling
    for part, index in arrived:
        carry = visit(carry, part, index)
    return carry


def _rows_of(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
    """The rows that belong to a device."""
    return lax.dynamic_slice_in_dim(x, index * rows, rows, axis=x.ndim - 2)


def _unwritten(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *operands: jax.Array) -> jax.Array:
    """An array of which every row will be written, and whose type varies as that of the operands."""
    return vary_over(varying_axes(operands), lax.empty(shape, dtype))


def _zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *operands: jax.Array) -> jax.Array:
    """Zeros whose type varies as that of the operands."""
    return vary_over(varying_axes(operands), jnp.zeros(shape, dtype))


def gathered_by_parts(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``all_gather(lhs) · rhs``."""
    rows, n = lhs.shape[-2], rhs.shape[0 if options.transpose_rhs else 1]
    strategy = options.chosen(lhs.size * lhs.dtype.itemsize, 2.0 * lhs.size * n)
    if strategy == "collective":
        return _matmul(_gathered(lhs, options), rhs, options, options.out_dtype)

    def visit(out: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        product = _part_matmul(part, rhs, options, options.out_dtype)
        return lax.dynamic_update_slice_in_dim(out, product, index * rows, axis=out.ndim - 2)

    out = _unwritten((*lhs.shape[:-2], rows * options.devices, n), options.out_dtype, lhs, rhs)
    return _gather_visiting(lhs, options, strategy, out, visit)


def scattered_by_parts(lhs: jax.Array, rhs: jax.Array, options: RingOptions) -> jax.Array:
    """``psum_scatter(lhs · rhs)``, summed in float32 (float64 for float64)."""
    wide = accumulator(lhs.dtype, rhs.dtype, jnp.dtype(options.out_dtype))
    devices, n = options.devices, rhs.shape[0 if options.transpose_rhs else 1]
    rows, steps = lhs.shape[-2] // devices, lhs.size // devices
    moved_bytes = (steps // max(lhs.shape[-1], 1)) * n * wide.itemsize
    strategy = options.chosen(moved_bytes, 2.0 * steps * n)
    if strategy == "collective":
        whole = _matmul(lhs, rhs, options, wide)
        summed = lax.psum_scatter(whole, options.axis_name, scatter_dimension=whole.ndim - 2, tiled=True)
        return summed.astype(options.out_dtype)
    here = lax.axis_index(options.axis_name)

    def partial(index: jax.Array) -> jax.Array:
        return _part_matmul(_rows_of(lhs, index % devices, rows), rhs, options, wide)

    to_right, to_left = options.steps(strategy)
    total_right = total_left = None
    for step in range(to_right):
        right = partial(here + to_right - step)
        total_right = options.moved(right if total_right is None else total_right + right, 1)
        if step < to_left:
            left = partial(here - to_left + step)
            total_left = options.moved(left if total_left is None else total_left + left, -1)
    total = partial(here)
    for each in (total_right, total_left):
        total = total if each is None else total + each
    return total.astype(options.out_dtype)


def _gathered(x: jax.Array, options: RingOptions) -> jax.Array:
    whole: jax.Array = lax.all_gather(x, options.axis_name, axis=x.ndim - 2, tiled=True)
    return whole


def _of_rhs(rows: jax.Array, columns: jax.Array, options: RingOptions, wide: jax.typing.DTypeLike) -> jax.Array:
    """The gradient of rhs in its layout, from rows of lhs and of the cotangents."""
    first, second = (columns, rows) if options.transpose_rhs else (rows, columns)
    return _matmul(first, second, options, wide, rows=True)


def gathered_rhs_gradient(lhs: jax.Array, rhs: jax.Array, d_out: jax.Array, options: RingOptions) -> jax.Array:
    """The gradient of rhs in ``all_gather(lhs) · rhs``, for which lhs is gathered again."""
    wide, rows = accumulator(lhs.dtype, rhs.dtype, d_out.dtype), lhs.shape[-2]
    strategy = options.chosen(lhs.size * lhs.dtype.itemsize, 2.0 * lhs.size * d_out.shape[-1])
    if strategy == "collective":
        return _of_rhs(_gathered(lhs, options), d_out, options, wide).astype(rhs.dtype)

    def visit(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        return total + _of_rhs(part, _rows_of(d_out, index, rows), options, wide)

    d_rhs = _gather_visiting(lhs, options, strategy, _zeros(rhs.shape, wide, lhs, d_out), visit)
    return d_rhs.astype(rhs.dtype)


def scattered_gradients(
    lhs: jax.Array, rhs: jax.Array, d_out: jax.Array, options: RingOptions
) -> tuple[jax.Array, jax.Array]:
    """The gradients of ``psum_scatter(lhs · rhs)``, for both of which the cotangents are gathered once."""
    wide, rows = accumulator(lhs.dtype, rhs.dtype, d_out.dtype), d_out.shape[-2]
    other = options.backward(lhs.dtype)
    strategy = options.chosen(d_out.size * d_out.dtype.itemsize, 4.0 * d_out.size * lhs.shape[-1])
    if strategy == "collective":
        whole = _gathered(d_out, options)
        d_lhs = _matmul(whole, rhs, other, lhs.dtype)
        return d_lhs, _of_rhs(lhs, whole, options, wide).astype(rhs.dtype)

    def visit(totals: tuple[jax.Array, jax.Array], part: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        d_lhs, d_rhs = totals
        product = _part_matmul(part, rhs, other, lhs.dtype)
        d_lhs = lax.dynamic_update_slice_in_dim(d_lhs, product, index * rows, axis=d_lhs.ndim - 2)
        return d_lhs, d_rhs + _of_rhs(_rows_of(lhs, index, rows), part, options, wide)

    totals = _unwritten(lhs.shape, lhs.dtype, d_out, rhs), _zeros(rhs.shape, wide, lhs, d_out)
    d_lhs, d_rhs = _gather_visiting(d_out, options, strategy, totals, visit)
    return d_lhs, d_rhs.astype(rhs.dtype)
