"""The movements of rows, in XLA and by Triton's interpreter, against sums over choices in NumPy."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check
from tests.kernels.permutation.oracle import combined, gathered, inner_products, routing_of
from tilewright.kernels.numerics.activations import ACTIVATIONS, gated
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movements import MOVEMENTS
from tilewright.kernels.permutation.triton import movement
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report
from tilewright.kernels.triton.interpreter import interpret_triton

pytestmark = pytest.mark.usefixtures("unoptimised")

MACHINES = {Platform.XLA: contextlib.nullcontext, Platform.TRITON: interpret_triton}

platforms = pytest.mark.parametrize("platform", MACHINES)


def run(platform: Platform, name: str, *arrays: Any, **options: Any) -> Any:
    """A method of a movement, compiled for these arrays, or ``None``; the options and other values are static."""
    is_static = [isinstance(x, str | int) for x in arrays]
    dynamic = [None if static else x for x, static in zip(arrays, is_static, strict=True)]

    def call(dynamic: Any) -> Any:
        given = [x if static else d for x, d, static in zip(arrays, dynamic, is_static, strict=True)]
        return getattr(MOVEMENTS[platform], name)(*given, **options)

    with MACHINES[platform]():
        return jax.block_until_ready(jax.jit(call)(dynamic))


@dataclasses.dataclass(frozen=True)
class Call:
    """The arrays of a layer of experts whose choices have ids from −1 to the number of experts."""

    name: str
    tokens: int = 40
    k: int = 3
    d: int = 24
    experts: int = 5
    capacity: int | None = None
    dtype: str = "float32"

    @functools.cached_property
    def ids(self) -> Any:
        drawn = np.random.default_rng(1).integers(-1, self.experts + 1, (self.tokens, self.k))
        return jnp.asarray(drawn, jnp.int32)

    @functools.cached_property
    def routing(self) -> Any:
        return jax.tree.map(jnp.asarray, routing_of(self.ids, self.experts, self.capacity))

    def array(self, seed: int, *shape: int, dtype: str | None = None) -> Any:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype or self.dtype)

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        return {
            "x": self.array(2, self.tokens, self.d),
            "rows": self.array(3, self.tokens * self.k, self.d),
            "weights": self.array(4, self.tokens, self.k, dtype="float32"),
            "bias": self.array(5, self.experts, self.d),
        }


CALLS = [
    Call("plain"),
    Call("capacity", capacity=4, dtype="bfloat16"),
    Call("nothing_fits", tokens=6, capacity=0),
    Call("k_1", tokens=33, k=1, dtype="float16"),
    Call("d_1", tokens=9, d=1),
    Call("odd_d", tokens=9, d=301, dtype="bfloat16"),
    Call("blocks_of_columns", tokens=5, k=2, d=2048, dtype="bfloat16"),
    Call("one_expert", tokens=9, experts=1),
    Call("one_token", tokens=1, k=16, experts=70),
    Call("no_token", tokens=0),
]

calls = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)


def same(got: Any, want: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


@platforms
@calls
def test_route(platform: Platform, call: Call):
    same(run(platform, "route", call.ids, call.experts, call.capacity), call.routing)


@platforms
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "capacity"), [(700, 1, 4, None), (150, 4, 100, 5), (300, 2, 3, 20), (90, 9, 33, 2**40)]
)
def test_route_of_several_blocks(
    platform: Platform, tokens: int, k: int, experts: int, capacity: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(movement, "SUMMED", (2, 8))  # several tiles of their counts, too
    ids = Call("", tokens, k, experts=experts).ids
    # Empty experts, one that has most choices, and ids at the ends of int32.
    ids = jnp.where(ids % 3 == 1, 2, ids).at[:2, 0].set(jnp.array([-(2**31), 2**31 - 1]))
    same(run(platform, "route", ids, experts, capacity), routing_of(ids, experts, capacity))


def test_keys_that_would_overflow_are_sorted_as_pairs():
    """Ids times choices beyond 2³¹."""
    experts = 2**22
    ids = jnp.asarray(np.random.default_rng(0).integers(0, experts, (300, 2)), jnp.int32).at[3:5].set(experts - 1)
    found = run(Platform.XLA, "route", ids, experts)
    np.testing.assert_array_equal(found.source, np.argsort(np.asarray(ids).ravel(), kind="stable"))
    np.testing.assert_array_equal(found.group_sizes, np.bincount(np.asarray(ids).ravel(), minlength=experts))


@platforms
@calls
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gather(platform: Platform, call: Call, weighted: bool):
    x, weights = call.arrays["x"], call.arrays["weights"] if weighted else None
    got = run(platform, "gather", x, call.routing, weights)
    assert (got.shape, got.dtype) == (call.arrays["rows"].shape, x.dtype)
    want = gathered(x, call.routing, weights)
    # One product, rounded to float32 and then to the rows' dtype.
    np.testing.assert_array_equal(got, jnp.asarray(np.asarray(want, np.float32), x.dtype))


@platforms
@calls
@pytest.mark.parametrize("extras", ["", "weights", "bias", "weights bias"])
def test_combine_and_dots(platform: Platform, call: Call, extras: str):
    x, rows, weights, bias = (call.arrays[name] for name in ("x", "rows", "weights", "bias"))
    weights, bias = weights if "weights" in extras else None, bias if "bias" in extras else None
    ids = None if bias is None else call.ids
    got = run(platform, "combine", rows, call.routing, weights, bias, ids)
    assert (got.shape, got.dtype) == ((call.tokens, call.d), rows.dtype)
    check({"out": got}, {"out": combined(rows, call.routing, weights, bias, ids)})
    wide = run(platform, "combine", rows, call.routing, weights, bias, ids, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(got.dtype), got)
    dots = run(platform, "dots", x, rows, call.routing, bias, ids)
    assert (dots.shape, dots.dtype) == ((call.tokens, call.k), jnp.float32)
    np.testing.assert_allclose(dots, inner_products(x, rows, call.routing, bias, ids), rtol=1e-5, atol=1e-4)


@platforms
def test_nothing_of_dropped_choices_is_read(platform: Platform):
    """NaN in rows that nobody holds, and in the weights of choices and tokens that have no row."""
    call = Call("", capacity=4)
    dropped, held = np.asarray(call.routing.positions) < 0, np.asarray(call.routing.source) >= 0
    assert 0 < held.sum() < held.size
    rows = jnp.where(held[:, None], call.arrays["rows"], jnp.nan)
    weights = jnp.where(dropped, jnp.nan, call.arrays["weights"])
    x = jnp.where(dropped.all(1)[:, None], jnp.nan, call.arrays["x"])
    assert np.isnan(x).any()
    for name, poisoned, clean in (
        ("combine", (rows, call.routing, weights), (call.arrays["rows"], call.routing, call.arrays["weights"])),
        ("dots", (x, rows, call.routing), (call.arrays["x"], call.arrays["rows"], call.routing)),
        ("gather", (x, call.routing, weights), (call.arrays["x"], call.routing, call.arrays["weights"])),
    ):
        got = run(platform, name, *poisoned)
        assert np.isfinite(got).all()
        same(got, run(platform, name, *clean))


@platforms
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_gradients(platform: Platform, activation: str, dtype: str):
    rows, n = 7, 1100 if activation == "silu" else 33
    call = Call("", dtype=dtype)
    gate, up, d_hidden = (call.array(seed, rows, n) for seed in range(3))
    gate = gate.at[0, :8].set(jnp.array([0.0, -0.0, 60.0, -60.0, 3e-3, -3e-3, 9.0, -9.0], dtype))
    weights = call.array(6, rows, dtype="float32")
    source = jnp.arange(rows, dtype=jnp.int32)
    got = run(platform, "gate_gradients", activation, gate, up, d_hidden, weights, source)
    names = ("d_gate", "d_up", "weighted_hidden", "dots")
    assert [x.dtype for x in got] == [*[gate.dtype] * 3, jnp.float32]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (gate, up, d_hidden, weights)]
        hidden, pull_back = jax.vjp(functools.partial(gated, activation), wide[0], wide[1])
        want = (*pull_back(wide[3][:, None] * wide[2]), wide[3][:, None] * hidden, (wide[2] * hidden).sum(1))
        exact = {name: np.asarray(x) for name, x in zip(names, want, strict=True)}
    low = {name: np.asarray(x, np.float64) for name, x in exact.items()}
    if dtype == "bfloat16":
        low |= {name: np.asarray(jnp.asarray(exact[name], dtype), np.float64) for name in names[:3]}
    check(dict(zip(names, got, strict=True)), exact, low)


def test_gate_gradients_of_tiles_with_rows_that_hold_no_choice(monkeypatch: pytest.MonkeyPatch):
    """Tiles of many rows, as on a device with few cores: some of them, all of them."""
    from tilewright.kernels.permutation.triton import movement

    monkeypatch.setattr(movement, "PROGRAMS_PER_CORE", 0)
    rows, held, n, call = 200, 70, 40, Call("")
    gate, up, d_hidden = (call.array(seed, rows, n) for seed in range(3))
    weights, row = call.array(6, rows, dtype="float32"), jnp.arange(rows, dtype=jnp.int32)
    arguments = "silu", gate, up, d_hidden, weights, jnp.where(row < held, row, -1)
    with interpret_triton(), recorded_launches() as launches:
        jax.eval_shape(lambda: MOVEMENTS[Platform.TRITON].gate_gradients(*arguments))
    (launched,) = launches
    assert launched.grid[0] < rows / 8
    got, want = (run(each, "gate_gradients", *arguments) for each in (Platform.TRITON, Platform.XLA))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours[:held], theirs[:held], rtol=1e-5, atol=1e-6)


@platforms
def test_vmap_over_everything(platform: Platform):
    """And over one array alone, twice, as one call each."""
    call, moving, count = Call("", tokens=5, k=2, d=8, experts=3), MOVEMENTS[platform], 3
    ids = jnp.stack([jnp.roll(call.ids, shift, 0) for shift in range(count)])
    rows, weights, bias = (
        jnp.stack([call.arrays[name] * (1 + i) for i in range(count)]) for name in ("rows", "weights", "bias")
    )
    x = jnp.stack([call.arrays["x"] - i for i in range(count)])

    def every(ids: Any, x: Any, rows: Any, weights: Any, bias: Any) -> Any:
        routing = moving.route(ids, 3, 2)
        return (
            routing,
            moving.gather(x, routing, weights),
            moving.combine(rows, routing, weights, bias, ids),
            moving.dots(x, rows, routing, bias, ids),
            moving.gate_gradients("silu", rows, rows + 1, rows * 2, weights.reshape(-1), ids.reshape(-1) * 0),
        )

    arrays = (ids, x, rows, weights, bias)
    for mapped in (None, *range(5)):
        axes = tuple(0 if mapped is None or i == mapped else None for i in range(5))
        given = [array if axis == 0 else array[1] for array, axis in zip(arrays, axes, strict=True)]
        call_all = jax.vmap(every, axes)
        with MACHINES[platform](), recorded_launches() as launches:
            got = jax.block_until_ready(jax.jit(call_all)(*given))
        if platform is Platform.TRITON and mapped is None:
            assert len(launches) == 2 * 7, "as they were traced without the map, and with it"
        for i in range(count):
            with MACHINES[platform]():
                one = [x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
                want = jax.block_until_ready(jax.jit(every)(*one))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),  # FMAs differ
                jax.tree.map(lambda x: x[i], got),  # noqa: B023
                want,
            )
    twice = jax.vmap(jax.vmap(moving.combine, in_axes=(0, None, None)), in_axes=(0, 0, None))
    routing = jax.tree.map(lambda *each: jnp.stack(each), *[routing_of(each, 3, 2) for each in ids])
    pairs = jnp.stack([rows, -rows], 1)
    with MACHINES[platform]():
        got = jax.block_until_ready(jax.jit(twice)(pairs, routing, weights[0]))
    for i, j in np.ndindex(count, 2):
        want = combined(pairs[i, j], jax.tree.map(lambda x: np.asarray(x[i]), routing), weights[0])  # noqa: B023
        np.testing.assert_allclose(got[i, j], want, rtol=1e-5, atol=1e-5)


def test_float64():
    with jax.enable_x64(True):
        call = Call("", dtype="float64")
        rows, weights = call.arrays["rows"], call.array(4, call.tokens, call.k)
        got = run(Platform.XLA, "combine", rows, call.routing, weights)
        np.testing.assert_allclose(got, combined(rows, call.routing, weights), rtol=1e-14, atol=1e-14)
        dots = run(Platform.XLA, "dots", call.arrays["x"], rows, call.routing)
        assert dots.dtype == jnp.float64


@pytest.mark.parametrize(("tokens", "d"), [(16, 4096), (4096, 512), (1024, 2880), (64, 301)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_compiled(tokens: int, d: int, capability: tuple[int, int]):
    """Without spills, and with accesses of 16 bytes where rows are aligned."""
    moving, k, dtype = MOVEMENTS[Platform.TRITON], 8, jnp.bfloat16
    struct = jax.ShapeDtypeStruct
    ids, x = struct((tokens, k), jnp.int32), struct((tokens, d), dtype)
    rows, weights, bias = struct((tokens * k, d), dtype), struct((tokens, k), jnp.float32), struct((128, d), dtype)

    def every(ids: Any, x: Any, rows: Any, weights: Any, bias: Any) -> Any:
        routing = moving.route(ids, 128)
        return (
            moving.gather(x, routing, weights),
            moving.combine(rows, routing, weights, bias, ids),
            moving.dots(x, rows, routing, bias, ids),
            moving.gate_gradients("silu", rows, rows, rows, weights.reshape(-1), routing.source),
        )

    with interpret_triton(), recorded_launches() as launches:
        jax.eval_shape(every, ids, x, rows, weights, bias)
    assert len(launches) == 7
    for each in launches:
        found = report(each, capability)
        assert found.faults == [], found
        assert found.stack == 0
        if each.name in ("spread", "combine", "dots", "gate_gradients") and d % 8 == 0:
            assert "ld.global.v4.b32" in found.texts["ptx"], each.name
