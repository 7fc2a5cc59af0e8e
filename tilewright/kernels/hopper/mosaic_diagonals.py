"""Tiles with one value on each diagonal, in Mosaic GPU's own terms, below Pallas: only `diagonals` calls it.

A thread of a warpgroup holds, of an accumulator ``[64, columns]``, the elements of rows 16 · warp + g + 8h and columns
8k + 2t + e, where g = lane / 4, t = lane % 4, and h, e are 0 or 1. So the difference of column and row is a part of the
thread's own, 2t − g − 16 · warp, and the constant 8 (k − h) + e: all elements of one k − h have the same value.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

WARP_ROWS = 16
"""Rows of the accumulator that a warp of the warpgroup holds."""


class Thread(NamedTuple):
    """The indices of a thread of a warpgroup, int32.

    Attributes:
      warp: in the warpgroup.
      group, member: g and t.
    """

    warp: Any
    group: Any
    member: Any


def _opaque_zero(array: Any) -> Any:
    """A 0 that the compiler cannot know, int32: the high bits of the offset of a part of an array."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    i64, i32 = (ir.IntegerType.get_signless(bits) for bits in (64, 32))
    offset = arith.index_cast(i64, memref.extract_strided_metadata(array)[1])
    return arith.trunci(i32, arith.shrui(offset, utils.c(62, i64)))


def _thread(array: Any) -> Thread:
    """The indices of this thread, computed anew in each step of a loop over parts of an array.

    Else the compiler keeps them, and what follows from them, in registers of the whole loop, and spills others.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32 = ir.IntegerType.get_signless(32)
    index = arith.addi(utils.thread_idx(), _opaque_zero(array))

    def bits(shift: int, mask: int) -> Any:
        return arith.andi(arith.shrui(index, utils.c(shift, i32)), utils.c(mask, i32))

    return Thread(bits(5, 3), bits(2, 7), bits(0, 3))


def _linear(constant: int, *terms: tuple[int, Any]) -> Any:
    """``constant + sum of factor · value``, int32."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32 = ir.IntegerType.get_signless(32)
    total = utils.c(constant, i32)
    for factor, value in terms:
        total = arith.addi(total, arith.muli(value, utils.c(factor, i32)))
    return total


