"""Conformance of the backends of the layer of experts; the oracle is a loop over choices in NumPy's float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import ContainedConformance, Found, Poisoned
from tests.kernels.matmul.gates import activation_and_slope
from tilewright.kernels import kernel
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.kernels.experts.inputs import ExpertsInputs, ExpertsResults
from tilewright.kernels.numerics.activations import ACTIVATIONS

BASE = ExpertsCase("", tokens=19, d=24, n=16, num_experts=5, k=2)


def case_of(name: str, **fields: Any) -> ExpertsCase:
    return dataclasses.replace(BASE, name=name, **fields)


CASES = (
    case_of("float32"),
    case_of("bfloat16", dtype="bfloat16", tokens=40, k=3),
    case_of("float16", dtype="float16", n=24),
    *(case_of(name, activation=name) for name in ACTIVATIONS if name != "silu"),
    case_of("gpt_oss", activation="swiglu_oai", biases=True, k=3),
    case_of("gpt_oss_bfloat16", activation="swiglu_oai", biases=True, dtype="bfloat16"),
    case_of("biases", biases=True, dtype="bfloat16"),
    case_of("capacity", capacity=4, zipf=1.0, biases=True),
    case_of("capacity_of_one", capacity=1, zipf=1.0, dtype="bfloat16"),
    case_of("skewed", zipf=3.0, num_experts=16, k=1),
    case_of("many_experts", num_experts=64, k=8, d=8, n=8),
    case_of("all_experts", num_experts=3, k=3),
    case_of("one_expert", num_experts=1, k=1),
    case_of("odd_sizes", d=23, n=17),
    case_of("odd_sizes_bfloat16", d=23, n=17, dtype="bfloat16"),
    case_of("one_token", tokens=1, k=4),
    case_of("no_tokens", tokens=0),
    case_of("no_n", n=0),
    case_of("no_d", d=0),
)


def inputs_of(case: ExpertsCase) -> ExpertsInputs:
    args, options = case.arguments()
    found: ExpertsInputs = kernel("moe_mlp").prepare(*args, **options)
    return found


def gate_and_slopes(activation: str, gate: Any, up: Any) -> tuple[Any, Any, Any]:
    """The hidden row, and its derivatives by both pre-activations."""
    if activation != "swiglu_oai":
        value, slope = activation_and_slope(activation, gate)
        return value * up, slope * up, value
    inside, between = gate <= 7, np.abs(up) <= 7
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    sigmoid = 1 / (1 + np.exp(-1.702 * gate))
    swish = gate * sigmoid
    slope = sigmoid + 1.702 * swish * (1 - sigmoid)
    return swish * (up + 1), inside * slope * (up + 1), between * swish


def kept_choices(inputs: ExpertsInputs) -> list[tuple[int, int, int]]:
    """``(token, choice, expert)`` of all that are not dropped, in order."""
    used, found = [0] * inputs.num_experts, []
    for t, row in enumerate(np.asarray(inputs.flat.experts).tolist()):
        for j, expert in enumerate(row):
            if 0 <= expert < inputs.num_experts and (inputs.capacity is None or used[expert] < inputs.capacity):
                used[expert] += 1
                found.append((t, j, expert))
    return found


def oracle(inputs: ExpertsInputs, d_out: Any, dtype: Any = np.float64) -> Found:
    """Results and gradients, choice by choice; rows and results are rounded to a dtype, sums are not."""
    flat = inputs.flat
    arrays = {name: None if x is None else np.asarray(x).astype(np.float64) for name, x in flat.arrays.items()}
    found: Found = {f"d_{name}": np.zeros(arrays[name].shape) for name in flat.gradients}
    found["out"] = np.zeros(arrays["x"].shape)
    d_out = np.asarray(d_out).astype(np.float64).reshape(found["out"].shape)

    def rounded(x: Any) -> Any:
        return np.asarray(x).astype(dtype).astype(np.float64)

    def add(name: str, place: Any, value: Any) -> None:
        if name in found:
            found[name][place] += value

    def bias(name: str, expert: int) -> Any:
        return 0 if arrays[name] is None else arrays[name][expert]

    for t, j, e in kept_choices(inputs):
        x, weight, d_row = arrays["x"][t], arrays["weights"][t, j], d_out[t]
        gate, up, down = (arrays[name][e] for name in ("gate", "up", "down"))
        pre_activations = [
            rounded(rounded(x @ matrix) + bias(name, e)) for matrix, name in ((gate, "gate_bias"), (up, "up_bias"))
        ]
        hidden, by_gate, by_up = gate_and_slopes(inputs.activation, *pre_activations)
        hidden = rounded(hidden)
        row = rounded(hidden @ down) + bias("down_bias", e)
        d_hidden = weight * rounded(down @ d_row)
        d_gate, d_up = rounded(d_hidden * by_gate), rounded(d_hidden * by_up)
        add("out", t, weight * row)
        add("d_weights", (t, j), row @ d_row)
        add("d_x", t, rounded(gate @ d_gate + up @ d_up))
        add("d_gate", e, np.outer(x, d_gate))
        add("d_up", e, np.outer(x, d_up))
        add("d_down", e, weight * np.outer(hidden, d_row))
        add("d_gate_bias", e, d_gate)
        add("d_up_bias", e, d_up)
        add("d_down_bias", e, weight * d_row)
    shapes = {"out": (*inputs.leading, inputs.d), "d_x": inputs.x.shape, "d_weights": inputs.weights.shape}
    return {
        name: (x if name == "d_weights" else rounded(x)).reshape(shapes.get(name, x.shape)) for name, x in found.items()
    }


class ExpertsConformance(ContainedConformance[ExpertsCase, ExpertsInputs]):
    """A backend of ``moe_mlp``."""

    cases = CASES
    repeated = CASES[1]
    poisons = ("token", "expert", "dropped")

    def inputs(self, case: ExpertsCase) -> ExpertsInputs:
        return inputs_of(case)

    def factor(self, case: ExpertsCase) -> float:
        """Pre-activations, hidden rows, rows of the result and their gradients are rounded one after another."""
        return 4.0

    def cotangents(self, inputs: ExpertsInputs) -> Any:
        shape = (*inputs.leading, inputs.d)
        return ExpertsResults(jnp.asarray(np.random.default_rng(1).standard_normal(shape), inputs.out_dtype))

    @staticmethod
    def residuals(results: Any) -> Any:
        return results._replace(out=None)

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return {"out": results.out} | {f"d_{name}": x for name, x in gradients.items()}

    def dtypes(self, inputs: ExpertsInputs) -> dict[str, Any]:
        return {"out": jnp.dtype(inputs.out_dtype)}

    def oracle(self, inputs: ExpertsInputs, cotangents: Any) -> tuple[Found, Found]:
        return oracle(inputs, cotangents.out), oracle(inputs, cotangents.out, inputs.out_dtype)

    def test_results_are_as_the_op_declares(self, case: ExpertsCase) -> None:
        inputs = self.inputs(self.adapted(case))
        with type(self).machine():
            if said := self.reasons(inputs, "forward"):
                pytest.skip("; ".join(said))
            forward, _ = self.params_of(inputs.structs)
            got = jax.eval_shape(lambda inputs: self.backend.forward(inputs, forward), inputs)
        wanted = kernel("moe_mlp").results(inputs.structs)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)

    def poisoned(self, poison: str) -> Poisoned:
        """A NaN in one token, in one expert's matrix, or in a token all of whose choices are dropped."""
        clean = inputs_of(self.adapted(case_of(poison)))
        experts = np.array(clean.experts)
        experts[3] = (-1, clean.num_experts) if poison == "dropped" else (0, 1)
        if poison == "expert":
            experts[:9] = np.where(experts[:9] == 2, 3, experts[:9])
        clean = clean.replace(experts=jnp.asarray(experts))
        cotangents = self.cotangents(clean)
        if poison == "expert":
            reached = (experts == 2).any(1)
            bad = clean.replace(down=clean.down.at[2].set(np.nan))
            places = {"out": reached, "d_x": reached, "d_weights": experts == 2, "d_gate": 2, "d_up": 2}
            return Poisoned((clean, cotangents), (bad, cotangents), places)
        bad = clean.replace(x=clean.x.at[3].set(np.nan))
        if poison == "dropped":
            zero = {"out": 3, "d_x": 3, "d_weights": 3}
            wrong = ExpertsResults(cotangents.out.at[3].set(np.nan))
            return Poisoned((clean, cotangents), (bad, wrong), zero=zero)
        matrices = dict.fromkeys(("d_gate", "d_up", "d_down"), slice(0, 2))
        return Poisoned((clean, cotangents), (bad, cotangents), {"out": 3, "d_x": 3, "d_weights": 3, **matrices})
