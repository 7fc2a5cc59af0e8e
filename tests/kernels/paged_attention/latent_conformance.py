"""What a backend must pass that serves pages of latents of 512 and 64: a test file subclasses ``LatentConformance``."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.paged_attention.conformance import check, inputs_of
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.ops.utils.device import current_device

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
    "sinks": {"sinks": 2},
    "large logits": {"softmax_scale": 3.0},
    "negative scale": {"softmax_scale": -0.3, "q_lengths": (2,)},
    "no scale": {"softmax_scale": 0.0},
    "sinks of several tokens": {"sinks": 1, "q_lengths": (3,), "heads": 6},
}


def latent_inputs(lengths: Any = None, **fields: Any) -> PagedInputs:
    inputs = inputs_of("mla_decode", MlaCase("", **SIZES | fields))
    return inputs if lengths is None else dataclasses.replace(inputs, kv_lengths=jnp.asarray(lengths, jnp.int32))


class LatentConformance(abc.ABC):
    """Set ``backend``, and ``machine`` to what it runs in."""

    backend: ClassVar[Backend]
    machine: ClassVar[Callable[[], AbstractContextManager[Any]]] = contextlib.nullcontext

    @abc.abstractmethod
    def params(self, splits: int) -> Any:
        """What to run with."""

    def run(self, inputs: PagedInputs, splits: int = 1) -> Any:
        with type(self).machine():
            reasons = self.backend.not_supported_reasons(inputs, current_device(), "forward")
            # Of these tests, none is for something else; the interpreter's device is not the card.
            assert all("compute capability" in reason for reason in reasons), reasons
            run = jax.jit(lambda inputs: self.backend.forward(inputs, self.params(splits)))
            return jax.block_until_ready(run(inputs))

    def run_and_check(self, inputs: PagedInputs, splits: int = 1, factor: float = 2.0) -> Any:
        got = self.run(inputs, splits)
        check(got, inputs, factor)
        return got

    # One part and several take turns.
    @pytest.mark.parametrize(
        ("name", "splits"),
        [(name, 1 + 2 * (index % 2)) for index, name in enumerate(CALLS)],
    )
    def test_calls(self, name: str, splits: int):
        self.run_and_check(latent_inputs(**CALLS[name]), splits)

    def test_more_splits_than_tiles(self):
        self.run_and_check(latent_inputs([70, 256]), 7)

    @pytest.mark.parametrize(("q_length", "splits"), [(1, 1), (3, 2)])
    def test_lengths(self, q_length: int, splits: int):
        """Around a page's end, beyond the table, and none at all."""
        lengths = [0, 1, 63, 64, 65, 127, 128, 256, 257, 1 << 30, 2**31 - 1, -5, -(2**31)]
        inputs = latent_inputs(lengths, sequences=len(lengths), q_lengths=(q_length,))
        out, lse = self.run_and_check(inputs, splits)
        for row, length in enumerate(lengths):
            if length <= 0:
                tokens = slice(row * q_length, (row + 1) * q_length)
                assert not np.any(np.asarray(out[tokens]))
                assert np.all(np.isneginf(np.asarray(lse[tokens])))

    @pytest.mark.parametrize(("seed", "splits"), [(0, 1), (1, 2), (2, 1)])
    def test_hostile_tables(self, seed: int, splits: int):
        """Any page numbers and lengths; what is in no page that a query sees, page 0 among them, is NaN."""
        draw = np.random.default_rng(seed)
        inputs = latent_inputs(sequences=4, page_size=(64, 128)[seed % 2], q_lengths=(1 + seed,))
        num_pages = inputs.key.shape[0]
        wild = [-1, -(2**31), num_pages, 2**31 - 1, 3, 3]
        table = np.maximum(np.asarray(inputs.page_table), 1)
        table = np.where(draw.random(table.shape) < 0.4, draw.choice(wild, table.shape), table)
        used = set(table[(table >= 0) & (table < num_pages)].tolist())
        unused = [page for page in range(num_pages) if page not in used]
        hostile = dataclasses.replace(
            inputs,
            key=inputs.key.at[jnp.asarray(unused, jnp.int32)].set(jnp.nan),
            page_table=jnp.asarray(table, jnp.int32),
            kv_lengths=jnp.asarray(draw.choice([0, 5, 71, 200, 1000, -3, 2**31 - 1], 4), jnp.int32),
        )
        out, _ = self.run_and_check(hostile, splits)
        assert np.isfinite(np.asarray(out, np.float32)).all()

    def test_what_lies_beyond_the_lengths_is_not_looked_at(self, splits: int = 2):
        inputs = latent_inputs([130, 64, 0, 191], sequences=4)
        position = np.arange(inputs.capacity).reshape(-1, inputs.page_size)
        dirty = np.zeros(inputs.key.shape[:2], bool)
        for row, length in enumerate(np.asarray(inputs.kv_lengths)):
            dirty[np.asarray(inputs.page_table)[row]] = position >= length
        key = jnp.where(jnp.asarray(dirty)[..., None, None], jnp.nan, inputs.key)
        for got, want in zip(
            self.run(dataclasses.replace(inputs, key=key), splits), self.run(inputs, splits), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))

    @pytest.mark.parametrize("fields", [{"sequences": 0}, {"kv_length": 0, "sinks": 1}])
    def test_nothing_at_all(self, fields: dict[str, Any]):
        inputs = latent_inputs(**fields)
        self.run_and_check(inputs)

    def test_vmap(self):
        inputs = latent_inputs([100, 3])
        queries = jnp.stack([inputs.query, 2 * inputs.query])
        with type(self).machine():
            run = lambda query: self.backend.forward(dataclasses.replace(inputs, query=query), self.params(1))
            mapped = jax.block_until_ready(jax.jit(jax.vmap(run))(queries))
        for got, want in zip(mapped, self.run(dataclasses.replace(inputs, query=queries[1])), strict=True):
            np.testing.assert_array_equal(np.asarray(got[1], np.float32), np.asarray(want, np.float32))