def _pointer(memref: Any, index: Any) -> Any:
    """The pointer to an element behind the first of a memref of float32 in global memory."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    # Of the global address space, so that loads need not find out where a generic address is.
    pointer = llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(memref))
    return utils.getelementptr(pointer, [index], ir.F32Type.get())


def toeplitz_tile(values: Any, columns: int, ascending: bool) -> Any:
    """A tile ``[64, columns]`` of float32 in the accumulator's layout, loaded from the memref of its diagonals.

    Args:
      values: ``[64 + columns - 1]`` in global memory. Element (r, c) is number c − r + 63, or r − c + columns − 1 if
        not ``ascending``.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    f32, thread = ir.F32Type.get(), _thread(values)
    sign = 1 if ascending else -1
    origin = 63 if ascending else columns - 1
    own = _linear(origin, (-sign * WARP_ROWS, thread.warp), (-sign, thread.group), (2 * sign, thread.member))
    pointer = _pointer(values, own)
    # A thread loads the value of each of its diagonals once, and uses it for all elements there.
    loaded: dict[int, Any] = {}

    def load(offset: int) -> Any:
        if offset not in loaded:
            loaded[offset] = llvm.load(f32, utils.getelementptr(pointer, [offset], f32))
        return loaded[offset]

    layout, pair = mgpu.WGMMA_LAYOUT, ir.VectorType.get((2,), f32)
    shape = layout.registers_shape((64, columns))
    assert shape == (1, columns // 8, 1, 1, 2, 1, 1, 1, 1), shape
    # The accumulator's registers are pairs of neighbouring columns.
    registers = np.empty(shape, dtype=object)
    i32 = ir.IntegerType.get_signless(32)
    for index in np.ndindex(shape):
        k, h = index[1], index[4]
        vector = llvm.mlir_undef(pair)
        for e in range(2):
            vector = llvm.insertelement(vector, load(sign * (8 * (k - h) + e)), utils.c(e, i32))
        registers[index] = vector
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def add_diagonal_sums(tile: Any, target: Any, warp_stride: int) -> None:
    """Adds the sums along the diagonals of a float32 tile ``[64, 64]`` to global memory, by reductions of each warp.

    Args:
      tile: in the accumulator's layout; element (r, c) belongs to number r − c + 63.
      target: a memref of 127 float32 at least, of warp 0.
      warp_stride: elements from the target of a warp to that of the next.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, nvvm

    f32, i32, thread = ir.F32Type.get(), ir.IntegerType.get_signless(32), _thread(target)
    zero = utils.c(0.0, f32)

    def constant(value: int) -> Any:
        return utils.c(value, i32)

    def own_sum(m: int, e: int) -> Any:
        """The sum of the thread's own elements with h − k = m, two at most, and one e."""
        parts = [
            llvm.extractelement(tile.registers[index], constant(e))
            for index in np.ndindex(tile.registers.shape)
            if index[4] - index[1] == m
        ]
        return zero if not parts else functools.reduce(arith.addf, parts)

    def move(steps: int, lanes: int) -> Callable[[Any, Any], Any]:
        """A move of sums from the lane ``steps`` groups and ``lanes`` members further to the lane of their diagonals.

        Behind the last group follows the first, whose diagonals are 8 lower: it sends its sum of those 8 above.
        """
        source = arith.andi(_linear(4 * steps + lanes, (4, thread.group), (1, thread.member)), constant(31))
        wraps = arith.cmpi(arith.CmpIPredicate.ult, thread.group, constant(steps))

        def moved(here: Any, above: Any) -> Any:
            sent = arith.bitcast(i32, arith.select(wraps, above, here))
            taken = nvvm.shfl_sync(utils.c(0xFFFFFFFF, i32), sent, source, constant(31), nvvm.ShflKind.idx)
            return arith.bitcast(f32, taken)

        return moved

    # A warp's 16 rows begin 16 diagonals further on, and with ``warp_stride`` in another row of the target.
    own = _linear(63, (WARP_ROWS + warp_stride, thread.warp), (1, thread.group))
    pointer, is_first = _pointer(target, own), arith.cmpi(arith.CmpIPredicate.eq, thread.member, constant(0))
    # Of a quad of lanes, which share g, the first has the sums in the end, and adds them.
    predicate = arith.extui(i32, is_first)

    def add(m: int, part: Any) -> None:
        inside = predicate
        if m == -8:
            # Diagonal 63 + 8m + g of warp 0 begins at -1 for g = 0, where nothing is.
            not_before = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ne, thread.group, constant(0)))
            inside = arith.andi(predicate, not_before)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [utils.getelementptr(pointer, [8 * m], f32), part, inside],
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.add.f32 [$0], $1; }",
            "l,f,r",
            has_side_effects=True,
        )

    # An element is on diagonal 63 + 16 · warp + 8 (h − k) + g − 2t − e: e, then both bits of t, are made 0 by a move to
    # the lane whose g is less by that much. From m = 1 downwards, each move two of m behind the one before, whose
    # latency that hides: all sums at once would take 30 registers.
    moves = [move(1, 0), move(2, 1), move(4, 2)]
    stages: list[dict[int, Any]] = [{2: zero}, {2: zero}, {2: zero}, {}]
    # A software pipeline of three moves: in a step move k works on the m that move k − 1 had two steps before.
    for step in range(10 + 2 * (len(moves) - 1)):
        for number, moved in enumerate(moves):
            m, sums = 1 - step + 2 * number, stages[number]
            if not -8 <= m <= 1:
                continue
            if number == 0:
                sums[m] = own_sum(m, 1)
            kept = own_sum(m, 0) if number == 0 else sums[m]
            stages[number + 1][m] = arith.addf(kept, moved(sums[m], sums[m + 1]))
            if number == len(moves) - 1:
                add(m, stages[-1][m])
