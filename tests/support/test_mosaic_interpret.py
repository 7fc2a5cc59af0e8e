"""The interpreter of the tests against numpy, and against kernels with a planted fault."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import mosaic_interpret
from tests.support.mosaic_interpret import KernelError, interpret_mosaic

TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
ROWS = plgpu.Layout.WGMMA.reduce(1)
PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def in_float32(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(array, np.float32) for array in arrays]


def run(
    body: Callable[..., None], out: Any, scratch: Any, *inputs: jax.Array, races: bool = True, **kernel: Any
) -> Any:
    """`body(*inputs, out, *scratch)` as one kernel, inside jit and between two operations of XLA."""
    call = plgpu.kernel(body, out_type=out, scratch_types=scratch, compiler_params=PARAMS, **kernel)

    @jax.jit
    def function(*arrays: jax.Array) -> Any:
        doubled = [array + array for array in arrays]
        return jax.tree.map(lambda array: array + array, call(*(array * 0.5 for array in doubled)))

    with interpret_mosaic(detect_races=races):
        return jax.tree.map(lambda array: np.asarray(array) / 2, function(*inputs))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, fault: str = "", num_stages: int = 2, block: int = 64
) -> jax.Array:
    """Full attention [length, 64] with two consumer warpgroups, a producer, and two products in flight.

    `fault` leaves out one synchronisation.
    """
    (length, head_dim), num_tiles = query.shape, key.shape[0] // block
    scale = head_dim**-0.5 * math.log2(math.e)

    def body(q_ref, k_ref, v_ref, o_ref, q_smem, k_smem, v_smem, q_full, full, k_empty, v_empty):
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup < 2)
        def _() -> None:
            rows, q_tile = pl.ds((lax.axis_index("q") * 2 + warpgroup) * block, block), q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[rows], q_tile, q_full.at[warpgroup])
            plgpu.barrier_wait(q_full.at[warpgroup])

            def scores(tile: Any) -> Callable[[Any], Any]:
                slot = lax.rem(tile, num_stages)

                def product(s_acc: Any) -> Any:
                    if fault != "full":
                        plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(s_acc, q_tile, k_smem.at[slot].T)
                    return s_acc[...]

                return product

            def accumulate(acc: Any) -> Any:
                def step(tile: Any, carry: Any) -> Any:
                    maximum, total = carry
                    slot = lax.rem(tile, num_stages)
                    s = pl.run_scoped(scores(tile), plgpu.ACC((block, block), jnp.float32))
                    plgpu.barrier_arrive(k_empty.at[slot])
                    new = jnp.maximum(maximum, s.max(axis=1) * scale)
                    p = jnp.exp2(s * scale - lax.broadcast_in_dim(new, s.shape, [0]))
                    rescale = jnp.exp2(maximum - new)
                    acc[...] = acc[...] * lax.broadcast_in_dim(rescale, (block, head_dim), [0])
                    plgpu.wgmma(acc, p.astype(query.dtype), v_smem.at[slot])
                    if fault != "wgmma_wait":
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return new, total * rescale + p.sum(axis=1)

                start = [plgpu.layout_cast(jnp.full((block,), x, jnp.float32), ROWS) for x in (-jnp.inf, 0.0)]
                _, total = lax.fori_loop(0, num_tiles, step, tuple(start))
                return acc[...] / lax.broadcast_in_dim(total, (block, head_dim), [0])

            out = pl.run_scoped(accumulate, plgpu.ACC((block, head_dim), jnp.float32))
            q_tile[...] = out.astype(query.dtype)
            if fault != "commit_smem":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, o_ref.at[rows])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
        def _() -> None:
            @pl.loop(0, num_tiles)
            def _(tile: Any) -> None:
                slot, rows = lax.rem(tile, num_stages), pl.ds(tile * block, block)
                if fault != "empty":

                    @pl.when(tile >= num_stages)
                    def _() -> None:
                        plgpu.barrier_wait(k_empty.at[slot])
                        plgpu.barrier_wait(v_empty.at[slot])

                plgpu.copy_gmem_to_smem(k_ref.at[rows], k_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[rows], v_smem.at[slot], full.at[slot])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_types=[
            plgpu.SMEM((2, block, head_dim), query.dtype, transforms=TILED),
            plgpu.SMEM((num_stages, block, head_dim), query.dtype, transforms=TILED),
            plgpu.SMEM((num_stages, block, head_dim), query.dtype, transforms=TILED),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        ],
        grid=(length // (2 * block),),
        grid_names=("q",),
        num_threads=3,
        thread_name="wg",
        compiler_params=PARAMS,
    )
    return kernel(query, key, value)


@pytest.mark.parametrize("detect_races", [False, True])
def test_attention_forward(detect_races: bool) -> None:
    query, key, value = (normal(seed, 256, 64) for seed in range(3))
    with interpret_mosaic(detect_races=detect_races):
        out = jax.jit(attention)(query, key, value)
    widened = (array.astype(jnp.float32)[None, :, None] for array in (query, key, value))
    expected = jax.nn.dot_product_attention(*widened)[0, :, 0]
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)


@pytest.mark.parametrize("fault", ["full", "empty", "commit_smem", "wgmma_wait"])
def test_races_are_found(fault: str) -> None:
    query, key, value = (normal(seed, 256, 64) for seed in range(3))
    with pytest.raises(KernelError, match="RACE DETECTED"), interpret_mosaic(detect_races=True):
        jax.jit(functools.partial(attention, fault=fault))(query, key, value)
    # What failed must leave nothing behind.
    with interpret_mosaic(detect_races=True):
        jax.block_until_ready(jax.jit(attention)(query, key, value))


def test_a_deadlock_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_interpret, "_DEADLOCK_SECONDS", 0.5)

    def body(x_ref: Any, o_ref: Any, barrier: Any) -> None:
        plgpu.barrier_wait(barrier)
        o_ref[...] = x_ref[...]

    with pytest.raises(KernelError, match="deadlocked"):
        run(body, f32(128), [plgpu.Barrier()], normal(0, 128, dtype=jnp.float32))


def test_run_state_accumulator_and_registers_operand() -> None:
    a, b, initial = normal(0, 64, 64), normal(1, 64, 128), normal(2, 64, 128, dtype=jnp.float32)

    def body(a_ref: Any, b_ref: Any, i_ref: Any, o_ref: Any, b_smem: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(b_ref, b_smem, barrier)
        plgpu.barrier_wait(barrier)
        operand = plgpu.load(a_ref, layout=plgpu.Layout.WGMMA, optimized=False)

        def products(acc: Any) -> None:
            plgpu.wgmma(acc, operand, b_smem)
            plgpu.wgmma(acc, operand, b_smem)

        start = plgpu.load(i_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        o_ref[...] = pl.run_state(products)(plgpu.ACC.init(start))

    scratch = [plgpu.SMEM((64, 128), jnp.bfloat16, transforms=TILED), plgpu.Barrier()]
    out = run(body, f32(64, 128), scratch, a, b, initial)
    left, right, start = in_float32(a, b, initial)
    np.testing.assert_allclose(out, start + 2 * left @ right, rtol=1e-5, atol=1e-4)


def test_an_accumulator_read_in_flight_is_an_error() -> None:
    def body(a_ref: Any, o_ref: Any, smem: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(a_ref, smem, barrier)
        plgpu.barrier_wait(barrier)

        def product(acc: Any) -> Any:
            plgpu.wgmma(acc, smem, smem)
            return plgpu.wgmma_accumulator_load(acc, wait_n=1)

        o_ref[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))

    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILED), plgpu.Barrier()]
    with pytest.raises(KernelError, match="read while a wgmma"):
        run(body, f32(64, 64), scratch, normal(0, 64, 64), races=False)


@pytest.mark.parametrize("operation", ["add", "min", "max"])
def test_tma_reduction_is_clipped(operation: Any) -> None:
    x = normal(0, 3, 64, 64, dtype=jnp.float32)
    initial = jnp.zeros((100, 64), jnp.float32)

    def body(x_ref: Any, initial_ref: Any, o_ref: Any, smem: Any, barrier: Any) -> None:
        block = lax.axis_index("block")

        @pl.when(block == 0)
        def _() -> None:
            o_ref[...] = initial_ref[...]

        plgpu.copy_gmem_to_smem(x_ref.at[block], smem, barrier)
        plgpu.barrier_wait(barrier)
        rows = o_ref.at[pl.ds(lax.rem(block, 2) * 64, 64)]
        plgpu.copy_smem_to_gmem(smem, rows, reduction_op=operation)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    out = run(body, f32(100, 64), scratch, x, initial, grid=(3,), grid_names=("block",))
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    expected = np.zeros((128, 64), np.float32)
    for block in range(3):
        rows = slice(block % 2 * 64, block % 2 * 64 + 64)
        expected[rows] = function(expected[rows], np.asarray(x[block]))
    np.testing.assert_allclose(out, expected[:100], rtol=1e-6)


def test_reductions_of_two_warpgroups_commute_but_race_with_a_store() -> None:
    def body(store: bool, x_ref: Any, o_ref: Any, smem: Any, barrier: Any) -> None:
        warpgroup = lax.axis_index("wg")
        plgpu.copy_gmem_to_smem(x_ref, smem.at[warpgroup], barrier.at[warpgroup])
        plgpu.barrier_wait(barrier.at[warpgroup])

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(smem.at[0], o_ref, reduction_op=None if store else "max")
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.copy_smem_to_gmem(smem.at[1], o_ref, reduction_op="max")
            plgpu.wait_smem_to_gmem(0)

    x = normal(0, 64, 64, dtype=jnp.float32)
    scratch = [plgpu.SMEM((2, 64, 64), jnp.float32), plgpu.Barrier(num_barriers=2)]
    threads: dict[str, Any] = {"num_threads": 2, "thread_name": "wg"}
    run(functools.partial(body, False), f32(64, 64), scratch, x, **threads)
    with pytest.raises(KernelError, match="RACE DETECTED"):
        run(functools.partial(body, True), f32(64, 64), scratch, x, **threads)


def test_tma_pads_loads_and_clips_stores() -> None:
    x = normal(0, 100, 64, dtype=jnp.float32)

    def body(x_ref: Any, o_ref: Any, smem: Any, barrier: Any) -> None:
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], smem, barrier)
        plgpu.barrier_wait(barrier)
        total = smem[...].sum(axis=0)  # out of bounds there are zeros
        smem[...] = smem[...] + lax.broadcast_in_dim(total, (64, 64), [1])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    out = run(body, f32(100, 64), scratch, x, grid=(2,), grid_names=("block",))
    full = np.asarray(x)
    np.testing.assert_allclose(out[:64], full[:64] + full[:64].sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[64:], full[64:] + full[64:].sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [6, 100, 104])
@pytest.mark.parametrize("store", [False, True])
def test_tiled_tma_wants_whole_tiles(length: int, store: bool) -> None:
    source_length, target_length = (64, length) if store else (length, 128)
    x = normal(0, 2, source_length, 3, 64)

    def body(x_ref: Any, o_ref: Any, smem: Any, barrier: Any) -> None:
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        plgpu.copy_gmem_to_smem(x_ref.at[0, pl.ds(0, 64) if store else rows, 1], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref.at[rows, 0])
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct((target_length, 1, 64), x.dtype)
    scratch = [plgpu.SMEM((64, 64), x.dtype, transforms=TILED), plgpu.Barrier()]
    call = functools.partial(run, body, out, scratch, x, grid=(2,), grid_names=("block",))
    if length == 100:
        with pytest.raises(ValueError, match="multiple of its tile"):
            call()
        return
    (source,) = in_float32(x[0, :, 1])
    expected = np.concatenate([source, source])[:length] if store else np.pad(source, ((0, 128 - length), (0, 0)))
    np.testing.assert_array_equal(in_float32(call())[0][:, 0], expected)


def test_global_loads_scalars_and_one_dimensional_store() -> None:
    rows, scalars = (
        jnp.round(normal(0, 2, 64, dtype=jnp.float32) * 16) / 16,
        jnp.asarray([[3.0, 5.0], [7.0, 11.0]], jnp.float32),
    )

    def body(r_ref: Any, s_ref: Any, o_ref: Any, smem: Any) -> None:
        block = lax.axis_index("block")
        loaded = plgpu.load(r_ref.at[block], layout=ROWS, optimized=False)
        smem[...] = loaded * s_ref[block, 1] + s_ref[0, block]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    out = run(body, f32(2, 64), [plgpu.SMEM((64,), jnp.float32)], rows, scalars, grid=(2,), grid_names=("block",))
    expected = np.asarray(rows) * np.asarray([[5.0], [11.0]]) + np.asarray([[3.0], [5.0]])
    np.testing.assert_array_equal(out, expected)  # every value is exact in float32


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_control_flow_around_accumulators(trips: int) -> None:
    a, bounds = normal(0, 64, 64), jnp.asarray([float(trips)])

    def body(a_ref: Any, bounds_ref: Any, o_ref: Any, smem: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(a_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        count = bounds_ref[0].astype(jnp.int32)

        def products(acc: Any) -> Any:
            def step(i: Any, carry: None) -> None:
                @pl.when(lax.rem(i, 2) == 0)
                def _() -> None:
                    plgpu.wgmma(acc, smem, smem)
                    plgpu.wgmma_wait(0)

            lax.fori_loop(0, count, step, None)
            value = acc[...]
            acc[...] = lax.cond(count > 1, lambda: value * 2.0, lambda: value)
            plgpu.wgmma(acc, smem, smem)
            return acc[...]

        total = lax.while_loop(lambda x: x < count * 10, lambda x: x + 7, jnp.int32(0))
        out = pl.run_scoped(products, plgpu.ACC((64, 64), jnp.float32))
        o_ref[...] = out + total.astype(jnp.float32)

    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILED), plgpu.Barrier()]
    out = run(body, f32(64, 64), scratch, a, bounds)
    (left,) = in_float32(a)
    factor = (trips + 1) // 2 * (2 if trips > 1 else 1) + 1
    np.testing.assert_allclose(out, factor * left @ left + -(-10 * trips // 7) * 7, rtol=1e-4, atol=1e-3)


def test_unsigned_integers() -> None:
    x = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)

    def mixed(bits: Any) -> Any:
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
        return bits ^ (bits << 5) ^ (bits >> 15)

    def body(x_ref: Any, o_ref: Any) -> None:
        del x_ref
        rows, columns = (
            plgpu.broadcasted_iota(jnp.int32, (64, 64), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
        )
        bits = mixed((rows * 64 + columns).astype(jnp.uint32))
        o_ref[...] = jnp.where((bits >> 8) < jnp.uint32(1 << 23), 1.0, 0.0)

    out = run(body, f32(64, 64), [], x)
    bits = mixed(jnp.arange(64 * 64, dtype=jnp.uint32)).reshape(64, 64)
    np.testing.assert_array_equal(out, np.asarray(bits >> 8) < 1 << 23)


@pytest.mark.parametrize("fault", [False, True])
def test_named_barrier(fault: bool) -> None:
    def bar(operation: str, barrier_id: int, num_threads: int) -> None:
        # The name and the closure are what the interpreter recognises.
        def bar_op(context: Any) -> None:
            raise NotImplementedError(context, operation, barrier_id, num_threads)

        plgpu.inline_mgpu()(bar_op)()

    def body(x_ref: Any, o_ref: Any, smem: Any) -> None:
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == 0)
        def _() -> None:
            smem[...] = x_ref[...]
            bar("arrive", 3, 256)

        @pl.when(warpgroup == 1)
        def _() -> None:
            if not fault:
                bar("sync", 3, 256)
            o_ref[...] = smem[...]

    x = normal(0, 64, 64, dtype=jnp.float32)
    call = functools.partial(
        run, body, f32(64, 64), [plgpu.SMEM((64, 64), jnp.float32)], x, num_threads=2, thread_name="wg"
    )
    if fault:
        with pytest.raises(KernelError, match="RACE DETECTED"):
            call()
    else:
        np.testing.assert_array_equal(call(), np.asarray(x))
