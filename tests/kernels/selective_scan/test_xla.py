"""The XLA backend of the selective scan: conformance, several chunks, derivatives in float64, splits by states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.selective_scan.conformance import BOTH, ScanCase, ScanConformance, recurrence, small
from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs
from tilewright.kernels.selective_scan.xla.selective_scan import XlaSelectiveScan
from tilewright.modules import selective_scan
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

pytestmark = pytest.mark.usefixtures("unoptimised")

SEVERAL_CHUNKS = (
    small("rows", batch=2, length=130, **BOTH),
    small("lengths", batch=2, length=129, row_lengths=(66, 128), **BOTH),
    small("packed", length=150, cum=(1, 1, 66, 67, 140, 149), **BOTH),
    small("segments", length=140, ids=((4,) * 65 + (2,) * 40 + (-1,) * 5 + (2,) * 30,)),
    small("huge", length=70, huge=True, delta_softplus=False, delta_bias=False, **BOTH),
)


class TestXla(ScanConformance):
    backend = XlaSelectiveScan()

    def params(self, inputs: SelectiveScanInputs) -> tuple[FwdParams, BwdParams]:
        return FwdParams(), BwdParams()


def _floats(inputs: SelectiveScanInputs) -> dict[str, Any]:
    return {name: np.asarray(getattr(inputs, name), np.float64) for name in inputs.gradients}


def _call(floats: dict[str, Any], inputs: SelectiveScanInputs) -> Any:
    others = {n: x for n, x in inputs.arrays.items() if n not in floats and x is not None}
    flags = {"delta_softplus": inputs.delta_softplus, "return_state": inputs.return_state}
    return selective_scan(**floats, **others, **flags, platform="xla")


@pytest.mark.parametrize("case", SEVERAL_CHUNKS, ids=lambda case: case.name)
def test_float64_over_chunks(case: ScanCase):
    """Results are the recurrence's to rounding, and gradients its finite differences, in a random direction."""
    inputs = case.inputs()
    floats = _floats(inputs)
    random = np.random.default_rng(5)
    wanted = recurrence(floats, inputs)[:2]
    out_weight, state_weight = (random.standard_normal(x.shape) for x in wanted)
    if not inputs.return_state:
        state_weight = np.zeros(state_weight.shape)

    def exact(floats: dict[str, Any]) -> float:
        out, state, _ = recurrence(floats, inputs)
        return float(np.sum(out * out_weight) + np.sum(state * state_weight))

    with jax.enable_x64(True):

        def loss(floats: dict[str, Any]) -> Any:
            found = _call(floats, inputs)
            out, state = found if inputs.return_state else (found, 0.0)
            return jnp.sum(out * out_weight) + jnp.sum(state * state_weight), found

        (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(jax.tree.map(jnp.asarray, floats))
    for got, want in zip(found if inputs.return_state else (found,), wanted, strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)
    for name, gradient in gradients.items():
        direction = random.standard_normal(floats[name].shape)
        step = 1e-6
        ends = [exact(floats | {name: floats[name] + sign * step * direction}) for sign in (1, -1)]
        got = np.sum(np.asarray(gradient) * direction)
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / (2 * step), rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("first", [1, 16, 64, 100])
def test_two_parts_by_a_state_are_the_whole(first: int):
    inputs = small("", length=130, **BOTH).inputs()
    by_token = ("u", "delta", "B", "C", "z")
    floats = {name: getattr(inputs, name) for name in inputs.gradients}
    out, state = _call(floats, inputs)
    head = floats | {name: floats[name][:, :first] for name in by_token}
    head_out, middle = _call(head, inputs)
    tail = floats | {name: floats[name][:, first:] for name in by_token} | {"initial_state": middle}
    tail_out, last = _call(tail, inputs)
    np.testing.assert_allclose(jnp.concatenate([head_out, tail_out], axis=1), out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(last, state, rtol=2e-5, atol=2e-5)


def test_segments_are_what_packed_sequences_are():
    inputs = small("", length=100, cum=(0, 30, 64, 100)).inputs()
    floats = {name: getattr(inputs, name) for name in inputs.gradients}
    ids = jnp.asarray([[5] * 30 + [2] * 34 + [5] * 36])
    packed = _call(floats, inputs)
    np.testing.assert_allclose(
        _call(floats, inputs.replace(cum_seqlens=None, segment_ids=ids)), packed, rtol=2e-5, atol=2e-5
    )
    alone = [
        _call(floats | {n: floats[n][:, a:b] for n in ("u", "delta", "B", "C", "z")}, inputs.replace(cum_seqlens=None))
        for a, b in ((0, 30), (30, 64), (64, 100))
    ]
    np.testing.assert_allclose(jnp.concatenate(alone, axis=1), packed, rtol=2e-5, atol=2e-5)


def test_a_packed_row_without_tokens():
    """Its sequences keep their states, whose gradients pass through."""
    inputs = small("", length=0, cum=(0, 0, 0), **BOTH).inputs()
    first = inputs.initial_state

    def states(first: Any) -> Any:
        tokens = inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C
        return selective_scan(*tokens, cum_seqlens=inputs.cum_seqlens, initial_state=first, return_state=True)[1]

    np.testing.assert_array_equal(states(first), first)
    np.testing.assert_array_equal(
        jax.grad(lambda first: jnp.sum(states(first) * 3.0))(first), jnp.full_like(first, 3.0)
    )


def test_equal_groups_are_one():
    inputs = small("", channels=6, groups=2).inputs()
    floats = {name: getattr(inputs, name) for name in inputs.gradients}
    one = {name: floats[name][:, :, 0] for name in ("B", "C")}
    repeated = {name: jnp.stack([x, x], axis=2) for name, x in one.items()}
    np.testing.assert_allclose(_call(floats | one, inputs), _call(floats | repeated, inputs), rtol=1e-6, atol=1e-6)


def test_memory_is_that_of_chunks():
    """No array of the program has a state for each token."""
    length, channels, state = 2048, 64, 16
    shapes = {"u": (1, length, channels), "delta": (1, length, channels), "A": (channels, state)}
    shapes |= dict.fromkeys(("B", "C"), (1, length, state))
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    loss = lambda arrays: jnp.sum(selective_scan(**arrays, platform="xla"))
    compiled = jax.jit(jax.grad(loss)).lower(structs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * 4 * length * channels * state
