"""With XLA's flags for repeatable programs no call takes a config whose results differ from run to run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.kernels.test_portfolio import Double, Doubling, Plain
from tilewright.errors import UnsupportedError
from tilewright.kernels import kernel
from tilewright.kernels.flash_attention.cuda.backend import CudaBackwardParams
from tilewright.kernels.flash_attention.cudnn.backend import CudnnBackwardParams, CudnnFlashAttention
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams
from tilewright.kernels.flash_attention.hopper.params import HopperBackwardParams
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.xla_flags import flag, wants_repeatable
from tilewright.ops import ConfigSelectorChain, Invocation
from tilewright.ops.config.selection import default_chain
from tilewright.ops.kernel.prepared import prepared

FLAG = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", False),
        (FLAG, True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=1 --xla_dump_to=/tmp/x=y", True),
        ("--xla_gpu_exclude_nondeterministic_ops=True", True),
        (f"{FLAG} --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_too=true xla_gpu_deterministic_ops=true", False),
    ],
)
def test_the_flags(flags: str, wanted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert wants_repeatable() == wanted
    assert flag("xla_dump_to") == ("/tmp/x=y" if "dump" in flags else "")


def attention(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> Invocation:
    """A backward call for an H100."""
    query, key = (jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
    inv, _ = prepared(kernel("flash_attention"), (query, key, key), options, concrete=False)
    return dataclasses.replace(inv, direction="backward")


SHAPES = [(8, 1024, 16, 16, 64), (4, 4096, 16, 16, 128), (4, 4096, 32, 8, 128), (2, 2048, 16, 16, 256)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_backward_pass_of_attention(shape: Any, monkeypatch: pytest.MonkeyPatch):
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        inv = attention(*shape, causal=True)
        usual = default_chain().choose(inv).config
        monkeypatch.setenv("XLA_FLAGS", FLAG)
        repeating = default_chain().choose(attention(*shape, causal=True)).config
        space = list(inv.kernel.config_space(inv))
    assert repeating.params.deterministic
    assert repeating.backend == "hopper"
    # A measured config keeps its tiles.
    assert repeating == dataclasses.replace(usual, params=dataclasses.replace(usual.params, deterministic=True))
    assert space
    assert all(getattr(choice.params, "deterministic", True) or choice.backend == "cudnn" for choice in space)


def test_a_cached_config_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch):
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        inv = attention(*SHAPES[0])
        varying = Choice("hopper", HopperBackwardParams(64, 2, False))
        assert not inv.kernel.config_reasons(inv, varying)
        monkeypatch.setenv("XLA_FLAGS", FLAG)
        (why,) = inv.kernel.config_reasons(inv, varying)
        assert "the same bits in every run" in why
        adapted = inv.kernel.adapted_config(inv, varying)
        assert adapted.params == HopperBackwardParams(64, 2, True)
        assert not inv.kernel.config_reasons(inv, adapted)
        triton = Choice("triton", "anything")
        assert inv.kernel.adapted_config(inv, triton) == triton


def test_params_that_say_nothing_repeat():
    of = {each.name: each for each in kernel("flash_attention").backends.usable}
    assert of["xla"].repeats(object())
    assert not of["cuda"].repeats(CudaBackwardParams())
    assert of["cuda"].repeats(CudaBackwardParams(None, True))


def test_cudnn_follows_the_flag_itself(monkeypatch: pytest.MonkeyPatch):
    assert not CudnnFlashAttention().repeats(CudnnBackwardParams())
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    assert CudnnFlashAttention().repeats(CudnnBackwardParams())
    assert not Fa4BackwardParams.deterministic


class Varying(Plain):
    """Its blocks of 8 do not repeat."""

    def repeats(self, params: Any) -> bool:
        return params.q_blocksize != 8


class Never(Plain):
    def repeats(self, params: Any) -> bool:
        return False


def test_the_first_candidate_that_repeats(monkeypatch: pytest.MonkeyPatch):
    op = Double(f"{__name__}:Varying")
    inv = Invocation(op, (Doubling(jnp.ones(5)),))
    assert op.heuristic_cfg(inv).params.q_blocksize == 8
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    assert op.heuristic_cfg(inv).params.q_blocksize == 16
    assert {choice.params.q_blocksize for choice in op.config_space(inv)} == {16}


def test_an_op_without_one_says_so(monkeypatch: pytest.MonkeyPatch):
    op = Double(f"{__name__}:Never")
    inv = Invocation(op, (Doubling(jnp.ones(5)),))
    assert op.heuristic_cfg(inv)
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    with pytest.raises(UnsupportedError, match="none of its configs gives the same bits in every run"):
        ConfigSelectorChain().choose(inv)
