"""wgmma on tiles of panels, in Mosaic GPU's own terms, below Pallas: only `panels.mma` calls it."""

from typing import Any, NamedTuple


class Panels(NamedTuple):
    """The panels of a tile.

    Attributes:
      stride: elements from a panel to the next.
      transposed: whether the operand is ``[columns, rows]`` of the tile.
    """

    number: int
    stride: int
    transposed: bool


def panelled_operand(panel: Any, panels: Panels) -> Any:
    """An operand of wgmma over all panels, from the memref of the first one, ``[rows / 8, 1, 8, width]``."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import memref

    kind = ir.MemRefType(panel.type)
    (row_atoms, _, atom_rows, width), (strides, offset) = kind.shape, kind.get_strides_and_offset()
    shape = [row_atoms, panels.number, atom_rows, width]
    strides = [strides[0], panels.stride, *strides[2:]]
    # A ring's slot is chosen at run time, so the offset may be dynamic. It must be passed on: the base pointer of a
    # memref is that of the whole stack.
    dynamic = offset == ir.ShapedType.get_dynamic_stride_or_offset()
    operand = memref.reinterpret_cast(
        ir.MemRefType.get(shape, kind.element_type, ir.StridedLayoutAttr.get(offset, strides), kind.memory_space),
        panel,
        [memref.extract_strided_metadata(panel)[1]] if dynamic else [],
        [],
        [],
        static_offsets=[offset],
        static_sizes=shape,
        static_strides=strides,
    )
    return transposed_operand(operand) if panels.transposed else operand


def transposed_operand(operand: Any) -> Any:
    """The transpose of a tiled memref: of its atoms, and within them."""
    from jax.experimental.mosaic import gpu as mgpu

    return mgpu.memref_transpose(operand, (1, 0, 3, 2))


def issue_wgmma(accumulator: Any, a: Any, b: Any, swizzle: int) -> Any:
    """The accumulator, in flight, of ``+= a @ b``, issued as ``plgpu.wgmma`` does it.

    Args:
      accumulator: a ``FragmentedArray``.
      a: the same, or a tiled memref.
      b: a tiled memref.
      swizzle: in bytes.
    """
    from jax.experimental.mosaic import gpu as mgpu

    return mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(accumulator, sync=False), a, b, swizzle=swizzle).value


def issue_wgmma_of_columns(accumulator: Any, a: Any, b: Any, swizzle: int) -> Any:
    """`issue_wgmma` of the first columns of ``b``, as many as the accumulator has, and of ``a`` in registers.

    Mosaic's own function takes all columns of ``b``, and as many of ``a`` as are whole swizzle widths. The descriptor
    of ``b`` is the same: it has the distances of atoms, not their number.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as arrays
    from jax.experimental.mosaic.gpu import mma_utils as operands
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma_fence, wgmma_m64
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    (_, columns), dtype = operands.tiled_memref_shape(b)
    width, i64 = swizzle // 2, ir.IntegerType.get_signless(64)
    (first, (_, (step, *_))), (_, stride), fastest = operands.create_descriptor(
        b, swizzle=swizzle, large_tile=(width, width), group_size=(width, columns), logical_k_major=True
    )
    result = WGMMAAccumulator.from_registers(accumulator, sync=False)
    # Threads have just written the registers of `a`, and PTX wants a fence between that and the wgmma which reads them.
    # The optimisation barrier in it keeps LLVM from moving their arithmetic behind it.
    a, registers = wgmma_fence(a), result._value.registers.copy()
    for begin in range(0, a.shape[1], width):
        count = min(width, a.shape[1] - begin)
        distance = utils.c(operands.encode_addr(begin // width * stride), i64)
        registers = wgmma_m64(
            registers,
            a[:, begin : begin + count],
            llvm.add(first, distance, overflow_flags=llvm.IntegerOverflowFlags.none),
            a_transpose=None,
            b_transpose=fastest != operands.Dim.K,
            a_k_stride=None,
            b_k_stride=step,
            n=accumulator.shape[1],
            swizzle=2 * count,  # of this it takes the number of instructions
            a_element_type=dtype,
            b_element_type=dtype,
        )
    issued = arrays.FragmentedArray(
        _registers=registers, _layout=result._value.layout, _is_signed=result._value.is_signed
    )
    return WGMMAAccumulator(_value=issued, _original_layout=result._original_layout, _sync=False).value


def commit_wgmma() -> None:
    """Makes a group of the wgmmas issued since the last one, as ``plgpu.wgmma`` does it."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
