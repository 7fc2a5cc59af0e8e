"""Statistics and gradients of logits on TPUs: tiles of tokens and classes, whose whole d is in VMEM.

A step of the grid has ``block_rows`` tokens and ``block_classes`` classes. The tokens stay in VMEM while all classes
go past them, so that the matrix is read once for each tile of tokens. Within a step a loop takes ``ROWS`` tokens at a
time, which bounds the code that the compiler unrolls.

Sums over classes are kept for each lane, and their lanes are summed at the end: no step reduces along a row.
Columns behind the last class, and rows behind the last token, are whatever is in VMEM: they are selected away.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Head
from tilewright.kernels.linear_cross_entropy.tpu.params import ROWS, TpuTile
from tilewright.kernels.pallas_types import Ref
from tilewright.kernels.tpu.device import LANES, VMEM_RESERVE
from tilewright.kernels.tpu.launch import run_kernel


@dataclasses.dataclass(frozen=True)
class LogitTiles:
    """Logits of a tile of tokens and classes.

    Attributes:
      vocab_axis: of the matrix.
      soft_cap: of the logits.
    """

    vocab_axis: int
    soft_cap: float | None

    def logits(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """``[rows, classes]`` in float32."""
        axes = (((1,), (1 - self.vocab_axis,)), ((), ()))
        logits: jax.Array = lax.dot_general(x, weight, axes, preferred_element_type=jnp.float32)
        if bias is not None:
            logits = logits + bias
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


def _over_rows(block_rows: int, step: Callable[[pl.Slice], None]) -> None:
    """``step`` of a slice of the rows of a block, one after another."""
    rows = min(ROWS, block_rows)

    def body(index: jax.Array, _: None) -> None:
        step(pl.ds(pl.multiple_of(index * rows, rows), rows))

    if rows == block_rows:
        step(pl.ds(0, rows))
    else:
        lax.fori_loop(0, block_rows // rows, body, None)


def _weight_spec(head: Head, classes: int, place: Callable[..., jax.Array]) -> pl.BlockSpec:
    """Blocks of classes of the matrix, at the classes that ``place`` says."""
    if head.vocab_axis == 0:
        return pl.BlockSpec((pl.Element(classes), pl.Element(head.weight.shape[1])), lambda *grid: (place(*grid), 0))
    return pl.BlockSpec((pl.Element(head.weight.shape[0]), pl.Element(classes)), lambda *grid: (0, place(*grid)))


def softmax_sums(
    head: Head, x: jax.Array, labels: jax.Array, *, sums_logits: bool, tile: TpuTile
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """lse, the label's logit (0 if it is no class) and with ``sums_logits`` the logits' sum, float32 ``[tokens]``."""
    tokens, d = x.shape
    classes = tile.block_classes
    rows, steps = tile.rows(tokens), pl.cdiv(head.width, classes)
    shape = (classes, d) if head.vocab_axis == 0 else (d, classes)
    operands = [x, head.weight, labels[:, None]]
    specs = [
        pl.BlockSpec((rows, d), lambda row, _: (row, 0)),
        pl.BlockSpec(shape, (lambda _, step: (step, 0)) if head.vocab_axis == 0 else (lambda _, step: (0, step))),
        pl.BlockSpec((rows, 1), lambda row, _: (row, 0)),
    ]
    if head.bias is not None:
        operands.append(head.bias.astype(jnp.float32)[None])
        specs.append(pl.BlockSpec((1, classes), lambda _, step: (0, step)))
    sums: jax.Array = run_kernel(
        functools.partial(
            _sum_softmax, LogitTiles(head.vocab_axis, head.soft_cap), head.vocab, head.bias is not None, sums_logits
        ),
        *operands,
        role="softmax_sums",
        grid=(pl.cdiv(tokens, rows), steps),
        orders=("parallel", "arbitrary"),
        in_specs=specs,
        out_specs=pl.BlockSpec((rows, 3), lambda row, _: (row, 0)),
        out_shape=jax.ShapeDtypeStruct((tokens, 3), jnp.float32),
        scratch_shapes=[pltpu.VMEM((rows, LANES), jnp.float32)] * 4,
        flops=2 * tokens * d * head.width,
        transcendentals=tokens * head.width,
        bytes_accessed=x.nbytes + pl.cdiv(tokens, rows) * head.weight.nbytes,
        vmem_limit=tile.vmem_bytes(tokens, d, x.dtype.itemsize) + VMEM_RESERVE,
    )
    return sums[:, 0], sums[:, 1], sums[:, 2]


def _sum_softmax(
    tiles: LogitTiles, vocab: int, has_bias: bool, sums_logits: bool, x: Ref, weight: Ref, labels: Ref, *refs: Ref
) -> None:
    bias = refs[0] if has_bias else None
    out, highest, total, label_logit, logit_sum = refs[has_bias:]
    step = pl.program_id(1)
    classes = weight.shape[tiles.vocab_axis]
    begin = step * classes

    @pl.when(step == 0)
    def _start() -> None:
        highest[...] = jnp.full_like(highest, -jnp.inf)
        for each in (total, label_logit, logit_sum):
            each[...] = jnp.zeros_like(each)

    def rows_step(rows: pl.Slice) -> None:
        logits = tiles.logits(x[rows, :], weight[...], None if bias is None else bias[...])
        column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        own = column == labels[rows, :] - begin
        masked = logits
        if vocab % classes:
            inside = column < vocab - begin
            # The label of no class may be that of a column behind the last one.
            own, masked = own & inside, jnp.where(inside, logits, -jnp.inf)
        label_logit[rows, :] += _lane_sums(jnp.where(own, logits, 0))
        if sums_logits:
            logit_sum[rows, :] += _lane_sums(jnp.where(inside, logits, 0) if vocab % classes else logits)
        before = highest[rows, :]
        new = before
        for lanes in _lanes(classes):
            new = jnp.maximum(new, masked[:, lanes])
        highest[rows, :] = new
        # A bias may rule out classes with -inf, and -inf - -inf would be NaN.
        finite = jnp.where(new == -jnp.inf, 0, new)
        found = total[rows, :] * jnp.exp(before - finite)
        for lanes in _lanes(classes):
            found = found + jnp.exp(masked[:, lanes] - finite)
        total[rows, :] = found

    _over_rows(x.shape[0], rows_step)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish() -> None:
        of_lanes = highest[...]
        of_row = of_lanes.max(1, keepdims=True)
        finite = jnp.where(of_row == -jnp.inf, 0, of_row)
        whole = (total[...] * jnp.exp(of_lanes - finite)).sum(1, keepdims=True)
        out[:, 0:1] = of_row + jnp.log(whole)
        out[:, 1:2] = label_logit[...].sum(1, keepdims=True)
        out[:, 2:3] = logit_sum[...].sum(1, keepdims=True)


def _lanes(columns: int) -> list[slice]:
    """The columns, as many at a time as a register has lanes."""
    return [slice(first, first + LANES) for first in range(0, columns, LANES)]


def _lane_sums(values: jax.Array) -> jax.Array:
    """The sums of the columns of each lane, ``[rows, LANES]``."""
    return functools.reduce(jnp.add, [values[:, lanes] for lanes in _lanes(values.shape[1])])


def logit_gradients(
    head: Head,
    x: jax.Array,
    labels: jax.Array,
    numbers: jax.Array,
    bounds: jax.Array,
    *,
    size: int,
    sums_logits: bool,
    epsilon: float | None,
    tile: TpuTile,
    dtype: DTypeLike,
) -> jax.Array:
    """The gradients of ``x · weight + bias`` for ``size`` classes, ``[tokens, size]`` in ``dtype``.

    Args:
      numbers: ``[tokens, 4]``: lse, inf for a token that is ignored; the cotangents of lse, of the label's logit, and
        with ``sums_logits`` of the logits' sum.
      bounds: the first class, a multiple of ``LANES`` unless ``size`` is the whole width; and the class before which
        gradients are 0.
    """
    tokens, d = x.shape
    classes = tile.dividing(size)
    rows = tile.rows(tokens)
    operands = [bounds, x, head.weight, labels[:, None], numbers]

    def place(_: jax.Array, step: jax.Array, bounds: Ref) -> jax.Array:
        return pl.multiple_of(bounds[0] + step * classes, LANES)

    specs = [
        pl.BlockSpec((rows, d), lambda row, *_: (row, 0)),
        _weight_spec(head, classes, place),
        pl.BlockSpec((rows, 1), lambda row, *_: (row, 0)),
        pl.BlockSpec((rows, 4), lambda row, *_: (row, 0)),
    ]
    if head.bias is not None:
        operands.append(head.bias.astype(jnp.float32)[None])
        specs.append(pl.BlockSpec((pl.Element(1), pl.Element(classes)), lambda *grid: (0, place(*grid))))
    found: jax.Array = run_kernel(
        functools.partial(
            _make_gradients, LogitTiles(head.vocab_axis, head.soft_cap), head.vocab, head.bias is not None, sums_logits,
            epsilon,
        ),
        *operands,
        role="logit_gradients",
        scalars=1,
        grid=(pl.cdiv(tokens, rows), size // classes),
        orders=("parallel", "arbitrary"),
        in_specs=specs,
        out_specs=pl.BlockSpec((rows, classes), lambda row, step, _: (row, step)),
        out_shape=jax.ShapeDtypeStruct((tokens, size), dtype),
        flops=2 * tokens * d * size,
        transcendentals=tokens * size,
        bytes_accessed=x.nbytes + pl.cdiv(tokens, rows) * d * size * head.weight.dtype.itemsize,
        vmem_limit=tile.vmem_bytes(tokens, d, x.dtype.itemsize) + VMEM_RESERVE,
    )  # fmt: skip
    return found


def _make_gradients(
    tiles: LogitTiles, vocab: int, has_bias: bool, sums_logits: bool, epsilon: float | None, bounds: Ref, x: Ref,
    weight: Ref, labels: Ref, numbers: Ref, *refs: Ref,
) -> None:  # fmt: skip
    bias, out = refs[0] if has_bias else None, refs[-1]
    classes = weight.shape[tiles.vocab_axis]
    begin = bounds[0] + pl.program_id(1) * classes

    def rows_step(rows: pl.Slice) -> None:
        logits = tiles.logits(x[rows, :], weight[...], None if bias is None else bias[...])
        # Tokens to ignore have lse = inf, and so no probabilities.
        probabilities = jnp.exp(logits - numbers[rows, 0:1])
        if epsilon is not None:
            probabilities = jnp.where(probabilities < epsilon, 0, probabilities)
        column = begin + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        # In float32 until it is stored: where a probability is near 1 it and the label's -1 cancel.
        gradient = numbers[rows, 1:2] * probabilities
        gradient = gradient + jnp.where(column == labels[rows, :], numbers[rows, 2:3], 0)
        if sums_logits:
            gradient = gradient + numbers[rows, 3:4]
        if tiles.soft_cap is not None:
            gradient = gradient * (1 - (logits / tiles.soft_cap) ** 2)
        # Blocks may overlap so that all have one size: classes that an earlier block has get zeros. So does padding.
        gradient = jnp.where((column >= bounds[1]) & (column < vocab), gradient, 0)
        out[rows, :] = gradient.astype(out.dtype)

    _over_rows(x.shape[0], rows_step)
