"""The cross-entropy on a GPU: conformance of all backends in all forms of the gradients, and at larger sizes."""

import concurrent.futures
import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_cross_entropy.conformance import (
    CASES,
    LossConformance,
    call_of,
    check,
    cotangents_of,
    expected,
    huge,
    served,
    through,
)
from tests.kernels.linear_cross_entropy.oracle import Found
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.hopper.backend import HopperLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.triton.backend import TritonLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.xla.backend import XlaLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.xla.params import XlaLossBackwardParams, XlaLossParams
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

LARGE = LinearCrossEntropyCase("large", tokens=2048, d=1024, vocab=32000, dtype="bfloat16", ignored=0.1)
MEDIUM = dataclasses.replace(LARGE, tokens=1024, d=512, vocab=16000)


@pytest.fixture(name="one_device")
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several GPUs XLA may split the tokens, which only its own backend serves."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)


def forms_of_xla() -> list[PerDirection]:
    return [
        PerDirection(
            Choice("xla", XlaLossParams(tokens, vocab)),
            Choice("xla", XlaLossBackwardParams(tokens, vocab, recompute)),
        )
        for tokens, vocab, recompute in ((16, 1 << 20, False), (16, 128, True), (None, 128, True))
    ]


def forms_of(backend: Backend[Any, Any, Any, Any], inputs: LossInputs, **sizes: int) -> list[PerDirection]:
    """Every tile of a backend with kernels; the heuristic's form, and the recomputed one, in blocks of these sizes."""
    device, found = current_device(), []
    if any(backend.not_supported_reasons(inputs, device, way) for way in ("forward", "backward")):
        return []
    forward, backward = (list(backend.candidates(inputs, device, way)) for way in ("forward", "backward"))
    for number, given in enumerate(forward):
        for back in (backward[0], backward[number % len(backward)]):
            both = dataclasses.replace(given, **sizes), dataclasses.replace(back, **sizes)
            found.append(PerDirection(*(Choice(backend.name, each) for each in both)))
    return list(dict.fromkeys(found))


class _OnGpu(LossConformance):
    def run(self, args: Any, options: dict[str, Any], d_loss: Any, d_lse: Any, cfg: Any) -> Found:
        """With float32 that is not rounded to TensorFloat-32."""
        with jax.default_matmul_precision("highest"):
            return super().run(args, options, d_loss, d_lse, cfg)


class TestXla(_OnGpu):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = XlaLinearCrossEntropy()

    def configs(self, inputs: LossInputs) -> list[Any]:
        return forms_of_xla()


class TestTriton(_OnGpu):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = TritonLinearCrossEntropy()

    def configs(self, inputs: LossInputs) -> list[Any]:
        pytest.importorskip("triton")
        return forms_of(self.backend, inputs, block_tokens=24, block_vocab=128)[:3]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("float16", "two_dtypes", "no_tokens")])
def test_hopper(name: str, one_device: None):
    """The cases in bfloat16, with rows of whole 16 bytes."""
    case = served(CASES[name])
    kernel, (args, options) = LinearCrossEntropy(), call_of(case)
    inputs = kernel.prepare(*args, **options).structs
    cotangents = cotangents_of(args[0], options)
    want = expected(args, options, *cotangents)
    listed = forms_of(HopperLinearCrossEntropy(), inputs, block_tokens=24, block_vocab=128)
    if not listed:
        pytest.skip("not on this GPU")
    for cfg in listed[:3]:
        got = compiled(options, cotangents, cfg)(*args)
        check(got, want, str(cfg)) if name != "huge_logits" else huge(got, want)


