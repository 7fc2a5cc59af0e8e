"""From layouts to Mosaic's transforms: what they say agrees with the layout, and what cannot be said is refused."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.layouts import WarpAccess, bank_conflicts, is_bijective
from tilewright.kernels.hopper.layouts import (
    Swizzle,
    SwizzledLayout,
    blocked_product,
    row_major,
)
from tilewright.kernels.hopper.shared import SharedTile, emit_transforms, hardware_swizzle, shared_layout, swizzle_of

DTYPES = {jnp.float8_e4m3fn: 1, jnp.bfloat16: 2, jnp.float32: 4}


@pytest.mark.parametrize(("head_dim", "swizzle"), [(64, 128), (96, 64), (128, 128), (192, 128), (256, 128)])
def test_every_head_dim_has_its_widest_swizzle(head_dim: int, swizzle: int):
    tiling, swizzling = SharedTile((128, head_dim), jnp.bfloat16).transforms
    assert (type(tiling), tiling.tiling) == (plgpu.TilingTransform, (8, swizzle // 2))
    assert (type(swizzling), swizzling.swizzle) == (plgpu.SwizzleTransform, swizzle)


@pytest.mark.parametrize(
    ("columns", "swizzle", "panels"),
    [(80, 128, (64, 16)), (160, 128, (64, 64, 32)), (96, None, (32, 32, 32)), (128, 128, (64, 64)), (48, 64, (32, 16))],
)
def test_the_last_panel_has_the_rest(columns: int, swizzle: int | None, panels: tuple[int, ...]):
    tile = SharedTile((128, columns), jnp.bfloat16, swizzle, panelled=True)
    assert (tile.panels, tile.copies) == (panels, len(panels))
    assert tile.stack_bytes(2) == 2 * 128 * columns * 2
    assert [swizzling.swizzle for _, swizzling in map(tile.panel_transforms, panels)] == [2 * width for width in panels]


@pytest.mark.parametrize("columns", [72, 112])
def test_a_last_panel_that_is_as_wide_as_no_swizzle_is_refused(columns: int):
    with pytest.raises(ValueError, match="as wide as no swizzle"):
        SharedTile((128, columns), jnp.bfloat16, 128, panelled=True)


def stored_by_hardware(rows: int, columns: int, itemsize: int, width: int) -> np.ndarray:
    """Offset of each element: tiles of 8 × width bytes one after another, 16-byte vectors permuted by address bits."""
    row, column = np.mgrid[:rows, :columns]
    tile_columns = width // itemsize
    tile = row // 8 * (columns // tile_columns) + column // tile_columns
    byte = tile * 8 * width + row % 8 * width + column % tile_columns * itemsize
    line = byte // 128 % (width // 16)  # the number of the 128-byte line chooses the permutation
    return (byte ^ line * 16) // itemsize


@given(st.sampled_from(sorted(DTYPES, key=str)), st.sampled_from([32, 64, 128]), st.integers(1, 6), st.integers(1, 4))
def test_the_layout_is_where_the_hardware_stores(dtype, width: int, blocks: int, repeats: int):
    itemsize = DTYPES[dtype]
    rows, columns = 8 * blocks, width // itemsize * repeats
    layout = shared_layout(rows, columns, dtype, width)
    np.testing.assert_array_equal(layout.matrix(), stored_by_hardware(rows, columns, itemsize, width))
    assert is_bijective(layout)
    assert emit_transforms(layout, jnp.dtype(dtype)) == SharedTile((rows, columns), dtype, width).transforms


@pytest.mark.parametrize("width", [32, 64, 128])
def test_wgmma_reads_without_conflicts(width: int):
    layout = shared_layout(64, 128, jnp.bfloat16, width)
    for column in range(0, 128, 8):
        access = WarpAccess(tuple((row, column) for row in range(8)), vector=8, itemsize=2)
        assert bank_conflicts(layout, access) == 0


@pytest.mark.parametrize(
    ("rows", "columns", "swizzle", "reason"),
    [
        (12, 64, None, r"8 rows.*rows=12"),
        (64, 8, None, "narrowest"),
        (64, 96, 128, "128-byte swizzle"),
        (64, 64, 48, "swizzle=48"),
        (0, 64, None, "empty"),
    ],
)
def test_a_tile_that_no_swizzle_fits_is_refused(rows: int, columns: int, swizzle: int | None, reason: str):
    with pytest.raises(ValueError, match=reason):
        swizzle_of(rows, columns, jnp.bfloat16, swizzle)


def test_a_layout_that_wgmma_cannot_read_is_refused():
    swizzle = hardware_swizzle(128, 2)
    with pytest.raises(ValueError, match="no swizzle"):
        emit_transforms(row_major(64, 64), jnp.dtype(jnp.bfloat16))
    with pytest.raises(ValueError, match="none of the hardware's"):
        emit_transforms(SwizzledLayout(row_major(64, 64), Swizzle(3, 4, 3)), jnp.dtype(jnp.bfloat16))
    with pytest.raises(ValueError, match="row-major order"):  # rows of 256 bytes are no block of the swizzle
        emit_transforms(SwizzledLayout(row_major(64, 128), swizzle), jnp.dtype(jnp.bfloat16))
    column_blocks = blocked_product(row_major(64, 64), row_major(1, 2))
    with pytest.raises(ValueError, match="row-major order"):
        emit_transforms(SwizzledLayout(column_blocks, swizzle), jnp.dtype(jnp.bfloat16))
    with pytest.raises(ValueError, match="rows and columns"):
        emit_transforms(SwizzledLayout(row_major(64, 64, 2), swizzle), jnp.dtype(jnp.bfloat16))
