"""wgmma on tiles of panels, in Mosaic GPU's own terms, below Pallas: `panels.mma` alone calls it."""

import importlib
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
    ir = importlib.import_module("jaxlib.mlir.ir")
    memref = importlib.import_module("jaxlib.mlir.dialects.memref")

    kind = ir.MemRefType(panel.type)
    (row_atoms, _, atom_rows, width), (strides, offset) = kind.shape, kind.get_strides_and_offset()
    shape = [row_atoms, panels.number, atom_rows, width]
    strides = [strides[0], panels.stride, *strides[2:]]
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
    return importlib.import_module("jax.experimental.mosaic.gpu").memref_transpose(operand, (1, 0, 3, 2))


def issue_wgmma(accumulator: Any, a: Any, b: Any, swizzle: int) -> Any:
    """The accumulator, in flight, of ``+= a @ b``, issued and committed as ``plgpu.wgmma`` does it.

    Args:
      accumulator: a ``FragmentedArray``.
      a: the same, or a tiled memref.
      b: a tiled memref.
      swizzle: in bytes.
    """
    mgpu = importlib.import_module("jax.experimental.mosaic.gpu")
    ir = importlib.import_module("jaxlib.mlir.ir")
    llvm = importlib.import_module("jaxlib.mlir.dialects.llvm")

    result = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(accumulator, sync=False), a, b, swizzle=swizzle)
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
    return result.value
