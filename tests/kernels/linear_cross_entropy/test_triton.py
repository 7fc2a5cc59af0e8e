"""Conformance of the Triton backend of the cross-entropy, by Triton's interpreter; hostile cases, and its params."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilewright

pytest.importorskip("triton")

from tests.kernels.conformance import check_candidates
from tests.kernels.conftest import A100, H100
from tests.kernels.linear_cross_entropy.conformance import (
    CASES,
    KernelLossConformance,
    call_of,
    check,
    directly,
    expected,
)
from tests.kernels.linear_cross_entropy.oracle import cross_entropy
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import aligned, even_blocks
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossResults
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.triton.backend import MAX_VOCAB, TritonLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.triton.params import (
    WORKSPACE,
    TritonLossBackwardParams,
    TritonLossParams,
    block_sizes,
)
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device

pytestmark = pytest.mark.usefixtures("unoptimised", "one_device")

BACKEND = TritonLinearCrossEntropy()
TILE = TritonTile(16, 128, 16, 1, 1)
OTHER = TritonTile(32, 64, 16, 1, 1)


def config(tokens: int | None, vocab: int, *, keep: bool, recompute: bool) -> PerDirection:
    """Tiles that are smaller than the blocks, so that there are several along each dimension."""
    return PerDirection(
        Choice("triton", TritonLossParams(tokens, vocab, TILE, OTHER, keep)),
        Choice("triton", TritonLossBackwardParams(tokens, vocab, OTHER, recompute)),
    )


FORMS = {
    "kept": config(24, 1 << 20, keep=True, recompute=False),
    "kept, in blocks": config(24, 128, keep=True, recompute=False),
    "recomputed forward": config(24, 128, keep=False, recompute=False),
    "recomputed": config(24, 128, keep=False, recompute=True),
    "whole": config(None, 160, keep=False, recompute=True),
}


def kept_is_not_served(inputs: LossInputs) -> bool:
    cfg = FORMS["kept"].forward.params
    return inputs.keeps_gradients and bool(BACKEND.config_reasons(inputs, H100, "forward", cfg))


class TestTriton(KernelLossConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)
    forms = FORMS
    ruled_out = ("kept", "recomputed")
    edges = ("kept", "whole")
    edge_case = "float32"

    def configs(self, inputs: LossInputs) -> list[Any]:
        if not inputs.keeps_gradients:
            names = ["recomputed"]
        elif kept_is_not_served(inputs):
            names = ["recomputed forward", "whole"]
        else:
            names = ["kept", "kept, in blocks", "whole"]
        return [FORMS[name] for name in names]


run = TestTriton().run


def arrays_of(name: str = "float32", **fields: Any) -> tuple[Any, dict[str, Any]]:
    return call_of(dataclasses.replace(CASES[name], **fields))


@pytest.mark.parametrize("form", FORMS)
def test_ignored_tokens_reach_nothing(form: str):
    """Neither their NaN nor that of their weights."""
    args, options = arrays_of("token_weights", ignored=0.4)
    skipped = args[2] == -100
    want = run(args, options, np.float32(2), None, FORMS[form])
    x = jnp.where(skipped[:, None], jnp.nan, args[0])
    weights = jnp.where(skipped, jnp.inf, options["token_weights"])
    got = run((x, *args[1:]), options | {"token_weights": weights}, np.float32(2), None, FORMS[form])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(got["x"][skipped])


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_label_that_is_nearly_certain(cap: float | None):
    """Its gradient is a small difference of the probability and 1, of which bfloat16 shares have no digit."""
    vocab, d = 150, 150
    x = 12 * jnp.eye(20, d, dtype=jnp.bfloat16)
    weight = jnp.eye(d, vocab, dtype=jnp.bfloat16)
    labels = jnp.arange(20, dtype=jnp.int32)
    options = {"reduction": "sum", "return_lse": False, "logits_soft_cap": cap}
    want = cross_entropy(x, weight, labels, **options)
    got = run((x, weight, labels), options, np.float32(1), None, FORMS["kept"])
    diagonal = np.arange(20), np.arange(20)
    np.testing.assert_allclose(got["weight"].astype(np.float32)[diagonal], want["weight"][diagonal], rtol=0.01)
    np.testing.assert_allclose(got["x"].astype(np.float32)[diagonal], want["x"][diagonal], rtol=0.01)


@pytest.mark.parametrize("form", ["kept", "recomputed"])
def test_small_probabilities_of_float16(form: str):
    """Below its least number: a scaled loss makes gradients of them that float16 has."""
    args, options = arrays_of("float16", ignored=0.0, tokens=20, reduction="sum", bias=True)
    rare = np.arange(40)
    options["bias"] = jnp.asarray(options["bias"]).at[rare].set(-20.0)
    labels = jnp.maximum(args[2], 40)
    got = run((*args[:2], labels), options, np.float32(2.0**15), None, FORMS[form])
    want = expected((*args[:2], labels), options, 2.0**15, None)
    found = got["bias"].astype(np.float32)[rare]
    assert np.all(want["bias"][rare] / 2**15 < 6e-8)
    np.testing.assert_allclose(found, want["bias"][rare], rtol=3e-3, atol=1e-7)


def test_a_soft_cap_of_small_logits():
    """The logit of the label, by itself, of a token whose logits are small against the cap."""
    args, _ = arrays_of(tokens=20, scale=1e-3)
    inputs = LinearCrossEntropy().prepare(*args, axis_name="vocab", logits_soft_cap=30.0)
    with interpret_triton():
        params = FORMS["recomputed"].forward.params
        got = jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params))(inputs))
    logits = np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64)
    own = 30 * np.tanh(logits[np.arange(20), args[2]] / 30)
    np.testing.assert_allclose(got.statistics[1], own, rtol=1e-3, atol=1e-8)


def test_vmap_is_one_launch_after_another():
    args, options = arrays_of(tokens=20, reduction="sum", dtype="bfloat16")
    xs = jnp.stack([args[0], -args[0]])
    labels = jnp.stack([args[2], args[2].at[:5].set(-100)])
    with interpret_triton():
        call = lambda x, labels: directly(BACKEND, (x, args[1], labels), options, np.float32(1), None, FORMS["kept"])
        got = jax.block_until_ready(jax.jit(jax.vmap(call))(xs, labels))
    for i in range(2):
        want = expected((xs[i], args[1], labels[i]), options, 1.0, None)
        check({name: each[i] for name, each in got.items()}, want, str(i))


def test_a_call_without_gradients_keeps_nothing():
    args, options = arrays_of(dtype="bfloat16")
    kernel = LinearCrossEntropy()
    inputs = kernel.prepare(*args, **options)
    for method, keeps in ((kernel.run, False), (kernel.forward_with_residuals, True)):
        with interpret_triton(), recorded_launches() as launches:
            jax.eval_shape(lambda inputs, method=method: method(inputs, cfg=FORMS["kept"].forward), inputs)
        assert [dict(launch.constants)["KEEP"] for launch in launches] == [keeps]
        assert [launch.outputs[3].size > 0 for launch in launches] == [keeps]


def structs_of(**fields: Any) -> LossInputs:
    args, options = arrays_of(**fields)
    return LinearCrossEntropy().prepare(*args, **options).structs


def resized(inputs: LossInputs, **sizes: int) -> LossInputs:
    """The structs of a call with other numbers of tokens or classes."""
    struct: Any = jax.ShapeDtypeStruct
    tokens, vocab = (sizes.get(name, getattr(inputs, name)) for name in ("tokens", "vocab"))
    x, weight = struct((tokens, inputs.d), inputs.x.dtype), struct((inputs.d, vocab), inputs.weight.dtype)
    return inputs.replace(x=x, weight=weight, labels=struct((tokens,), jnp.int32))


def test_what_it_declines():
    def reasons(device: Device = A100, **fields: Any) -> str:
        return "; ".join(BACKEND.not_supported_reasons(structs_of(**fields), device, "forward"))

    for options in ({}, {"dtype": "bfloat16", "logits_soft_cap": 3.0, "label_smoothing": 0.1}, {"reduction": "none"}):
        assert not reasons(**options)
    assert "must have one dtype, got bfloat16 and float32" in reasons(dtype="bfloat16", weight_dtype="float32")
    assert "x must be one of" in reasons(dtype="float8_e4m3fn")
    assert "needs a CUDA GPU" in reasons(Device("cpu", "cpu"))
    inputs = structs_of()
    large = resized(inputs, vocab=MAX_VOCAB + 1)
    assert "count up to" in "; ".join(BACKEND.not_supported_reasons(large, A100, "forward"))
    distributed = inputs.replace(is_distributed=True)
    assert "would gather them" in "; ".join(BACKEND.not_supported_reasons(distributed, A100, "forward"))


@pytest.mark.parametrize("also", [{"label_smoothing": 0.1}, {"gradient_epsilon": 1e-3}])
def test_what_shares_do_not_give(also: dict[str, Any]):
    """The heuristic and the candidates recompute; a config that keeps shares says why it cannot."""
    inputs = structs_of(logits_soft_cap=3.0, **also)
    for params in BACKEND.candidates(inputs, H100, "forward"):
        assert isinstance(params, TritonLossParams)
        assert not params.keep
        assert not BACKEND.config_reasons(inputs, H100, "forward", params)
        kept = dataclasses.replace(params, keep=True)
        assert next(iter(also)) in "; ".join(BACKEND.config_reasons(inputs, H100, "forward", kept))
    for served in (structs_of(**also), structs_of(logits_soft_cap=3.0)):
        params = BACKEND.heuristic(served, H100, "forward")
        assert isinstance(params, TritonLossParams)
        assert params.keep
        assert not BACKEND.config_reasons(served, H100, "forward", params)


@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {}, {"reduction": "none"}, {"d": 30, "dtype": "float16"}])
def test_params(device: Device, fields: dict[str, Any]):
    inputs = structs_of(**fields)
    forward, backward = (listed[0] for listed in check_candidates(BACKEND, inputs, device).values())
    assert isinstance(forward, TritonLossParams)
    assert isinstance(backward, TritonLossBackwardParams)
    assert forward.keep == inputs.keeps_gradients == (not backward.recompute)
    with pytest.raises(ValueError, match="needs a positive integer, got block_vocab=0"):
        dataclasses.replace(forward, block_vocab=0)
    with pytest.raises(TypeError, match="needs a bool, got keep=1"):
        dataclasses.replace(forward, keep=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a bool, got recompute=None"):
        dataclasses.replace(backward, recompute=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [1, 300, 32768, 50257, 128256, 131072, 1 << 20])
def test_blocks_fit_into_the_workspace(vocab: int):
    inputs = resized(structs_of(dtype="bfloat16"), tokens=20000, vocab=vocab)
    tokens, classes = block_sizes(inputs, keep=True)
    assert classes == aligned(vocab)
    assert tokens == 128 or 2 * tokens * vocab <= WORKSPACE
    tokens, classes = block_sizes(inputs, keep=False)
    assert tokens >= 1024
    assert 1 <= classes <= aligned(vocab)
    assert 2 * tokens * classes <= 1.01 * WORKSPACE
    count = -(-vocab // classes)
    assert count * classes - vocab < 256 * count
    assert even_blocks(vocab, 10**9, 256) == vocab
    assert even_blocks(1000, 256, 256) == 256


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_types_in_shard_map(form: str, check_vma: bool):
    """What a launch returns can be carried by the loops, and is typed as different on each device."""
    args, options = arrays_of(tokens=20, dtype="bfloat16", label_smoothing=0.1)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    kernel, cfg = LinearCrossEntropy(), FORMS[form]

    def call(*arrays: Any) -> Any:
        inputs = kernel.prepare(*arrays, **options)
        results = BACKEND.forward(inputs, cfg.forward.params)
        gradients = BACKEND.backward(inputs, results, LossResults(total=results.total), cfg.backward.params)
        return [x[None] for x in (results.statistics[0], results.statistics[2], gradients["x"], gradients["weight"])]

    def traced(out: Any) -> Any:
        specs = (P("tokens"), P(), P("tokens"))
        return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma), *args)

    assert [x.shape for x in traced(P("tokens"))] == [(2, 10), (2, 10), (2, 10, 24), (2, 24, 301)]
    if check_vma:
        with pytest.raises(ValueError, match="out_specs"):
            traced(P())


def test_types_with_a_mesh_in_context():
    args, options = arrays_of(tokens=20, label_smoothing=0.1)
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    with tilewright.target_device(H100.name):
        for form in FORMS.values():
            call = lambda *arrays, form=form: directly(BACKEND, arrays, options, np.float32(1), None, form)
            assert jax.eval_shape(call, *given)["weight"].shape == args[1].shape
