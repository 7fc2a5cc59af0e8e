"""JAX's own kernels for TPUs compile as they would be called: fails if a new JAX has changed or lost one."""

import pytest

from tests.aot_tpu.compiler import TPUS, report


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("member", ["splash", "flash", "megablox", "ragged_pages"])
def test_it_compiles(member: str, tpu: str) -> None:
    found = report(tpu, f"tests.aot_tpu.members:{member}")
    assert not found.error
