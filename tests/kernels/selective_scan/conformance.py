"""Conformance of the backends of the selective scan: cases, and the recurrence in float64 from its definition."""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import ContainedConformance, Found, Poisoned
from tilewright.kernels.op.cases import normal
from tilewright.kernels.selective_scan.cases import SelectiveScanCase
from tilewright.kernels.selective_scan.inputs import ScanResults, SelectiveScanInputs
from tilewright.kernels.selective_scan.ops.selective_scan import SelectiveScan

OP = SelectiveScan()
ARRAYS = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
BARE = {"skip": False, "gate": False, "delta_bias": False, "delta_softplus": False}


@dataclasses.dataclass(frozen=True, slots=True)
class ScanCase(SelectiveScanCase):
    """A call of one or a few sequences.

    Attributes:
      cum: ``cum_seqlens``.
      ids: ``segment_ids``.
      row_lengths: ``seq_lengths``.
      huge: every third step is so large that it forgets all before, and every fourth one is 0.
    """

    cum: tuple[int, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None
    row_lengths: tuple[int, ...] | None = None
    huge: bool = False

    def inputs(self, seed: int = 0) -> SelectiveScanInputs:
        args, options = dataclasses.replace(self, initial_state=False).arguments(seed)
        if self.initial_state:
            sequences = self.batch if self.cum is None else len(self.cum) - 1
            options["initial_state"] = normal(seed + 7, (sequences, self.channels, self.state), "float32")
        if self.cum is not None:
            options["cum_seqlens"] = jnp.asarray(self.cum, jnp.int32)
        if self.ids is not None:
            options["segment_ids"] = jnp.asarray(self.ids, jnp.int32)
        if self.row_lengths is not None:
            options["seq_lengths"] = jnp.asarray(self.row_lengths, jnp.int32)
        u, delta, *others = args
        if self.huge:
            position = jnp.arange(self.length)[:, None]
            delta = jnp.where(position % 3 == 0, 1e4, jnp.where(position % 4 == 0, 0.0, delta)).astype(delta.dtype)
        return OP.prepare(u, delta, *others, **options)


SMALL = ScanCase("", length=9, channels=5, state=4)


def small(name: str, **fields: Any) -> ScanCase:
    return dataclasses.replace(SMALL, name=name, **fields)


BOTH = {"initial_state": True, "return_state": True}
CASES: tuple[ScanCase, ...] = (
    small("rows", batch=2),
    small("one_token", length=1, **BOTH),
    small("bare", length=15, **BARE),
    small("bfloat16", length=16, dtype="bfloat16", channels=6, **BOTH),
    small("float16", length=17, dtype="float16", gate=False),
    small("groups", groups=2, channels=6, state=3, return_state=True),
    small("state_of_one", state=1, skip=False),
    small("lengths", batch=3, row_lengths=(9, 0, 4), **BOTH),
    small("packed", length=20, cum=(2, 2, 9, 10, 10, 18), **BOTH),
    small("packed_empty", cum=(0, 0, 0), **BOTH),
    small("packed_full", length=12, cum=(0, 5, 12), dtype="bfloat16"),
    small("segments", batch=2, length=10, ids=((3, 3, -1, 3, 3, 1, 1, 1, 0, -2), (-1, -1, 0, 0, 0, 0, 5, 5, 5, 5))),
    small("huge", length=13, huge=True, delta_softplus=False, delta_bias=False, **BOTH),
)
"""The shapes that every backend is tested with, and interpreters are quick enough for."""


def spans_of(inputs: SelectiveScanInputs) -> list[tuple[int, int, int]]:
    """The row of each sequence, its first token and the one behind its last."""
    batch, length = inputs.u.shape[:2]
    if inputs.cum_seqlens is not None:
        return [(0, int(first), int(last)) for first, last in itertools.pairwise(np.asarray(inputs.cum_seqlens))]
    if inputs.segment_ids is not None:
        spans: list[tuple[int, int, int]] = []
        for row, ids in enumerate(np.asarray(inputs.segment_ids)):
            edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), length]
            spans += [(row, first, last) for first, last in itertools.pairwise(edges) if ids[first] >= 0]
        return spans
    lengths = [length] * batch if inputs.seq_lengths is None else np.asarray(inputs.seq_lengths).tolist()
    return [(row, 0, last) for row, last in enumerate(lengths)]


