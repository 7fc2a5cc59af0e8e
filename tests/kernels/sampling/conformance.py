"""Conformance of the backends of ``sample``: calls, and a draw by sorting each row in float64 as the oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import Conformance, Found
from tests.kernels.test_dropout import philox_of_integers
from tests.support.draws import draw
from tilewright.kernels import kernel
from tilewright.kernels.sampling.cases import SampleCase
from tilewright.kernels.sampling.inputs import SampleInputs

CASES = (
    SampleCase("all", rows=3, vocab=300),
    SampleCase("warm", rows=3, vocab=129, temperature=3.0, return_log_probs=True),
    SampleCase("greedy", rows=3, vocab=300, temperature=0.0, top_k=5, return_log_probs=True),
    SampleCase("top_k", rows=4, vocab=300, top_k=7, return_log_probs=True),
    SampleCase("most", rows=2, vocab=260, top_k=259, temperature=0.5, return_log_probs=True),
    SampleCase("top_p", rows=4, vocab=300, top_p=0.8, temperature=1.5, return_log_probs=True),
    SampleCase("little", rows=3, vocab=300, top_p=1e-12, return_log_probs=True),
    SampleCase("min_p", rows=4, vocab=200, min_p=0.2, return_log_probs=True),
    # Of as many groups as k, and of a peaked distribution, whose largest logits alone reach the share.
    SampleCase("few_of_many", rows=6, vocab=1500, top_k=4, return_log_probs=True),
    SampleCase("peaked", rows=6, vocab=1500, top_p=0.6, scale=4.0, return_log_probs=True),
    SampleCase("every_limit", rows=5, vocab=700, top_k=40, top_p=0.9, min_p=0.05, temperature=0.7),
    SampleCase("bfloat16", rows=3, vocab=256, top_k=9, top_p=0.7, dtype="bfloat16", return_log_probs=True),
    SampleCase("float16", rows=3, vocab=300, top_k=9, dtype="float16", return_log_probs=True),
    SampleCase("one_token", rows=2, vocab=1, top_k=3, top_p=0.5, return_log_probs=True),
    SampleCase(
        "below_min_p", rows=8, vocab=6400, top_k=50, top_p=0.8, min_p=0.04, temperature=0.7, return_log_probs=True
    ),
    # More tokens than the kernels list of a row.
    SampleCase("flat", rows=6, vocab=3000, top_p=0.5),
    SampleCase("flat_every_limit", rows=1, vocab=2200, top_k=1800, top_p=0.9, min_p=0.01, return_log_probs=True),
    SampleCase("many_of_top_k", rows=2, vocab=2200, top_k=1500, top_p=0.6, min_p=0.02, temperature=0.8),
    SampleCase("no_rows", rows=0, vocab=5, top_k=3, return_log_probs=True),
)


@functools.cache
def _words(first: int, second: int, size: int) -> tuple[int, ...]:
    return tuple(word for i in range((size + 1) // 2) for word in philox_of_integers(first, i, second))[:size]


def noise_of(key: np.ndarray, size: int) -> np.ndarray:
    """The noise of a row in float64, by a Philox of Python's integers."""
    u = (np.array(_words(int(key[0]), int(key[1]), size), np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log1p(-u))


def kept_of(logits: np.ndarray, temperature: float, k: int, p: float, min_p: float) -> np.ndarray:
    """Marks the tokens of one row that limits keep, by sorting; logits in float64 and without NaN."""
    descending = np.sort(logits)[::-1]
    threshold = descending[k - 1] if 0 < k < len(logits) else -np.inf
    weights = weights_of(logits, temperature)
    if p < 1.0:
        sums = np.cumsum(np.where(descending >= threshold, np.sort(weights)[::-1], 0.0))
        last = int(np.argmax(sums >= p * sums[-1]))
        threshold = max(threshold, descending[last])
    return (logits >= threshold) & (weights >= min_p) & (logits > -np.inf)


def weights_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    """``exp(logits / temperature)`` over that of the largest; 1 for +∞, and 0 beside it."""
    largest = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(logits == largest, 0.0, logits - largest) / (temperature or 1.0)
    return np.exp(distance)


def drawn(logits: np.ndarray, key: np.ndarray, temperature: float, *limits: Any) -> tuple[int, float]:
    """The token of one row and its log-probability."""
    logits = np.where(np.isnan(logits), -np.inf, logits)
    if logits.max() == -np.inf:
        return 0, -np.inf
    weights = np.where(kept_of(logits, temperature, *limits), weights_of(logits, temperature), 0.0)
    with np.errstate(divide="ignore"):
        score = logits if temperature == 0 else np.log(weights) + noise_of(key, len(logits))
        token = int(np.argmax(score))
        return token, np.log(weights[token] / weights.sum())


def oracle_of(inputs: SampleInputs) -> Found:
    rows = np.asarray(inputs.logits, np.float64).reshape(-1, inputs.vocab)
    keys = np.asarray(inputs.key).reshape(-1, 2)
    of_row = [
        np.full(len(rows), none, np.float64) if x is None else np.asarray(x, np.float64).reshape(-1)
        for x, none in ((inputs.temperature, 1.0), (inputs.top_k, 0), (inputs.top_p, 1.0), (inputs.min_p, 0.0))
    ]
    found = [
        drawn(row, key, temperature, int(k), p, min_p)
        for row, key, temperature, k, p, min_p in zip(rows, keys, *of_row, strict=True)
    ]
    tokens, log_probs = (np.array([each[i] for each in found]).reshape(inputs.leading) for i in range(2))
    return {"tokens": tokens.astype(np.int32), "log_probs": log_probs}


def check_draw(got: Found, want: Found, tolerance: float = 2e-6) -> None:
    """The tokens are those of the oracle; log-probabilities are in float32."""
    np.testing.assert_array_equal(got["tokens"], want["tokens"])
    if "log_probs" in got:
        np.testing.assert_allclose(got["log_probs"], want["log_probs"], rtol=tolerance, atol=tolerance)


def named(results: Any) -> Found:
    """The results of a backend by their names."""
    found = {"tokens": results.tokens, "log_probs": results.log_probs}
    return {name: x for name, x in found.items() if x is not None}


def inputs_of(case: SampleCase) -> SampleInputs:
    args, kwargs = case.arguments()
    found: SampleInputs = kernel("sample").prepare(*args, **kwargs)
    return found


LOW = float(np.finfo(np.float32).min)
TINY = float(np.float32(1e-45))


def strange(vocab: int = 140) -> np.ndarray:
    """Rows with ties, zeros of both signs, subnormal numbers, NaN, infinities and the ends of float32."""
    rows = np.array(draw(11, vocab))
    rows[0] = 0.0
    rows[1] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
    rows[2] = np.repeat(rows[2, : vocab // 4], 4)
    rows[3, ::2] = np.nan
    rows[4, 3:] = -np.inf
    rows[5] = np.where(np.arange(vocab) % 3, -np.inf, np.nan)
    rows[6] = np.resize([LOW, -np.inf, -LOW, LOW, TINY, -TINY], vocab)
    rows[7, [9, vocab - 1]] = np.inf
    rows[8] = np.resize([TINY, 0.0, 2 * TINY, -0.0, -TINY, 3 * TINY, -2 * TINY], vocab)
    rows[9] = np.round(2 * rows[9])
    rows[10] = -np.abs(rows[10]) - 300.0
    return rows


def strange_inputs(k: int, p: float | None, temperature: float, vocab: int = 140) -> SampleInputs:
    """A call with rows of every kind, that returns log-probabilities."""
    rows = strange(vocab)
    keys = np.random.default_rng(5).integers(0, 1 << 32, (len(rows), 2), np.uint32)
    found: SampleInputs = kernel("sample").prepare(
        jnp.asarray(rows), keys, temperature=temperature, top_k=k, top_p=p, return_log_probs=True
    )
    return found


class SampleConformance(Conformance[SampleCase, SampleInputs]):
    """A backend of ``sample``."""

    cases = CASES
    repeated = CASES[10]

    def inputs(self, case: SampleCase) -> SampleInputs:
        return inputs_of(case)

    def cotangents(self, inputs: SampleInputs) -> None:
        return None

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return named(results)

    def dtypes(self, inputs: SampleInputs) -> dict[str, Any]:
        return {"tokens": np.int32} | ({"log_probs": np.float32} if inputs.return_log_probs else {})

    def oracle(self, inputs: SampleInputs, cotangents: Any) -> tuple[Found, None]:
        return oracle_of(inputs), None

    def check(self, got: Found, inputs: SampleInputs, cotangents: Any, factor: float = 2.0, where: object = "") -> None:
        check_draw(got, oracle_of(inputs))

    def run(self, inputs: SampleInputs) -> Found:
        return jax.tree.map(np.asarray, self.compiled(inputs)(inputs, None))

    def test_strange_rows(self):
        """Of flat distributions, where the log-probability is that of one token among those that are kept."""
        for k, p in ((0, None), (1, None), (5, None), (139, None), (5, 0.5), (0, 0.3137)):
            for temperature in (0.0, 1e-3, 1.0, 1e6):
                inputs = strange_inputs(k, p, temperature)
                check_draw(self.run(inputs), oracle_of(inputs))

    def test_a_row_with_options_of_its_own(self):
        logits, keys = draw(8, 260), np.random.default_rng(1).integers(0, 1 << 32, (8, 2), np.uint32)
        inputs: SampleInputs = kernel("sample").prepare(
            logits,
            keys,
            temperature=np.array([1, 0, 0.5, 2, -1, np.nan, 1, 7], np.float32),
            top_k=np.array([0, 3, -5, 4, 260, 1, 1000, 259], np.int64),
            top_p=np.array([1, 0.5, 0.3, 2, 0, 0.7, 0.95, 0.01], np.float32),
            min_p=np.array([0, 0.5, 0.1, 0, 1, 0, 2, 0.99], np.float32),
            return_log_probs=True,
        )
        plain = inputs.replace(
            temperature=jnp.array([1, 0, 0.5, 2, 0, 0, 1, 7], jnp.float32),
            min_p=jnp.array([0, 0.5, 0.1, 0, 1, 0, 1, 0.99], jnp.float32),
        )
        check_draw(self.run(inputs), oracle_of(plain))

    def test_neighbours_change_nothing(self):
        """The same bits alone, among others, and in another order."""
        inputs = inputs_of(SampleCase("", rows=5, vocab=700, top_k=40, top_p=0.9, min_p=0.01, return_log_probs=True))
        whole = self.run(inputs)
        for rows in ([3], [4, 1], [4, 3, 2, 1, 0], [0, 0, 2]):
            part: Any = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[np.array(rows)], inputs)
            got = self.run(part)
            for name, x in whole.items():
                assert got[name].tobytes() == x[rows].tobytes()
