"""What runs on a GPU where nvcc has compiled nothing yet, and once it has."""

import dataclasses
import logging
import sys
import threading
from pathlib import Path

import pytest

from tests.kernels.conftest import A100, H100, abstract_arguments
from tests.support import fake_nvcc
from tests.support.fake_nvcc import FakeNvcc
from tilewright.kernels import kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.ops import ConfigSelectorChain, Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device

pytestmark = pytest.mark.skipif(fake_nvcc.HOST_COMPILER is None or sys.platform != "linux", reason=fake_nvcc.NEEDED)

FLASH = kernel("flash_attention")
H200 = Device("gpu", "NVIDIA H200", (9, 0), 132, fingerprint="gpu:NVIDIA H200:9.0", present=False)


@pytest.fixture(autouse=True)
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    made = fake_nvcc.install(tmp_path / "cuda")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])  # headers are nothing to the stand-in
    return made


def invocation(device: Device, dtype: str, direction: str = "forward", **options: object) -> Invocation:
    case = AttentionCase("unbuilt", batch=1, q_length=512, heads=4, head_dim=128, dtype=dtype, **options)
    args, keywords = abstract_arguments(case)
    inv, _ = prepared(FLASH, args, keywords, concrete=False)
    return dataclasses.replace(inv, device=device, direction=direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("device", [A100, H100], ids=["A100", "H100"])
def test_float32_runs_by_xla_until_its_group_is_built(nvcc: FakeNvcc, device: Device, direction: str):
    inv = invocation(device, "float32", direction)
    assert FLASH.preferred_cfg(inv).backend == "cuda"
    assert FLASH.heuristic_cfg(inv).backend == "xla"
    (group,) = FLASH.config_builds(inv, FLASH.preferred_cfg(inv))
    (why,) = FLASH.rejection_reasons(inv, FLASH.heuristic_cfg(inv), ())["cuda"]
    assert why == f"supported, but nvcc must compile it first: `{group.command('flash_attention')}`"
    assert not nvcc.compilations()
    group.make(threading.Event())
    assert FLASH.heuristic_cfg(inv).backend == "cuda"
    assert "behind cuda" in FLASH.rejection_reasons(inv, FLASH.heuristic_cfg(inv), ())["xla"][0]
    assert len(nvcc.compilations()) == 1


def test_what_needs_no_compiler_is_the_first_choice_as_before(nvcc: FakeNvcc, caplog: pytest.LogCaptureFixture):
    inv = invocation(H100, "bfloat16", causal=True)
    with caplog.at_level(logging.WARNING):
        assert ConfigSelectorChain().choose(inv).config.backend == "hopper"
    assert not caplog.records
    assert not nvcc.compilations()


def test_a_platform_that_was_asked_for_is_not_passed_over():
    inv = invocation(H100, "float32")
    (inputs,) = inv.args
    asked = dataclasses.replace(inv, args=(inputs.replace(platform=("cuda",)),))
    assert FLASH.heuristic_cfg(asked).backend == "cuda"
    either = dataclasses.replace(inv, args=(inputs.replace(platform=("cuda", "xla")),))
    assert FLASH.heuristic_cfg(either).backend == "xla"


def test_a_named_variant_needs_its_own_group():
    inv = invocation(H100, "bfloat16", causal=True)
    cuda = [choice for choice in FLASH.config_space(inv) if choice.backend == "cuda"]
    groups = {choice.params.variant: FLASH.config_builds(inv, choice) for choice in cuda}
    assert all(len(needed) == 1 for needed in groups.values())
    assert groups["fmha_ampereF_bf16_k128_plain_128x64_w4x1_s2"] == groups[None]
    assert len({needed[0] for needed in groups.values()}) > 2


def test_the_shipped_tables_pass_over_what_is_not_built(nvcc: FakeNvcc):
    """A call that the H200's table has, whose winner is compiled by nvcc."""
    case = AttentionCase("f32", batch=4, q_length=4096, heads=16, head_dim=128, causal=True, dtype="float32")
    args, keywords = abstract_arguments(case)
    inv = dataclasses.replace(prepared(FLASH, args, keywords, concrete=False)[0], device=H200)
    chain = ConfigSelectorChain()
    entry = chain.shipped(inv)
    assert entry is not None
    assert entry.winner.config.backend == "cuda"
    chosen = chain.lookup(inv)
    able = [config for config in entry.ranked[1:] if not FLASH.config_reasons(inv, config)]
    assert (chosen.step, chosen.config) == ("shipped", able[0])
    preferred, builds = chain.not_built(inv, chosen)
    assert preferred == entry.winner.config
    assert not nvcc.compilations()
    for build in builds:
        build.make(threading.Event())
    assert chain.lookup(inv).config == entry.winner.config


def test_packed_queries_run_without_cuda_until_their_group_is_built(nvcc: FakeNvcc):
    op = kernel("ragged_page_attention")
    case = RaggedPageCase("unbuilt", 8, 2048, 32, 128, kv_heads=8, dtype="bfloat16", q_lengths=(512,))
    args, keywords = case.arguments()
    inv, _ = prepared(op, args, keywords, concrete=False)
    inv = dataclasses.replace(inv, device=H100)
    assert op.preferred_cfg(inv).backend == "cuda"
    assert op.heuristic_cfg(inv).backend == "hopper"
    (group,) = op.config_builds(inv, op.preferred_cfg(inv))
    group.make(threading.Event())
    assert op.heuristic_cfg(inv).backend == "cuda"


def test_explain_says_that_a_backend_is_for_other_shapes():
    op = kernel("ragged_page_attention")
    args, keywords = RaggedPageCase("few", 8, 2048, 32, 128, kv_heads=8, dtype="bfloat16").arguments()
    inv = dataclasses.replace(prepared(op, args, keywords, concrete=False)[0], device=H100)
    chosen = op.heuristic_cfg(inv)
    assert chosen.backend == "triton"
    assert "probably slower for these shapes" in op.rejection_reasons(inv, chosen, ())["hopper"][0]
