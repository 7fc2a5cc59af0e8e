"""The arguments of linear attention: what is refused, in one error that says why, and how types split a call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.draws import draw, zeros
from tilewright.kernels import kernel
from tilewright.modules import linear_attention

QUERY, VALUE, GATE = draw(2, 5, 2, 4), draw(2, 5, 4, 3, seed=1), zeros((2, 5, 4))
KEYS = zeros((2, 5, 4, 4))
STATE = zeros((2, 4, 4, 3))

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"query": QUERY[0]}, ValueError, r"query and key must be \[batch"),
    "key": ({"key": draw(2, 5, 1, 4)}, ValueError, "query and key must be"),
    "length": ({"value": VALUE[:, :4]}, ValueError, "same batch and length"),
    "heads": ({"value": draw(2, 5, 3, 3)}, ValueError, "value_heads must be a multiple of heads"),
    "dtypes": ({"value": VALUE.astype(jnp.bfloat16)}, ValueError, "one floating-point dtype"),
    "integers": ({"query": zeros((2, 5, 2, 4), np.int32)}, ValueError, "one floating-point dtype"),
    "gate": ({"log_decay": zeros((2, 5, 2))}, ValueError, "log_decay must have the shape"),
    "gate of integers": ({"log_decay": zeros((2, 5, 4), np.int32)}, TypeError, "log_decay must be floating-point"),
    "beta": ({"beta": zeros((2, 5, 2))}, ValueError, "beta must have the shape"),
    "two updates": ({"beta": GATE, "removal": (KEYS, KEYS)}, ValueError, "a call has one of them"),
    "bonus and beta": ({"beta": GATE, "bonus": zeros((4, 4))}, ValueError, "a call has one of them"),
    "one removal": ({"removal": KEYS}, ValueError, "removal must be a pair"),
    "removal": ({"removal": (KEYS, GATE)}, ValueError, r"removal\[1\] must have the shape"),
    "bonus": ({"bonus": zeros((2, 4))}, ValueError, "bonus must have the shape"),
    "states": ({"initial_state": STATE[:1]}, ValueError, "initial_state must have the shape"),
    "narrow states": ({"initial_state": STATE.astype(jnp.bfloat16)}, TypeError, "initial_state must be float32"),
    "packed rows": ({"cum_seqlens": zeros(3, np.int32)}, ValueError, "batch must be 1"),
    "two descriptions": (
        {"segment_ids": zeros((2, 5), np.int32), "seq_lengths": zeros(2, np.int32)}, ValueError, "in one way",
    ),
    "a state of segments": (
        {"segment_ids": zeros((2, 5), np.int32), "return_state": True}, ValueError, "describe sequences by cum_seqlens",
    ),
    "scale": ({"scale": float("nan")}, ValueError, "scale must be finite"),
    "eps": ({"l2norm_eps": -1.0}, ValueError, "must not be negative"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_refused(name: str):
    changed, error, message = REFUSED[name]
    arguments = {"query": QUERY, "key": QUERY, "value": VALUE} | changed
    with pytest.raises(error, match=f"linear_attention: .*{message}"):
        linear_attention(**arguments)


def test_gates_are_not_rounded_and_states_are_wide():
    low = [x.astype(jnp.bfloat16) for x in (QUERY, QUERY, VALUE)]
    inputs = kernel("linear_attention").prepare(*low, log_decay=GATE, beta=GATE, initial_state=STATE, return_state=True)
    assert inputs.log_decay.dtype == inputs.beta.dtype == inputs.initial_state.dtype == np.float32
    out, state = kernel("linear_attention").results(inputs)
    assert (out.dtype, state.dtype, state.shape) == (jnp.bfloat16, np.float32, STATE.shape)
    assert inputs.scale == 0.5


def test_types_must_split_batch_or_heads():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):

        def placed(x: Any, *spec: Any) -> Any:
            return jax.device_put(x, NamedSharding(mesh, P(*spec)))

        by_heads = placed(QUERY, None, None, "x"), placed(QUERY, None, None, "x"), placed(VALUE, None, None, "x")
        out = jax.jit(linear_attention)(*by_heads)
        assert out.sharding.spec == P(None, None, "x", None)
        with pytest.raises(ValueError, match="by batch and heads alone"):
            jax.jit(linear_attention)(placed(QUERY, None, None, None, "x"), QUERY, VALUE)
        with pytest.raises(ValueError, match="must be split alike"):
            jax.jit(linear_attention)(placed(QUERY, "x"), QUERY, placed(VALUE, None, None, "x"))
        one = placed(QUERY[:, :, :1], None)
        with pytest.raises(ValueError, match="need key heads of their own"):
            jax.jit(linear_attention)(one, one, placed(VALUE, None, None, "x"))
