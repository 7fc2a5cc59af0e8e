"""A step of the selective scan gives what the scan gives, and what NumPy gives; slots that no row writes are kept."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check, check_candidates
from tests.kernels.conftest import H100
from tests.kernels.selective_scan.conformance import BARE, small
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.selective_scan.cases import SelectiveScanStepCase
from tilewright.kernels.selective_scan.inputs import SelectiveScanStepInputs
from tilewright.kernels.selective_scan.ops.selective_scan_step import SelectiveScanStep
from tilewright.kernels.selective_scan.triton.selective_scan_step import TritonSelectiveScanStep
from tilewright.kernels.selective_scan.xla.selective_scan_step import XlaSelectiveScanStep
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.modules import selective_scan, selective_scan_step
from tilewright.ops.utils.datacarrier import FwdParams

pytestmark = pytest.mark.usefixtures("unoptimised")

OP = SelectiveScanStep()
BASE = SelectiveScanStepCase("", rows=4, channels=6, state=3)
CASES = (
    dataclasses.replace(BASE, name="own_slots"),
    dataclasses.replace(BASE, name="slots", slots=7),
    dataclasses.replace(BASE, name="written_elsewhere", slots=9, written=True),
    dataclasses.replace(BASE, name="groups", groups=2, dtype="bfloat16", slots=5),
    dataclasses.replace(BASE, name="bare", **BARE),
    dataclasses.replace(BASE, name="bfloat16_pool", dtype="bfloat16", state_dtype="bfloat16", state=16),
)
BACKENDS: tuple[tuple[Backend[Any, Any, Any, Any], Any], ...] = (
    (XlaSelectiveScanStep(), contextlib.nullcontext),
    (TritonSelectiveScanStep(), interpret_triton),
)
every_backend = pytest.mark.parametrize(("backend", "machine"), BACKENDS, ids=["xla", "triton"])


def wanted(inputs: SelectiveScanStepInputs) -> dict[str, Any]:
    """The output and the pool by a loop over rows in float64."""
    arrays = {n: np.asarray(x, np.float64) for n, x in inputs.arrays.items() if x is not None}
    slots, group = len(arrays["state_pool"]), np.arange(inputs.channels) // (inputs.channels // inputs.groups)
    out, pool = np.zeros(inputs.u.shape), arrays["state_pool"].copy()
    for row in range(inputs.rows):
        slot = row if inputs.state_indices is None else int(inputs.state_indices[row])
        target = slot if inputs.write_indices is None else int(inputs.write_indices[row])
        if not 0 <= slot < slots:
            continue
        step = arrays["delta"][row] + arrays.get("delta_bias", 0.0)
        if inputs.delta_softplus:
            step = np.logaddexp(step, 0.0)
        state = np.exp(step[:, None] * arrays["A"]) * arrays["state_pool"][slot]
        state = state + (step * arrays["u"][row])[:, None] * arrays["B"][row, group]
        out[row] = np.sum(state * arrays["C"][row, group], axis=1) + arrays.get("D", 0.0) * arrays["u"][row]
        if "z" in arrays:
            out[row] *= arrays["z"][row] / (1.0 + np.exp(-arrays["z"][row]))
        if 0 <= target < slots:
            pool[target] = state
    return {"out": out, "pool": pool}


def run(backend: Any, machine: Any, inputs: SelectiveScanStepInputs) -> dict[str, Any]:
    with machine():
        assert not backend.not_supported_reasons(inputs.structs, H100, "forward")
        found = jax.block_until_ready(jax.jit(lambda each: backend.forward(each, FwdParams(num_warps=1)))(inputs))
    return dict(zip(("out", "pool"), found, strict=True))


@every_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results(backend: Any, machine: Any, case: SelectiveScanStepCase):
    args, options = case.arguments()
    inputs = OP.prepare(*args, **options)
    got = run(backend, machine, inputs)
    assert got["out"].dtype == inputs.u.dtype
    assert got["pool"].dtype == inputs.state_pool.dtype
    check(got, wanted(inputs))


@every_backend
def test_states_are_wider_than_tokens(backend: Any, machine: Any):
    args, options = dataclasses.replace(BASE, dtype="bfloat16", state_dtype="float32").arguments()
    inputs = OP.prepare(*args, **options)
    assert (inputs.u.dtype, inputs.state_pool.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(run(backend, machine, inputs)["pool"], wanted(inputs)["pool"], rtol=1e-5, atol=1e-6)


@every_backend
def test_padding_writes_nothing(backend: Any, machine: Any):
    """Rows without a slot, with anything in them, and rows whose state is to be written nowhere."""
    args, options = dataclasses.replace(BASE, slots=6).arguments()
    inputs = OP.prepare(*args, **options)
    inputs = inputs.replace(
        state_indices=jnp.asarray([2, -1, 6, 4], jnp.int32),
        write_indices=jnp.asarray([5, 0, 1, -1], jnp.int32),
        u=inputs.u.at[1:3].set(jnp.nan),
        delta=inputs.delta.at[1:3].set(jnp.inf),
    )
    got = run(backend, machine, inputs)
    assert not np.any(got["out"][1:3])
    kept = [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(got["pool"][jnp.asarray(kept)], inputs.state_pool[jnp.asarray(kept)])
    check(got, wanted(inputs))


@every_backend
def test_a_slot_that_is_not_finite_stays_alone(backend: Any, machine: Any):
    args, options = dataclasses.replace(BASE, slots=6).arguments()
    inputs = OP.prepare(*args, **options)
    rows = inputs.state_indices
    assert rows is not None
    pool = inputs.state_pool.at[rows[0]].set(jnp.nan)
    got, clean = (run(backend, machine, each) for each in (inputs.replace(state_pool=pool), inputs))
    assert np.all(np.isnan(got["out"][0]))
    np.testing.assert_array_equal(got["out"][1:], clean["out"][1:])


def test_steps_continue_a_scan():
    """Prefill, then a token at a time, is the scan of all tokens."""
    inputs = small("", batch=3, length=20, return_state=True).inputs()
    floats = {name: getattr(inputs, name) for name in inputs.gradients}
    by_token = ("u", "delta", "B", "C", "z")
    whole, last = selective_scan(**floats, delta_softplus=True, return_state=True)
    head = floats | {name: floats[name][:, :12] for name in by_token}
    _, pool = selective_scan(**head, delta_softplus=True, return_state=True)
    step = jax.jit(lambda pool, **arrays: selective_scan_step(pool, **arrays, delta_softplus=True))
    for t in range(12, 20):
        out, pool = step(pool, **floats | {name: floats[name][:, t] for name in by_token})
        np.testing.assert_allclose(out, whole[:, t], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(pool, last, rtol=2e-5, atol=2e-5)


def test_wrong_calls():
    args, options = BASE.arguments()
    pool, u, *others = args
    for changed, said in (
        ((pool[:3], u, *others), "must have rows=4 slots"),
        ((pool[:, :5], u, *others), r"state_pool must have the shape \[slots, channels, state\]"),
        ((pool, u[None], *others), "u must be a floating-point array"),
    ):
        with pytest.raises(ValueError, match=said):
            selective_scan_step(*changed, **options)
    with pytest.raises(TypeError, match="see selective_scan for training"):
        jax.grad(lambda u: selective_scan_step(pool, u, *others, **options)[0].sum())(u)


def test_what_ships_can_run():
    for fields in ({}, {"channels": 3, "state": 1}, {"channels": 64, "state": 256}, {"rows": 1, "slots": 300}):
        args, options = SelectiveScanStepCase("", **fields).abstract_arguments()
        assert check_candidates(TritonSelectiveScanStep(), OP.prepare(*args, **options), H100)["forward"]
