"""Attention in Triton as far as no kernel has to run: reasons, configs, what is launched."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.kernels.conftest import A100, H100
from tests.kernels.flash_attention.conformance import inputs_of
from tilewright.errors import UnsupportedError
from tilewright.kernels.biases import AlibiBias
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.flash_attention.triton.params import Tiles, TritonBackwardParams, TritonForwardParams
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.triton import recorded_launches, requirements
from tilewright.modules import flash_attention
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.serialize import from_json, to_json

BACKEND = TritonFlashAttention()
ADA = Device("gpu", "NVIDIA GeForce RTX 4090", (8, 9), 128)
B200 = find_device("NVIDIA B200").device
THOR = find_device("NVIDIA Thor").device
RTX_5090 = find_device("NVIDIA GeForce RTX 5090").device
GB10 = find_device("NVIDIA GB10").device


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons are those of a machine with Triton."""
    monkeypatch.setattr(requirements, "package_reasons", list)


def call_of(dtype: Any = jnp.bfloat16, head_dim: int = 64, length: int = 128, **kwargs: Any) -> AttentionInputs:
    shape = (2, length, 4, head_dim)
    return FlashAttention().prepare(*[jax.ShapeDtypeStruct(shape, dtype)] * 3, **kwargs)


def reasons(device: Device = H100, direction: Direction = "forward", **kwargs: Any) -> list[str]:
    return BACKEND.not_supported_reasons(call_of(**kwargs), device, direction)


@pytest.mark.parametrize("device", [A100, ADA, H100, B200, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_it_serves(device: Device, direction: Direction):
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        assert reasons(device, direction, dtype=dtype, head_dim=256, logits_soft_cap=3.0, causal=True) == []


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("head dims go to 256, got head_dim=257", {"head_dim": 257}),
        ("float32, float16 or bfloat16, got dtype=float64", {"dtype": jnp.float64}),
        ("counted by 32 bits", {"length": 1 << 23}),
        ("does not serve position_bias", {"bias": AlibiBias(jax.ShapeDtypeStruct((4,), jnp.float32))}),
    ],
)
def test_what_it_declines(said: str, options: dict[str, Any]):
    assert any(said in why for why in reasons(**options)), reasons(**options)


def test_where_it_does_not_run():
    assert "compute capability 8.0 or up" in reasons(Device("gpu", "Tesla T4", (7, 5), 40))[0]
    query = jnp.ones((1, 16, 2, 16))
    with pytest.raises(UnsupportedError, match=r"triton: needs a CUDA GPU of compute capability 8\.0 or up, got cpu"):
        flash_attention(query, query, query, platform="triton")


