"""Zeros in rows of a tile in shared memory, in Mosaic GPU's own terms, below Pallas.

Only `matmul/mask.py` and `flash_attention/hopper/outside.py` call it.
"""

from typing import Any, cast

from tilewright.kernels.hopper.limits import WARPGROUP_THREADS

LINE_BYTES = 128
"""Bytes of a row of a panel of the widest swizzle, which permutes the bytes of a row and moves none to another row."""

VECTOR_BYTES = 16


def zero_lines(panel: Any, first: Any) -> None:
    """Zeroes the rows from ``first`` on of a panel with rows of 128 bytes, without a load, 16 bytes a store.

    Loads, a selection and stores of 4 bytes in the accumulator's layout are twenty times as many instructions.

    Args:
      panel: a tiled memref, ``[rows / 8, 1, 8, width]``.
      first: a ``FragmentedArray`` of one int32.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))

    row_atoms, _, atom_rows, width = ir.MemRefType(panel.type).shape
    assert width * utils.bytewidth(ir.MemRefType(panel.type).element_type) == LINE_BYTES, panel.type
    vectors_per_line = LINE_BYTES // VECTOR_BYTES
    lines_per_store = WARPGROUP_THREADS // vectors_per_line
    assert row_atoms * atom_rows % lines_per_store == 0, panel.type

    # 128 threads of 16 bytes each cover 16 lines at a time. A line is zeroed as a whole, so its swizzle does not
    # matter.
    thread = arith.andi(utils.thread_idx(), utils.c(WARPGROUP_THREADS - 1, i32))
    line = arith.divui(thread, utils.c(vectors_per_line, i32))
    pointer = utils.getelementptr(utils.memref_ptr(panel), [arith.muli(thread, utils.c(VECTOR_BYTES, i32))], i8)
    vector = ir.VectorType.get((VECTOR_BYTES // 4,), i32)
    # mypy takes the generated function of this name, whose arguments are others, for the one that replaces it.
    zeros = cast(Any, arith).constant(vector, ir.DenseElementsAttr.get_splat(vector, ir.IntegerAttr.get(i32, 0)))
    for number in range(row_atoms * atom_rows // lines_per_store):
        own = arith.addi(line, utils.c(number * lines_per_store, i32))
        with utils.when(arith.cmpi(arith.CmpIPredicate.sge, own, first.registers.item())):
            target = utils.getelementptr(pointer, [number * WARPGROUP_THREADS * VECTOR_BYTES], i8)
            llvm.store(zeros, target, alignment=VECTOR_BYTES)


def zero_lines_outside(tile: Any, low: Any, high: Any) -> None:
    """Zeroes the rows of a tile that are not from ``low`` to ``high``, without a load, 16 bytes a store.

    Args:
      tile: a tiled memref, ``[rows / 8, columns / width, 8, width]``, of any swizzle: none moves bytes from one line,
        ``width`` elements, to another.
      low, high: each a ``FragmentedArray`` of one int32.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))

    row_atoms, column_atoms, atom_rows, width = ir.MemRefType(tile.type).shape
    vectors_per_line = width * utils.bytewidth(ir.MemRefType(tile.type).element_type) // VECTOR_BYTES
    vectors = row_atoms * column_atoms * atom_rows * vectors_per_line
    assert vectors % WARPGROUP_THREADS == 0, tile.type

    thread = arith.andi(utils.thread_idx(), utils.c(WARPGROUP_THREADS - 1, i32))
    pointer = utils.getelementptr(utils.memref_ptr(tile), [arith.muli(thread, utils.c(VECTOR_BYTES, i32))], i8)
    vector = ir.VectorType.get((VECTOR_BYTES // 4,), i32)
    zeros = cast(Any, arith).constant(vector, ir.DenseElementsAttr.get_splat(vector, ir.IntegerAttr.get(i32, 0)))
    for first in range(0, vectors, WARPGROUP_THREADS):
        line = arith.divui(arith.addi(thread, utils.c(first, i32)), utils.c(vectors_per_line, i32))
        row = line
        if column_atoms > 1:  # lines of one column of atoms come before those of the next one
            block = arith.divui(line, utils.c(column_atoms * atom_rows, i32))
            within = arith.remui(line, utils.c(atom_rows, i32))
            row = arith.addi(arith.muli(block, utils.c(atom_rows, i32)), within)
        # Signed: a tile may lie before or behind all of what is kept.
        before = arith.cmpi(arith.CmpIPredicate.slt, row, low.registers.item())
        behind = arith.cmpi(arith.CmpIPredicate.sge, row, high.registers.item())
        with utils.when(arith.ori(before, behind)):
            target = utils.getelementptr(pointer, [first * VECTOR_BYTES], i8)
            llvm.store(zeros, target, alignment=VECTOR_BYTES)
