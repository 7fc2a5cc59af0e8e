"""The conformance suite on the kernels for TPUs, interpreted on the CPU."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tests.kernels.flash_attention.conformance import Conformance
from tests.support.tpu_interpret import interpret_tpu
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.tpu.backend import TpuFlashAttention
from tilewright.kernels.flash_attention.tpu.params import TpuTiles
from tilewright.kernels.op.backend import Backend
from tilewright.ops.types import Direction

BACKEND = TpuFlashAttention()
SMALL = TpuTiles(128, 128, 128, 128)

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_tpu():
        yield


class TestConformance(Conformance):
    backend: ClassVar[Backend] = BACKEND

    def params(self, inputs: AttentionInputs, direction: Direction) -> Any:
        return SMALL
