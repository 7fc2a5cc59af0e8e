"""Conformance of the backends of linear attention: cases, and the recurrence by token in float64 as the oracle."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import QUICK, Conformance, Found
from tilewright.kernels import kernel
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.reference import linear_attention_reference
from tilewright.kernels.op.cases import variants

_TINY = LinearAttentionCase("", length=37, heads=1, value_heads=2, key_dim=8, value_dim=6, state=True)

CASES = tuple(
    variants(
        _TINY,
        {
            "one_token": {"batch": 2, "length": 1},
            "a_chunk": {"length": 64, "gate": "none"},
            "a_chunk_and_one": {"length": 65, "batch": 2},
            "bfloat16": {"dtype": "bfloat16", "length": 70, "qk_l2norm": True},
            "float16_channel": {"dtype": "float16", "length": 33, "gate": "channel"},
            "add": {"update": "add", "gate": "none", "sequences": "cum_seqlens"},
            "add_head": {"update": "add", "gate": "head", "sequences": "seq_lengths", "batch": 3},
            "add_token": {"update": "add", "gate": "token", "sequences": "segment_ids", "scale": 1.0},
            "add_channel": {"update": "add", "gate": "channel", "heads": 2, "qk_l2norm": True},
            "delta_none_packed": {"gate": "none", "sequences": "cum_seqlens"},
            "delta_head_segments": {"gate": "head", "sequences": "segment_ids", "batch": 2},
            "delta_token_packed": {"sequences": "cum_seqlens", "length": 90, "qk_l2norm": True},
            "delta_token_lengths": {"sequences": "seq_lengths", "batch": 2},
            "delta_channel_segments": {"gate": "channel", "sequences": "segment_ids", "value_heads": 3},
            "delta_channel_packed": {"gate": "channel", "sequences": "cum_seqlens"},
            "removal_none": {"update": "removal", "gate": "none", "sequences": "seq_lengths", "batch": 2},
            "removal_token": {"update": "removal", "gate": "token", "sequences": "segment_ids"},
            "removal_channel": {"update": "removal", "gate": "channel", "sequences": "cum_seqlens", "heads": 2},
            "bonus_head": {"update": "bonus", "gate": "head", "sequences": "segment_ids"},
            "bonus_channel": {"update": "bonus", "gate": "channel", "sequences": "cum_seqlens", "qk_l2norm": True},
            "no_tokens": {"length": 0, "batch": 2},
        },
    ).values()
)


def inputs_of(case: LinearAttentionCase, seed: int = 0) -> LinearAttentionInputs:
    args, kwargs = case.arguments(seed)
    found: LinearAttentionInputs = kernel("linear_attention").prepare(*args, **kwargs)
    return found


def wide(tree: Any) -> Any:
    """The same with float64 in place of other floating-point dtypes; within ``enable_x64``."""
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@functools.partial(jax.jit, compiler_options=QUICK)
def _both(inputs: LinearAttentionInputs, cotangents: LinearAttentionResults) -> tuple[Any, Any]:
    floats = {name: getattr(inputs, name) for name in inputs.gradients}
    results, pull_back = jax.vjp(lambda arrays: linear_attention_reference(inputs.replace(**arrays)), floats)
    return results, pull_back(cotangents)[0]


def exact(inputs: LinearAttentionInputs, cotangents: LinearAttentionResults) -> Found:
    """Results and gradients in float64, token by token."""
    with jax.enable_x64(True):
        found = jax.device_get(_both(wide(inputs), wide(cotangents)))
    return named(*found)


def named(results: LinearAttentionResults, gradients: dict[str, Any]) -> Found:
    state = {} if results.state is None else {"state": results.state}
    return {"out": results.out, **state, **{f"d_{name}": each for name, each in gradients.items()}}


class LinearAttentionConformance(Conformance[LinearAttentionCase, LinearAttentionInputs]):
    """A backend of linear attention."""

    cases = CASES
    repeated = CASES[11]

    def inputs(self, case: LinearAttentionCase) -> LinearAttentionInputs:
        return inputs_of(case)

    def cotangents(self, inputs: LinearAttentionInputs) -> Any:
        random = np.random.default_rng(1)
        out = jnp.asarray(random.standard_normal(inputs.value.shape), inputs.value.dtype)
        state = random.standard_normal(inputs.state_shape) if inputs.return_state else None
        return LinearAttentionResults(out, None if state is None else jnp.asarray(state, inputs.state_dtype))

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return named(results, gradients)

    def dtypes(self, inputs: LinearAttentionInputs) -> dict[str, Any]:
        state = {"state": inputs.state_dtype} if inputs.return_state else {}
        return {"out": inputs.value.dtype, **state}

    def oracle(self, inputs: LinearAttentionInputs, cotangents: Any) -> tuple[Found, None]:
        return exact(inputs, cotangents), None


def check_contained(forward: Any, case: LinearAttentionCase, at: int) -> None:
    """A number of a token that is NaN or infinite: what comes before is the same to the bit, and so are other heads.

    From that token on results and states are NaN or infinite where the recurrence by token has them so. Each row of a
    batch has another such number in the same arrays; the first has none.

    Args:
      forward: computes the results of inputs.
      case: with two heads.
      at: the token.
    """
    values = {"log_decay": np.nan, "query": np.nan, "key": np.inf, "value": np.nan}
    values |= dict.fromkeys(("beta", "removal_read", "removal_write"), np.nan)
    sizes = dataclasses.replace(case, state=True)
    names = [name for name, x in inputs_of(sizes).arrays.items() if x is not None and name in values]
    names = [name for name in names if inputs_of(sizes).arrays[name].ndim > 1]
    spoiled = [(name, values[name]) for name in names]
    rows = 1 + len(spoiled)
    every = inputs_of(dataclasses.replace(sizes, batch=rows))
    one = {name: np.array(x) for name, x in every.arrays.items() if x is not None and x.shape[0] == rows and x.ndim > 1}
    arrays = {name: np.repeat(x[:1], rows, axis=0) for name, x in one.items()}
    for row, (name, value) in enumerate(spoiled, 1):
        arrays[name][(row, at, 0, 1)[: arrays[name].ndim]] = value
    inputs = every.replace(**{name: jnp.asarray(x) for name, x in arrays.items()})
    got = jax.tree.map(np.asarray, forward(inputs))
    with jax.enable_x64(True):
        definition = jax.tree.map(np.asarray, linear_attention_reference(wide(inputs)))
    clean = got.out[:1]
    np.testing.assert_array_equal(got.out[:, :at], np.repeat(clean[:, :at], rows, axis=0))
    np.testing.assert_array_equal(got.out[:, :, 1], np.repeat(clean[:, :, 1], rows, axis=0))
    np.testing.assert_array_equal(got.state[:, 1], np.repeat(got.state[:1, 1], rows, axis=0))
    assert np.isfinite(clean).all()
    assert np.isfinite(got.state[0]).all()
    for found, defined in zip(got, definition, strict=True):
        reached = ~np.isfinite(defined)
        assert reached.any()
        assert not np.isfinite(found[reached]).any(), np.argwhere(reached & np.isfinite(found))[:9]
