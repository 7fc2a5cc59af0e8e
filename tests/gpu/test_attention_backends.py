"""Every backend of attention on a GPU: conformance, real lengths, other backends' halves, transformations."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.real_lengths import (
    DIRECTIONS,
    REAL,
    check_at_real_lengths,
    check_on_every_device,
    long_case,
    looped,
    skip_unless_served,
)
from tests.kernels.flash_attention import library
from tests.kernels.flash_attention.conformance import (
    CASES,
    Conformance,
    ConformanceCase,
    cotangents,
    inputs_of,
    judge,
    oracles,
    run_and_judge,
)
from tests.kernels.flash_attention.library import case_of, check_residuals, inputs_for
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaBackwardParams, CudaFlashAttention, CudaForwardParams
from tilewright.kernels.flash_attention.cudnn.backend import (
    CudnnBackwardParams,
    CudnnFlashAttention,
    CudnnForwardParams,
)
from tilewright.kernels.flash_attention.fa4.backend import Fa4FlashAttention
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.masks import LengthMask
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

CUDA, CUDNN, FA4 = CudaFlashAttention(), CudnnFlashAttention(), Fa4FlashAttention()
HOPPER, TRITON, XLA = PallasGpuFlashAttention(), TritonFlashAttention(), XlaFlashAttention()


@pytest.fixture(autouse=True)
def exact_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """The products of float32, which Hopper's kernels do not take."""
    suite = request.node.callspec.params.get("suite") if hasattr(request.node, "callspec") else None
    of_hopper = request.cls is TestHopper or (suite is not None and suite.backend is HOPPER)
    with jax.default_matmul_precision(None if of_hopper else "highest"):
        yield


class TestCudnn(Conformance):
    backend: ClassVar[Backend] = CUDNN
    low_bias = False
    additive_dtype = "bfloat16"
    deterministic: ClassVar[bool] = False
    cases: ClassVar[Sequence[ConformanceCase]] = library.CUDNN_PAIRWISE


class TestFa4(Conformance):
    backend: ClassVar[Backend] = FA4
    low_bias = False
    deterministic: ClassVar[bool] = False
    cases: ClassVar[Sequence[ConformanceCase]] = [
        *library.FA4_PAIRWISE,
        *(ConformanceCase(each, False) for each in library.FA4_OF_256.values()),
    ]


class TestCuda(Conformance):
    backend: ClassVar[Backend] = CUDA
    low_bias = False
    deterministic: ClassVar[bool] = False
    cases = CASES[::2]


class TestCudaDeterministic(Conformance):
    backend: ClassVar[Backend] = CUDA
    low_bias = False
    cases = CASES[1::2]

    def params(self, inputs: AttentionInputs, direction: Direction) -> CudaForwardParams | CudaBackwardParams:
        return CudaForwardParams() if direction == "forward" else CudaBackwardParams(None, True)


class TestTriton(Conformance):
    backend: ClassVar[Backend] = TRITON


class TestHopper(Conformance):
    backend: ClassVar[Backend] = HOPPER
    # A third of them, for the time that compilation takes: all run in the interpreter.
    cases = CASES[::3]


# At real lengths.


