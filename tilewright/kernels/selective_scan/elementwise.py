"""The steps of a selective scan, which are computed of each token alone."""

from typing import Any

import jax

from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs
from tilewright.kernels.sequences import without_padding


def steps_of(inputs: SelectiveScanInputs, ids: jax.Array, delta: jax.Array, bias: jax.Array | None) -> Any:
    """Delta as the recurrence uses it: 0, and not softplus of 0, for tokens that belong to no sequence."""
    delta = without_padding(delta, ids).astype(inputs.dtype)
    if bias is not None:
        delta = delta + bias.astype(inputs.dtype)
    return without_padding(jax.nn.softplus(delta) if inputs.delta_softplus else delta, ids)
