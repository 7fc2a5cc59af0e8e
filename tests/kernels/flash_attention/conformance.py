"""Conformance of the backends of flash attention: cases in which all pairs of options occur, and extreme calls."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import conformance as every_op
from tests.kernels.conformance import QUICK, Found, check, run_both
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.reference import attention_reference, reference_gradients
from tilewright.kernels.flash_attention.results import HIDING_BIAS
from tilewright.kernels.masks import CausalMask, LengthMask, Mask, WindowMask
from tilewright.kernels.op.backend import Backend
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

FACTORS: dict[str, Sequence[Any]] = {
    "lengths": [(33, 33), (48, 80), (40, 17), (1, 37), (29, 0), (64, 64)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (24, 8), (5, 20)],
    "dtype": ["float32", "bfloat16", "float16"],
    "causality": [None, "top_left", "bottom_right"],
    "window": [None, 6, (3, None), (None, 2), (0, 9)],
    "soft_cap": [None, 4.0],
    "sinks": [0, 1, 3],
    "mask": [None, "bhqk", "hqk", "bk", "q", "object"],
    "bias": [None, "bhqk", "hqk", "bk", "q"],
    "variable": ["", "segments", "lengths", "segments lengths", "packed"],
    "dropout": [0.0, 0.3],
    "scale": [None, 0.7],
}
"""Another factor would draw all rows anew, and leave a backend that declines it the other rows alone: an option that
some backends decline has a test of its own in `Conformance`.
"""


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, tries: int = 30) -> list[dict[str, Any]]:
    """Rows in which every pair of levels of every two factors occurs, by greedy choice."""
    draw = random.Random(seed)
    names = list(factors)
    wanted = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }

    def covered(row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return {pair for pair in itertools.combinations(sorted(row.items()), 2) if pair in wanted}

    def gain(row: dict[int, int], factor: int, level: int) -> int:
        return sum(tuple(sorted(((factor, level), item))) in wanted for item in row.items())

    def candidate() -> dict[int, int]:
        row = dict(draw.choice(sorted(wanted)))
        rest = [factor for factor in range(len(names)) if factor not in row]
        draw.shuffle(rest)
        for factor in rest:
            levels = range(len(factors[names[factor]]))
            row[factor] = max(levels, key=lambda level: (gain(row, factor, level), draw.random()))
        return row

    rows = []
    while wanted:
        best = max((candidate() for _ in range(tries)), key=lambda row: len(covered(row)))
        wanted -= covered(best)
        rows.append({names[factor]: factors[names[factor]][level] for factor, level in sorted(best.items())})
    return rows


@dataclasses.dataclass(frozen=True)
class ConformanceCase:
    """A case, and whether an object of the mask algebra is added to it."""

    case: AttentionCase
    mask_object: bool

    def prepared(self, seed: int) -> AttentionInputs:
        arrays, kwargs = self.case.arguments(seed)
        if self.mask_object:
            kwargs["mask"] = example_mask(self.case.score_shape)
        return FlashAttention().prepare(*arrays, **kwargs)


def example_mask(scores: tuple[int, int, int, int]) -> Mask:
    """Nested AND and OR over static masks and arrays."""
    batch, _, q_length, kv_length = scores
    lengths = LengthMask(None, jnp.arange(kv_length, kv_length - batch, -1, dtype=jnp.int32))
    return (CausalMask(kv_length - q_length) & lengths) | WindowMask(2, 1, 3)


def as_case(index: int, row: Mapping[str, Any]) -> ConformanceCase:
    (q_length, kv_length), (heads, kv_heads), (head_dim, value_dim) = row["lengths"], row["heads"], row["dims"]
    packed = row["variable"] == "packed"
    case = AttentionCase(
        f"pairwise_{index}",
        batch=1 if packed else 2,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=row["dtype"],
        causal=row["causality"] is not None,
        causal_alignment=row["causality"] or ("bottom_right" if index % 2 else "top_left"),
        sliding_window=row["window"],
        logits_soft_cap=row["soft_cap"],
        softmax_scale=row["scale"],
        bias=row["bias"],
        mask=None if row["mask"] == "object" else row["mask"],
        sinks=row["sinks"],
        segments="segments" in row["variable"],
        lengths="lengths" in row["variable"],
        packed=packed,
        dropout_prob=row["dropout"],
    )
    return ConformanceCase(case, row["mask"] == "object")


MAX = float(np.finfo(np.float32).max)

CASES = [as_case(index, row) for index, row in enumerate(pairwise(FACTORS))]


def _position_bias(kind: str, **options: Any) -> AttentionCase:
    sizes: dict[str, Any] = {"batch": 2, "q_length": 40, "heads": 4, "kv_heads": 2, "head_dim": 16}
    options = {"dtype": "bfloat16", "bias_dtype": "float32"} | options
    return AttentionCase("", **sizes | options, position_bias=kind)


POSITION_BIASES = {
    "alibi": _position_bias("alibi", causal=True, kv_length=70, causal_alignment="bottom_right"),
    "alibi, two sides": _position_bias("alibi", kv_length=56),
    "alibi, later keys": _position_bias("alibi", sliding_window=(0, None)),
    "alibi, mask, dropout": _position_bias("alibi", mask="bk", dropout_prob=0.3, sliding_window=9, bias_dtype=None),
    "alibi, negative scale": _position_bias("alibi", softmax_scale=-0.3, causal=True),
    "alibi, cap, sinks": _position_bias("alibi", logits_soft_cap=3.0, sinks=2, q_length=70, kv_length=33),
    "alibi, packed": _position_bias("alibi", batch=1, packed=True, causal=True),
    "alibi, packed, other keys": _position_bias("alibi", batch=1, packed=True, kv_length=56),
    "alibi, lengths": _position_bias("alibi", lengths=True, causal_alignment="bottom_right", dtype="float16"),
    "relative": _position_bias("relative", kv_length=70),
    "relative, causal": _position_bias("relative", q_length=70, causal=True, dtype="float16"),
    "relative of all heads": _position_bias("relative of all heads", kv_length=56, bias_dtype=None),
    "relative, cap": _position_bias("relative", logits_soft_cap=3.0, sinks=1, q_length=33, kv_length=70),
    "relative, mask, dropout": _position_bias("relative", mask="hqk", dropout_prob=0.3, softmax_scale=-0.3),
    "relative, packed": _position_bias("relative", batch=1, packed=True),
    "relative, packed, other keys": _position_bias("relative", batch=1, packed=True, kv_length=56),
    "relative, lengths": _position_bias("relative", lengths=True, causal_alignment="bottom_right"),
}
"""Calls with a bias of positions, which some backends decline."""


OUTSIDE: dict[str, dict[str, Any]] = {
    "lengths": {"heads": 2, "kv_heads": 2},
    "lengths, causal": {"causal": True, "causal_alignment": "bottom_right"},
    "lengths, cap, sinks": {"logits_soft_cap": 4.0, "sinks": 2, "kv_heads": 1},
    "lengths, bias, dropout": {"bias": "hqk", "dropout_prob": 0.3},
    "packed": {},
    "packed, causal, cap": {"causal": True, "logits_soft_cap": 4.0, "q_length": 90},
}
"""Calls in which there are queries and keys beyond the lengths, or outside of packed sequences."""

LENGTHS = ((70, 33, 0, 70), (17, 0, 64, 90))
BOUNDARIES = (5, 20, 20, 61), (11, 48, 53, 77)


def outside_call(name: str, dtype: str, **sizes: Any) -> tuple[AttentionInputs, np.ndarray, np.ndarray]:
    """A call of `OUTSIDE`, and which queries and keys ``[batch, length]`` are outside of it."""
    shape = {"batch": 4, "q_length": 70, "kv_length": 90, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": dtype}
    options = shape | OUTSIDE[name] | sizes
    packed = "packed" in name
    lengths = options.pop("lengths", BOUNDARIES if packed else LENGTHS)
    if packed:
        options["batch"] = 1
    case = AttentionCase("", **options)
    arrays, kwargs = case.arguments()
    sides = [jnp.asarray(each, jnp.int32) for each in lengths]
    if packed and case.q_length == case.kv_length:
        sides[1] = sides[0]
    names = ("cum_seqlens_q", "cum_seqlens_k") if packed else ("query_seq_lengths", "key_value_seq_lengths")
    inputs = FlashAttention().prepare(*arrays, **kwargs, **dict(zip(names, sides, strict=True)))
    outside = []
    for side, length in zip(sides, (case.q_length, case.kv_length), strict=True):
        rows, ends = np.arange(length)[None], np.asarray(side)[:, None]
        outside.append((rows < ends[0]) | (rows >= ends[-1]) if packed else rows >= ends)
    return inputs, outside[0], outside[1]


def poisoned(name: str, poison: float, dtype: str, **sizes: Any) -> every_op.Poisoned:
    """A call of `OUTSIDE` with and without ``poison`` in what lies outside, which has no gradient."""
    inputs, q_outside, kv_outside = outside_call(name, dtype, **sizes)
    d_out, d_lse = cotangents(inputs)

    def spoilt(array: jax.Array, outside: np.ndarray) -> jax.Array:
        return jnp.where(outside.reshape(*outside.shape, *[1] * (array.ndim - 2)), poison, array).astype(array.dtype)

    sides = {"query": q_outside, "key": kv_outside, "value": kv_outside}
    bad = inputs.replace(**{side: spoilt(getattr(inputs, side), rows) for side, rows in sides.items()})
    bad_lse = d_lse
    if inputs.softmax_aux is None:  # sinks have a gradient through the lse of any row
        bad_lse = jnp.swapaxes(spoilt(jnp.swapaxes(d_lse, 1, 2), q_outside), 1, 2)
    zero = {side: np.nonzero(rows) for side, rows in (sides | {"out": q_outside}).items()}
    return every_op.Poisoned((inputs, (d_out, d_lse)), (bad, (spoilt(d_out, q_outside), bad_lse)), zero=zero)


def describe(conformance_case: ConformanceCase) -> str:
    """A test's name that says what is unusual in it."""
    case, default = conformance_case.case, AttentionCase("", batch=2, q_length=0, heads=0, head_dim=0)
    parts = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name != "name" and value != getattr(default, field.name):
            parts.append(f"{field.name}={value}".replace(" ", ""))
    return "-".join(parts + ["mask_object"] * conformance_case.mask_object)


