"""The op ``grouped_matmul``: what it takes, gives and refuses, and how it is differentiated, mapped and exported."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.conformance import check
from tests.kernels.matmul.grouped_conformance import FUZZED, random_sizes
from tests.kernels.matmul.grouped_oracle import oracle
from tilewright.kernels.matmul import reference
from tilewright.kernels.matmul.cases import GROUPED_CASES, GroupedMatmulCase
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul
from tilewright.kernels.op.roofline import min_ms
from tilewright.modules import grouped_matmul
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.known_devices import find_device


def operands(seed: int = 0, **fields: Any) -> tuple[Any, ...]:
    case = GroupedMatmulCase("", **{"rows": 30, "k": 12, "n": 20, "groups": 4} | fields)
    (lhs, rhs, sizes), _ = case.arguments(seed)
    d_out = jnp.asarray(np.random.default_rng(seed + 1).standard_normal((lhs.shape[0], case.n)), lhs.dtype)
    return lhs, rhs, sizes, d_out


def expected(lhs: Any, rhs: Any, sizes: Any, d_out: Any, offset: Any = None) -> dict[str, Any]:
    return oracle(MatmulInputs(lhs, rhs, "float32", group_sizes=sizes, group_offset=offset), d_out)


def all_of(lhs: Any, rhs: Any, sizes: Any, d_out: Any, **options: Any) -> dict[str, Any]:
    out, pull_back = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, **options), lhs, rhs)
    d_lhs, d_rhs = pull_back(d_out)
    return {"out": out, "d_lhs": d_lhs, "d_rhs": d_rhs}


def test_eager_and_compiled_as_the_definition_says():
    arrays = operands()
    check(all_of(*arrays), expected(*arrays))
    check(jax.jit(all_of)(*arrays), expected(*arrays))


@pytest.mark.parametrize("sizes", [(3, 0, 9, 1, 1, 1, 1, 1, 6, 7), (0, 0, 8, 8, 0, 0, 0, 9, 0, 0), (30, *[0] * 9)])
@pytest.mark.parametrize("offset", [None, 3])
def test_the_reference_by_chunks_of_rows(sizes, offset, monkeypatch: pytest.MonkeyPatch):
    """Candidates of a tuning are compared with it; groups share chunks here, and a group has several."""
    monkeypatch.setattr(reference, "CHUNK", 8)
    lhs, rhs, sizes, d_out = operands(groups=10, sizes=sizes)
    rhs = rhs if offset is None else rhs[offset : offset + 4]

    def of(lhs: Any, rhs: Any) -> Any:
        given = MatmulInputs(lhs, rhs, "float32", group_sizes=sizes, group_offset=offset)
        return reference.matmul_reference(given)

    out, pull_back = jax.vjp(of, lhs, rhs)
    d_lhs, d_rhs = pull_back(d_out)
    check({"out": out, "d_lhs": d_lhs, "d_rhs": d_rhs}, expected(lhs, rhs, sizes, d_out, offset))


def test_it_is_a_drop_in_for_ragged_dot():
    """The same arguments by position, as far as JAX's function serves them, and the same dtypes."""
    lhs, rhs, sizes, _ = operands()
    for dtypes, preferred in (
        (("float32", "float32"), None),
        (("bfloat16", "bfloat16"), None),
        (("bfloat16", "bfloat16"), jnp.float32),
        (("float16", "float32"), None),
        (("float32", "float32"), "bfloat16"),
        (("float8_e4m3fn", "float8_e4m3fn"), None),
        (("float8_e4m3fn", "float8_e5m2"), jnp.bfloat16),
    ):
        x, w = lhs.astype(dtypes[0]), rhs.astype(dtypes[1])
        want = jax.lax.ragged_dot(x, w, sizes, jax.lax.Precision.HIGHEST, preferred)
        got = grouped_matmul(x, w, sizes, jax.lax.Precision.HIGHEST, preferred, None, None)
        assert got.dtype == want.dtype
        # Ours is rounded once, from float32.
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.13, atol=0.1)


