"""Triton kernels for tests of the bridge."""

import triton
import triton.language as tl


@triton.jit
def widen(x, scale: tl.constexpr):
    return x.to(tl.float32) * scale


@triton.jit
def scaled(source, length, result, block: tl.constexpr, scale: tl.constexpr = 2.0):
    """``result = source * scale`` for as many as ``length`` elements."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(result + index, widen(tl.load(source + index, mask=index < length), scale), mask=index < length)


@triton.jit
def append(values, cache, position, before, width: tl.constexpr):
    """Writes ``values`` into the row ``position`` of ``cache``, in place, and what was there into ``before``."""
    index = tl.arange(0, width)
    tl.store(before + index, tl.load(cache + position * width + index))
    tl.store(cache + position * width + index, tl.load(values + index))


@triton.jit
def row_softmax(source, result, width: tl.constexpr):
    index = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.load(source + index).to(tl.float32)
    weights = tl.exp(row - tl.max(row, 0))
    tl.store(result + index, (weights / tl.sum(weights, 0)).to(result.dtype.element_ty))


@triton.jit
def product(left, right, result, size: tl.constexpr):
    """``result = left @ right``, accumulated in float32."""
    rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    accumulator = tl.dot(tl.load(left + rows * size + columns), tl.load(right + rows * size + columns))
    tl.store(result + rows * size + columns, accumulator.to(result.dtype.element_ty))


@triton.jit
def copied(source, rows, result, block: tl.constexpr, width: tl.constexpr):
    """``result = source``, both [rows, width], by TMA."""
    start = tl.program_id(0) * block
    tile = tl.make_tensor_descriptor(source, [rows, width], [width, 1], [block, width]).load([start, 0])
    index = start + tl.arange(0, block)[:, None]
    tl.store(result + index * width + tl.arange(0, width)[None, :], tile, mask=index < rows)