@pytest.mark.parametrize("device", [A100, ADA, H100, B200, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_candidates_fit(device: Device, dtype: Any, head_dim: int):
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        for options in ({}, {"bias": jax.ShapeDtypeStruct((128, 128), jnp.float32)}):
            inputs = call_of(dtype, head_dim, **options)
            candidates = BACKEND.candidates(inputs, device, direction)
            assert candidates[0] == BACKEND.heuristic(inputs, device, direction)
            assert len(set(candidates)) == len(candidates) <= 8
            repeats = [params.deterministic for params in candidates if isinstance(params, TritonBackwardParams)]
            assert direction == "forward" or any(repeats)
            assert not any(BACKEND.config_reasons(inputs, device, direction, params) for params in candidates)


@pytest.mark.parametrize("device", [RTX_5090, GB10], ids=lambda device: device.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_capability_12_takes_the_tiles_of_ada(device: Device, direction: Direction, head_dim: int):
    """It has Ada's shared memory: tiles of Hopper's table that fit are few, and spilled up to 19 kB a thread."""
    for options in ({}, {"bias": jax.ShapeDtypeStruct((128, 128), jnp.float32)}, {"logits_soft_cap": 3.0}):
        inputs = call_of(head_dim=head_dim, **options)
        assert BACKEND.candidates(inputs, device, direction) == BACKEND.candidates(inputs, ADA, direction)


@pytest.mark.parametrize("device", [B200, THOR], ids=lambda device: device.name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tensor_memory_takes_128_queries(device: Device, head_dim: int):
    for causal in (False, True):
        params = BACKEND.heuristic(call_of(head_dim=head_dim, causal=causal), device, "forward")
        assert isinstance(params, TritonForwardParams)
        assert (params.tiles.block_q, params.tiles.num_warps, params.tiles.tma) == (128, 8, True)


def test_preferred_to_xla_where_its_matmuls_are_tcgen05s():
    """Without cuDNN and without a build; elsewhere XLA comes first until something is measured."""
    query = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    single = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    names = {"NVIDIA B200": "triton", "NVIDIA GB300": "triton", "NVIDIA A100-SXM4-80GB": "xla"}
    for name, first in names.items():
        with tilewright.target_device(name):
            for direction in ("forward", "backward"):
                assert _first(query, direction) == first
            assert _first(single, "forward") == "xla"


def _first(query: jax.ShapeDtypeStruct, direction: Direction) -> str:
    """The first of both in the order of preference; others depend on what is installed and built."""
    inv = dataclasses.replace(prepared(FlashAttention(), (query,) * 3, {}, concrete=False)[0], direction=direction)
    names = [choice.backend for choice in FlashAttention()._by_preference(inv)]
    return next(name for name in names if name in ("triton", "xla"))


def test_configs():
    big = TritonForwardParams(Tiles(256, 256, 8, 4))
    (why,) = BACKEND.config_reasons(call_of(head_dim=256), H100, "forward", big)
    assert "bytes of shared memory" in why
    with pytest.raises(ValueError, match="deterministic must be true or false"):
        TritonBackwardParams(deterministic=1)  # type: ignore[arg-type]
    for params in (big, TritonBackwardParams(Tiles(16, 32, 2, 1), Tiles(64, 64, tma=True), False)):
        assert from_json(to_json(params), type(params)) == params
        choice = Choice("triton", params)
        assert from_json(to_json(choice), Choice) == choice


@pytest.mark.parametrize(
    "changes", [{"block_q": 8}, {"block_k": 48}, {"num_warps": 3}, {"num_stages": 0}, {"block_q": True}, {"tma": 1}]
)
def test_tiles_are_checked(changes: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(Tiles(64, 64), **changes)


def test_what_the_backward_pass_launches(on_an_h100: Device):
    """With dQ on the way there is no kernel for it, and what is added to has rows for TMA."""
    pytest.importorskip("triton")
    inputs = inputs_of(AttentionCase("", 2, 201, 330, heads=6, kv_heads=2, head_dim=40, dtype="bfloat16", causal=True))
    out, lse = jax.ShapeDtypeStruct((2, 201, 6, 40), jnp.bfloat16), jax.ShapeDtypeStruct((2, 6, 201), jnp.float32)
    for deterministic in (True, False):
        params = TritonBackwardParams(Tiles(64, 64), deterministic=deterministic)
        with recorded_launches() as launches:
            jax.eval_shape(functools.partial(BACKEND.backward, params=params), inputs, (out, lse), (out, lse))
        names = [each.name for each in launches]
        assert names[:2] == ["attention_row_terms", "attention_key_value_gradients"]
        assert names[2:] == ["attention_query_gradients"] * deterministic
        constants = dict(launches[1].constants)
        assert (constants["FUSED"], constants["GROUPS"], constants["PARTS"]) == (not deterministic, 3, 7)
        assert [each.shape for each in launches[1].outputs[2:]] == [(2, 6, 40, 204)] * (not deterministic)


def test_what_is_launched(on_an_h100: Device):
    pytest.importorskip("triton")
    inputs = inputs_of(AttentionCase("", 2, 200, 330, heads=6, kv_heads=2, head_dim=40, dtype="bfloat16", causal=True))
    with recorded_launches() as launches:
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, TritonForwardParams(Tiles(64, 32, 4, 2, True))), inputs)
    (found,) = launches
    constants = dict(found.constants)
    assert found.grid == (4 * 2 * 6, 1, 1)
    assert found.scalars == (("q_length", 200), ("kv_length", 330))
    assert (constants["DIM"], constants["TMA"], constants["PARTS"], constants["LAST_FIRST"]) == (64, True, 0b110, True)
    assert (constants["GROUPS"], constants["AT_ONCE"], constants["MASK"], constants["BIAS"]) == (3, 12, -1, -1)
