"""A model exported once, for every batch size and length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import tilewright
from tilewright.errors import UnsupportedError
from tilewright.modules import flash_attention
from tilewright.ops import policy_override

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "last queries at the last keys": {"causal": True, "causal_alignment": "bottom_right"},
    "window and soft cap": {"sliding_window": (40, 10), "logits_soft_cap": 5.0},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 3},
}
SIZES = [(1, 1, 1), (2, 300, 200), (3, 129, 257)]


def arrays(batch, q_length, kv_length):
    shapes = (batch, q_length, 4, 16), (batch, kv_length, 2, 16), (batch, kv_length, 2, 16)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def symbols(*names):
    scope = export.SymbolicScope()
    b, n, m = (export.symbolic_shape(name, scope=scope)[0] for name in names)
    query, keys = (b, n, 4, 16), (b, m, 2, 16)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (query, keys, keys)]


def close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5), ours, theirs)


@pytest.mark.parametrize("name", OPTIONS)
def test_batch_and_lengths_are_symbols(name):
    def attention(q, k, v):
        return flash_attention(q, k, v, **OPTIONS[name])

    exported = export.export(jax.jit(attention))(*symbols("b", "n", "m"))
    for sizes in SIZES:
        close(exported.call(*arrays(*sizes)), attention(*arrays(*sizes)))


@pytest.mark.parametrize(
    "names",
    [("b", "300", "200"), ("2", "n", "m"), ("b", "n", "n")],
    ids=str,
)
def test_a_training_step_with_symbols(names):
    step = jax.value_and_grad(lambda q, k, v: jnp.sin(flash_attention(q, k, v, causal=True)).sum(), (0, 1, 2))
    exported = export.export(jax.jit(step))(*symbols(*names))
    for sizes in SIZES:
        given = [int(name) if name.isdigit() else size for name, size in zip(names, sizes, strict=True)]
        given[2] = given[1] if names[1] == names[2] else given[2]
        close(exported.call(*arrays(*given)), step(*arrays(*given)))


def test_masks_of_arrays_with_symbols():
    def attention(q, k, v, ids, lengths, bias, mask):
        segments = {"q_segment_ids": ids[0], "kv_segment_ids": ids[1]}
        a = flash_attention(q, k, v, bias, mask, **segments)
        b = flash_attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, causal=True)
        packed = jnp.minimum(jnp.array([0, 10, 50, 1000]), q.shape[1])
        c = flash_attention(q[:1], q[:1, :, :2], q[:1, :, :2], cum_seqlens_q=packed, cum_seqlens_k=packed, causal=True)
        return a, b, c

    b, n, m = export.symbolic_shape("b, n, m")
    struct = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    ids = struct(jnp.int32, b, n), struct(jnp.int32, b, m)
    rest = struct(jnp.int32, b), struct(jnp.float32, b, 1, n, m), struct(jnp.bool_, 1, 4, n, m)
    query, keys = struct(jnp.float32, b, n, 4, 16), struct(jnp.float32, b, m, 2, 16)
    exported = export.export(jax.jit(attention))(query, keys, keys, ids, *rest)
    rng = np.random.default_rng(0)
    for batch, rows, columns in SIZES[1:3]:
        given = (
            *arrays(batch, rows, columns),
            tuple(jnp.asarray(np.sort(rng.integers(0, 3, (batch, size))), jnp.int32) for size in (rows, columns)),
            jnp.asarray(rng.integers(0, min(rows, columns) + 1, batch), jnp.int32),
            jnp.asarray(rng.standard_normal((batch, 1, rows, columns)), jnp.float32),
            jnp.asarray(rng.random((1, 4, rows, columns)) > 0.2),
        )
        close(exported.call(*given), attention(*given))


def test_vmap_over_a_symbolic_axis():
    (b,) = export.symbolic_shape("b")
    struct = jax.ShapeDtypeStruct((b, 2, 24, 2, 16), jnp.float32)
    attention = jax.vmap(lambda x: flash_attention(x, x, x, causal=True))
    exported = export.export(jax.jit(attention))(struct)
    x = jax.random.normal(jax.random.key(0), (5, 2, 24, 2, 16))
    close(exported.call(x), attention(x))


def test_it_is_neither_measured_nor_remembered_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    with policy_override(autotune=True):
        export.export(jax.jit(lambda q, k, v: flash_attention(q, k, v)))(*symbols("b", "n", "m"))
    assert not list(tmp_path.rglob("*.json"))


def test_a_platform_that_cannot_says_why():
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in symbols("b", "n", "m")]
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        chosen = export.export(jax.jit(lambda *x: flash_attention(*x)), platforms=["cuda"])(*shapes)
        with pytest.raises(UnsupportedError, match="hopper: its programs are for given shapes, got symbolic"):
            export.export(jax.jit(lambda *x: flash_attention(*x, platform="pallas")), platforms=["cuda"])(*shapes)
    assert "flash_attention" in chosen.mlir_module()