@dataclasses.dataclass(frozen=True)
class Judged:
    """Results and gradients of the oracle, by name."""

    results: dict[str, Any]
    gradients: dict[str, Any]

    @property
    def arrays(self) -> Found:
        return {**self.results, **self.gradients}


@functools.partial(jax.jit, static_argnames="dtype", compiler_options=QUICK)
def _oracle(inputs: AttentionInputs, d_out: Any, d_lse: Any, dtype: Any) -> tuple[Any, Any]:
    # The oracle is exact where a device's default for float32 products is not; in the input dtype it is what it is.
    with jax.default_matmul_precision("highest" if dtype is None else None):
        return attention_reference(inputs, dtype), reference_gradients(inputs, d_out, d_lse, dtype)


def oracle(inputs: AttentionInputs, d_out: Any, d_lse: Any, dtype: Any = None) -> Judged:
    """The oracle's results; in float32 (float64 for float64) and exact unless a dtype is given."""
    (out, lse), gradients = _oracle(inputs, d_out, d_lse, None if dtype is None else jnp.dtype(dtype))
    return Judged({"out": out, "lse": lse}, gradients)


def oracles(inputs: AttentionInputs, d_out: Any, d_lse: Any) -> tuple[Judged, Judged]:
    """The oracle's results, exact and in the dtype of the inputs."""
    exact = oracle(inputs, d_out, d_lse)
    narrow = inputs.query.dtype
    same = narrow == jnp.float32 and current_device().kind == "cpu"  # elsewhere its products are less than exact
    return exact, exact if same else oracle(inputs, d_out, d_lse, narrow)


