"""Configs and keys in words."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from tilewright.compat.base import KernelConfig
from tilewright.kernels.masks import CausalMask, WindowMask
from tilewright.kernels.op.choice import Choice
from tilewright.modules import FlashAttention
from tilewright.ops import FwdParams
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.serialize import tagged


@dataclasses.dataclass(frozen=True)
class Inner:
    rows: int = 3
    columns: int | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    fast: bool = True


@dataclasses.dataclass(frozen=True)
class Tiles:
    sizes: tuple[int, ...] = (64, 32)
    stages: tuple[int, ...] = (2,)
    dtype: str = "bfloat16"
    scale: float = float("inf")


def test_a_choice_names_its_implementation_and_the_params_that_are_set():
    choice = Choice("xla", FwdParams(q_blocksize=128, kv_blocksize=256))
    assert describe_config(choice) == "xla q_blocksize=128 kv_blocksize=256"
    assert describe_config(KernelConfig(platform="cuda", algorithm="cutlass")).startswith("cuda:cutlass block_q=128 ")


def test_nested_dataclasses_are_flattened_and_none_left_out():
    assert describe_config(Outer()) == "rows=3 fast=True"
    assert describe_config(7) == "7"


def test_the_key_of_a_real_call_names_arrays_mask_and_scale():
    query = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    inv, _ = prepared(FlashAttention(), (query, key, key), {"causal": True}, concrete=False)
    assert describe_key(inv.key) == "bf16[1,512,8,64] bf16[1,512,2,64]×2 mask=causal softmax_scale=0.125"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": True, "sliding_window": 128}, "mask=window(left=128, offset=0, right=0)"),
        ({"mask": CausalMask() & WindowMask(3, None)}, "mask=and(causal, window(left=3, offset=0))"),
        ({"mask": jnp.ones((1, 1, 512, 512), bool)}, "mask=explicit(array=bool[1,1,512,512])"),
    ],
)
def test_masks_are_written_as_people_write_them(options, said):
    query = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.bfloat16)
    inv, _ = prepared(FlashAttention(), (query, query, query), options, concrete=False)
    assert said in describe_key(inv.key)


def test_the_platforms_of_a_call_are_named():
    query = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
    inv, _ = prepared(FlashAttention(), (query,) * 3, {"platform": ("triton", "xla")}, concrete=False)
    assert "platform=triton xla" in describe_key(inv.key)


def test_anything_else_comes_as_it_prints():
    for key in ("no json", json.dumps({"a": 1}), json.dumps([1]), ("a", 3), 5):
        assert describe_key(key) == str(key)


def test_a_config_whose_type_is_not_loaded_reads_the_same_from_its_tagged_json():
    choice = Choice("xla", FwdParams(q_blocksize=128, kv_blocksize=256))
    for config in (choice, Outer(), Tiles()):
        assert describe_config(json.loads(json.dumps(tagged(config)))) == describe_config(config)
