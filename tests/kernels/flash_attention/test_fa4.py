"""FlashAttention-4 as far as a CPU can prove it: declined, mapped, and run as its kernels would."""

import contextlib
import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import pytest

from tests.kernels.conftest import A100, H100
from tests.kernels.flash_attention.fa4_emulation import KERNELS
from tests.kernels.flash_attention.library import (
    BIAS,
    DIRECTIONS,
    FA4_CASES,
    FA4_PAIRWISE,
    LENGTHS,
    LibraryConformance,
    call_of,
)
from tests.kernels.flash_attention.library import FA4 as BACKEND
from tilewright.errors import UnsupportedError
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask, computed_dims
from tilewright.kernels.masks import CausalMask, WindowMask
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.serialize import from_json, to_json

FORWARD, BACKWARD = Fa4ForwardParams(), Fa4BackwardParams()
BOTH = PerDirection(Choice("fa4", FORWARD), Choice("fa4", BACKWARD))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The packages count as installed."""
    with mock.patch.object(cute, "package_reasons", list):
        yield


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    with installed(), mock.patch.object(cute, "kernels", return_value=KERNELS):
        yield


class TestFa4(LibraryConformance):
    backend = BACKEND
    present = staticmethod(installed)
    machine = staticmethod(emulated)
    both = BOTH
    cases = FA4_PAIRWISE
    exchanged = FA4_CASES
    served: ClassVar[list[dict[str, Any]]] = [
        {"head_dim": 256, "return_lse": True},
        {"kv_length": 1000, "causal": True, "causal_alignment": "bottom_right"},
        {"sliding_window": (16, 3), "logits_soft_cap": 30.0},
        {"sliding_window": (16, 3), "query_seq_lengths": LENGTHS},
    ]
    declined: ClassVar[list[tuple[str, dict[str, Any]]]] = [
        ("does not serve bias", {"bias": BIAS}),
        ("up to 256 elements, got head_dim=257", {"head_dim": 257}),
        ("none beside lengths of keys", {"causal": True, "key_value_seq_lengths": LENGTHS}),
    ]


def reasons(direction: Direction = "forward", device: Device = H100, **kwargs: Any) -> list[str]:
    return BACKEND.not_supported_reasons(call_of(**kwargs), device, direction)


def test_devices():
    for device in (A100, Device("cpu", "cpu"), Device("gpu", "NVIDIA B200", (10, 0), 148)):
        assert TestFa4.said(device=device)[0].startswith("needs a GPU of compute capability 9.x, got")


def test_packages(monkeypatch: pytest.MonkeyPatch):
    versions = {"flash-attn-4": "4.0.0b9", "quack-kernels": "0.10.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(cute, "missing_packages", cute.missing_packages.__wrapped__)
    least = cute.MIN_VERSIONS
    assert reasons() == [
        f"needs flash-attn-4 {least['flash-attn-4']} or later, got 4.0.0b9: pip install 'tilewright[fa4]'",
        "needs nvidia-cutlass-dsl, torch: pip install 'tilewright[fa4]'",
    ]
    versions |= {"flash-attn-4": "4.0.0", "nvidia-cutlass-dsl": "4.10.0"}
    assert reasons() == ["needs torch: pip install 'tilewright[fa4]'"]
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
    assert "pip install 'tilewright[fa4]'" in reasons()[0]
    x = [jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")] * 3
    traced = jax.jit(lambda *a: flash_attention(*a, cfg=BOTH)).trace(*x)
    with pytest.raises(UnsupportedError, match="needs flash-attn-4"):
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
