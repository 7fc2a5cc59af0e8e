"""The Hopper matmul with a gather in it: its schedule, and its kernel on one device that sends to itself."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.matmul import gathered, scattered, sending
from tilewright.kernels.hopper.matmul.gathered import gathered_matmul, gathered_params, sending_pace
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.scattered import scattered_matmul
from tilewright.kernels.hopper.matmul.schedule import GatheredSchedule, ScatteredSchedule, TileShape
from tilewright.kernels.hopper.matmul.sending import PIECE_BYTES, DeviceRing, Pieces

PARAMS = MatmulParams(128, 128, 3, band=2)


@pytest.mark.parametrize(("batches", "rows"), [(1, 512), (1, 200), (3, 256), (2, 72)])
@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize(
    "tile", [TileShape(128, 256, 1, 1, 2), TileShape(128, 128, 2, 1, 1), TileShape(256, 128, 1, 2, 8)]
)
def test_every_element_is_computed_once(batches: int, rows: int, devices: int, tile: TileShape):
    """By the rows of the device and the range that it belongs to, the own ones first."""
    columns, own = 300, devices // 2
    schedule = GatheredSchedule(np.asarray([own]), devices, batches, rows, columns, 7, tile)
    shape = (batches * devices * rows, columns)
    # Of each element of the result the row of the part that it comes from, and that part; beside it is nothing stored.
    count, sources = np.zeros(shape, int), np.full((*shape, 2), -1)
    parts = []
    for item in range(schedule.items()):
        for cta in range(tile.cluster_m * tile.cluster_n):
            work = schedule.work(item, cta)
            row, column, lhs_row, part = (int(x) for x in (work.row, work.column, work.lhs_row, work.part))
            end = min(row + tile.rows, shape[0] if work.row_end is None else int(work.row_end))
            assert work.steps == 7
            parts.append(part)
            if end <= row:
                continue
            count[row:end, column : column + tile.columns] += 1
            sources[row:end, column : column + tile.columns, 0] = lhs_row + np.arange(end - row)[:, None]
            sources[row:end, column : column + tile.columns, 1] = part
    assert (count == 1).all()
    assert parts == sorted(parts)
    batch, device, row = np.unravel_index(np.arange(shape[0]), (batches, devices, rows))
    assert (sources[..., 0] == (batch * rows + row)[:, None]).all()
    assert (sources[..., 1] == ((device - own) % devices)[:, None]).all()


@pytest.mark.parametrize(("batches", "rows"), [(1, 512), (1, 200), (3, 256), (2, 72)])
@pytest.mark.parametrize("devices", [2, 5])
@pytest.mark.parametrize(
    "tile", [TileShape(128, 256, 1, 1, 2), TileShape(128, 128, 2, 1, 1), TileShape(256, 128, 1, 2, 8)]
)
def test_every_product_is_computed_once(batches: int, rows: int, devices: int, tile: TileShape):
    """The rows of this device are the last ones, and the tiles of each device are in the same order."""
    columns, own = 300, devices // 2
    schedule = ScatteredSchedule(np.asarray([own]), devices, batches, rows, columns, 7, tile)
    count = np.zeros((batches, devices, rows, columns), int)
    places: dict[int, list[Any]] = {}
    for item in range(schedule.items()):
        for cta in range(tile.cluster_m * tile.cluster_n):
            work = schedule.work(item, cta)
            row, column, lhs_row, part, batch = (
                int(x) for x in (work.row, work.column, work.lhs_row, work.part, work.matrix)
            )
            device = (own + part + 1) % devices
            assert lhs_row == (batch * devices + device) * rows + row
            assert part == item // schedule.items_of_part
            count[batch, device, row : row + tile.rows, column : column + tile.columns] += 1
            places.setdefault(part, []).append((batch, row, column))
    assert (count == 1).all()
    assert all(each == places[0] for each in places.values())


class Itself(DeviceRing):
    """A device that takes itself for all others."""

    def index(self) -> jax.Array:
        return jnp.int32(0)

    def before(self, places: int) -> Any:
        return places


class Semaphores:
    """Semaphores that are set once, as barriers of the CTA that sends to itself: the interpreter orders by these."""

    count = 16

    def __init__(self) -> None:
        self.barriers: Any = None
        self.calls: Counter[str] = Counter()

    @property
    def at(self) -> Any:
        return self.barriers.at

    def run_kernel(self, body: Any, operands: Any, results: Any, scratch: Any, **options: Any) -> Any:
        """Runs a kernel with barriers beside its own scratch."""

        def with_barriers(operands: Any, results: Any, scratch: Any) -> None:
            self.barriers = scratch[1]
            body(operands, results, scratch[0])

        barriers = plgpu.Barrier(num_arrivals=1, num_barriers=self.count)
        return run_kernel(with_barriers, operands, results, (scratch, barriers), **options)

    def signal(self, semaphore: Any, device_id: Any) -> None:
        self.calls["signals"] += 1
        plgpu.barrier_arrive(semaphore)

    def wait(self, semaphore: Any, value: int, decrement: bool) -> None:
        assert (value, decrement) == (1, False)
        self.calls["waits"] += 1
        plgpu.barrier_wait(semaphore)


@contextlib.contextmanager
def sent_to_itself() -> Iterator[Counter[str]]:
    """Remote references are those of the device, and the only sender is the CTA that receives."""
    semaphores = Semaphores()
    with (
        mock.patch.object(pl, "get_global", return_value=semaphores),
        mock.patch.object(pl, "semaphore_signal", semaphores.signal),
        mock.patch.object(pl, "semaphore_wait", semaphores.wait),
        mock.patch.object(plgpu, "remote_ref", lambda ref, device: ref),
        mock.patch.object(gathered, "run_kernel", semaphores.run_kernel),
        mock.patch.object(scattered, "run_kernel", semaphores.run_kernel),
        mock.patch.object(gathered, "fence_copies"),
        mock.patch.object(scattered, "fence_copies"),
        mock.patch.object(sending, "fence_copies"),
        mock.patch.object(gathered, "SENDERS", 1),
    ):
        yield semaphores.calls


@pytest.mark.parametrize(
    ("gathers", "devices", "batches", "rows", "k", "n", "transposed", "pace"),
    [
        (True, 2, 1, 256, 192, 384, False, 1),
        (True, 3, 1, 136, 72, 136, True, 2),
        (True, 2, 2, 72, 264, 128, False, 8),
        (False, 2, 1, 256, 1024, 384, False, 1),
        (False, 3, 1, 136, 72, 136, True, 2),
        (False, 2, 2, 72, 520, 128, False, 8),
    ],
)
def test_rows_that_are_sent_are_multiplied_and_products_added(
    gathers: bool, devices: int, batches: int, rows: int, k: int, n: int, transposed: bool, pace: int
):
    random = np.random.default_rng(rows)
    lhs = jnp.asarray(random.standard_normal((batches, rows if gathers else devices * rows, k)), jnp.bfloat16)
    rhs = jnp.asarray(random.standard_normal((n, k) if transposed else (k, n)), jnp.bfloat16)
    op: Any = gathered_matmul if gathers else scattered_matmul
    with interpret_mosaic(detect_races=True), sent_to_itself() as calls, mock.patch.object(gathered, "MAX_PACE", pace):
        out = op(
            lhs, rhs, Itself("x", devices, ("x",)), transpose_rhs=transposed, params=PARAMS, num_sms=1,
            out_dtype=jnp.float32 if gathers else jnp.bfloat16,
        )  # fmt: skip
    left, right = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
    products = left @ (right.T if transposed else right)
    if gathers:
        np.testing.assert_allclose(out, np.broadcast_to(products[:, None], out.shape), rtol=1e-4, atol=1e-3)
    else:  # what it has computed for all others comes back to it
        want = products.reshape(batches, devices, rows, n).sum(1)
        np.testing.assert_allclose(np.asarray(out).astype(np.float64), want, rtol=5e-3, atol=1e-2)
    assert calls["waits"]
    assert calls["signals"]


def test_pieces_that_do_not_divide_the_rows():
    """The last ones overlap the ones before, which the interpreter calls a race."""
    random = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((1, 67, 136), (136, 128)))
    assert 67 % Pieces.of((67, 136), jnp.bfloat16).height
    with interpret_mosaic(), sent_to_itself():
        out = gathered_matmul(lhs, rhs, Itself("x", 2, ("x",)), out_dtype=jnp.float32, params=PARAMS, num_sms=1)
    want = np.broadcast_to((np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64))[:, None], out.shape)
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "shape"),
    [
        (4096, 4096, "bfloat16", (1, 4096)),
        (4096, 5120, "bfloat16", (1, 2560)),
        (1024, 512, "bfloat16", (8, 512)),
        (256, 192, "float16", (16, 192)),
        (67, 136, "bfloat16", (23, 136)),
        (3, 8, "bfloat16", (3, 8)),
        (9, 8248, "bfloat16", (1, 2752)),
        (128, 256, "float32", (8, 256)),
    ],
)
def test_pieces_are_contiguous_and_cover_the_matrix(rows: int, columns: int, dtype: str, shape: tuple[int, int]):
    pieces = Pieces.of((rows, columns), dtype)
    assert (pieces.height, pieces.width) == shape
    assert pieces.height == 1 or pieces.width == columns
    assert pieces.height * pieces.width * jnp.dtype(dtype).itemsize <= PIECE_BYTES
    covered = np.zeros((rows, columns), bool)
    for index in range(pieces.count):
        (row, column) = (int(part.start) for part in pieces.place(jnp.int32(index)))
        assert column * jnp.dtype(dtype).itemsize % 16 == 0
        assert row + pieces.height <= rows
        assert column + pieces.width <= columns
        covered[row : row + pieces.height, column : column + pieces.width] = True
    assert covered.all()


def test_the_best_config_leaves_memory_to_the_sender():
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 4096), (4096, 7168)))
    params = gathered_params(lhs, rhs, 2, jnp.bfloat16, False, 132)
    assert (params.block_m * params.block_n, params.num_stages) == (128 * 256, 3)


@pytest.mark.parametrize(("steps", "pace"), [(0, 1), (40, 1), (217, 4), (10**6, gathered.MAX_PACE)])
def test_pieces_are_sent_in_most_of_the_steps(steps: int, pace: int):
    found = sending_pace(32, steps)
    assert found == pace
    assert found == 1 or found * 33 <= steps
