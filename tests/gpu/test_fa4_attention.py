"""FlashAttention-4 on a Hopper GPU: conformance, residuals with other backends, every config, transformations."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.real_lengths import check_on_every_device, differences, long_case
from tests.kernels.flash_attention.conformance import Conformance, cotangents, judge, oracles
from tests.kernels.flash_attention.cudnn_cases import case_of, check_residuals, inputs_for
from tests.kernels.flash_attention.fa4_cases import BACKEND, CASES, PAIRWISE
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaFlashAttention
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.masks import LengthMask
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

FORWARD, BACKWARD = Fa4ForwardParams(), Fa4BackwardParams()
BOTH = PerDirection(Choice("fa4", FORWARD), Choice("fa4", BACKWARD))
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


class TestFa4(Conformance):
    backend: ClassVar[Backend] = BACKEND
    low_bias = False
    deterministic: ClassVar[bool] = False
    cases = PAIRWISE


def skip_unless_served(inputs: AttentionInputs, backend: Backend = BACKEND) -> AttentionInputs:
    structs = inputs.structs.replace(return_lse=True)
    for direction in DIRECTIONS:
        if why := backend.not_supported_reasons(structs, current_device(), direction):
            pytest.skip("; ".join(why))
    return structs


DIMS = (8, 32, 40, 64, 72, 96, 125, 128, 136, 192, 200, 253, 256)
MORE = {
    "one query": case_of(q_length=1, kv_length=300, causal=True, causal_alignment="bottom_right"),
    "the first query": case_of(q_length=1, kv_length=300, causal=True),
    "one head": case_of(heads=1, kv_heads=1, q_length=130, head_dim=8, causal=True),
    "odd": case_of(q_length=127, kv_length=301, head_dim=65, causal=True),
    "many groups": case_of(heads=12, kv_heads=1, q_length=200, head_dim=80, causal=True, dtype="float16"),
    "three groups": case_of(heads=6, kv_heads=2, q_length=260, head_dim=128),
    "narrow values": case_of(q_length=256, head_dim=192, value_dim=128, kv_heads=4, causal=True),
    "narrow values of groups": case_of(q_length=256, head_dim=192, value_dim=128),
    "wide values of each head": case_of(q_length=200, head_dim=64, value_dim=128, kv_heads=4),
    "window past the keys": case_of(q_length=500, kv_length=130, head_dim=64, sliding_window=(40, 5)),
    "long soft cap": case_of(q_length=400, kv_length=400, head_dim=128, causal=True, logits_soft_cap=30.0),
    "long window": case_of(q_length=600, kv_length=700, head_dim=128, sliding_window=(150, 20), dtype="float16"),
    **{f"head_dim {dim}": case_of(q_length=256, head_dim=dim, causal=True) for dim in DIMS},
    **{f"head_dim {dim} of each head": case_of(q_length=301, head_dim=dim, kv_heads=4) for dim in DIMS},
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_residuals_are_those_of_every_backend(name: str):
    case = (CASES | MORE)[name]
    inputs = inputs_for(case)
    skip_unless_served(inputs)
    check_residuals(inputs, current_device(), [XlaFlashAttention()], BACKEND, case.tolerance_factor)


@pytest.mark.parametrize("other", [PallasGpuFlashAttention(), CudaFlashAttention()], ids=["pallas", "cuda"])
@pytest.mark.parametrize("name", ["causal", "window", "lengths"])
def test_pairs_with_kernels_of_ours(name: str, other: Backend):
    inputs = inputs_for(dataclasses.replace(CASES[name], head_dim=64, q_length=192))
    skip_unless_served(inputs)
    skip_unless_served(inputs, other)
    check_residuals(inputs, current_device(), [other], BACKEND)


def judge_both(inputs: AttentionInputs) -> tuple[Any, dict[str, Any]]:
    """Compares both directions with the oracle and returns what they gave."""
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = jax.jit(lambda inputs: BACKEND.forward(inputs, FORWARD))(inputs)
    run = jax.jit(lambda inputs, results, d: BACKEND.backward(inputs, results, d, BACKWARD))
    gradients = run(inputs, results, (d_out, d_lse))
    judge({"out": results[0], "lse": results[1], **gradients}, exact.arrays, low.arrays, 2.0)
    return results, gradients


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_lengths_of_nothing_and_beyond(kv_heads: int):
    inputs = inputs_for(case_of(q_length=200, head_dim=64, kv_heads=kv_heads))
    skip_unless_served(inputs)
    lengths = LengthMask(jnp.array([250, 17]), jnp.array([0, 999])) & LengthMask(jnp.array([133]), None)
    (_, lse), gradients = judge_both(inputs.replace(mask=lengths))
    assert np.all(np.isneginf(np.asarray(lse)[0]))
    assert not np.any(np.asarray(gradients["value"][0], np.float32))


def test_lengths_of_queries_beside_a_window():
    inputs = inputs_for(case_of(q_length=300, head_dim=64, sliding_window=(60, 10)))
    skip_unless_served(inputs)
    judge_both(inputs.replace(mask=inputs.mask & LengthMask(jnp.array([250, 0]), None)))


LONG = {
    "causal": long_case(1400, batch=2, causal=True),
    "narrow": long_case(1408, head_dim=64, causal=True),
    "middle": long_case(1000, head_dim=96),
    "wider": long_case(1100, head_dim=192, causal=True),
    "wide": long_case(1280, head_dim=248, causal=True),
    "full": long_case(2048),
    "grouped": long_case(1024, heads=4, kv_heads=2, causal=True),
    "more_queries": long_case(1300, 700, causal=True, causal_alignment="bottom_right"),
    "more_keys": long_case(700, 1300, dtype="float16", causal=True),
    "ragged": long_case(1399, 1277, head_dim=72, dtype="float16", causal=True),
    "window": long_case(1500, head_dim=64, causal=True, sliding_window=300),
    "soft_cap": long_case(1024, head_dim=128, causal=True, logits_soft_cap=30.0),
    "lengths": long_case(1024, batch=2, head_dim=96, lengths=True),
    "values": long_case(1024, head_dim=64, value_dim=128),
}


@pytest.mark.parametrize("name", LONG)
def test_every_config_at_real_lengths(name: str):
    """Against the oracle, and further runs against the first one."""
    case: AttentionCase = LONG[name]
    inputs = inputs_for(case)
    structs = skip_unless_served(inputs)
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    found = []
    for params in BACKEND.candidates(structs, current_device(), "forward"):
        forward = jax.jit(lambda inputs, params=params: BACKEND.forward(inputs, params))
        out, lse = forward(inputs)
        judge({"out": out, "lse": lse}, exact.results, low.results, case.tolerance_factor, params)
        repeats = differences(lambda forward=forward: dict(zip(("out", "lse"), forward(inputs), strict=True)))
        found += [(params, repeats)] * any(repeats.values())
    assert not found
    # Sums in global memory are added up in whatever order tiles finish.
    added = ("query",) if structs.groups == 1 else ("query", "key", "value")
    for params in BACKEND.candidates(structs, current_device(), "backward"):
        backward = jax.jit(lambda inputs, results, d, params=params: BACKEND.backward(inputs, results, d, params))

        def run(backward: Any = backward) -> dict[str, jax.Array]:
            gradients = backward(inputs, (out, lse), (d_out, d_lse))
            return {part: gradients[part] for part in exact.gradients}

        judge(run(), exact.gradients, low.gradients, case.tolerance_factor, params)
        for part, difference in differences(run).items():
            assert difference <= (2.0**-7 if part in added else 0.0), (params, part, difference)


def test_vmap_and_gradients():
    query, key, value = (jnp.stack([jnp.asarray(a)] * 2) for a in LONG["window"].arguments()[0])

    def loss(*arrays: Any) -> Any:
        out, lse = flash_attention(*arrays, causal=True, return_lse=True, cfg=BOTH)
        return out.astype(jnp.float32).sum() + lse.sum()

    one = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query[0], key[0], value[0])
    both = jax.jit(jax.grad(lambda *a: jax.vmap(loss)(*a).sum(), argnums=(0, 1, 2)))(query, key, value)
    for alone, mapped in zip(one, both, strict=True):
        want = np.asarray(alone, np.float32)
        for got in np.asarray(mapped, np.float32):
            assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("loop", ["fori", "scan"])
def test_inside_a_command_buffer(loop: str, direction: Direction):
    """Many calls in a loop, which XLA may record as a graph, each on the result of the last."""
    query, key, value = (jnp.asarray(a) for a in LONG["grouped"].arguments()[0])

    def repeated(**options: Any) -> Any:
        def call(x: Any) -> Any:
            return flash_attention(x, key, value, causal=True, **options)

        def step(x: Any) -> Any:
            if direction == "forward":
                return call(x)
            return x + 0.1 * jax.grad(lambda x: call(x).astype(jnp.float32).sum())(x)

        if loop == "fori":
            return jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: step(x), x))(query)
        return jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, length=8)[0])(query)

    got, want = (np.asarray(repeated(**options), np.float32) for options in ({"cfg": BOTH}, {"platform": "xla"}))
    assert np.abs(got - want).max() <= 2.0**-5 * np.abs(want).max()


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
def test_on_every_device_of_a_process():
    check_on_every_device(LONG["causal"], cfg=BOTH)
