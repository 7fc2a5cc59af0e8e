"""Conformance of the XLA backend of attention over a cache."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.conformance import QUICK
from tests.kernels.conftest import H100
from tests.kernels.paged_attention.conformance import (
    PAGED,
    PagedConformance,
    check,
    inputs_of,
    ragged,
    structs_of,
)
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.xla.backend import XlaPagedAttention
from tilewright.ops.types import Device
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.device import current_device


class TestXla(PagedConformance):
    backend = XlaPagedAttention()

    def params(self, inputs: PagedInputs) -> Any:
        return FwdParams(q_blocksize=4, kv_blocksize=24, blocksize_heads=2 * inputs.heads)


PARAMS = [
    FwdParams(q_blocksize=1, kv_blocksize=8, blocksize_heads=1),
    FwdParams(q_blocksize=128, kv_blocksize=1024, blocksize_heads=1024),
    FwdParams(q_blocksize=5, kv_blocksize=7, blocksize_heads=12),
    FwdParams(),
]


@pytest.mark.parametrize(("params", "q_lengths"), list(itertools.product(PARAMS, [(1,), (4, 0, 11)])))
def test_any_params_give_the_same(params: FwdParams, q_lengths: tuple[int, ...]):
    inputs = ragged(q_lengths=q_lengths, sliding_window=40)
    check(jax.jit(lambda inputs: XlaPagedAttention().forward(inputs, params), compiler_options=QUICK)(inputs), inputs)


@pytest.mark.parametrize("capacity", [30, 50])
def test_a_dense_cache_that_is_no_whole_number_of_blocks(capacity: int):
    """The last block begins before its own keys: those of the one before count once."""
    case = DecodeCase("", **PAGED | {"kv_length": capacity}, paged=False)
    inputs = inputs_of("decode_attention", case)
    inputs = dataclasses.replace(inputs, kv_lengths=jnp.asarray([capacity, capacity - 1, 24], jnp.int32))
    check(XlaPagedAttention().forward(inputs, FwdParams(q_blocksize=1, kv_blocksize=24)), inputs)


@pytest.mark.parametrize("device", [current_device(), H100], ids=["cpu", "gpu"])
def test_the_heuristic_is_bounded_and_no_candidate(device: Device):
    backend = XlaPagedAttention()
    for sequences, kv_length, q_lengths in ((1, 131072, (1,)), (256, 1024, (1,)), (2, 64, (700, 1)), (0, 0, (1,))):
        case = RaggedPageCase("", **PAGED | {"sequences": sequences, "kv_length": kv_length}, q_lengths=q_lengths)
        inputs = structs_of("ragged_page_attention", case)
        best = backend.heuristic(inputs, device, "forward")
        tiles = best.blocksize_heads // inputs.heads
        assert best.kv_blocksize <= max(kv_length + 7, 1)
        assert tiles * best.kv_blocksize * inputs.heads * best.q_blocksize * 4 <= 1 << 30
        others = list(backend.candidates(inputs, device, "forward"))
        assert best not in others
        assert len(set(others)) == len(others)
