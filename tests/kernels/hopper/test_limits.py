"""The limits of a CTA: registers of its warpgroups."""

import pytest

from tilewright.kernels.hopper.limits import DQ_REGISTERS, NARROW_REGISTERS, REGISTERS, RegisterSplit

REGISTERS_PER_SM = 1 << 16


@pytest.mark.parametrize(
    ("split", "consumers"),
    [*((split, consumers) for consumers, split in REGISTERS.items()), (NARROW_REGISTERS, 2), (DQ_REGISTERS, 2)],
)
def test_a_register_split_takes_no_more_than_a_cta_starts_with(split: RegisterSplit, consumers: int):
    warpgroups = consumers + 1 + (split.dq > 0)
    at_start = REGISTERS_PER_SM // (128 * warpgroups) // 8 * 8
    assert consumers * split.consumer + split.producer + split.dq <= at_start * warpgroups
    assert all(registers % 8 == 0 and registers <= 256 for registers in split)