def test_a_group_offset_is_the_share_of_a_device():
    """The shares of all devices are the whole, in the result and in the gradients."""
    lhs, rhs, sizes, d_out = operands(rows=31, groups=6)
    whole = all_of(lhs, rhs, sizes, d_out)
    share = jax.jit(lambda matrices, first: all_of(lhs, matrices, sizes, d_out, group_offset=first))
    shares = [share(rhs[first : first + 2], first) for first in (0, 2, 4)]
    for name in ("out", "d_lhs"):
        np.testing.assert_allclose(sum(each[name] for each in shares), whole[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([each["d_rhs"] for each in shares]), whole["d_rhs"], rtol=1e-5, atol=1e-5)
    check(shares[1], expected(lhs, rhs[2:4], sizes, d_out, 2))


def test_vmap_over_each_operand_and_all():
    lhs, rhs, _, d_out = operands(rows=FUZZED.rows, groups=FUZZED.groups)
    random = np.random.default_rng(4)
    sizes = jnp.asarray([random_sizes(random, FUZZED.rows, FUZZED.groups) for _ in range(3)])
    stacks = [jnp.stack([x, x + 1, x - 1]) for x in (lhs, rhs, d_out)]
    for mapped in ((0, 0, 0, 0), (None, None, 0, 0), (0, None, None, 0), (None, 0, None, 0)):
        whole = (lhs, rhs, sizes[0], d_out)
        stacked = (*stacks[:2], sizes, stacks[2])
        given = [stack if axis == 0 else one for one, stack, axis in zip(whole, stacked, mapped, strict=True)]
        got = jax.jit(jax.vmap(all_of, mapped))(*given)
        for i in range(3):
            one = [x[i] if axis == 0 else x for x, axis in zip(given, mapped, strict=True)]
            check({name: x[i] for name, x in got.items()}, expected(*one))


def test_scan_and_remat_over_layers():
    lhs, rhs, sizes, d_out = operands(k=16, n=16)
    layers = jnp.stack([rhs, rhs[::-1], 0.5 * rhs])

    def through(op: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, matrices: Any) -> tuple[Any, None]:
            return jnp.tanh(op(x, matrices, sizes)), None

        return jax.jit(jax.grad(lambda x, layers: (jax.lax.scan(layer, x, layers)[0] * d_out).sum(), (0, 1)))

    got, want = (through(op)(lhs, layers) for op in (grouped_matmul, jax.lax.ragged_dot))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def test_forward_mode():
    lhs, rhs, sizes, d_out = operands(k=20)
    tangents = (d_out, 2 * rhs)
    got, want = (
        jax.jvp(lambda a, b, op=op: op(a, b, sizes), (lhs, rhs), tangents)
        for op in (grouped_matmul, jax.lax.ragged_dot)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_a_gradient_that_nobody_uses_is_not_computed():
    """Frozen matrices: of their gradient not even the memory is there."""
    lhs, rhs, sizes, _ = operands()
    compiled = jax.jit(jax.grad(lambda lhs: grouped_matmul(lhs, rhs, sizes).sum())).lower(lhs).as_text()
    assert compiled.count("stablehlo.while") == 1
    both = jax.jit(jax.grad(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes).sum(), (0, 1))).lower(lhs, rhs).as_text()
    assert both.count("stablehlo.while") == 2


def test_scales_have_no_gradient():
    lhs, rhs, sizes, _ = operands()
    assert np.all(np.isfinite(grouped_matmul(lhs, rhs, sizes, lhs_scale=2, rhs_scale=jnp.float32(0.5))))
    with pytest.raises(TypeError, match="'lhs_scale'"):
        jax.grad(lambda scale: grouped_matmul(lhs, rhs, sizes, lhs_scale=scale).sum())(jnp.float32(2.0))


def test_sizes_that_are_known_are_checked_and_those_of_a_program_are_not():
    lhs, rhs, _, d_out = operands()
    sizes = [9, -2, 8, 20]
    for given in (sizes, np.asarray(sizes), np.asarray(sizes, np.int8), jax.block_until_ready(jnp.asarray(sizes))):
        with pytest.raises(ValueError, match=r"must not be negative, got \[9, -2, 8, 20\]"):
            grouped_matmul(lhs, rhs, given)
        with pytest.raises(ValueError, match="must not be negative"):
            grouped_matmul(lhs, rhs, group_sizes=given)
    check(all_of(lhs, rhs, jnp.asarray(sizes), d_out), expected(lhs, rhs, sizes, d_out))
    want = jax.jit(grouped_matmul)(lhs, rhs, jnp.asarray(sizes))
    np.testing.assert_array_equal(grouped_matmul(lhs, rhs, [9, 0, 8, 13]), want)
    with pytest.raises(ValueError, match="must not add up to more than the 30 rows of lhs"):
        grouped_matmul(lhs, rhs, [9, 0, 8, 14])
    listed = jax.jit(lambda size: grouped_matmul(lhs, rhs, [9, size, 8, 20]))
    np.testing.assert_array_equal(listed(-2), want)


def test_sizes_beyond_32_bits_are_long_groups():
    lhs, rhs, _, _ = operands()
    with jax.enable_x64(True):
        wide = jax.jit(grouped_matmul)(lhs, rhs, jnp.asarray([3, 2**40, 5, -(2**40)]))
    np.testing.assert_array_equal(wide, grouped_matmul(lhs, rhs, [3, 27, 0, 0]))
    shorts = jnp.asarray([3, 20, 5, 2], jnp.uint8)
    np.testing.assert_array_equal(grouped_matmul(lhs, rhs, shorts), grouped_matmul(lhs, rhs, shorts.astype(jnp.int32)))


def test_float64():
    arrays = operands()
    with jax.enable_x64(True):
        lhs, rhs, d_out = (jnp.asarray(np.asarray(x, np.float64)) for x in (arrays[0], arrays[1], arrays[3]))
        for given in ((lhs, rhs), (lhs.astype(jnp.float32), rhs)):
            got = all_of(*given, arrays[2], d_out)
            for name, exact in expected(*given, arrays[2], d_out).items():
                tolerance = 1e-12 if got[name].dtype == np.float64 else 1e-5
                np.testing.assert_allclose(got[name], exact, rtol=tolerance, atol=tolerance)
        preferred = grouped_matmul(*arrays[:3], preferred_element_type=jnp.float64)
    np.testing.assert_allclose(preferred, expected(*arrays)["out"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("error", "said", "change"),
    [
        (ValueError, r"lhs must be a floating-point array \[m, k\]", {"lhs": jnp.ones((30, 12), jnp.int8)}),
        (ValueError, r"rhs must be a floating-point array \[groups, k, n\], got", {"rhs": jnp.ones((12, 20))}),
        (ValueError, r"lhs has k=12, and axis 1 of rhs", {"rhs": jnp.ones((4, 13, 20))}),
        (ValueError, r"axis 2 of rhs must have as many", {"transpose_rhs": True}),
        (ValueError, r"each of 4 groups, got rhs.shape=\(3, 12, 20\); with", {"rhs": jnp.ones((3, 12, 20))}),
        (ValueError, r"at most 4 matrices", {"rhs": jnp.ones((5, 12, 20)), "group_offset": 0}),
        (TypeError, r"group_sizes must hold integers", {"group_sizes": jnp.ones(4)}),
        (ValueError, r"group_sizes must have the shape \[groups\]", {"group_sizes": jnp.ones((4, 1), jnp.int32)}),
        (ValueError, r"group_offset must be a scalar", {"group_offset": jnp.zeros(1, jnp.int32)}),
        (TypeError, r"group_offset must be an integer", {"group_offset": 1.0}),
        (ValueError, r"rhs_scale must be a number or have the shape \(4, 1, 1\)", {"rhs_scale": jnp.ones((4, 12))}),
        (TypeError, r"lhs_scale must be floating-point", {"lhs_scale": jnp.ones((30, 1), jnp.int32)}),
        (ValueError, r"preferred_element_type must be floating-point", {"preferred_element_type": jnp.int32}),
        (
            ValueError, "operands of float8_e4m3fn and float8_e5m2 need a preferred_element_type",
            {"lhs": jnp.ones((30, 12), jnp.float8_e4m3fn), "rhs": jnp.ones((4, 12, 20), jnp.float8_e5m2)},
        ),
        (ValueError, r"precision='swift'", {"precision": "swift"}),
        (TypeError, r"transpose_rhs must be True or False", {"transpose_rhs": 1}),
    ],
)  # fmt: skip
def test_what_it_does_not_take(error: type[Exception], said: str, change: Any):
    lhs, rhs, sizes, _ = operands()
    with pytest.raises(error, match=said):
        grouped_matmul(**{"lhs": lhs, "rhs": rhs, "group_sizes": sizes} | change)


def test_tuning_draws_sizes_that_sum_to_the_rows():
    lhs, rhs, sizes, _ = operands(rows=64, groups=8)
    kernel = GroupedMatmul()
    inputs = kernel.prepare(lhs, rhs[:2], sizes, group_offset=3, rhs_scale=2.0).structs
    seen = set()
    for seed in range(4):
        sample = kernel.sampled(inputs, jax.random.key(seed))
        drawn = sample.group_sizes
        assert drawn.dtype == np.int32
        assert drawn.sum() == 64
        assert drawn.min() >= 0
        assert sample.group_offset is not None
        assert 0 <= sample.group_offset <= 6
        assert sample.rhs_scale is not None
        assert sample.rhs_scale > 0
        seen.add(tuple(drawn.tolist()))
    assert len(seen) == 4


def test_tuning_measures_every_backend():
    lhs, rhs, sizes, _ = operands()
    result = tilewright.tune(lambda *xs: grouped_matmul(*xs, sizes).sum(), lhs, rhs, budget_s=30)
    (call,) = result
    checked = {each.config.backend for each in call.candidates if each.check}
    assert checked == {"xla", "ragged_dot"}


def test_cost():
    kernel, h100 = GroupedMatmul(), find_device("NVIDIA H100 80GB HBM3").device
    case = GROUPED_CASES.by_device["gpu"]["8x8k"]
    structs = (
        jax.ShapeDtypeStruct((case.rows, case.k), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, case.k, case.n), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    inv, _ = prepared(kernel, structs, {}, concrete=False)
    assert min_ms(kernel.cost(inv), h100) == pytest.approx(1e3 * 2 * 8192 * 4096 * 14336 / 989.4e12)
    assert kernel.time_bound_ms(inv) < min_ms(kernel.cost(inv), h100)
    assert kernel.cost(inv.backward()).flops == 2 * kernel.cost(inv).flops
