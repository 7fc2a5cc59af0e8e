"""FlashAttention-4 as far as a CPU can prove it: declined, mapped, and run as its kernels would."""

import dataclasses
import importlib.metadata
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import A100, H100
from tests.kernels.flash_attention.conformance import (
    ConformanceCase,
    check_kinds,
    cotangents,
    describe,
    inputs_of,
    judge,
    oracles,
)
from tests.kernels.flash_attention.cudnn_cases import case_of, check_residuals, inputs_for
from tests.kernels.flash_attention.fa4_cases import BACKEND, CASES, PAIRWISE
from tests.kernels.flash_attention.fa4_emulation import KERNELS
from tilewright.errors import UnsupportedError
from tilewright.kernels.biases import AlibiBias
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask, computed_dims
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.masks import CausalMask, LengthMask, WindowMask
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.serialize import from_json, to_json

FORWARD, BACKWARD = Fa4ForwardParams(), Fa4BackwardParams()
BOTH = PerDirection(Choice("fa4", FORWARD), Choice("fa4", BACKWARD))
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages count as installed."""
    monkeypatch.setattr(cute, "package_reasons", list)


@pytest.fixture
def emulated(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "kernels", lambda: KERNELS)


def call_of(
    dtype: Any = jnp.bfloat16, head_dim: int = 64, q_length: int = 128, kv_length: int = 128, **kwargs: Any
) -> AttentionInputs:
    value_dim, kv_heads = kwargs.pop("value_dim", head_dim), kwargs.pop("kv_heads", 2)
    shapes = [(2, q_length, 4, head_dim), (2, kv_length, kv_heads, head_dim), (2, kv_length, kv_heads, value_dim)]
    return FlashAttention().prepare(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), **kwargs)


def reasons(direction: Direction = "forward", device: Device = H100, **kwargs: Any) -> list[str]:
    return BACKEND.not_supported_reasons(call_of(**kwargs), device, direction)


LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)
IDS = jax.ShapeDtypeStruct((2, 128), jnp.int32)
BIAS = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": jnp.float16, "causal": True, "softmax_scale": -0.3},
        {"head_dim": 100, "value_dim": 20, "return_lse": True},
        {"head_dim": 256, "return_lse": True},
        {"q_length": 7, "kv_length": 1000, "causal": True},
        {"kv_length": 1000, "causal": True, "causal_alignment": "bottom_right"},
        {"sliding_window": (16, 3), "logits_soft_cap": 30.0},
        {"sliding_window": (16, 3), "query_seq_lengths": LENGTHS},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    ],
    ids=str,
)
def test_what_it_serves(options: dict[str, Any], direction: Direction):
    assert reasons(direction, **options) == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("computes in float16 or bfloat16, got inputs.dtype=dtype('float32')", {"dtype": jnp.float32}),
        ("does not serve bias", {"bias": BIAS}),
        ("does not serve position_bias", {"bias": AlibiBias(jax.ShapeDtypeStruct((4,), jnp.float32))}),
        ("does not serve softmax_aux", {"softmax_aux": jax.ShapeDtypeStruct((4,), jnp.float32)}),
        ("does not serve dropout_prob=0.1", {"dropout_prob": 0.1, "dropout_seed": 0}),
        ("a scale of 0", {"softmax_scale": 0.0}),
        ("up to 256 elements, got inputs.head_dim=257", {"head_dim": 257}),
        ("has no segments", {"q_segment_ids": IDS, "kv_segment_ids": IDS}),
        ("takes a query's index for its position", {"mask": CausalMask(0, IDS)}),
        ("got a mask that is none of them", {"mask": jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)}),
        ("got a mask that is none of them", {"mask": CausalMask() | WindowMask(3, 3)}),
        ("none beside lengths of keys", {"causal": True, "key_value_seq_lengths": LENGTHS}),
    ],
)
def test_what_it_declines(said: str, options: dict[str, Any]):
    assert any(said in why for why in reasons(**options)), reasons(**options)


def test_devices(installed: None):
    for device in (A100, Device("cpu", "cpu"), Device("gpu", "NVIDIA B200", (10, 0), 148)):
        assert reasons(device=device)[0].startswith("is for GPUs of compute capability 9.x alone, got")


def test_packages(monkeypatch: pytest.MonkeyPatch):
    versions = {"flash-attn-4": "4.0.0b9", "quack-kernels": "0.10.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(cute, "missing_packages", cute.missing_packages.__wrapped__)
    least = cute.MIN_VERSIONS
    absent = f"nvidia-cutlass-dsl {least['nvidia-cutlass-dsl']} or later (extra fa4), which is not installed"
    assert reasons() == [
        f"needs flash-attn-4 {least['flash-attn-4']} or later, got 4.0.0b9",
        f"needs the package {absent}",
        "needs the package torch (extra fa4), which is not installed",
    ]
    versions |= {"flash-attn-4": "4.0.0", "nvidia-cutlass-dsl": "4.10.0"}
    assert reasons() == ["needs the package torch (extra fa4), which is not installed"]
    versions["torch"] = "2.8.0+cu128"
    assert reasons() == []


def test_what_cannot_be_loaded_is_a_reason_from_then_on(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> Any:
        raise OSError(f"no libcuda for {name}")

    monkeypatch.setattr(cute, "missing_packages", tuple)
    monkeypatch.setattr(cute, "_LOAD_ERRORS", [])
    cute._loaded.cache_clear()
    monkeypatch.setattr(importlib, "import_module", broken)
    assert reasons() == []  # nothing was loaded to find that out
    for _ in range(2):
        with pytest.raises(ImportError, match=r"FlashAttention-4 cannot be loaded: OSError: no libcuda for cutlass"):
            cute.kernels()
    assert reasons() == ["FlashAttention-4 cannot be loaded: OSError: no libcuda for cutlass"]


def test_versions_are_ordered():
    ordered = ["4.0.0.dev1", "4.0.0a1", "4.0.0b9", "4.0.0b36", "4.0.0rc1", "4.0.0", "4.0.1", "4.7", "4.10.0+cu13", "5"]
    keys = [cute._version_key(each) for each in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert cute._version_key("4.7") == cute._version_key("4.7.0")


@pytest.mark.skipif(not cute.missing_packages(), reason="the packages are there")
def test_without_packages_the_call_goes_elsewhere(on_an_h100: Device):
    modules = set(sys.modules)
    assert "which is not installed" in reasons()[0]
    x = [jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")] * 3
    traced = jax.jit(lambda *a: flash_attention(*a, cfg=BOTH)).trace(*x)
    with pytest.raises(UnsupportedError, match="needs the package flash-attn-4"):
        traced.lower(lowering_platforms=("cuda",))
    assert not {name for name in set(sys.modules) - modules if name.startswith(("torch", "cutlass", "flash_attn"))}


def test_masks_in_its_terms():
    def terms(mask: Any, q_length: int = 40, kv_length: int = 60) -> tuple[int | None, int | None]:
        found = Fa4Mask.of(mask, q_length, kv_length)
        assert found.reasons() == []
        return found.left, found.right

    assert terms(None) == (None, None)
    assert terms(CausalMask()) == (None, -20)
    assert terms(CausalMask(20)) == (None, 0)
    assert terms(CausalMask(59)) == (None, None)
    assert terms(WindowMask(3, 4)) == (23, -16)
    assert terms(WindowMask(39, 0)) == (None, -20)
    assert terms(WindowMask(3, 0), 60, 40) == (-17, 20)
    assert terms(CausalMask(-(1 << 30))) == (None, -60)


@pytest.mark.parametrize(
    ("dims", "kv_heads", "forward", "backward"),
    [
        ((64, 64), 2, (64, 64), (64, 64)),
        ((20, 50), 4, (56, 56), (64, 64)),
        ((80, 80), 2, (80, 80), (96, 96)),
        ((192, 128), 4, (192, 128), (192, 128)),
        ((136, 20), 4, (136, 128), (192, 128)),
        ((192, 128), 2, (192, 128), (192, 192)),
        ((200, 200), 2, (200, 200), (256, 256)),
    ],
)
def test_head_dims(dims: tuple[int, int], kv_heads: int, forward: tuple[int, int], backward: tuple[int, int]):
    inputs = call_of(head_dim=dims[0], value_dim=dims[1], kv_heads=kv_heads)
    assert computed_dims(inputs, "forward") == forward
    assert computed_dims(inputs, "backward") == backward


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sliding_window": (9, 9)}, {"kv_heads": 4}], ids=str)
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 128, 136, 192, 256])
def test_configs(dim: int, options: dict[str, Any], direction: Direction):
    inputs = call_of(head_dim=dim, **options)
    first = BACKEND.heuristic(inputs, H100, direction)
    assert None not in dataclasses.astuple(first)
    candidates = BACKEND.candidates(inputs, H100, direction)
    assert candidates[0] == first
    assert len(set(candidates)) == len(candidates)
    for params in candidates:
        assert BACKEND.config_reasons(inputs, H100, direction, params) == []
        choice = Choice("fa4", params)
        assert from_json(to_json(choice), Choice) == choice
    plain = FORWARD if direction == "forward" else BACKWARD
    assert BACKEND.config_reasons(inputs, H100, direction, plain) == []
    assert plain.completed(first) == first


def test_configs_that_cannot_be():
    inputs = call_of(head_dim=128)
    for said, params in (
        ("64, 128 or 192 queries", Fa4ForwardParams(block_q=96)),
        ("a multiple of 16", Fa4ForwardParams(block_k=40)),
        ("bytes of shared memory", Fa4ForwardParams(num_stages=5)),
        ("registers", Fa4ForwardParams(block_q=192, block_k=128)),
    ):
        assert said in BACKEND.config_reasons(inputs, H100, "forward", params)[0]
    for said, params in (
        ("as many as of queries", Fa4BackwardParams(query_stages=3)),
        ("2 warpgroups compute", Fa4BackwardParams(groups=3)),
        ("divided evenly", Fa4BackwardParams(d_key_groups_k=3)),
        ("multiples of 16", Fa4BackwardParams(block_q=72)),
        ("bytes of shared memory", Fa4BackwardParams(block_q=128)),
    ):
        assert any(said in why for why in BACKEND.config_reasons(inputs, H100, "backward", params)), said
    with pytest.raises(ValueError, match="Fa4ForwardParams needs a positive integer, got block_q=0"):
        Fa4ForwardParams(block_q=0)
    with pytest.raises(ValueError, match="got groups=True"):
        Fa4BackwardParams(groups=True)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", CASES)
def test_residuals_are_those_of_every_backend(name: str):
    case = CASES[name]
    inputs = inputs_for(case)
    structs = inputs.structs.replace(return_lse=True)
    for direction in DIRECTIONS:
        assert BACKEND.not_supported_reasons(structs, H100, direction) == []
    check_residuals(inputs, H100, [XlaFlashAttention()], BACKEND, case.tolerance_factor)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("conformance_case", PAIRWISE, ids=describe)
def test_options_together(conformance_case: ConformanceCase):
    inputs = inputs_for(conformance_case.case)
    check_residuals(inputs, H100, [], BACKEND, conformance_case.case.tolerance_factor)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_lengths_beyond_and_below_the_arrays(kv_heads: int):
    inputs = inputs_of(case_of(kv_heads=kv_heads))
    lengths = LengthMask(jnp.array([50, 17]), jnp.array([0, 99])) & LengthMask(jnp.array([33]), None)
    inputs = inputs.replace(mask=lengths)
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = BACKEND.forward(inputs, FORWARD)
    assert np.all(np.isneginf(np.asarray(results[1])[0]))
    gradients = BACKEND.backward(inputs, results, (d_out, d_lse), BACKWARD)
    judge({"out": results[0], "lse": results[1], **gradients}, exact.arrays, low.arrays, 2.0)
    assert not np.any(np.asarray(gradients["value"][0]))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("offset", [-(1 << 30), -45, 45, 1 << 30])
def test_windows_far_away(offset: int):
    inputs = inputs_of(case_of(kv_length=70))
    inputs = inputs.replace(mask=CausalMask(offset) & WindowMask(50, 3, offset))
    check_residuals(inputs, H100, [], BACKEND)


@pytest.mark.usefixtures("emulated")
def test_without_d_lse():
    inputs = inputs_of(case_of(causal=True))
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, jnp.zeros_like(d_lse))
    gradients = BACKEND.backward(inputs, BACKEND.forward(inputs, FORWARD), (d_out, None), BACKWARD)
    judge(gradients, exact.gradients, low.gradients, 2.0)


@pytest.mark.usefixtures("on_an_h100", "emulated")
def test_mapped_calls_give_what_single_ones_do():
    """Lengths and queries are mapped, keys shared."""
    (query, key, value), _ = case_of(batch=6).arguments()
    query, key, value = jnp.stack([query[:2], query[2:4], query[4:]]), key[:2], value[:2]
    lengths = jnp.array([[40, 3], [0, 17], [39, 40]])

    def loss(query: Any, key: Any, lengths: Any) -> Any:
        options = {"key_value_seq_lengths": lengths, "return_lse": True, "cfg": BOTH}
        out, lse = flash_attention(query, key, value, **options)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isinf(lse), 0.0, lse).sum()

    one = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    mapped = jax.jit(jax.vmap(one, in_axes=(0, None, 0)))(query, key, lengths)
    for i in range(3):
        for want, got in zip(*(jax.tree.leaves(x) for x in (one(query[i], key, lengths[i]), mapped)), strict=True):
            want, got = np.asarray(want, np.float32), np.asarray(got[i], np.float32)
            assert np.abs(want - got).max() <= 2.0**-7 * np.abs(want).max()


@pytest.mark.usefixtures("on_an_h100", "emulated")
@pytest.mark.parametrize("name", CASES)
def test_shapes_and_dtypes_are_those_of_the_contract(name: str):
    inputs = inputs_for(CASES[name])
    out, lse = jax.eval_shape(lambda inputs: BACKEND.forward(inputs, FORWARD), inputs)
    batch, length, heads, _ = inputs.query.shape
    assert (out.shape, out.dtype) == ((batch, length, heads, inputs.value.shape[3]), inputs.query.dtype)
    assert (lse.shape, lse.dtype) == ((batch, heads, length), jnp.float32)
    run = lambda inputs, *rest: BACKEND.backward(inputs, *rest, BACKWARD)
    check_kinds(jax.eval_shape(run, inputs, (out, lse), cotangents(inputs)), inputs)


def test_nothing_to_compute():
    empty = [jnp.zeros((2, 8, 4, 16), jnp.bfloat16), *[jnp.zeros((2, 0, 2, 16), jnp.bfloat16)] * 2]
    inputs = FlashAttention().prepare(*empty)
    out, lse = BACKEND.forward(inputs, FORWARD)
    assert not np.any(np.asarray(out, np.float32))
    assert np.all(np.isneginf(np.asarray(lse)))
    gradients = BACKEND.backward(inputs, (out, lse), (out, lse * 0), BACKWARD)
    assert gradients["key"].shape == (2, 0, 2, 16)
