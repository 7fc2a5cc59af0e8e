"""The comparison of compiled kernels, on reports that were written by hand."""

from typing import Any

import pytest

from tests.aot.registers import is_worse, table

KERNEL: dict[str, Any] = {
    "registers": 168, "stack": 0, "spill_stores": 4, "spill_loads": 8, "serialised": False, "shared_bytes": 100,
    "code": "a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "worse"),
    [({}, False), ({"code": "b"}, False), ({"registers": 160}, False), ({"spill_loads": 0}, False)]
    + [({name: KERNEL[name] + 1}, True) for name in KERNEL if name != "code"],
)
def test_more_of_anything_is_worse(change: dict[str, Any], worse: bool):
    assert is_worse([KERNEL], [KERNEL | change]) == worse


def test_another_number_of_kernels_is_worse():
    assert is_worse([KERNEL], [])
    assert is_worse([KERNEL], [KERNEL, KERNEL])


def test_the_table_shows_what_changed():
    before = {"same": [KERNEL], "gone": [KERNEL], "other": [KERNEL, KERNEL]}
    after = {"same": [KERNEL], "other": [KERNEL, KERNEL | {"registers": 128, "code": "b"}]}
    assert table(before, after)[2:] == [
        "| gone | 168 → none | 8 → none | differs |",
        "| other | 168, 168 → 168, 128 | 8, 8 | differs |",
        "| same | 168 | 8 | equal |",
    ]
