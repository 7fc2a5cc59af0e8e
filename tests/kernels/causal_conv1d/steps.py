"""Cases of steps, and their definition row by row in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import Found, check
from tilewright.kernels import kernel
from tilewright.kernels.causal_conv1d.cases import ConvStepCase
from tilewright.kernels.causal_conv1d.inputs import StepInputs

CASES = {
    case.name: case
    for case in (
        ConvStepCase("rows", batch=3, channels=24),
        ConvStepCase("indices", batch=5, channels=40, slots=4, tokens=2),
        ConvStepCase("moves", batch=4, channels=24, slots=9, moves=True, tokens=5),
        ConvStepCase("bfloat16", batch=3, channels=33, slots=6, dtype="bfloat16", weight_dtype="float32", bias=False),
        ConvStepCase("wider_pool", batch=3, channels=16, slots=6, dtype="bfloat16", pool_dtype="float32"),
        ConvStepCase("narrower_pool", batch=2, channels=16, pool_dtype="bfloat16", tokens=2, activation=None),
        ConvStepCase("float16", batch=2, channels=16, dtype="float16", tokens=8),
        ConvStepCase("width_2", batch=2, channels=16, width=2, tokens=3),
        ConvStepCase("width_8", batch=2, channels=16, width=8, tokens=3),
        ConvStepCase("width_1", batch=2, channels=16, width=1),
        ConvStepCase("no_rows", batch=0, channels=16, slots=3),
    )
}


def inputs_of_step(case: ConvStepCase) -> StepInputs:
    """What a backend gets, with rows without a slot, and slots that no row has, full of NaN.

    Where states move, the last row has a slot to write to and none to read: it is padding.
    """
    args, kwargs = case.arguments()
    found: StepInputs = kernel("causal_conv1d_step").prepare(*args, **kwargs)
    if found.state_indices is None:
        return found
    slots = found.conv_pool.shape[0]
    if found.write_indices is not None:
        found = found.replace(state_indices=found.state_indices.at[-1].set(-1))
    used = np.asarray(found.state_indices)
    unused = [slot for slot in range(slots) if slot not in used]
    # A slot beyond the pool is none, as one before it.
    indices = jnp.where(found.state_indices < 0, slots + 3, found.state_indices)
    pool = found.conv_pool.at[np.asarray(unused, int)].set(jnp.nan)
    if found.write_indices is not None:
        pool = pool.at[found.write_indices[-1]].set(1.0)  # what the row of NaN must not overwrite
    return found.replace(
        x=found.x.at[np.flatnonzero(used < 0)].set(jnp.nan),
        conv_pool=pool,
        state_indices=indices if found.write_indices is None else found.state_indices,
    )


def oracle(inputs: StepInputs) -> Found:
    x, weight = (np.asarray(each, np.float64) for each in (inputs.x, inputs.weight))
    batch, tokens, channels = x.shape
    bias = np.zeros(channels) if inputs.bias is None else np.asarray(inputs.bias, np.float64)
    before = np.asarray(inputs.conv_pool.astype(jnp.float32), np.float64)
    pool, y = before.copy(), np.zeros_like(x)
    read = range(batch) if inputs.state_indices is None else np.asarray(inputs.state_indices).tolist()
    write = read if inputs.write_indices is None else np.asarray(inputs.write_indices).tolist()
    for row, (source, target) in enumerate(zip(read, write, strict=True)):
        if not 0 <= source < len(pool):
            continue
        state = before[source]
        for t in range(tokens):
            window = np.concatenate([state, x[row, t][:, None]], axis=1)
            total = (window * weight).sum(1) + bias
            y[row, t] = total / (1 + np.exp(-total)) if inputs.activation else total
            state = window[:, 1:]
        if 0 <= target < len(pool):
            pool[target] = state
    return {"y": y, "pool": np.asarray(jnp.asarray(pool, inputs.conv_pool.dtype).astype(jnp.float32), np.float64)}


def check_step(inputs: StepInputs, got: tuple[Any, Any]) -> None:
    want, (y, pool) = oracle(inputs), got
    assert (y.dtype, pool.dtype) == (inputs.x.dtype, inputs.conv_pool.dtype)
    np.testing.assert_array_equal(np.asarray(pool.astype(jnp.float32)), want["pool"])
    if inputs.state_indices is not None:
        slots = np.asarray(inputs.state_indices)
        assert not np.any(np.asarray(y.astype(jnp.float32))[(slots < 0) | (slots >= len(want["pool"]))])
    if y.size:
        check({"y": y}, {"y": want["y"]})