def compiled(options: dict[str, Any], cotangents: Any, cfg: Any) -> Any:
    return jax.jit(lambda *xs: through(LinearCrossEntropy(), xs, options, *cotangents, cfg))


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(LARGE, name="every_triton"),
        dataclasses.replace(LARGE, name="every_pallas"),
        dataclasses.replace(MEDIUM, name="tied_with_cap", vocab_first=True, logits_soft_cap=10.0, vocab=16032),
        dataclasses.replace(MEDIUM, name="smoothing", label_smoothing=0.1, z_loss=1e-3, bias=True, token_weights=True),
        dataclasses.replace(MEDIUM, name="recomputed", label_smoothing=0.1, logits_soft_cap=10.0),
        dataclasses.replace(MEDIUM, name="float16", dtype="float16", vocab_first=True),
        dataclasses.replace(MEDIUM, name="odd", d=500, vocab=16003, tokens=999),
        dataclasses.replace(MEDIUM, name="peaked", scale=8.0),
    ],
    ids=lambda case: case.name,
)
def test_at_real_sizes(case: LinearCrossEntropyCase, one_device: None):
    """Candidates are right against float64, and repeatable bit for bit."""
    pytest.importorskip("triton")
    kernel = LinearCrossEntropy()
    args, options = call_of(case)
    cotangents = cotangents_of(args[0], options)
    want = expected(args, options, *cotangents)
    inputs = kernel.prepare(*args, **options).structs
    kernels = (TritonLinearCrossEntropy(), HopperLinearCrossEntropy())
    # All of a backend in one case: to compile a config takes seconds.
    each = [
        forms_of(backend, inputs, block_tokens=384, block_vocab=4096)[
            : None if str(backend.platform) in case.name else 2
        ]
        for backend in kernels
    ]
    configs = [None, *forms_of_xla()[1:2], *itertools.chain.from_iterable(each)]
    lowered = [compiled(options, cotangents, cfg).lower(*args) for cfg in configs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda x: x.compile(), lowered))
    for cfg, program in zip(configs, programs, strict=True):
        got, again = program(*args), program(*args)
        check(got, want, str(cfg))
        for name, x in got.items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[name], np.float32))


@pytest.mark.parametrize("recompute", [False, True])
def test_more_logits_in_a_block_than_32_bits_count(recompute: bool, one_device: None):
    """Beside XLA, whose blocks are smaller; 5 GB."""
    pytest.importorskip("triton")
    case = dataclasses.replace(LARGE, tokens=17000, d=32, vocab=131072, reduction="sum")
    assert case.tokens * case.vocab > 2**31
    args, options = call_of(case)
    cotangents = cotangents_of(args[0], options)
    kernel = LinearCrossEntropy()
    inputs = kernel.prepare(*args, **options).structs
    listed = forms_of(TritonLinearCrossEntropy(), inputs, block_tokens=case.tokens, block_vocab=case.vocab)
    cfg = next(each for each in listed if each.backward.params.recompute == recompute)
    xla = PerDirection(
        Choice("xla", XlaLossParams(1024, 1 << 20)),
        Choice("xla", XlaLossBackwardParams(1024, 1 << 20, False)),
    )
    want, got = (compiled(options, cotangents, each)(*args) for each in (xla, cfg))
    for name, exact in want.items():
        exact, found = (np.asarray(x, np.float64) for x in (exact, got[name]))
        np.testing.assert_allclose(found, exact, atol=0.02 * np.abs(exact).max(), err_msg=name)


def test_no_logits_in_memory(one_device: None):
    """The temporaries of the chosen config are a small part of the logits."""
    case = dataclasses.replace(LARGE, tokens=16384, d=64, vocab=65536)
    args, options = call_of(case)
    loss = lambda x, weight: LinearCrossEntropy()(x, weight, args[2], **options)
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args[:2]).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 16384 * 65536 / 3


def test_under_transformations(one_device: None):
    """By the public function: vmap of gradients, and a scan over steps."""
    pytest.importorskip("triton")
    args, options = call_of(dataclasses.replace(CASES["float32"], reduction="sum"))
    xs = jnp.stack([args[0], -args[0]])

    def gradient(x: Any, platform: str) -> Any:
        loss = lambda x: LinearCrossEntropy()(x, *args[1:], **options, platform=platform)
        return jax.grad(loss)(x)

    def summed(platform: str) -> Any:
        step = lambda total, x: (total + gradient(x, platform), None)
        scanned = jax.lax.scan(step, jnp.zeros_like(args[0]), xs)[0]
        return jax.vmap(lambda x: gradient(x, platform))(xs), scanned

    with jax.default_matmul_precision("highest"):
        got, want = (jax.jit(summed, static_argnums=0)(platform) for platform in ("triton", "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
