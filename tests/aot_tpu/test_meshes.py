"""Calls that are split over the devices of four chips compile for every TPU."""

import pytest

from tests.aot_tpu.compiler import TPUS, report
from tests.aot_tpu.programs import SPLIT, devices_of_slice


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("name", SPLIT)
def test_it_compiles(name: str, tpu: str) -> None:
    found = report(tpu, "tests.aot_tpu.programs:split", name, tpu, devices=devices_of_slice(tpu))
    assert not found.error
    assert found.peak_bytes > 0
