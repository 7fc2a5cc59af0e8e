"""The oracle against the definitions of the models, one matrix equation a token, in NumPy."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.conformance import QUICK
from tests.kernels.linear_attention.conformance import inputs_of, wide
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.reference import linear_attention_reference


def spans_of(inputs: LinearAttentionInputs) -> list[tuple[int, int, int, int | None]]:
    """``(row, begin, end, state)`` of every sequence, by looking at each token."""
    batch, length = inputs.query.shape[:2]
    if inputs.cum_seqlens is not None:
        ends = np.asarray(inputs.cum_seqlens).tolist()
        return [(0, begin, end, i) for i, (begin, end) in enumerate(itertools.pairwise(ends))]
    if inputs.seq_lengths is not None:
        return [(b, 0, int(end), b) for b, end in enumerate(np.asarray(inputs.seq_lengths))]
    if inputs.segment_ids is None:
        return [(b, 0, length, b) for b in range(batch)]
    found = []
    for b, ids in enumerate(np.asarray(inputs.segment_ids).tolist()):
        begin = 0
        for t in range(1, length + 1):
            if t == length or ids[t] != ids[begin]:
                found += [(b, begin, t, None)] if ids[begin] >= 0 else []
                begin = t
    return found


def defined(inputs: LinearAttentionInputs) -> tuple[np.ndarray, np.ndarray]:
    """The results by the matrices of the recurrences, in which a state is ``[key_dim, value_dim]``."""
    x: dict[str, Any] = {name: np.asarray(a, np.float64) for name, a in inputs.arrays.items() if a is not None}
    query, key, value = x["query"], x["key"], x["value"]
    if inputs.qk_l2norm:
        query, key = (a / np.sqrt((a**2).sum(-1, keepdims=True) + inputs.l2norm_eps) for a in (query, key))
    out = np.zeros(value.shape)
    states = x.get("initial_state", np.zeros(inputs.state_shape)).copy()
    unit = np.eye(inputs.key_dim)
    for row, begin, end, slot in spans_of(inputs):
        for head in range(inputs.value_heads):
            state = np.zeros(inputs.state_shape[2:]) if slot is None else states[slot, head]
            for t in range(begin, end):
                q, k = (a[row, t, head // inputs.groups] for a in (query, key))
                v = value[row, t, head]
                g = x.get("log_decay", np.zeros(inputs.value_heads))
                decay = np.diag(np.exp(np.broadcast_to(g[head] if g.ndim == 1 else g[row, t, head], inputs.key_dim)))
                if "bonus" in x:
                    seen = state + np.diag(x["bonus"][head]) @ np.outer(k, v)
                    state = decay @ state + np.outer(k, v)
                elif "beta" in x:
                    beta = x["beta"][row, t, head]
                    seen = state = (unit - beta * np.outer(k, k)) @ decay @ state + beta * np.outer(k, v)
                elif inputs.removal is not None:
                    a, b = (x[name][row, t, head] for name in ("removal_read", "removal_write"))
                    seen = state = (decay + np.outer(b, a)) @ state + np.outer(k, v)
                else:
                    seen = state = decay @ state + np.outer(k, v)
                out[row, t, head] = inputs.scale * seen.T @ q
            if slot is not None:
                states[slot, head] = state
    return out, states


@pytest.mark.parametrize(
    ("update", "gate", "sequences"),
    [
        ("add", "none", "cum_seqlens"),
        ("add", "head", "segment_ids"),
        ("delta", "token", "cum_seqlens"),
        ("delta", "channel", "seq_lengths"),
        ("delta", "none", "segment_ids"),
        ("removal", "channel", "cum_seqlens"),
        ("removal", "token", "rows"),
        ("bonus", "channel", "segment_ids"),
        ("bonus", "head", "cum_seqlens"),
    ],
)
def test_the_oracle_is_the_recurrence(update: Any, gate: Any, sequences: Any):
    case = LinearAttentionCase(
        "",
        batch=1 if sequences == "cum_seqlens" else 2,
        length=13,
        heads=2,
        value_heads=4,
        key_dim=3,
        value_dim=2,
        gate=gate,
        update=update,
        sequences=sequences,
        state=True,
        qk_l2norm=update == "delta",
        l2norm_eps=0.5,
    )
    inputs = inputs_of(case, seed=3)
    with jax.enable_x64(True):
        got = jax.jit(linear_attention_reference, compiler_options=QUICK)(wide(inputs))
    out, states = defined(inputs)
    np.testing.assert_allclose(got.out, out, rtol=1e-12, atol=1e-13)
    assert (got.state is None) == (sequences == "segment_ids")
    if got.state is not None:
        np.testing.assert_allclose(got.state, states, rtol=1e-12, atol=1e-13)