def recurrence(
    arrays: Found, inputs: SelectiveScanInputs, d_out: Any = None, d_state: Any = None
) -> tuple[Any, Any, Found]:
    """``(out, states, gradients)`` token by token; only tokens of sequences are read."""
    channels, state = inputs.channels, inputs.state
    width = channels // inputs.groups
    spread = np.repeat(np.eye(inputs.groups), width, axis=0)  # [channels, groups]
    decay, skip, bias = arrays["A"], arrays.get("D", np.zeros(channels)), arrays.get("delta_bias", np.zeros(channels))
    spans = spans_of(inputs)
    out, states = np.zeros(inputs.u.shape), np.zeros((len(spans), channels, state))
    d = {name: np.zeros(x.shape) for name, x in arrays.items()}
    for number, (row, first, last) in enumerate(spans):
        h = arrays["initial_state"][number] if "initial_state" in arrays else np.zeros((channels, state))
        seen = []
        for t in range(first, last):
            raw = arrays["delta"][row, t] + bias
            step = np.logaddexp(raw, 0.0) if inputs.delta_softplus else raw
            u, b, c = arrays["u"][row, t], spread @ arrays["B"][row, t], spread @ arrays["C"][row, t]
            before, factor = h, np.exp(step[:, None] * decay)
            h = factor * before + (step * u)[:, None] * b
            y = np.sum(c * h, axis=1) + skip * u
            share = gate = np.ones(channels)
            if "z" in arrays:
                share = 1.0 / (1.0 + np.exp(-arrays["z"][row, t]))
                gate = arrays["z"][row, t] * share
            out[row, t] = y * gate
            seen.append((t, raw, step, u, b, c, before, factor, h, y, share, gate))
        states[number] = h
        if d_out is None:
            continue
        d_h = np.zeros((channels, state)) if d_state is None else d_state[number]
        for t, raw, step, u, b, c, before, factor, h, y, share, gate in reversed(seen):
            d_y = d_out[row, t] * gate
            if "z" in arrays:
                d["z"][row, t] = d_out[row, t] * y * share * (1.0 + arrays["z"][row, t] * (1.0 - share))
            d_h = d_h + c * d_y[:, None]
            d_step = np.sum(d_h * (factor * before * decay + u[:, None] * b), axis=1)
            d_raw = d_step / (1.0 + np.exp(-raw)) if inputs.delta_softplus else d_step
            d["u"][row, t] = step * np.sum(d_h * b, axis=1) + skip * d_y
            d["delta"][row, t] = d_raw
            d["A"] += d_h * factor * before * step[:, None]
            d["B"][row, t] = spread.T @ (d_h * (step * u)[:, None])
            d["C"][row, t] = spread.T @ (h * d_y[:, None])
            if "D" in d:
                d["D"] += d_y * u
            if "delta_bias" in d:
                d["delta_bias"] += d_raw
            d_h = factor * d_h
        if "initial_state" in d:
            d["initial_state"][number] = d_h
    return out, states, d


def oracle(inputs: SelectiveScanInputs, cotangents: ScanResults) -> Found:
    """Results and gradients in float64."""
    arrays = {name: np.asarray(x, np.float64) for name in ARRAYS if (x := inputs.arrays[name]) is not None}
    d_out, d_state = (None if x is None else np.asarray(x, np.float64) for x in (cotangents.out, cotangents.state))
    out, state, d = recurrence(arrays, inputs, d_out, d_state)
    return {"out": out, "state": state} | {f"d_{name}": x for name, x in d.items()}


def cotangents_of(inputs: SelectiveScanInputs, seed: int = 1) -> ScanResults:
    random = np.random.default_rng(seed)
    shape = (inputs.sequences, inputs.channels, inputs.state)
    d_out = jnp.asarray(random.standard_normal(inputs.u.shape), inputs.u.dtype)
    d_state = jnp.asarray(random.standard_normal(shape), jnp.float32) if inputs.return_state else None
    return ScanResults(d_out, d_state, None)


def named(results: ScanResults, gradients: dict[str, Any]) -> Found:
    found = {"out": results.out, "state": results.state, **{f"d_{name}": x for name, x in gradients.items()}}
    return {name: x for name, x in found.items() if x is not None}


