"""Zeros in rows of a tile in shared memory, in Mosaic GPU's own terms, below Pallas: only `mask.py` calls it."""

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
