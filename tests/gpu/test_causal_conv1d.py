"""The causal convolution in Triton on a GPU: conformance, configs at real sizes, and more than 2³¹ elements."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.causal_conv1d.conformance import ConvConformance, cotangents_of, inputs_of, named, oracle
from tests.kernels.causal_conv1d.steps import CASES as STEP_CASES
from tests.kernels.causal_conv1d.steps import check_step, inputs_of_step
from tests.kernels.conformance import check, check_same, run_both
from tilewright.kernels.causal_conv1d.cases import CASES, ConvCase
from tilewright.kernels.causal_conv1d.cases import STEP_CASES as SHIPPED_STEPS
from tilewright.kernels.causal_conv1d.inputs import ConvInputs, ConvResults
from tilewright.kernels.causal_conv1d.triton.backend import TritonConv, TritonConvStep
from tilewright.kernels.causal_conv1d.xla import XlaConv
from tilewright.kernels.op.backend import Backend
from tilewright.modules import causal_conv1d, causal_conv1d_step
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

BACKEND, STEP = TritonConv(), TritonConvStep()


def chosen(problem: ConvInputs) -> tuple[Any, Any]:
    device = current_device()
    return BACKEND.heuristic(problem, device, "forward"), BACKEND.heuristic(problem, device, "backward")


class TestTriton(ConvConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = BACKEND

    def params(self, problem: ConvInputs) -> tuple[Any, Any]:
        return chosen(problem)


REAL = {
    "bfloat16": ConvCase("", batch=2, length=1500, channels=1024, dtype="bfloat16"),
    "segments": ConvCase("", batch=2, length=1500, channels=1000, dtype="bfloat16", packing="segment_ids", sequences=7),
    "states": ConvCase("", length=2000, channels=768, dtype="bfloat16", packing="cum_seqlens", sequences=40,
                       initial_state=True, return_state=True),
    "float32": ConvCase("", batch=3, length=700, channels=520, packing="seq_lengths", initial_state=True,
                        return_state=True),
    "width_8": ConvCase("", length=900, channels=512, width=8, dtype="float16", packing="cum_seqlens",
                        initial_state=True, return_state=True),
}  # fmt: skip


@pytest.mark.parametrize("case", REAL.values(), ids=list(REAL))
def test_at_real_sizes(case: ConvCase):
    """Repeatable bit for bit, and as right as the recurrence, with the heuristic and with candidates."""
    inputs, device = inputs_of(case), current_device()
    cotangents = cotangents_of(inputs)
    exact = oracle(inputs, cotangents)
    every = [list(BACKEND.candidates(inputs.structs, device, way))[:12] for way in ("forward", "backward")]
    for params in zip(*every, strict=False):
        run = jax.jit(lambda *call: named(*run_both(BACKEND, *call, params)))  # noqa: B023
        got = run(inputs, cotangents)
        check(got, exact, where=params)
        check_same(run(inputs, cotangents), got)


@pytest.mark.parametrize("name", CASES.by_device["gpu"])
def test_shipped_sizes_are_what_xla_gives(name: str):
    inputs = inputs_of(CASES.by_device["gpu"][name])
    cotangents, params = cotangents_of(inputs), chosen(inputs.structs)
    got = jax.jit(lambda *call: named(*run_both(BACKEND, *call, params)))(inputs, cotangents)
    want = jax.jit(lambda *call: named(*run_both(XlaConv(), *call, (FwdParams(), BwdParams()))))(inputs, cotangents)
    for each, x in want.items():
        a, b = (np.asarray(value, np.float32) for value in (got[each], x))
        # Both round their float32 results once; sums over all tokens differ by their order.
        tolerance = 2.0 ** (-7 if x.dtype == jnp.bfloat16 else -10 if x.dtype == jnp.float16 else -18)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(), err_msg=each)


@pytest.mark.parametrize("packed", [False, True])
def test_more_elements_than_32_bits_count(packed: bool):
    """2³¹ elements and 8 MB more: the last tokens are what they are in an array of their own."""
    length, channels, last = (1 << 18) + 500, 8192, 64
    drawn = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    x = jax.jit(lambda key: drawn(key, (1, length, channels)))(jax.random.key(0))
    weight = drawn(jax.random.key(1), (channels, 4))
    options: dict[str, Any] = {"activation": "silu", "platform": "triton"}
    if packed:
        options["cum_seqlens"] = jnp.asarray([5, length // 2, length - 1])
    out = jax.jit(lambda x: causal_conv1d(x, weight, **options)[:, -last:])(x)
    tail = x[:, -last - 3 :]
    want = causal_conv1d(tail, weight, activation="silu", platform="xla")[:, 3:]
    kept = slice(0, last - 1 if packed else last)
    pair = (np.asarray(each[:, kept], np.float32) for each in (out, want))
    np.testing.assert_allclose(*pair, rtol=2**-7, atol=2**-9)

    def loss(x: Any) -> Any:
        return (causal_conv1d(x, weight, **options)[:, -last:].astype(jnp.float32) ** 2).sum()

    d_x = jax.jit(lambda x: jax.grad(loss)(x)[:, -last:])(x)
    del x
    small = lambda x: (causal_conv1d(x, weight, activation="silu", platform="xla")[:, 3:][:, kept] ** 2.0).sum()
    d_tail = jax.grad(lambda x: small(x).astype(jnp.float32))(tail)[:, 3:]
    a, b = (np.asarray(each[:, kept], np.float32) for each in (d_x, d_tail))
    np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05 * np.abs(b).max())


@pytest.mark.parametrize("case", STEP_CASES.values(), ids=list(STEP_CASES))
def test_steps(case: Any):
    inputs, device = inputs_of_step(case), current_device()
    if said := STEP.not_supported_reasons(inputs.structs, device, "forward"):
        pytest.skip("; ".join(said))
    for params in STEP.candidates(inputs.structs, device, "forward"):
        check_step(inputs, jax.jit(lambda inputs: STEP.forward(inputs, params))(inputs))  # noqa: B023


@pytest.mark.parametrize("name", SHIPPED_STEPS.by_device["gpu"])
def test_a_donated_pool_is_updated_in_place(name: str):
    args, options = SHIPPED_STEPS.by_device["gpu"][name].arguments()
    x, pool, *weights = args
    step = jax.jit(
        lambda x, pool: causal_conv1d_step(x, pool, *weights, **options, platform="triton"), donate_argnums=1
    )
    compiled = step.lower(x, pool).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes
    want = causal_conv1d_step(x, pool, *weights, **options, platform="xla")
    address = pool.unsafe_buffer_pointer()
    y, pool = compiled(x, pool)
    assert pool.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(pool, np.float32), np.asarray(want[1], np.float32))
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (y, want[0])), rtol=2**-7, atol=2**-7)


def test_under_transformations():
    """jit, grad and vmap by the public function, with a weight for each element."""
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((3, 2, 50, 96), (3, 96, 4)))

    def loss(x: Any, weight: Any, platform: str) -> Any:
        call = lambda x, weight: causal_conv1d(x, weight, activation="silu", platform=platform, return_state=True)
        out, state = jax.vmap(call)(x, weight)
        return jnp.sum(jnp.sin(out)) + jnp.sum(state**3)

    got, want = (
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, weight, platform) for platform in ("triton", "xla")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_nothing_is_zero():
    """Rows that belong to no sequence, in arrays that are uninitialised memory to the kernel."""
    inputs = inputs_of(ConvCase("", length=4096, channels=512, dtype="bfloat16", packing="cum_seqlens", sequences=2))
    inputs = inputs.replace(cum_seqlens=jnp.asarray([100, 200, 300]), x=jnp.full_like(inputs.x, jnp.nan))
    inputs = inputs.replace(x=inputs.x.at[:, 100:300].set(1.0))
    cotangents = ConvResults(jnp.full_like(inputs.x, jnp.nan).at[:, 100:300].set(1.0), None)
    call = lambda *given: named(*run_both(BACKEND, *given, chosen(inputs.structs)))
    got = jax.jit(call)(inputs, cotangents)
    for name in ("out", "d_x"):
        x = np.asarray(got[name], np.float32)
        assert not np.any(x[:, :100])
        assert not np.any(x[:, 300:])
        assert np.all(np.isfinite(x))
    assert np.all(np.isfinite(np.asarray(got["d_weight"], np.float32)))