class ScanConformance(ContainedConformance[ScanCase, SelectiveScanInputs]):
    """A backend of the selective scan; ``params`` gives those of the forward and of the backward pass."""

    cases = CASES
    repeated: ClassVar[ScanCase] = small("", length=11)
    poisons = ("padding", "the next sequence", "a segment before")
    named = staticmethod(named)
    residuals = staticmethod(OP.residuals)

    def inputs(self, case: ScanCase) -> SelectiveScanInputs:
        return case.inputs()

    def cotangents(self, inputs: SelectiveScanInputs) -> ScanResults:
        return cotangents_of(inputs)

    def dtypes(self, inputs: SelectiveScanInputs) -> dict[str, Any]:
        return {"out": inputs.u.dtype} | ({"state": np.dtype("float32")} if inputs.return_state else {})

    def oracle(self, inputs: SelectiveScanInputs, cotangents: ScanResults) -> tuple[Found, None]:
        return oracle(inputs, cotangents), None

    def poisoned(self, poison: str) -> Poisoned:
        """NaN and infinities in tokens of one kind, and in what comes back to them."""
        everything = dict.fromkeys(("d_A", "d_D", "d_delta_bias"), ...)
        reached: dict[str, Any] = {}
        if poison == "padding":
            inputs, spoiled = small("", length=16, cum=(3, 8, 12), **BOTH).inputs(), np.r_[0:3, 12:16]
        elif poison == "the next sequence":
            inputs, spoiled = small("", length=14, cum=(0, 6, 14), **BOTH).inputs(), np.r_[9:14]
            reached = everything | dict.fromkeys(("state", "d_initial_state"), np.s_[1])
            reached |= dict.fromkeys(("out", "d_C", "d_z"), np.s_[:, 9:])
            # What comes back from the spoiled tokens reaches those before them.
            reached |= dict.fromkeys(("d_u", "d_delta", "d_B"), np.s_[:, 6:])
        else:
            inputs, spoiled = small("", length=14, ids=((0,) * 6 + (1,) * 8,)).inputs(), np.r_[0:6]
            reached = everything | dict.fromkeys(("out", "d_u", "d_delta", "d_B", "d_C", "d_z"), np.s_[:, :6])
        cotangents = cotangents_of(inputs)
        bad = {n: getattr(inputs, n).at[:, spoiled].set(jnp.nan) for n in ("u", "delta", "B", "C", "z")}
        assert cotangents.out is not None
        back = ScanResults(cotangents.out.at[:, spoiled].set(jnp.nan), cotangents.state, None)
        return Poisoned((inputs, cotangents), (inputs.replace(**bad), back), reached)

    def test_nothing_depends_on_later_tokens(self):
        """The output before a token has the same bits whatever follows."""
        inputs = small("", length=21, gate=False).inputs()
        run = self.compiled(inputs)
        later = {n: getattr(inputs, n).at[:, 13:].set(x) for n, x in (("u", jnp.nan), ("delta", 1e30), ("B", jnp.inf))}
        cotangents = cotangents_of(inputs)
        before, after = (run(each, cotangents)["out"][:, :13] for each in (inputs, inputs.replace(**later)))
        np.testing.assert_array_equal(before, after)

    def test_a_packed_sequence_is_the_same_wherever_it_is(self):
        one = small("", length=24, cum=(0, 9, 24), **BOTH).inputs()
        other = one.replace(
            cum_seqlens=jnp.asarray([3, 12, 24], jnp.int32),
            **{n: jnp.roll(getattr(one, n), 3, axis=1) for n in ("u", "delta", "B", "C", "z")},
        )
        cotangents = cotangents_of(one)
        assert cotangents.out is not None
        moved = ScanResults(jnp.roll(cotangents.out, 3, axis=1), cotangents.state, None)
        first, second = self.compiled(one)(one, cotangents), self.compiled(other)(other, moved)
        np.testing.assert_array_equal(first["out"][:, :9], second["out"][:, 3:12])
        np.testing.assert_array_equal(first["state"][0], second["state"][0])
        np.testing.assert_array_equal(first["d_u"][:, :9], second["d_u"][:, 3:12])
        np.testing.assert_array_equal(first["d_initial_state"][0], second["d_initial_state"][0])
