"""Random inputs with the shapes of a call, for tuning without real values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import generator_of
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.latent_rows import LATENT_DIM, quantize_latents

SMALL_SCALE = 1.0 / 64.0
"""Scale of int8 elements, with which they are about as large as normal numbers."""


def sampled(inputs: PagedInputs, key: jax.Array) -> PagedInputs:
    """Arrays for the inputs of an attention op."""
    draw = Draw(key)
    counts = draw.counts(inputs.tokens, inputs.sequences)
    ends = np.maximum(draw.lengths(inputs.capacity, inputs.sequences), np.minimum(counts, inputs.capacity))
    return inputs.replace(
        query=draw.floats(inputs.query),
        key=draw.cache(inputs.key),
        value=draw.cache(inputs.value),
        page_table=draw.table(inputs.page_table, inputs.num_pages),
        kv_lengths=jnp.asarray(ends, jnp.int32),
        kv_starts=None if inputs.kv_starts is None else jnp.asarray(ends // 4, jnp.int32),
        cum_q_lens=None if inputs.cum_q_lens is None else jnp.asarray(np.append(0, np.cumsum(counts)), jnp.int32),
        key_scale=draw.scale(inputs.key_scale, inputs.key),
        value_scale=draw.scale(inputs.value_scale, inputs.value),
        alibi_slopes=draw.slopes(inputs.alibi_slopes),
        softmax_aux=draw.floats(inputs.softmax_aux),
        tree_mask=draw.words(inputs.tree_mask),
        new_key=draw.floats(inputs.new_key),
        new_value=draw.floats(inputs.new_value),
    )


class Draw:
    """Random draws from one seed; every method returns ``None`` for ``None``."""

    def __init__(self, key: jax.Array) -> None:
        self.generator = generator_of(key)

    def floats(self, struct: Any) -> Any:
        if struct is None:
            return None
        # On the device: a cache may be too large to be sent from the host. And not in `jax.ensure_compile_time_eval`,
        # where the random bits would be computed early and be a constant of the program that uses them.
        key = jax.random.key(int(self.generator.integers(0, 1 << 31)))
        sampled_dtype = jnp.float32 if struct.dtype.itemsize < 2 else struct.dtype
        return jax.random.normal(key, struct.shape, sampled_dtype).astype(struct.dtype)

    def cache(self, struct: Any) -> Any:
        if struct is not None and struct.dtype == jnp.uint8:
            return quantize_latents(self.floats(jax.ShapeDtypeStruct((*struct.shape[:-1], LATENT_DIM), jnp.bfloat16)))
        if struct is None or struct.dtype != jnp.int8:
            return self.floats(struct)
        key = jax.random.key(int(self.generator.integers(0, 1 << 31)))
        return jax.random.randint(key, struct.shape, -127, 128, jnp.int8)

    def scale(self, struct: Any, cache: Any) -> Any:
        if struct is None:
            return None
        size = SMALL_SCALE if cache.dtype == jnp.int8 else 1.0
        return jnp.asarray(self.generator.uniform(0.5 * size, 2 * size, struct.shape), jnp.float32)

    def words(self, struct: Any) -> Any:
        """Random bits."""
        if struct is None:
            return None
        return jnp.asarray(self.generator.integers(0, 1 << 32, struct.shape, np.uint32))

    def slopes(self, struct: Any) -> Any:
        """The slopes of the paper, arXiv 2108.12409: a geometric series."""
        if struct is None:
            return None
        return jnp.asarray(2.0 ** (-8.0 * np.arange(1, struct.shape[0] + 1) / struct.shape[0]), struct.dtype)

    def table(self, struct: Any, num_pages: int) -> Any:
        """Pages in random order, each once if there are enough."""
        if struct is None:
            return None
        size = int(np.prod(struct.shape))
        rounds = -(-size // max(num_pages, 1))
        page_numbers = np.concatenate([self.generator.permutation(max(num_pages, 1)) for _ in range(max(rounds, 1))])
        return jnp.asarray(page_numbers[:size].reshape(struct.shape), jnp.int32)

    def lengths(self, capacity: int, sequences: int) -> np.ndarray:
        """Lengths from half to the full capacity, at least 1."""
        low = min(max(capacity // 2, 1), capacity)
        return self.generator.integers(low, capacity + 1, sequences)

    def counts(self, tokens: int, sequences: int) -> np.ndarray:
        """Counts as even as possible."""
        if not sequences:
            return np.zeros(0, np.int64)
        return np.diff(np.arange(sequences + 1) * tokens // sequences)
