"""Rows of an array copied into a tile by an index, in Mosaic GPU's own terms, below Pallas: only `rows.py` calls it.

TMA copies rows that lie one behind another. Here the 128 threads of a warpgroup copy 16 bytes each (cp.async): thread t
bytes ``16 (t % 8)`` and following of the rows t / 8, t / 8 + 16, ... of a tile with rows of 128 bytes. So a warp reads
four whole lines of 128 bytes at a time, and the rows of a thread have the same place in their swizzle atoms.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.kernels.hopper.limits import SWIZZLE_ROWS, WARPGROUP_THREADS

LINE_BYTES = 128
"""Bytes of a row of the tile: the widest swizzle."""

VECTOR_BYTES = 16
"""The most bytes of a cp.async."""

LINE_VECTORS = LINE_BYTES // VECTOR_BYTES

ROWS_AT_A_TIME = WARPGROUP_THREADS // LINE_VECTORS


def _place() -> tuple[Any, Any]:
    """This thread's first row of the tile and its vector of 16 bytes in all of its rows, int32."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32 = ir.IntegerType.get_signless(32)
    thread = arith.andi(utils.thread_idx(), utils.c(WARPGROUP_THREADS - 1, i32))
    vectors = utils.c(LINE_VECTORS, i32)
    return arith.divui(thread, vectors), arith.remui(thread, vectors)


def load_sources(rows: int, index: Any, first: Any, end: Any) -> Any:
    """The element of an index for each row of a thread, -1 from row ``end`` on: one register for each of its rows.

    Args:
      rows: of the tile.
      index: a memref of int32 in global memory.
      first, end: ``FragmentedArray``s of one int32; ``first`` is the element of the tile's first row.
    """
    from jax.experimental import mosaic
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    i32, (line, _) = ir.IntegerType.get_signless(32), _place()
    pointer, end = _global_pointer(index), end.registers.item()
    # Rows behind the end load the last one's element, for there is no other that must exist.
    last = arith.maxsi(arith.subi(end, utils.c(1, i32)), utils.c(0, i32))
    start = arith.addi(first.registers.item(), line)
    registers = np.empty((rows // ROWS_AT_A_TIME,), dtype=object)
    single = ir.VectorType.get((1,), i32)
    for number in range(registers.size):
        row = arith.addi(start, utils.c(number * ROWS_AT_A_TIME, i32))
        found = llvm.load(i32, utils.getelementptr(pointer, [arith.minsi(row, last)], i32))
        is_inside = arith.cmpi(arith.CmpIPredicate.slt, row, end)
        registers[number] = vector.from_elements(single, [arith.select(is_inside, found, utils.c(-1, i32))])
    layout = mosaic.gpu.WGStridedFragLayout(shape=(registers.size * WARPGROUP_THREADS,), vec_size=1)
    return mosaic.gpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def copy_sources(array: Any, sources: Any, start: Any, panels: Sequence[Any], starts: Sequence[int]) -> None:
    """Starts the copies of this thread's part of a tile; zeros for negative sources, and behind the last column.

    Args:
      array: a memref ``[n, columns]`` in global memory, with rows at multiples of 16 bytes.
      sources: of `load_sources`.
      start: of columns, a ``FragmentedArray`` of one int32.
      panels: tiled memrefs with rows of 128 bytes, ``[rows / 8, 1, 8, width]``, in shared memory, aligned to an atom.
      starts: of each panel its first column in the tile.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
    kind = ir.MemRefType(array.type)
    itemsize, (_, columns) = utils.bytewidth(kind.element_type), kind.shape
    (stride, _), _ = kind.get_strides_and_offset()
    for panel in panels:
        row_atoms, _, atom_rows, width = ir.MemRefType(panel.type).shape
        assert width * itemsize == LINE_BYTES, panel.type
        assert row_atoms * atom_rows == sources.registers.size * ROWS_AT_A_TIME, panel.type
    assert stride * itemsize % VECTOR_BYTES == 0, array.type

    def constant(value: int) -> Any:
        return utils.c(value, i32)

    line, vector_index = _place()
    own = arith.addi(start.registers.item(), arith.muli(vector_index, constant(VECTOR_BYTES // itemsize)))
    # TMA's and wgmma's swizzle: vector v of row r is in place v ^ (r % 8).
    place = arith.xori(vector_index, arith.andi(line, constant(SWIZZLE_ROWS - 1)))
    offset = arith.addi(arith.muli(line, constant(LINE_BYTES)), arith.muli(place, constant(VECTOR_BYTES)))
    places = []
    for panel, first in zip(panels, starts, strict=True):
        column = arith.addi(own, constant(first)) if first else own
        is_column = arith.cmpi(arith.CmpIPredicate.slt, column, constant(columns))
        # Where nothing is read the address is inside of the array all the same.
        column = arith.select(is_column, column, constant(0))
        source = utils.getelementptr(_global_pointer(array), [column], kind.element_type)
        places.append((is_column, source, arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(panel)), offset)))
    for number, register in enumerate(sources.registers.flat):
        row = vector.extract(register, [], [0])
        is_row = arith.cmpi(arith.CmpIPredicate.sge, row, constant(0))
        # 64 bits: an array may have more than 2 GiB.
        begin = arith.muli(arith.extui(i64, arith.maxsi(row, constant(0))), utils.c(stride * itemsize, i64))
        # Panel by panel of one row, whose lines lie one behind another in global memory.
        for is_column, source, target in places:
            size = arith.select(arith.andi(is_row, is_column), constant(VECTOR_BYTES), constant(0))
            # cg: of 16 bytes, by the L2 cache alone. The bytes behind ``size`` become zeros.
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [target, utils.getelementptr(source, [begin], i8), size],
                f"cp.async.cg.shared.global [$0 + {number * ROWS_AT_A_TIME * LINE_BYTES}], [$1], {VECTOR_BYTES}, $2;",
                "r,l,r",
                has_side_effects=True,
            )


def _global_pointer(array: Any) -> Any:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import llvm

    return llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(array))


@functools.cache
def arrive_primitive() -> Any:
    """The primitive of an arrival of every thread on a barrier of an array, once its own copies are complete.

    Pallas knows arrivals of threads, which would have to wait for their copies, and of TMA; and no code below Pallas
    gets a barrier but by a primitive.
    """
    from jax._src.pallas.mosaic_gpu import core, lowering  # neither has a public name
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend import core as jax_core
    from jaxlib.mlir.dialects import nvvm

    primitive = jax_core.Primitive("arrive_when_copied")
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def abstract_eval(*args: Any) -> Any:
        del args
        return (), {core._memory_effect}

    @lowering.register_lowering_rule(primitive, mgpu.LoweringSemantics.Lane)
    @lowering.register_lowering_rule(primitive, mgpu.LoweringSemantics.Warpgroup)
    def lower(ctx: Any, barriers: Any, number: Any) -> Any:
        barrier = barriers[lowering._ensure_ir_value(number, ctx.avals_in[1].dtype)]
        # noinc: this arrival is one of those that the barrier counts, 128 of a warpgroup.
        nvvm.cp_async_mbarrier_arrive(barrier.get_ptr(), noinc=True)
        return ()

    return primitive
