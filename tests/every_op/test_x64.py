"""``jax_enable_x64`` changes no program of any op: neither what is chosen, nor its dtypes, nor its results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.every_op.matrix import call_of, choices, every_op
from tilewright.kernels.op.choice import PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.lowering.labels import find_labels_in_lowered, is_call_label, parse_label

DTYPES = ["bfloat16", "float32"]
WIDE = re.compile(r"tensor<(?:\d+x)*[if]64>")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", every_op())
def test_results_are_those_without(op, dtype):
    function, arrays = call_of(op, dtype).training()
    wanted = jax.jit(function)(*arrays)
    with jax.enable_x64(True):
        got = jax.jit(function)(*arrays)
        eager = function(*arrays)
    for each in (got, eager):
        assert [x.dtype for x in jax.tree.leaves(each)] == [x.dtype for x in jax.tree.leaves(wanted)]
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("op", every_op())
def test_integers_of_64_bits_are_taken(op):
    function, arrays = call_of(op).on_arrays()
    wanted = function(*arrays)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.int64) if x.dtype == jnp.int32 else x for x in arrays]
        got = jax.jit(function)(*wide)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def lowered_text(function, arrays):
    """What a call is lowered to on the target, without what differs by nature: locations and labels."""
    lowered = jax.jit(function).lower(*[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    labels = [parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)]
    return lowered.as_text(), [(label.direction, label.config.backend) for label in labels]


def every_implementation_lowers(call):
    """Lowers a call by each implementation that can serve it on the device in force; returns their names."""
    directions = ("forward", "backward") if call.differentiable else ("forward",)
    found = {direction: {c.backend: c for c in choices(call, direction)} for direction in directions}
    for name, choice in found["forward"].items():
        cfg = choice
        if call.differentiable:
            cfg = PerDirection(choice, found["backward"].get(name))
        function, arrays = call.training(cfg=cfg)
        _, ran = lowered_text(function, arrays)
        assert ("forward", name) in ran
        if name in found.get("backward", {}):
            assert ("backward", name) in ran
    return list(found["forward"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", every_op())
def test_on_an_h100_the_same_program_is_lowered(op, dtype, without_builds):
    function, arrays = call_of(op, dtype).training()
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        text, ran = lowered_text(function, arrays)
        with jax.enable_x64(True):
            wide_text, wide_ran = lowered_text(function, arrays)
    assert ran
    assert wide_ran == ran
    assert len(WIDE.findall(wide_text)) == len(WIDE.findall(text))
    if op == "flash_attention" and dtype == "bfloat16":
        assert ran == [("forward", "hopper"), ("backward", "hopper")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", every_op())
def test_on_an_h100_every_implementation_lowers(op, dtype, without_builds):
    call = call_of(op, dtype)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"), jax.enable_x64(True):
        lowered = every_implementation_lowers(call)
    for_gpus = {"hopper", "triton"} & {each.name for each in call.kernel.backends.usable}
    alone = not for_gpus or (
        op in ("mla_decode", "mla_ragged_page_attention", "matmul", "weight_only_matmul") and dtype == "float32"
    )
    assert len(lowered) >= (1 if alone else 2)


def test_arrays_that_are_float64_by_default_do_not_keep_a_call_from_the_gpu():
    with jax.enable_x64(True):
        q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
        bias = jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.float64)
        sinks = jax.ShapeDtypeStruct((4,), jnp.float64)

        def step(q, bias, sinks):
            out = flash_attention(q, q, q, bias, softmax_aux=sinks, softmax_scale=np.float64(0.1))
            return out.astype(jnp.float32).sum()

        with tilewright.target_device("NVIDIA H100 80GB HBM3"):
            lowered = jax.jit(jax.grad(step, argnums=(0, 1, 2))).lower(q, bias, sinks)
        labels = [parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)]
        assert [label.config.backend for label in labels] == ["hopper", "hopper"]
        arrays = [jnp.ones(x.shape, x.dtype) for x in (q, bias, sinks)]
        gradients = jax.grad(step, argnums=(0, 1, 2))(*arrays)
        assert [x.dtype for x in gradients] == [jnp.bfloat16, jnp.float64, jnp.float64]


def test_float64_is_still_computed_in_float64():
    with jax.enable_x64(True):
        q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8), jnp.float64)
        got = flash_attention(q, q, q)
        x = np.asarray(q)[0].transpose(1, 0, 2)
        weights = np.exp(x @ x.transpose(0, 2, 1) / np.sqrt(8))
        wanted = (weights / weights.sum(-1, keepdims=True)) @ x
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got[0], wanted.transpose(1, 0, 2), rtol=1e-12)


def test_lengths_beyond_32_bits_are_no_short_lengths():
    with jax.enable_x64(True):
        q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8), jnp.float32)
        wanted = flash_attention(q, q, q)
        lengths = jnp.array([2**32 + 3])
        attended = jax.jit(lambda lengths: flash_attention(q, q, q, key_value_seq_lengths=lengths))
        np.testing.assert_array_equal(attended(lengths), wanted)
        ids = jnp.full((1, 16), 2**40, jnp.int64).at[:, 8:].add(1)
        apart = flash_attention(q, q, q, q_segment_ids=ids, kv_segment_ids=ids)
        np.testing.assert_allclose(apart[:, :8], flash_attention(q[:, :8], q[:, :8], q[:, :8]), atol=1e-6)
