"""Every op compiles for every TPU, by the backends that selection takes there."""

import pytest

from tests.aot_tpu.compiler import TPUS, report
from tests.every_op.matrix import every_op


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("op", every_op())
def test_default_calls(op: str, tpu: str) -> None:
    found = report(tpu, "tests.aot_tpu.programs:call", op)
    assert not found.error
    assert found.peak_bytes > 0
