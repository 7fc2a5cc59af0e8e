"""Our TPU kernels take no more simulated cycles than are recorded, and no fewer without a new record."""

import pytest

from tests.aot_tpu.compiler import TPUS
from tests.aot_tpu.cycles import TOLERANCE, Budget, Program, budgets, libtpu, recorded

AGAIN = "python -m tests.aot_tpu.cycles --write"


@pytest.mark.parametrize("budget", list(budgets()), ids=lambda budget: f"{budget.name}-{budget.tpu}")
def test_cycles_are_as_recorded(budget: Budget | Program) -> None:
    record = recorded()
    if libtpu() != record["libtpu"]:
        pytest.skip(f"the record is of libtpu {record['libtpu']}, this is {libtpu()} ({AGAIN})")
    found, row = budget.found, record[budget.tpu].get(budget.name)
    if found is None:
        assert row is None, f"it served {budget.name} before"
        return
    assert not found.simulated.report.error
    assert row is not None, f"no record of {budget.name} ({AGAIN})"
    cycles = found.simulated.report.kernel_cycles if found.simulated.seconds is not None else None
    if cycles is None or row["cycles"] is None:
        assert cycles == row["cycles"], found.simulated.why_not
    else:
        assert cycles == pytest.approx(row["cycles"], rel=TOLERANCE), f"{AGAIN} if that is meant"
    assert found.simulated.report.peak_bytes <= 1.05 * row["peak_bytes"]


def test_nothing_is_recorded_that_does_not_exist() -> None:
    known = {(budget.tpu, budget.name) for budget in budgets()}
    assert {(tpu, name) for tpu in TPUS for name in recorded()[tpu]} <= known


def test_no_record_is_faster_than_the_matrix_units() -> None:
    for tpu in TPUS:
        for name, row in recorded()[tpu].items():
            assert row["cycles"] is None or 0 < row["share"] < 1, (tpu, name)
