"""Conformance of the backends that serve pages of latents of 512 and 64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.conformance import Poisoned, check_same
from tests.kernels.paged_attention.conformance import (
    CacheConformance,
    check_rows_without_keys,
    hostile,
    inputs_of,
    with_unseen_keys,
)
from tilewright.kernels.paged_attention.hopper import latent_work
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.ops.types import Direction

SIZES: dict[str, Any] = {
    "sequences": 2, "kv_length": 256, "heads": 16, "head_dim": 576, "value_dim": 512, "page_size": 64,
    "dtype": "bfloat16",
}  # fmt: skip

CALLS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "one head": {"heads": 1},
    "odd heads": {"heads": 5, "q_lengths": (3,)},
    "64 heads": {"heads": 64},
    "128 heads": {"heads": 128},
    "two tokens": {"q_lengths": (2,), "heads": 64},
    "tokens in one tile": {"q_lengths": (4,)},
    "tokens in several tiles": {"q_lengths": (7,), "heads": 20},
    "many tokens": {"q_lengths": (70,), "heads": 2},
    "not causal": {"q_lengths": (5,), "causal": False},
    "some keys ahead": {"q_lengths": (5,), "causal": False, "sliding_window": (None, 2)},
    "large pages": {"page_size": 128, "kv_length": 384},
    "larger pages": {"page_size": 256, "kv_length": 300},
    "sinks": {"sinks": 90},
    "large logits": {"softmax_scale": 3.0},
    "negative scale": {"softmax_scale": -0.3, "q_lengths": (2,)},
    "no scale": {"softmax_scale": 0.0},
    "sinks of several tokens": {"sinks": 90, "q_lengths": (3,), "heads": 6},
}


def latent_inputs(lengths: Any = None, **fields: Any) -> PagedInputs:
    inputs = inputs_of("mla_decode", MlaCase("", **SIZES | fields))
    return inputs if lengths is None else dataclasses.replace(inputs, kv_lengths=jnp.asarray(lengths, jnp.int32))


class LatentConformance(CacheConformance):
    """A backend of pages of latents of 512 and 64; ``params`` gives those for some ranges of all keys."""

    cases = tuple((name, (3, 1, 2)[index % 3]) for index, name in enumerate(CALLS))
    repeated = ("one head", 3)
    poisons = ("pages",)
    ranges = 1

    @pytest.fixture(autouse=True)
    def short_ranges(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sequences of few blocks are cut, too."""
        monkeypatch.setattr(latent_work, "ITEM_OVERHEAD", 1)
        monkeypatch.setattr(latent_work, "MIN_RANGE", 2)

    @staticmethod
    def describe(case: Any) -> str:
        return f"{case[0]}-{case[1]}"

    def inputs(self, case: tuple[str, int]) -> PagedInputs:
        return latent_inputs(**CALLS[case[0]])

    def params_of(self, inputs: PagedInputs) -> tuple[Any, Any]:
        return self.params(self.ranges), None

    def reasons(self, inputs: Any, direction: Direction) -> list[str]:
        found = super().reasons(inputs, direction)
        assert direction == "backward" or not found, found  # of these tests, none is for something else
        return found

    def poisoned(self, poison: str) -> Poisoned:
        self.ranges = 3
        inputs = latent_inputs([130, 64, 0, 191], sequences=4)
        return Poisoned((inputs, None), (with_unseen_keys(inputs), None))

    def test_results_and_gradients(self, case: Any):
        self.ranges = case[1]
        super().test_results_and_gradients(case)

    @pytest.mark.parametrize(
        ("lengths", "ranges", "fields"),
        [
            ([70, 256], 7, {}),  # more ranges than there is work for
            # More parts than are loaded at once, and sinks that matter beside so many keys.
            ([1300], 11, {"heads": 1, "sinks": 700}),
            ([5, 64, 500, 1, 0, 130], 5, {"heads": 2}),  # a long one among short ones
            ([600, 250], 3, {"q_lengths": (3,), "heads": 40}),  # a range within a sequence; row tiles
        ],
    )
    def test_cuts(self, lengths: list[int], ranges: int, fields: dict[str, Any]):
        self.ranges = ranges
        self.run_and_check(latent_inputs(lengths, **{"sequences": len(lengths), "kv_length": max(lengths)} | fields))

    @pytest.mark.parametrize(("q_length", "ranges"), [(1, 1), (3, 4)])
    def test_lengths(self, q_length: int, ranges: int):
        """Around a page's end, beyond the table, and none at all."""
        self.ranges = ranges
        lengths = [0, 1, 63, 64, 65, 127, 128, 256, 257, 1 << 30, 2**31 - 1, -5, -(2**31)]
        inputs = latent_inputs(lengths, sequences=len(lengths), q_lengths=(q_length,))
        check_rows_without_keys(self.run_and_check(inputs), lengths, q_length)

    @pytest.mark.parametrize(("seed", "ranges"), [(0, 1), (1, 2), (2, 3)])
    def test_hostile_tables(self, seed: int, ranges: int):
        """Any page numbers and lengths; page 0 is in no table."""
        self.ranges = ranges
        inputs = latent_inputs(sequences=4, page_size=(64, 128)[seed % 2], q_lengths=(1 + seed,))
        self.run_on_hostile(hostile(inputs, seed, [0, 5, 71, 200, 1000, -3, 2**31 - 1], own=3, first=1))

    @pytest.mark.parametrize("fields", [{"sequences": 0}, {"kv_length": 0, "sinks": 1}])
    def test_nothing_at_all(self, fields: dict[str, Any]):
        self.run_and_check(latent_inputs(**fields))

    def test_vmap(self):
        inputs = latent_inputs([100, 3])
        queries = jnp.stack([inputs.query, 2 * inputs.query])
        with type(self).machine():
            run = lambda query: self.backend.forward(inputs.replace(query=query), self.params(2))
            mapped = jax.block_until_ready(jax.jit(jax.vmap(run))(queries))
        one = inputs.replace(query=queries[1])
        self.ranges = 2
        check_same({"out": mapped[0][1], "lse": mapped[1][1]}, self.compiled(one)(one, None))