def judge(got: Mapping[str, Any], exact: Mapping[str, Any], low: Mapping[str, Any], factor: float, *said: Any) -> None:
    """Fails if anything that the oracle has is not as near to it as the policy asks; ``said`` goes into the message."""
    check(got, exact, low, factor, said)


def check_kinds(gradients: Mapping[str, Any], inputs: AttentionInputs) -> None:
    """Every gradient has the shape and the dtype of what it is the gradient of."""
    every_op.check_kinds(gradients, inputs)
    if inputs.position_bias is not None:
        values = inputs.position_bias.values
        found = gradients["position_bias"]
        assert (found.shape, found.dtype) == (values.shape, values.dtype), "position_bias"


def inputs_of(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """What a backend gets of a case."""
    arrays, kwargs = case.arguments(seed)
    return FlashAttention().prepare(*arrays, **kwargs)


def cotangents(inputs: AttentionInputs, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """Random ``(d_out, d_lse)``."""
    draw = np.random.default_rng(seed)
    batch, q_length, heads, _ = inputs.query.shape
    d_out = draw.standard_normal((batch, q_length, heads, inputs.value.shape[-1]), np.float32)
    d_lse = draw.standard_normal((batch, heads, q_length), np.float32)
    return jnp.asarray(d_out, inputs.query.dtype), jnp.asarray(d_lse)


def named(results: Any, gradients: dict[str, Any]) -> Found:
    return {"out": results[0], "lse": results[1], **gradients}


def run_and_judge(backend: Backend, case: AttentionCase, forward: Any, backward: Any) -> None:
    """Compares one config of each direction with the oracle."""
    inputs = inputs_of(case)
    given = cotangents(inputs)
    got = jax.jit(lambda *call: named(*run_both(backend, *call, (forward, backward))))(inputs, given)
    exact, low = oracles(inputs, *given)
    judge(got, exact.arrays, low.arrays, 2.0)


def judge_gradients(backend: Backend, inputs: AttentionInputs, configs: Sequence[Any], factor: float) -> None:
    """Compares configs of the backward pass with the oracle, from the oracle's residuals."""
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = exact.results["out"].astype(inputs.query.dtype), exact.results["lse"].astype(jnp.float32)
    for params in configs:
        run = jax.jit(lambda inputs, results, d, params=params: backend.backward(inputs, results, d, params))
        gradients = run(inputs, results, (d_out, d_lse))
        check_kinds(gradients, inputs)
        judge(gradients, exact.gradients, low.gradients, factor, params)


class Conformance(every_op.Conformance[ConformanceCase, AttentionInputs]):
    """A backend of attention; extend ``params`` if its heuristic has no small tiles.

    ``low_bias`` says whether a bias near the lowest number of float32 does not overflow.
    """

    low_bias: ClassVar[bool] = True
    additive_dtype: ClassVar[str] = "float32"
    """Of a bias that is a mask."""
    outside_dtype: ClassVar[str] = "bfloat16"
    """Of calls with something outside of their lengths."""
    dtype: ClassVar[str] = "float32"
    """Of the extreme calls that have no dtype of their own."""
    together = True
    cases: ClassVar[Sequence[ConformanceCase]] = CASES
    repeated = ConformanceCase(
        AttentionCase("", batch=2, q_length=70, heads=4, kv_heads=2, head_dim=16, bias="hqk", dtype="bfloat16"), False
    )
    named = staticmethod(named)

    def params(self, inputs: AttentionInputs, direction: Direction) -> Any:
        return self.backend.heuristic(inputs, self.device or current_device(), direction)

    @staticmethod
    def describe(case: ConformanceCase) -> str:
        return describe(case)

    def inputs(self, case: ConformanceCase) -> AttentionInputs:
        return case.prepared(seed=0)

    def factor(self, case: ConformanceCase) -> float:
        return case.case.tolerance_factor

    def cotangents(self, inputs: AttentionInputs) -> Any:
        return cotangents(inputs)

    def dtypes(self, inputs: AttentionInputs) -> dict[str, Any]:
        return {"out": inputs.query.dtype, "lse": jnp.float32}

    def oracle(self, inputs: AttentionInputs, cotangents: Any) -> tuple[Found, Found]:
        exact, low = oracles(inputs, *cotangents)
        return exact.arrays, low.arrays

    def params_of(self, inputs: AttentionInputs) -> tuple[Any, Any]:
        return self.params(inputs, "forward"), self.params(inputs, "backward")

    @pytest.mark.parametrize("name", POSITION_BIASES)
    def test_position_bias(self, name: str):
        case = POSITION_BIASES[name]
        self.run_and_check(inputs_of(case), case.tolerance_factor)

    def test_without_d_lse(self):
        inputs = inputs_of(
            AttentionCase("", batch=2, q_length=40, heads=4, kv_heads=2, head_dim=16, causal=True, dtype=self.dtype)
        )
        d_out, d_lse = cotangents(inputs)
        self.check(self.compiled(inputs)(inputs, (d_out, None)), inputs, (d_out, jnp.zeros_like(d_lse)))

    @pytest.mark.parametrize("sinks", [0, 2])
    def test_rows_that_see_nothing(self, sinks: int):
        case = AttentionCase("", batch=2, q_length=40, heads=2, head_dim=16, sinks=sinks, bias="bhqk")
        arrays, kwargs = case.arguments()
        hidden = np.ones((2, 1, 40, 40), bool)
        hidden[0, :, 3] = hidden[0, :, 17:35] = hidden[1] = False
        got = self.run_and_check(FlashAttention().prepare(*arrays, mask=hidden, **kwargs))
        for name in ("out", "query", "value"):
            assert not np.any(np.asarray(got[name])[1])
        if not sinks:
            assert np.all(np.isneginf(np.asarray(got["lse"])[1]))

    @pytest.mark.parametrize(("offset", "dtype"), list(itertools.product([1e4, -1e4], ["float32", "bfloat16"])))
    def test_large_logits(self, offset: float, dtype: str):
        """A shift of all logits changes the log-sum-exp alone."""
        case = AttentionCase("", batch=1, q_length=40, heads=2, head_dim=16, dtype=dtype, causal=True)
        arrays, kwargs = case.arguments()
        bias = jnp.full((2, 1, 1), offset, jnp.float32)
        inputs = FlashAttention().prepare(*arrays, bias=bias, **kwargs)
        given = cotangents(inputs)
        ours, (exact, low) = self.compiled(inputs)(inputs, given), self.oracle(inputs, given)
        # A float32 logit or log-sum-exp of this size is off by up to half a unit in the last place, and exp makes of
        # that a relative error in the probabilities; the oracle need not go through the log-sum-exp and errs less.
        rounding = 4 * abs(offset) * 2.0**-24
        for name, ref in exact.items():
            error = np.max(np.abs(np.asarray(ours[name], np.float32) - ref))
            narrow = np.max(np.abs(np.asarray(low[name], np.float32) - ref))
            allowed = 2 * (narrow if dtype != "float32" and name != "lse" else 0.0)
            assert error <= allowed + rounding * max(1.0, float(np.max(np.abs(ref)))), name

    @pytest.mark.parametrize("offset", [-(1 << 30), -45, 45, 1 << 30])
    def test_large_mask_offsets(self, offset: int):
        case = AttentionCase("", batch=1, q_length=40, kv_length=70, heads=4, kv_heads=2, head_dim=16, dtype=self.dtype)
        arrays, kwargs = case.arguments()
        mask = CausalMask(offset) & WindowMask(50, 3, offset)
        self.run_and_check(FlashAttention().prepare(*arrays, mask=mask, **kwargs))

    def test_bias_of_minus_infinity_masks(self):
        case = AttentionCase("", batch=2, q_length=40, heads=4, kv_heads=2, head_dim=16, dtype=self.dtype, causal=True)
        arrays, kwargs = case.arguments()
        bias = np.zeros((2, 1, 40, 40), np.float32)
        bias[..., 30:] = bias[:, :, 5] = bias[1, :, 7:20] = -np.inf
        self.run_and_check(FlashAttention().prepare(*arrays, bias=jnp.asarray(bias, self.dtype), **kwargs))

    @pytest.mark.parametrize("soft_cap", [None, 5.0])
    @pytest.mark.parametrize("lowest", [-0.7 * MAX, -MAX, HIDING_BIAS])
    def test_an_additive_mask(self, lowest: float, soft_cap: float | None):
        """As of programs that cap logits first and add their mask then; a row that it hides sees nothing."""
        dtype = "bfloat16" if self.dtype == "float32" else self.dtype
        case = AttentionCase("", batch=2, q_length=40, kv_length=70, heads=4, kv_heads=2, head_dim=16, dtype=dtype)
        arrays, kwargs = case.arguments()
        visible = np.tril(np.ones((40, 70), bool), 30) & (np.arange(40) != 7)[:, None]
        visible[11, :-5] = False
        bias = jnp.where(jnp.asarray(visible), 0.25, lowest).astype(self.additive_dtype)[None, None]
        assert np.all(np.asarray(bias, np.float32) <= HIDING_BIAS, where=~visible)
        prepare = functools.partial(FlashAttention().prepare, *arrays, logits_soft_cap=soft_cap, **kwargs)
        inputs = prepare(bias=bias)
        # Of the oracle, too, the definition is the same call with a mask.
        masked = prepare(bias=jnp.full_like(bias, 0.25), mask=visible[None, None])
        found = self.run_and_check(inputs, case.tolerance_factor if soft_cap is None else 3.0)
        given = cotangents(inputs)
        ours, want = (oracle(each, *given).arrays for each in (inputs, masked))
        for name in want:
            # To the order of the oracle's sums, which is XLA's.
            np.testing.assert_allclose(ours[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert np.all(np.isneginf(np.asarray(found["lse"])[:, :, 7]))
        assert not np.any(np.asarray(found["out"])[:, 7])
        if "query" in found:
            assert not np.any(np.asarray(found["query"])[:, 7])
        if "bias" in found:
            assert not np.any(np.asarray(found["bias"])[..., ~visible])

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    @pytest.mark.parametrize("name", OUTSIDE)
    def test_what_lies_outside_reaches_nothing(self, name: str, poison: float):
        call = poisoned(name, poison, self.outside_dtype)
        call.check(self.compiled(call.clean[0]))

    @pytest.mark.parametrize(("lowest", "dtype"), [(-1e10, "bfloat16"), (-1e10, "float32"), (-1e38, "bfloat16")])
    def test_rows_hidden_by_a_low_bias(self, lowest: float, dtype: str):
        """A softmax does not overflow in base 2, and is uniform where all logits are equal; such rows have no gradient.

        With P recomputed from the log-sum-exp, which has lost the number of keys, they would have it as often.
        """
        if not self.low_bias:
            pytest.skip("the backend's logits in base 2 overflow, or what they do is not documented")
        case = AttentionCase("", batch=1, q_length=70, heads=2, head_dim=16, dtype=dtype, causal=True)
        arrays, kwargs = case.arguments()
        bias, hidden = np.zeros((70, 70), np.float32), np.zeros(70, bool)
        hidden[[0, 5, 33, 69]] = True
        bias[hidden] = lowest  # the keys that they do not see are masked
        bias[33, 10:20] = bias[44, 30:] = -np.inf
        bias[40, :7] = bias[41, 7:] = bias[50:60, :35] = lowest
        bias = jnp.asarray(bias, dtype)
        inputs = FlashAttention().prepare(*arrays, bias=bias, **kwargs)
        d_out, d_lse = cotangents(inputs)
        found = self.compiled(inputs)(inputs, (d_out, d_lse))
        exact, low = self.oracle(inputs, (d_out * ~hidden[:, None, None], d_lse * ~hidden))
        for each in (found, exact):
            assert np.array_equal(np.asarray(each["lse"])[..., hidden], np.full((1, 2, 4), bias[0, 0], np.float32))
        for part in (found, exact, low):
            part["lse"] = jnp.where(hidden, 0.0, part["lse"])
        judge(found, exact, low, 2.0)

    def test_batch_of_none(self):
        arrays = [jnp.zeros((0, 8, 2, 16), self.dtype)] * 3
        got = self.run_and_check(FlashAttention().prepare(*arrays, causal=True))
        assert got["out"].shape == (0, 8, 2, 16)

    def test_forward_of_another_backend(self):
        """The residuals are (out, lse) and nothing else: the oracle's serve as well as the backend's own."""
        case = AttentionCase("", batch=2, q_length=40, kv_length=70, heads=4, kv_heads=2, head_dim=16, causal=True)
        inputs = inputs_of(dataclasses.replace(case, sinks=1, dropout_prob=0.2))
        given = cotangents(inputs)
        self.compiled(inputs)  # or it is skipped
        params = self.params(inputs.structs, "backward")
        results = oracle(inputs, *given).results
        run = jax.jit(lambda inputs, *rest: self.backend.backward(inputs, *rest, params))
        with type(self).machine():
            gradients = jax.block_until_ready(run(inputs, (results["out"], results["lse"]), given))
        self.check({name: gradients[name] for name in ("query", "key", "value", "softmax_aux")}, inputs, given)
