"""Chunks of sequences, and the triangular inverse of the delta rule by Triton's interpreter, against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.linear_attention.chunks import ChunkTable, chunk_table

pytest.importorskip("triton")

from tilewright.kernels.linear_attention.inverse import chunk_inverse, inverted
from tilewright.kernels.triton.interpreter import interpret_triton

pytestmark = pytest.mark.usefixtures("unoptimised")


def rows_by_sequence(table: ChunkTable) -> list[list[int]]:
    chunks, sequences = np.asarray(table.chunks), np.asarray(table.sequences)
    return [
        [row for first, _, tokens in chunks[begin : begin + count] for row in range(first, first + tokens)]
        for begin, count in sequences
    ]


@pytest.mark.parametrize(
    ("length", "bounds"),
    [
        (200, [0, 200]), (200, [0, 64, 65, 65, 129, 200]), (150, [3, 3, 10, 74, 140]), (70, [0, 0, 0]),
        (70, [70, 70]), (65, list(range(66))), (64, [0, 64]), (10, [4, 90]),
    ],
)  # fmt: skip
def test_chunks_of_a_packed_row(length: int, bounds: list[int]):
    """Every row is in one chunk, and those of a sequence are in its chunks, in order."""
    table = chunk_table(1, length, cum_seqlens=jnp.asarray(bounds, jnp.int32))
    inside = np.minimum(bounds, length)
    want = [list(range(begin, end)) for begin, end in itertools.pairwise(inside)]
    assert rows_by_sequence(table) == want
    written = [row for first, rows, _ in np.asarray(table.chunks) for row in range(first, first + rows)]
    assert sorted(written) == list(range(length))
    assert np.asarray(table.chunks)[:, 1].max() <= 64


def test_boundaries_that_decrease_stay_in_the_table():
    """Numbers that a program cannot know: the results mean nothing, but kernels may not leave their arrays."""
    table = chunk_table(1, 200, cum_seqlens=jnp.asarray([0, 200, 0, 200, 0, 200, 10, 150], jnp.int32))
    begin, count = np.asarray(table.sequences).T
    assert (count >= 0).all()
    assert (begin + count <= table.num_chunks)[count > 0].all()
    first, rows, tokens = np.asarray(table.chunks).T
    assert (tokens >= 0).all()
    assert (tokens <= rows).all()
    assert (first + rows <= 200)[rows > 0].all()


@pytest.mark.parametrize(("length", "lengths"), [(130, None), (64, None), (130, [0, 130, 64]), (5, [2, 9, -1])])
def test_chunks_of_rows(length: int, lengths: list[int] | None):
    table = chunk_table(3, length, seq_lengths=None if lengths is None else jnp.asarray(lengths, jnp.int32))
    valid = np.clip([length] * 3 if lengths is None else lengths, 0, length)
    assert rows_by_sequence(table) == [list(range(i * length, i * length + n)) for i, n in enumerate(valid)]
    written = [row for first, rows, _ in np.asarray(table.chunks) for row in range(first, first + rows)]
    assert written == list(range(3 * length))


def inverses(key: jax.Array, beta: jax.Array, table: ChunkTable) -> np.ndarray:
    """T0 of every chunk by ``numpy.linalg.inv`` in float64; NaN for chunks without a token, which nobody reads."""
    flat = np.asarray(key, np.float64).reshape(-1, *key.shape[2:])
    strength = np.asarray(beta, np.float64).reshape(-1, beta.shape[2])
    group = beta.shape[2] // key.shape[2]
    out = np.full((table.num_chunks, beta.shape[2], 64, 64), np.nan)
    for chunk, (first, _, tokens) in enumerate(np.asarray(table.chunks)):
        for head in range(beta.shape[2] if tokens else 0):
            k = np.zeros((64, key.shape[3]))
            k[:tokens] = flat[first : first + tokens, head // group]
            b = np.zeros(64)
            b[:tokens] = strength[first : first + tokens, head]
            out[chunk, head] = np.linalg.inv(np.eye(64) + np.tril(b[:, None] * (k @ k.T), -1))
    return out


def keys_of(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng(3).normal(size=shape)
    if kind != "random":
        noise = np.ones(shape) + (0.3 * noise if kind == "near" else 0)
    return noise / np.linalg.norm(noise, axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("kind", "beta", "narrow"),
    [
        ("random", 1.0, 3.2e-4), ("near", 1.0, 8e-4), ("near", 2.0, 5e-3), ("equal", 1.0, 1e-6), ("equal", 2.0, 1e-5),
    ],
)  # fmt: skip
def test_keys_that_are_alike(kind: str, beta: float, narrow: float, dtype: str):
    """Errors of T0 R as with an exact inverse that is rounded, up to a factor: powers of L would have no digit.

    With L in one part of float16 the error of keys that are nearly alike would be over its limit.
    """
    key = jnp.asarray(keys_of(kind, (1, 64, 1, 32)), jnp.float32)
    strength = jnp.full((1, 64, 1), beta, jnp.float32)
    table = chunk_table(1, 64)
    with interpret_triton():
        got = np.asarray(jax.jit(lambda *args: chunk_inverse(*args, dtype=dtype))(key, strength, table), np.float64)
    want = inverses(key, strength, table)
    value = np.random.default_rng(4).normal(size=(64, 16))
    error = np.linalg.norm((got - want)[0, 0] @ value) / np.linalg.norm(want[0, 0] @ value)
    assert error < (narrow if dtype == "float16" else 2e-5)
    assert not np.triu(got[0, 0], 1).any()
    np.testing.assert_array_equal(np.diagonal(got[0, 0]), 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("heads", "value_heads", "dim"), [(1, 1, 20), (2, 4, 96)])
def test_packed_sequences_whose_padding_is_nan(dtype: str, heads: int, value_heads: int, dim: int):
    length, bounds = 150, [3, 20, 20, 21, 90, 140]
    rng = np.random.default_rng(5)
    key = jnp.asarray(rng.normal(size=(1, length, heads, dim)) / np.sqrt(dim), dtype)
    beta = jnp.asarray(rng.uniform(0, 2, size=(1, length, value_heads)), jnp.float32)
    outside = (np.arange(length) < bounds[0]) | (np.arange(length) >= bounds[-1])
    key = jnp.where(outside[None, :, None, None], jnp.nan, key)
    beta = jnp.where(outside[None, :, None], jnp.inf, beta)
    table = chunk_table(1, length, cum_seqlens=jnp.asarray(bounds, jnp.int32))
    with interpret_triton():
        got = np.asarray(jax.jit(chunk_inverse)(key, beta, table), np.float64)
    want = inverses(key, beta, table)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.nanmax(np.abs(want)))


def test_rows_with_lengths():
    rng = np.random.default_rng(6)
    key = jnp.asarray(keys_of("near", (2, 70, 1, 16)), jnp.bfloat16)
    beta = jnp.asarray(rng.uniform(0, 1, size=(2, 70, 2)), jnp.bfloat16)
    table = chunk_table(2, 70, seq_lengths=jnp.asarray([70, 17], jnp.int32))
    with interpret_triton():
        got = np.asarray(jax.jit(lambda *args: chunk_inverse(*args, dtype="float16"))(key, beta, table), np.float64)
    np.testing.assert_allclose(got, inverses(key, beta, table), atol=4e-3)


def test_matrices_of_chunks_with_tokens_are_inverted_in_place():
    """Elements of any size, as keys that are not normed have; a chunk without a token keeps what it has."""
    rng = np.random.default_rng(7)
    table = chunk_table(3, 64, seq_lengths=jnp.asarray([64, 0, 3], jnp.int32))
    matrices = np.tril(rng.normal(size=(3, 2, 64, 64)) * rng.uniform(0.1, 0.6, size=(3, 2, 64, 1)), -1)
    with interpret_triton():
        got = np.asarray(jax.jit(inverted)(jnp.asarray(matrices, jnp.float32), table), np.float64)
    want = np.linalg.inv(np.eye(64) - np.asarray(matrices, np.float32).astype(np.float64))
    for chunk in (0, 2):
        np.testing.assert_allclose(got[chunk], want[chunk], atol=2e-6 * np.abs(want[chunk]).max())
    np.testing.assert_array_equal(got[1], np.asarray(matrices[1], np.float32))
