"""Conformance of the backends of the causal convolution: cases, and the definition token by token in float64."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import ContainedConformance, Found, Poisoned, check, check_same
from tilewright.kernels import kernel
from tilewright.kernels.causal_conv1d.cases import ConvCase
from tilewright.kernels.causal_conv1d.inputs import ConvInputs, ConvResults

CASES = {
    case.name: case
    for case in (
        ConvCase("rows", batch=2, length=11, channels=24),
        ConvCase("width_2", length=9, channels=16, width=2, bias=False),
        ConvCase("width_3", length=9, channels=40, width=3, activation=None),
        ConvCase("width_8", batch=2, length=13, channels=8, width=8, initial_state=True, return_state=True),
        ConvCase("width_1", length=5, channels=8, width=1, initial_state=True, return_state=True),
        ConvCase("width_9", length=12, channels=8, width=9, packing="cum_seqlens", return_state=True),
        ConvCase("one_token", batch=3, length=1, channels=8, return_state=True),
        ConvCase("one_token_with_state", batch=3, length=1, channels=8, return_state=True, initial_state=True),
        ConvCase("three_tokens", length=3, channels=8, return_state=True, initial_state=True, activation=None),
        ConvCase("no_tokens", batch=2, length=0, channels=8, return_state=True, initial_state=True),
        ConvCase("no_rows", batch=0, length=4, channels=8),
        ConvCase("one_channel", length=7, channels=1),
        ConvCase("odd_channels", length=7, channels=33, packing="segment_ids"),
        ConvCase("bfloat16", batch=2, length=19, channels=24, dtype="bfloat16", return_state=True),
        ConvCase("bfloat16_packed", length=19, channels=24, dtype="bfloat16", weight_dtype="float32",
                 packing="cum_seqlens", initial_state=True, return_state=True),
        ConvCase("float16", length=12, channels=24, dtype="float16", packing="seq_lengths", batch=3, return_state=True,
                 initial_state=True),
        ConvCase("packed", length=21, channels=12, packing="cum_seqlens", sequences=6),
        ConvCase("packed_states", length=21, channels=12, packing="cum_seqlens", sequences=9, initial_state=True,
                 return_state=True),
        ConvCase("packed_short", length=7, channels=8, packing="cum_seqlens", sequences=12, initial_state=True,
                 return_state=True, width=5),
        ConvCase("segments", batch=2, length=17, channels=12, packing="segment_ids", sequences=5),
        ConvCase("lengths", batch=4, length=9, channels=12, packing="seq_lengths", return_state=True),
    )
}  # fmt: skip


def sequences_of(inputs: ConvInputs) -> list[tuple[int, int, int]]:
    """Row, begin and end of each sequence, by a loop over what describes them."""
    batch, length, _ = inputs.x.shape
    if inputs.cum_seqlens is not None:
        return [(0, a, b) for a, b in itertools.pairwise(np.asarray(inputs.cum_seqlens).tolist())]
    if inputs.segment_ids is not None:
        found = []
        for row, ids in enumerate(np.asarray(inputs.segment_ids).tolist()):
            for number, tokens in itertools.groupby(range(length), ids.__getitem__):
                places = list(tokens)
                if number >= 0:
                    found.append((row, places[0], places[-1] + 1))
        return found
    ends = [length] * batch if inputs.seq_lengths is None else np.asarray(inputs.seq_lengths).tolist()
    return [(row, 0, end) for row, end in enumerate(ends)]


def oracle(inputs: ConvInputs, cotangents: ConvResults) -> Found:
    """Results and gradients token by token in float64, through a state of the last inputs that every token shifts."""
    x, weight, d_out = (np.asarray(each, np.float64) for each in (inputs.x, inputs.weight, cotangents.out))
    (_, _, channels), width, sequences = x.shape, inputs.width, sequences_of(inputs)
    bias = np.zeros(channels) if inputs.bias is None else np.asarray(inputs.bias, np.float64)
    initial = np.zeros((len(sequences), channels, width - 1))
    if inputs.initial_state is not None:
        initial = np.asarray(inputs.initial_state, np.float64)
    found = {"out": np.zeros_like(x), "d_x": np.zeros_like(x), "d_weight": np.zeros_like(weight)}
    found |= {"d_bias": np.zeros(channels), "d_initial_state": np.zeros_like(initial), "state": np.zeros_like(initial)}
    for number, (row, begin, end) in enumerate(sequences):
        # Each input with the place of its gradient.
        state = [(initial[number, :, c], found["d_initial_state"][number, :, c]) for c in range(width - 1)]
        for t in range(begin, end):
            window = [*state, (x[row, t], found["d_x"][row, t])]
            total = bias + sum(weight[:, j] * value for j, (value, _) in enumerate(window))
            y, slope = total, np.ones(channels)
            if inputs.activation:
                p = 1 / (1 + np.exp(-total))
                y, slope = total * p, p + total * p * (1 - p)
            found["out"][row, t] = y
            d_total = d_out[row, t] * slope
            found["d_bias"] += d_total
            for j, (value, d_value) in enumerate(window):
                found["d_weight"][:, j] += d_total * value
                d_value += weight[:, j] * d_total
            state = window[1:]
        for column, (value, d_value) in enumerate(state):
            found["state"][number, :, column] = value
            if cotangents.state is not None:
                d_value += np.asarray(cotangents.state, np.float64)[number, :, column]
    absent = {"d_bias": inputs.bias, "d_initial_state": inputs.initial_state, "state": inputs.return_state or None}
    return {name: value for name, value in found.items() if name not in absent or absent[name] is not None}


def named(results: ConvResults, gradients: dict[str, Any]) -> Found:
    found = {"out": results.out, "state": results.state, **{f"d_{name}": x for name, x in gradients.items()}}
    return {name: x for name, x in found.items() if x is not None}


def inputs_of(case: ConvCase, seed: int = 0) -> ConvInputs:
    args, kwargs = case.arguments(seed)
    found: ConvInputs = kernel("causal_conv1d").prepare(*args, **kwargs)
    return found


def cotangents_of(inputs: ConvInputs, seed: int = 1) -> ConvResults:
    random = np.random.default_rng(seed)

    def drawn(shape: Any, dtype: Any) -> Any:
        return jnp.asarray(random.standard_normal(shape), dtype)

    state = drawn(inputs.state.shape, inputs.state.dtype) if inputs.return_state else None
    return ConvResults(drawn(inputs.x.shape, inputs.x.dtype), state)


class ConvConformance(ContainedConformance[ConvCase, ConvInputs]):
    """A backend of the convolution; ``params`` gives those of the forward and of the backward pass."""

    cases = tuple(CASES.values())
    repeated = ConvCase("", length=37, channels=40, packing="cum_seqlens", initial_state=True, return_state=True)
    poisons = ("cum_seqlens", "segment_ids", "seq_lengths")
    named = staticmethod(named)

    def inputs(self, case: ConvCase) -> ConvInputs:
        return inputs_of(case)

    def cotangents(self, inputs: ConvInputs) -> ConvResults:
        return cotangents_of(inputs)

    def dtypes(self, inputs: ConvInputs) -> dict[str, Any]:
        return {"out": inputs.x.dtype} | ({"state": inputs.x.dtype} if inputs.return_state else {})

    def oracle(self, inputs: ConvInputs, cotangents: ConvResults) -> tuple[Found, None]:
        return oracle(inputs, cotangents), None

    def poisoned(self, poison: str) -> Poisoned:
        """Padding that holds NaN, before, between and behind sequences."""
        case = ConvCase("", length=12, channels=8, batch=1 if poison == "cum_seqlens" else 2)
        states = {} if poison == "segment_ids" else {"initial_state": True, "return_state": True}
        inputs = inputs_of(case)
        described: dict[str, Any] = {
            "cum_seqlens": [2, 5, 5, 10],
            "segment_ids": [[-1, 3, 3, -2, -2, 4, 4, 4, 3, -1, 0, -1]] * 2,
            "seq_lengths": [7, 0],
        }
        count = {"cum_seqlens": 3, "seq_lengths": 2, "segment_ids": 0}[poison]
        options = {poison: jnp.asarray(described[poison], jnp.int32), "return_state": bool(states)}
        if states:
            options["initial_state"] = jnp.asarray(np.random.default_rng(3).standard_normal((count, 8, 3)), jnp.float32)
        inputs = inputs.replace(**options)
        padding = np.ones(inputs.x.shape[:2], bool)
        for row, begin, end in sequences_of(inputs):
            padding[row, begin:end] = False
        cotangents = cotangents_of(inputs)
        spoilt = jnp.where(padding[..., None], jnp.nan, 1.0)
        return Poisoned(
            (inputs, cotangents),
            (inputs.replace(x=inputs.x * spoilt), ConvResults(cotangents.out * spoilt, cotangents.state)),
            zero={"out": padding, "d_x": padding},
        )

    @pytest.mark.parametrize("case_name", ["packed_states", "segments"])
    def test_a_token_does_not_know_what_follows(self, case_name: str):
        inputs = self.inputs(CASES[case_name])
        run, cotangents = self.compiled(inputs), self.cotangents(inputs)
        want = run(inputs, cotangents)["out"]
        for t in (1, 6, 14):
            later = inputs.replace(x=inputs.x.at[:, t:].set(jnp.nan))
            check_same({"": run(later, cotangents)["out"][:, :t]}, {"": want[:, :t]})

    def test_a_sequence_does_not_know_its_neighbours(self):
        """The same bits wherever it lies, whatever lies beside it."""
        inputs = self.inputs(ConvCase("", length=24, channels=8, packing="cum_seqlens", initial_state=True,
                                      return_state=True, sequences=3))  # fmt: skip
        cotangents = self.cotangents(inputs)
        run, found = self.compiled(inputs), []
        for begin in (3, 8, 11):
            roll = lambda x: jnp.roll(x.at[:, :3].set(begin).at[:, 10:].set(begin), begin - 3, axis=1)  # noqa: B023
            moved = inputs.replace(x=roll(inputs.x), cum_seqlens=jnp.asarray([1, begin, begin + 7, begin + 9]))
            got = run(moved, ConvResults(roll(cotangents.out), cotangents.state))
            part = {name: got[name][:, begin : begin + 7] for name in got.keys() & {"out", "d_x"}}
            found.append(part | {name: got[name][1] for name in got.keys() & {"state", "d_initial_state"}})
        check_same(found[1], found[0])
        check_same(found[2], found[0])

    def test_parts_continue_each_other(self):
        """A sequence in two parts through the state is the sequence in one, also of parts shorter than the state."""
        whole = self.inputs(ConvCase("", batch=2, length=12, channels=8, initial_state=True, return_state=True))
        want = self.compiled(whole)(whole, self.cotangents(whole))
        for at in (1, 2, 3, 7):
            state, outs = whole.initial_state, []
            for part in (whole.x[:, :at], whole.x[:, at:]):
                piece = whole.replace(x=part, initial_state=state)
                got = self.compiled(piece)(piece, self.cotangents(piece))
                state = got["state"]
                outs.append(got["out"])
            check({"out": jnp.concatenate(outs, 1)}, {"out": want["out"]})
            check_same({"": state}, {"": want["state"]})