def candidates(backend: Backend, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    return list(backend.candidates(inputs.structs.replace(return_lse=True), current_device(), direction))


def first_candidate(backend: Backend, name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    return candidates(backend, inputs, direction)[:1]


def every_candidate(backend: Backend, name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    return candidates(backend, inputs, direction)


def of_every_kind(backend: Backend, name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    """The heuristic and, where there are two of them, a config that repeats and one that need not; some calls: all."""
    found = candidates(backend, inputs, direction)
    if name in ("causal", "narrow", "wide", "full"):
        return found
    kinds = {getattr(params, "deterministic", True): params for params in reversed(found)}
    return found[:1] if direction == "forward" else list(kinds.values())


def of_cuda(backend: Backend, name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    return [CudaForwardParams()] if direction == "forward" else [CudaBackwardParams(None, d) for d in (False, True)]


def only_config(backend: Backend, name: str, inputs: AttentionInputs, direction: Direction) -> list[Any]:
    return [CudnnForwardParams() if direction == "forward" else CudnnBackwardParams()]


def added_by_fa4(inputs: AttentionInputs) -> tuple[str, ...]:
    """Sums in global memory are added up in whatever order tiles finish."""
    return ("query",) if inputs.groups == 1 else ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Suite:
    """What one backend runs.

    Attributes:
      options: those by which a call takes the backend.
      long: calls at real lengths.
      configs: those of a call that are run there.
      added: the gradients that need not repeat bit for bit, where a config does not.
    """

    backend: Backend
    options: dict[str, Any]
    long: Mapping[str, AttentionCase]
    configs: Callable[[Backend, str, AttentionInputs, Direction], list[Any]]
    added: Callable[[AttentionInputs], tuple[str, ...]] = lambda _: ("query", "bias")

    def skip_unless_here(self, name: str) -> None:
        """Skips a call that a library or the card cannot serve; our own kernels for any card must."""
        if self.backend is TRITON:
            pytest.importorskip("triton")
        elif self.backend is HOPPER and current_device().capability != (9, 0):
            pytest.skip("needs a Hopper GPU")
        elif self.backend in (CUDNN, FA4):
            skip_unless_served(self.backend, inputs_for(self.long[name]))


BOTH_DIRECTIONS = {
    "causal": REAL["causal"],
    "narrow": REAL["narrow"],
    "wide": long_case(1280, head_dim=248, causal=True),
    **{name: REAL[name] for name in ("full", "grouped", "ragged", "window", "lengths", "values")},
    "more_keys": long_case(700, 1300, dtype="float16", causal=True),
}
SUITES = {
    "cudnn": Suite(
        CUDNN,
        {"cfg": PerDirection(Choice("cudnn", CudnnForwardParams()), Choice("cudnn", CudnnBackwardParams()))},
        BOTH_DIRECTIONS
        | {
            "more_queries": long_case(1300, 700, causal=True),
            "lengths_causal": long_case(1024, batch=2, head_dim=64, lengths=True, causal=True, sliding_window=200),
        },
        only_config,
    ),
    "fa4": Suite(
        FA4,
        {"cfg": PerDirection(Choice("fa4", Fa4ForwardParams()), Choice("fa4", Fa4BackwardParams()))},
        BOTH_DIRECTIONS
        | {
            "middle": long_case(1000, head_dim=96),
            "wider": long_case(1100, head_dim=192, causal=True),
            "more_queries": REAL["more_queries"],
            "soft_cap": long_case(1024, head_dim=128, causal=True, logits_soft_cap=30.0),
        },
        every_candidate,
        added_by_fa4,
    ),
    "cuda": Suite(
        CUDA,
        {"platform": "cuda"},
        REAL
        | {
            "widest": long_case(1100, head_dim=512, causal=True),
            "widest_window": long_case(
                1000, 1399, heads=4, kv_heads=2, head_dim=400, dtype="float16", sliding_window=(300, 20)
            ),
        },
        of_cuda,
    ),
    "triton": Suite(TRITON, {"platform": "triton"}, REAL, first_candidate),
    "hopper": Suite(
        HOPPER,
        {"platform": "pallas"},
        {name: case for name, case in REAL.items() if case.dtype != "float32" and name[:5] != "more_"}
        | {
            "converted_early": long_case(1024, batch=8, heads=16, kv_heads=8, head_dim=64, causal=True),
            "one_kv_head": long_case(1024, 1300, heads=4, kv_heads=1, head_dim=64),
            "ragged": long_case(1399, 1277, head_dim=64, dtype="float16", causal=True),
            "segments": long_case(1024, batch=2, segments=True),
            "wide_192": long_case(1100, 1024, head_dim=192, causal=True),
            "wide_values": long_case(1024, head_dim=128, value_dim=256, kv_heads=1),
            "wide_queries": long_case(1024, head_dim=256, value_dim=128, dtype="float16", sliding_window=200),
            "wide_segments": long_case(1024, head_dim=256, segments=True, logits_soft_cap=20.0),
        },
        of_every_kind,
    ),
}
every_suite = pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)


@pytest.mark.parametrize(
    ("suite", "name"),
    [pytest.param(suite, name, id=f"{which}-{name}") for which, suite in SUITES.items() for name in suite.long],
)
def test_at_real_lengths(suite: Suite, name: str) -> None:
    suite.skip_unless_here(name)
    check_at_real_lengths(
        suite.backend, suite.long[name], functools.partial(suite.configs, suite.backend, name), suite.added
    )


TILED = {
    f"{'causal' if causal else 'full'}_d{dim}": long_case(600, 500, head_dim=dim, causal=causal)
    for dim in (64, 128, 256)
    for causal in (False, True)
}


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("name", TILED)
def test_candidates_of_triton(name: str, index: int) -> None:
    pytest.importorskip("triton")
    forward, backward = (candidates(TRITON, inputs_of(TILED[name]), direction) for direction in DIRECTIONS)
    if index >= max(len(forward), len(backward)):
        pytest.skip("there are fewer")
    run_and_judge(TRITON, TILED[name], forward[index % len(forward)], backward[index % len(backward)])


# With the halves of other backends.

MORE = {
    "one query": case_of(q_length=1, kv_length=300, causal=True, causal_alignment="bottom_right"),
    "the first query": case_of(q_length=1, kv_length=300, causal=True),
    "one head": case_of(heads=1, kv_heads=1, q_length=130, head_dim=8, causal=True),
    "odd": case_of(q_length=127, kv_length=301, head_dim=65, causal=True),
    "many groups": case_of(heads=12, kv_heads=1, q_length=200, head_dim=80, causal=True, dtype="float16"),
}
OF_CUDNN = MORE | {
    "bias at length": case_of(q_length=512, kv_length=768, head_dim=64, bias="hqk", causal=True),
    "bias beside lengths": case_of(q_length=256, head_dim=64, bias="bhqk", lengths=True),
    "rows of a bias": case_of(q_length=256, head_dim=128, bias="q", dtype="float16"),
    **{f"head_dim {dim}": case_of(q_length=256, head_dim=dim, causal=True) for dim in (32, 64, 96, 125, 128, 192, 253)},
}
DIMS = (8, 32, 40, 64, 72, 96, 125, 128, 136, 192, 200, 253, 256)
OF_FA4 = MORE | {
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
PAIRS: dict[Backend, tuple[Mapping[str, AttentionCase], tuple[str, ...], list[Backend]]] = {
    CUDNN: (library.CUDNN_CASES, ("causal", "lengths in a window", "shared bias"), [HOPPER, CUDA]),
    FA4: (library.FA4_CASES, ("causal", "window", "lengths"), [HOPPER, CUDA]),
    TRITON: (REAL, ("causal", "grouped", "window"), [HOPPER, CUDA, XLA]),
}


def residuals() -> Iterator[Any]:
    """A backend, others whose halves are used with its own, and a case."""
    for backend, cases in (
        (CUDNN, library.CUDNN_CASES | OF_CUDNN),
        (FA4, library.FA4_CASES | library.FA4_OF_192 | OF_FA4),
    ):
        for name, case in cases.items():
            yield pytest.param(backend, XLA, case, id=f"{backend.name}-xla-{name}")
    for backend, (cases, names, others) in PAIRS.items():
        size = {"q_length": 300} if backend is TRITON else {"head_dim": 64, "q_length": 192}
        for name, other in itertools.product(names, others):
            sized = dataclasses.replace(cases[name], **size)
            yield pytest.param(backend, other, sized, id=f"{backend.name}-{other.name}-{name}")


@pytest.mark.parametrize(("backend", "other", "case"), list(residuals()))
def test_residuals_are_those_of_every_backend(backend: Backend, other: Backend, case: AttentionCase) -> None:
    if backend is TRITON:
        pytest.importorskip("triton")
    inputs = inputs_of(case) if backend is TRITON else inputs_for(case)
    for each in {backend, other} - {TRITON}:
        skip_unless_served(each, inputs)
    check_residuals(inputs, current_device(), [other], backend, case.tolerance_factor)


# What no case can say.


def judge_both(backend: Backend, inputs: AttentionInputs) -> tuple[Any, dict[str, Any]]:
    """Compares both directions with the oracle and returns what they gave."""
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    forward, backward = (
        backend.heuristic(inputs.structs.replace(return_lse=True), current_device(), direction)
        for direction in DIRECTIONS
    )
    results = jax.jit(lambda inputs: backend.forward(inputs, forward))(inputs)
    run = jax.jit(lambda inputs, results, d: backend.backward(inputs, results, d, backward))
    gradients = run(inputs, results, (d_out, d_lse))
    judge({"out": results[0], "lse": results[1], **gradients}, exact.arrays, low.arrays, 2.0)
    return results, gradients


@pytest.mark.parametrize(
    ("backend", "kv_heads"), [(CUDNN, 2), (FA4, 2), (FA4, 4)], ids=["cudnn", "fa4", "fa4-of-each-head"]
)
def test_lengths_of_nothing_and_beyond(backend: Backend, kv_heads: int) -> None:
    inputs = inputs_for(case_of(q_length=200, head_dim=64, kv_heads=kv_heads))
    skip_unless_served(backend, inputs)
    lengths = LengthMask(jnp.array([250, 17]), jnp.array([0, 999])) & LengthMask(jnp.array([133]), None)
    (_, lse), gradients = judge_both(backend, inputs.replace(mask=lengths))
    assert np.all(np.isneginf(np.asarray(lse)[0]))
    assert not np.any(np.asarray(gradients["value"][0], np.float32))


def test_lengths_of_queries_beside_a_window_in_fa4() -> None:
    inputs = inputs_for(case_of(q_length=300, head_dim=64, sliding_window=(60, 10)))
    skip_unless_served(FA4, inputs)
    judge_both(FA4, inputs.replace(mask=inputs.mask & LengthMask(jnp.array([250, 0]), None)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_of_minus_infinity_masks_in_cudnn(dtype: str) -> None:
    bias = np.zeros((2, 1, 160, 160), np.float32)
    bias[:, :, :, 130:] = bias[:, :, 5] = bias[1, :, 7:80] = bias[0, :, 20:, :80] = -np.inf
    inputs = inputs_for(case_of(q_length=160, head_dim=64, dtype=dtype, causal=True))
    skip_unless_served(CUDNN, inputs)
    judge_both(CUDNN, inputs.replace(bias=jnp.asarray(bias, dtype)))


# Transformations.


@every_suite
def test_vmap_and_gradients(suite: Suite) -> None:
    suite.skip_unless_here("window")
    query, key, value = (jnp.stack([jnp.asarray(a)] * 2) for a in suite.long["window"].arguments()[0])

    def call(*arrays: Any) -> Any:
        return flash_attention(*arrays, causal=True, return_lse=True, **suite.options)

    def loss(*arrays: Any) -> Any:
        out, lse = call(*arrays)
        return out.astype(jnp.float32).sum() + lse.sum()

    one = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query[0], key[0], value[0])
    both = jax.jit(jax.grad(lambda *a: jax.vmap(loss)(*a).sum(), argnums=(0, 1, 2)))(query, key, value)
    for part, alone, mapped in zip(("query", "key", "value"), one, both, strict=True):
        want = np.asarray(alone, np.float32)
        for got in np.asarray(mapped, np.float32):
            if suite.backend is CUDA and part != "query":
                np.testing.assert_array_equal(got, want)
            # Of a larger batch, for which cuDNN may have another kernel; or summed in no fixed order.
            assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()
    if suite.backend is HOPPER:
        out, mapped = call(query[0], key[0], value[0])[0], jax.jit(jax.vmap(call))(query, key, value)[0]
        for each in mapped:
            np.testing.assert_array_equal(np.asarray(out), np.asarray(each))


@pytest.mark.parametrize(
    ("which", "name", "loop", "direction"),
    [
        *((which, "narrow", "fori", "forward") for which in ("cudnn", "cuda", "triton")),
        *(("fa4", "grouped", loop, direction) for loop in ("fori", "scan") for direction in DIRECTIONS),
    ],
)
def test_inside_a_command_buffer(which: str, name: str, loop: str, direction: Direction) -> None:
    """Many calls in a loop, which XLA may record as a graph, beside XLA's."""
    suite = SUITES[which]
    suite.skip_unless_here(name)
    got, want = (looped(suite.long[name], loop, direction, **how) for how in (suite.options, {"platform": "xla"}))
    assert np.abs(got - want).max() <= 2.0**-5 * np.abs(want).max()


@every_suite
@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
def test_on_every_device_of_a_process(suite: Suite) -> None:
    suite.skip_unless_here("causal")
    check_on_every_device(suite.long["causal"], **suite.options)
