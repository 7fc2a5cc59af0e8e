"""Random calls of every op are lowered for GPUs that are not here, or refused with the error that is meant for them."""

import pytest

from tests.every_op.matrix import every_op
from tests.every_op.sweep import DEVICES, draw, drawn_fields, failures, values_of

HANDFUL, CHUNK, CHUNKS = 2, 20, 2

every = pytest.mark.parametrize("op", every_op())
on_every_device = pytest.mark.parametrize("device", DEVICES)


@every
def test_every_field_is_drawn(op: str) -> None:
    """Fails for a new op, or a new field of its cases, of which nothing tells the values."""
    calls = [draw(op, "h100", seed) for seed in range(100)]
    for field in drawn_fields(op):
        values = {repr(getattr(call.case, field.name)) for call in calls}
        assert len(values) > 1, f"{field.name} is always {values}, of {values_of(op, field.name)}"


@every
def test_a_seed_gives_one_call(op: str) -> None:
    first, second = (repr(draw(op, "a100", seed)) for seed in (0, 1))
    assert first == repr(draw(op, "a100", 0)) != second


@on_every_device
@pytest.mark.parametrize("seed", range(HANDFUL))
@every
def test_a_handful(op: str, seed: int, device: str) -> None:
    assert failures([draw(op, device, seed)]) == []


@on_every_device
@pytest.mark.parametrize("chunk", range(CHUNKS))
@every
def test_hundreds(op: str, chunk: int, device: str) -> None:
    """As for the handful; other calls for each device."""
    first = HANDFUL + CHUNK * (chunk + CHUNKS * list(DEVICES).index(device))
    assert failures(draw(op, device, seed) for seed in range(first, first + CHUNK)) == []
