"""The checks of the selective scan's arguments."""

from typing import Any

import jax.numpy as jnp
import pytest

from tilewright.kernels.selective_scan.cases import SelectiveScanCase
from tilewright.modules import selective_scan

ARGS, OPTIONS = SelectiveScanCase("", batch=2, length=5, channels=4, state=3).arguments()
U, DELTA, A, B, C, D = ARGS

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "u of the wrong rank": ({"u": U[0]}, ValueError, r"u must be .*\[batch, length, channels\]"),
    "integers": ({"u": jnp.zeros(U.shape, jnp.int32)}, ValueError, "u must be a floating-point array"),
    "another length": ({"delta": DELTA[:, :4]}, ValueError, "delta must be .* of u's shape"),
    "no steps": ({"delta": None}, TypeError, "delta must be an array"),
    "complex A": ({"A": A.astype(jnp.complex64)}, ValueError, "complex states are not supported"),
    "A of other channels": ({"A": A[:3]}, ValueError, "with 4 channels as u has"),
    "B by channels first": ({"B": jnp.moveaxis(B, 1, 2)}, ValueError, "B must have the shape"),
    "groups that do not divide": (
        {name: jnp.zeros((2, 5, 3, 3)) for name in ("B", "C")}, ValueError, "must divide the channels"
    ),
    "groups of B alone": ({"B": jnp.zeros((2, 5, 2, 3))}, ValueError, "must have the same groups"),
    "D for each state": ({"D": A}, ValueError, "D must be floating-point"),
    "states of the wrong shape": ({"initial_state": jnp.zeros((1, 4, 3))}, ValueError, "initial_state must be"),
    "two packings": (
        {"segment_ids": jnp.zeros((2, 5), jnp.int32), "seq_lengths": jnp.asarray([5, 5])}, ValueError, "in one way"
    ),
    "packed rows": ({"cum_seqlens": jnp.asarray([0, 5])}, ValueError, "batch must be 1"),
    "states of segments": (
        {"segment_ids": jnp.zeros((2, 5), jnp.int32), "return_state": True}, ValueError, "with cum_seqlens"
    ),
    "more tokens than there are": ({"seq_lengths": jnp.asarray([5, 6])}, ValueError, "is more than the length 5"),
    "a number for a flag": ({"delta_softplus": 1}, TypeError, "delta_softplus must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str):
    changed, error, said = WRONG[name]
    given = dict(zip(["u", "delta", "A", "B", "C", "D"], ARGS, strict=True)) | OPTIONS | changed
    with pytest.raises(error, match=said):
        selective_scan(**given)
