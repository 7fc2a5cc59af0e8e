"""The XLA backend, with tiles small enough that every case has several."""

from typing import Any, ClassVar

import pytest

from tests.kernels.flash_attention.conformance import CASES, Conformance, describe
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.op.backend import Backend
from tilewright.ops.types import Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.device import current_device

TILES = {16: (16, 32), 24: (13, 9), 5: (32, 16)}
"""Rows and columns of a tile by head_dim, a factor of the cases: every other factor meets each of them."""


class TestXla(Conformance):
    backend: ClassVar[Backend] = XlaFlashAttention()

    def params(self, inputs: AttentionInputs, direction: Direction) -> FwdParams | BwdParams:
        kind = FwdParams if direction == "forward" else BwdParams
        q_block, kv_block = TILES[inputs.head_dim]
        return kind(q_blocksize=q_block, kv_blocksize=kv_block)


@pytest.mark.parametrize("conformance_case", CASES, ids=describe)
def test_supports_every_case(conformance_case: Any):
    inputs = conformance_case.prepared(seed=0).structs
    for direction in ("forward", "backward"):
        assert not XlaFlashAttention().not_supported_reasons(inputs, current_device(), direction)
