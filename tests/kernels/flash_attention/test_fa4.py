"""FlashAttention-4 as far as a CPU can prove it: declined, mapped, and run as its kernels would."""

import contextlib
import functools
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import pytest

from tests.kernels.conftest import A100, B200, H100, RTX5090
from tests.kernels.flash_attention.conformance import ConformanceCase, cotangents, judge, judge_gradients, oracles
from tests.kernels.flash_attention.fa4_emulation import KERNELS
from tests.kernels.flash_attention.library import (
    BIAS,
    DIRECTIONS,
    FA4_CASES,
    FA4_OF_192,
    FA4_OF_256,
    FA4_PAIRWISE,
    LENGTHS,
    LibraryConformance,
    call_of,
    case_of,
    inputs_for,
)
from tests.kernels.flash_attention.library import FA4 as BACKEND
from tilewright.errors import UnsupportedError
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.fa4 import backend, cute
from tilewright.kernels.flash_attention.fa4.backend import architecture_of
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask
from tilewright.kernels.masks import CausalMask, WindowMask
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.serialize import from_json, to_json

FORWARD, BACKWARD = Fa4ForwardParams(), Fa4BackwardParams()
BOTH = PerDirection(Choice("fa4", FORWARD), Choice("fa4", BACKWARD))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The packages count as installed."""
    with mock.patch.object(cute, "package_reasons", list):
        yield


@contextlib.contextmanager
def emulated(device: Device = H100) -> Iterator[None]:
    """The packages count as installed, and run on a device that counts as there."""
    with (
        installed(),
        mock.patch.object(cute, "kernels", lambda architecture: KERNELS[architecture.name]),
        mock.patch.object(backend, "current_device", return_value=device),
    ):
        yield


class TestFa4(LibraryConformance):
    backend = BACKEND
    present = staticmethod(installed)
    machine = staticmethod(emulated)
    both = BOTH
    cases = FA4_PAIRWISE
    exchanged = FA4_CASES
    served: ClassVar[list[dict[str, Any]]] = [
        {"head_dim": 256},
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


class TestFa4OnB200(TestFa4):
    device = B200
    machine = staticmethod(functools.partial(emulated, B200))
    cases: ClassVar[list[ConformanceCase]] = [
        *FA4_PAIRWISE,
        *(ConformanceCase(each, False) for each in FA4_OF_256.values()),
    ]
    exchanged = FA4_CASES | FA4_OF_192
    served: ClassVar[list[dict[str, Any]]] = [
        *TestFa4.served[2:],
        {"head_dim": 256, "causal": True},
        {"head_dim": 192, "value_dim": 128, "logits_soft_cap": 30.0, "return_lse": True},
        {"head_dim": 160, "value_dim": 160, "query_seq_lengths": LENGTHS},
    ]

    @pytest.mark.parametrize(
        ("why", "options"),
        [
            ("has no soft cap in the backward pass of heads of 256", {"logits_soft_cap": 30.0}),
            ("has no gradient to the log-sum-exp in the backward", {"return_lse": True}),
            ("has no window in the backward pass", {"causal": True, "sliding_window": 9}),
            ("has no window in the backward pass", {"causal": True, "kv_length": 60}),
        ],
    )
    def test_the_backward_pass_of_256(self, why: str, options: dict[str, Any]):
        for dims in ({"head_dim": 256}, {"head_dim": 20, "value_dim": 129}):
            assert self.said("forward", **dims, **options) == []
            assert [why in each for each in self.said("backward", **dims, **options)] == [True]


class TestFa4OnRtx5090(TestFa4):
    device = RTX5090
    machine = staticmethod(functools.partial(emulated, RTX5090))
    cases: ClassVar[list[ConformanceCase]] = [each for each in FA4_PAIRWISE if each.case.logits_soft_cap is None]
    exchanged: ClassVar[dict[str, AttentionCase]] = {
        name: each for name, each in FA4_CASES.items() if each.logits_soft_cap is None
    }
    served: ClassVar[list[dict[str, Any]]] = [
        {"head_dim": 128, "return_lse": True},
        {"kv_length": 1000, "causal": True, "causal_alignment": "bottom_right"},
        {"sliding_window": (16, 3), "query_seq_lengths": LENGTHS},
    ]
    declined: ClassVar[list[tuple[str, dict[str, Any]]]] = [
        *TestFa4.declined[:1],
        ("up to 128 elements on compute capability 12.x, got head_dim=136", {"head_dim": 136}),
    ]

    def test_soft_caps(self):
        assert self.said("forward", logits_soft_cap=30.0) == []
        assert self.said("backward", logits_soft_cap=30.0) == [
            "has no soft cap in the backward pass on compute capability 12.x"
        ]


@pytest.mark.parametrize(
    ("device", "case"),
    [
        (B200, case_of(head_dim=256, causal=True, sliding_window=9, logits_soft_cap=5.0)),
        (B200, case_of(q_length=1, heads=32, kv_length=300)),
        (B200, case_of(q_length=1, heads=12, kv_heads=4, head_dim=64, kv_length=300)),
        (B200, case_of(q_length=300, heads=6, head_dim=128)),
        (RTX5090, case_of(causal=True, logits_soft_cap=5.0, softmax_scale=0.7)),
    ],
)
def test_every_forward_config(device: Device, case: AttentionCase):
    """Where the backward pass serves less, and in every config that tuning can take: with what the classes assert."""
    inputs = inputs_for(case)
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    with emulated(device):
        candidates = BACKEND.candidates(inputs.structs, device, "forward")
        for params in candidates:
            results = jax.jit(lambda inputs, params=params: BACKEND.forward(inputs, params))(inputs)
            judge(dict(zip(("out", "lse"), results, strict=True)), exact.results, low.results, case.tolerance_factor)
    assert len(candidates) > 1


@pytest.mark.parametrize("device", [B200, RTX5090], ids=lambda device: device.name)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_every_backward_config(device: Device, dims: tuple[int, int]):
    if device is RTX5090 and dims[0] > 128:
        pytest.skip("has no heads of 192 elements")
    inputs = inputs_for(case_of(head_dim=dims[0], value_dim=dims[1], q_length=140, kv_length=150, causal=True))
    with emulated(device):
        candidates = BACKEND.candidates(inputs.structs, device, "backward")
        judge_gradients(BACKEND, inputs, candidates, 2.0)
    assert len(candidates) == (2 if (device, dims) in ((B200, (128, 128)), (RTX5090, (64, 64))) else 1)


def reasons(direction: Direction = "forward", device: Device = H100, **kwargs: Any) -> list[str]:
    return BACKEND.not_supported_reasons(call_of(**kwargs), device, direction)


def test_devices():
    for device in (A100, Device("cpu", "cpu"), Device("gpu", "NVIDIA Next", (13, 0), 148)):
        assert TestFa4.said(device=device)[0].startswith("needs a GPU of compute capability 9.x, 10.x, 11.x or 12.x, ")
    for device in (H100, B200, find_device("NVIDIA B300 SXM6 AC").device, find_device("NVIDIA Thor").device):
        assert TestFa4.said(device=device, head_dim=192) == []
    for device in (RTX5090, find_device("NVIDIA GB10").device):
        assert TestFa4.said(device=device) == []
        assert "up to 128 elements" in TestFa4.said(device=device, head_dim=192)[0]


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
            cute.kernels(architecture_of(H100))
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
    ("device", "dims", "kv_heads", "forward", "backward"),
    [
        (H100, (64, 64), 2, (64, 64), (64, 64)),
        (H100, (20, 50), 4, (56, 56), (64, 64)),
        (H100, (80, 80), 2, (80, 80), (96, 96)),
        (H100, (192, 128), 4, (192, 128), (192, 128)),
        (H100, (136, 20), 4, (136, 128), (192, 128)),
        (H100, (192, 128), 2, (192, 128), (192, 192)),
        (H100, (200, 200), 2, (200, 200), (256, 256)),
        (B200, (20, 50), 4, (64, 64), (64, 64)),
        (B200, (80, 72), 2, (96, 96), (96, 96)),
        (B200, (136, 20), 2, (192, 128), (192, 128)),
        (B200, (128, 136), 2, (256, 256), (256, 256)),
        (B200, (192, 192), 2, (256, 256), (256, 256)),
        (RTX5090, (80, 72), 2, (96, 96), (96, 96)),
    ],
)
def test_head_dims(
    device: Device, dims: tuple[int, int], kv_heads: int, forward: tuple[int, int], backward: tuple[int, int]
):
    inputs = call_of(head_dim=dims[0], value_dim=dims[1], kv_heads=kv_heads)
    architecture = architecture_of(device)
    assert architecture is not None
    assert architecture.computed_dims(inputs, "forward") == forward
    assert architecture.computed_dims(inputs, "backward") == backward


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sliding_window": (9, 9)}, {"kv_heads": 4}], ids=str)
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("device", [H100, B200, RTX5090], ids=lambda device: device.name)
def test_configs(device: Device, dim: int, options: dict[str, Any], direction: Direction):
    inputs = call_of(head_dim=dim, **options)
    with installed():
        if BACKEND.not_supported_reasons(inputs, device, direction):
            assert device != H100
            return
    first = BACKEND.heuristic(inputs, device, direction)
    assert None not in (first.block_q, first.block_k)
    candidates = BACKEND.candidates(inputs, device, direction)
    assert candidates[0] == first
    assert len(set(candidates)) == len(candidates)
    for params in candidates:
        assert BACKEND.config_reasons(inputs, device, direction, params) == []
        choice = Choice("fa4", params)
        assert from_json(to_json(choice), Choice) == choice
    plain = FORWARD if direction == "forward" else BACKWARD
    assert BACKEND.config_reasons(inputs, device, direction, plain) == []
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
    for device, direction, said, given in (
        (H100, "forward", "no choice of it on Hopper, got two_ctas=True", Fa4ForwardParams(two_ctas=True)),
        (B200, "forward", "no choice of it on data-center Blackwell, got num_stages=2", Fa4ForwardParams(num_stages=2)),
        (B200, "forward", "tiles are 128 or 256 queries, and 128 keys", Fa4ForwardParams(block_k=64)),
        (
            B200,
            "backward",
            "got groups=2, one_d_query_group=False",
            Fa4BackwardParams(groups=2, one_d_query_group=False),
        ),
        (B200, "backward", "tiles are 128 queries and keys", Fa4BackwardParams(block_q=64)),
        (RTX5090, "forward", "no choice of it on compute capability 12.x", Fa4ForwardParams(overlap=True)),
        (RTX5090, "forward", "bytes of shared memory of 101376", Fa4ForwardParams(block_k=128, num_stages=2)),
        (RTX5090, "backward", "bytes of shared memory", Fa4BackwardParams(query_stages=2, d_out_stages=2)),
        (RTX5090, "backward", "tiles are 64 queries and keys", Fa4BackwardParams(block_k=128)),
    ):
        assert any(said in why for why in BACKEND.config_reasons(inputs, device, direction, given)), said
    pairs = Fa4ForwardParams(two_ctas=True)
    for said, options in (
        ("pairs of CTAs have no lengths of queries", {"query_seq_lengths": LENGTHS}),
        ("without causality or a window, and for 256, got head_dim=96", {"head_dim": 96}),
        ("without causality or a window, and for 256, got head_dim=128", {"causal": True}),
        ("want packed query heads to divide 128, got inputs.groups=6", {"heads": 6, "kv_heads": 1}),
        ("two tiles of queries, got inputs.q_length=256, params.block_q=256", {"q_length": 256}),
    ):
        given = call_of(**{"head_dim": 128, "q_length": 2000, "kv_heads": 4} | options)
        assert [said in why for why in BACKEND.config_reasons(given, B200, "forward", pairs)] == [True]
    for dim, two_ctas in ((64, True), (192, False)):
        found = BACKEND.config_reasons(
            call_of(head_dim=dim, value_dim=64), B200, "backward", Fa4BackwardParams(two_ctas=two_ctas)
        )
        assert "pairs of CTAs are for head dims from 128" in found[0]
    with pytest.raises(ValueError, match="Fa4ForwardParams needs a positive integer, got block_q=0"):
        Fa4ForwardParams(block_q=0)
    with pytest.raises(ValueError, match="got groups=True"):
        Fa4BackwardParams(groups=True)
