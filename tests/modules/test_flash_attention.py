"""The public functions: signatures, results and gradients through the executor, and JAX's own function as the peer."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.support.draws import draw
from tilewright.errors import UnsupportedError
from tilewright.kernels.flash_attention.arguments import CausalAlignment
from tilewright.kernels.flash_attention.options import AttentionOptions
from tilewright.kernels.masks import CausalMask, WindowMask
from tilewright.kernels.op.signatures import short
from tilewright.modules import FlashAttention, dot_product_attention, flash_attention

QUERY, KEY, VALUE = draw(2, 24, 4, 16), draw(2, 24, 2, 16, seed=1), draw(2, 24, 2, 16, seed=2)


def oracle(*args: Any, **kwargs: Any) -> Any:
    return FlashAttention().reference(FlashAttention().prepare(*args, **kwargs))


def close(got: Any, want: Any, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-6), got, want)


def test_signature_is_that_of_prepare():
    _, *arrays, _ = inspect.signature(FlashAttention.prepare).parameters.values()
    *ours, refused_of_flax = inspect.signature(flash_attention).parameters.values()
    assert ours[: len(arrays)] == [each.replace(annotation=short(each.annotation)) for each in arrays]
    options = ours[len(arrays) :]
    assert [each.name for each in options] == list(AttentionOptions.__annotations__)
    assert {each.name: each.default for each in options if each.default is not None} == {
        "causal": False, "causal_alignment": "top_left", "dropout_prob": 0.0, "return_lse": False,
    }  # fmt: skip
    assert ours[6].annotation == CausalAlignment
    assert (ours[-1].name, ours[-1].kind, ours[-1].default) == ("cfg", inspect.Parameter.KEYWORD_ONLY, None)
    assert refused_of_flax.name == "dropout_rng"


def test_every_argument_is_documented():
    documented = inspect.getdoc(flash_attention) or ""
    for name in inspect.signature(flash_attention).parameters:
        assert f"  {name}: " in documented, name


def test_drop_in_has_the_signature_of_jax():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert ours == theirs


def test_kernel_and_function_agree():
    close(FlashAttention()(QUERY, KEY, VALUE, causal=True), flash_attention(QUERY, KEY, VALUE, causal=True), 0)


def everything(query: Any, key: Any, value: Any, bias: Any, sinks: Any, attention: Callable[..., Any]) -> Any:
    return attention(
        query, key, value, bias, WindowMask(9, 2) | CausalMask(-3), softmax_aux=sinks, logits_soft_cap=5.0,
        key_value_seq_lengths=jnp.asarray([24, 11]), dropout_prob=0.2, dropout_seed=7, return_lse=True,
    )  # fmt: skip


def loss(attention: Callable[..., Any]) -> Callable[..., Any]:
    def total(*arrays: Any) -> Any:
        out, lse = everything(*arrays, attention)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    return total


ARRAYS = (QUERY, KEY, VALUE, draw(4, 24, 24, seed=3), draw(4, 2, seed=4))


def test_results_and_gradients_of_every_array():
    close(everything(*ARRAYS, flash_attention), jax.jit(lambda *arrays: everything(*arrays, oracle))(*ARRAYS))
    wanted = jax.jit(jax.grad(loss(oracle), argnums=(0, 1, 2, 3, 4)))(*ARRAYS)
    close(jax.grad(loss(flash_attention), argnums=(0, 1, 2, 3, 4))(*ARRAYS), wanted)
    close(jax.jit(jax.grad(loss(flash_attention), argnums=(0, 1, 2, 3, 4)))(*ARRAYS), wanted)


def test_unbatched_is_a_batch_of_one():
    ids = jnp.asarray([0] * 9 + [1] * 15)
    arrays = [array[1:] for array in ARRAYS[:3]]

    def results(query, key, value):
        segments = ids if query.ndim == 3 else ids[None]
        options = {"q_segment_ids": segments, "kv_segment_ids": segments}
        return flash_attention(query, key, value, causal=True, return_lse=True, **options)

    def gradients(*arrays):
        return jax.grad(lambda *arrays: jnp.sum(jnp.sin(results(*arrays)[0])), argnums=(0, 1, 2))(*arrays)

    for function in (results, gradients):
        batched = function(*arrays)
        close(function(*(array[0] for array in arrays)), tuple(result[0] for result in batched))


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": lambda f: lambda x: jax.vmap(f, (0, None, None))(x, KEY, VALUE),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f, argnums=(0, 1)), (0, None, None))(x, KEY, VALUE),
    "grad of vmap": lambda f: lambda x: jax.grad(lambda k: jax.vmap(f, (0, None, None))(x, k, VALUE).sum())(KEY),
    "remat": lambda f: lambda x: jax.grad(jax.checkpoint(f))(x[0], KEY, VALUE),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, q: (c + f(q, KEY, VALUE), jax.grad(f)(q, KEY, VALUE)), 0.0, x),
    "jacrev": lambda f: lambda x: jax.jacrev(lambda k: jnp.stack([f(q, k, VALUE) for q in x]))(KEY),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str):
    transform = TRANSFORMS[name]

    def total(attention: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: jnp.sum(jnp.sin(attention(*arrays, causal=True, sliding_window=5)))

    queries = jnp.stack([QUERY, QUERY[::-1] * 2])
    close(transform(total(flash_attention))(queries), jax.jit(transform(total(oracle)))(queries))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_output_has_the_dtype_of_the_query(dtype: Any):
    arrays = [array.astype(dtype) for array in (QUERY, KEY, VALUE)]
    out, lse = flash_attention(*arrays, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    bias = draw(24, 24)
    gradient = jax.grad(lambda bias: flash_attention(*arrays, bias).astype(jnp.float32).sum())(bias)
    assert gradient.dtype == jnp.float32


def test_dropout_keeps_the_mean_and_follows_the_seed():
    ones = jnp.ones((1, 256, 2, 8))
    first, again, other = (flash_attention(ones, ones, ones, dropout_prob=0.5, dropout_seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert float(first.mean()) == pytest.approx(1.0, abs=0.02)
    traced = jax.jit(lambda key: flash_attention(ones, ones, ones, dropout_prob=0.5, dropout_seed=key))
    np.testing.assert_allclose(traced(jax.random.key(1)), first, rtol=1e-6)


def test_platform_is_strict():
    close(flash_attention(QUERY, KEY, VALUE, platform="xla"), flash_attention(QUERY, KEY, VALUE), 0)
    close(flash_attention(QUERY, KEY, VALUE, platform=("triton", "xla")), flash_attention(QUERY, KEY, VALUE), 0)
    with pytest.raises(UnsupportedError, match="triton"):
        flash_attention(QUERY, KEY, VALUE, platform="triton")
    with pytest.raises(ValueError, match="platform='metal'"):
        flash_attention(QUERY, KEY, VALUE, platform="metal")


def test_wrong_config():
    with pytest.raises(TypeError, match="cfg"):
        flash_attention(QUERY, KEY, VALUE, cfg="fast")


MASK = draw(2, 1, 24, 24, seed=5) > -1
PEERS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bias": {"bias": draw(1, 4, 24, 24)},
    "integer bias": {"bias": np.arange(24 * 24).reshape(24, 24) % 5},
    "mask": {"mask": np.asarray(MASK)},
    "bias and mask": {"bias": draw(4, 1, 24), "mask": MASK},
    "window": {"local_window_size": (3, 5)},
    "causal window": {"local_window_size": 6, "is_causal": True},
    "key lengths": {"key_value_seq_lengths": jnp.asarray([20, 3])},
    "lengths": {"query_seq_lengths": jnp.asarray([9, 24]), "key_value_seq_lengths": jnp.asarray([20, 3])},
    "xla": {"implementation": "xla"},
}


@pytest.mark.parametrize("name", PEERS)
def test_drop_in_agrees_with_jax(name: str):
    options, results = PEERS[name], []
    for attention in (dot_product_attention, jax.nn.dot_product_attention):
        out, pullback = jax.vjp(lambda *arrays, f=attention: f(*arrays, **options), QUERY, KEY, VALUE)
        results.append((out, pullback(draw(*out.shape, seed=6))))
    close(*results)


@pytest.mark.parametrize(
    ("ranks", "dtype"), [((4, 4, 4), jnp.bfloat16), ((3, 3, 3), jnp.float32), ((3, 4, 4), jnp.float32)]
)
def test_drop_in_residual_and_ranks(ranks: tuple[int, ...], dtype: Any):
    arrays = [array.astype(dtype)[:1].reshape(array.shape[4 - rank:] if rank == 3 else (1, *array.shape[1:]))
              for array, rank in zip((QUERY, KEY, VALUE), ranks, strict=True)]  # fmt: skip
    got = dot_product_attention(*arrays, is_causal=True, return_residual=True)
    want = jax.nn.dot_product_attention(*arrays, is_causal=True, return_residual=True)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    close(*(jax.tree.map(lambda x: x.astype(jnp.float32), results) for results in (got, want)), 0.05)
    gradient = jax.grad(lambda query: dot_product_attention(query, *arrays[1:], return_residual=True)[1].sum())(
        arrays[0]
    )
    assert not np.any(np.asarray(gradient, np.float32))


def test_drop_in_with_traced_scale():
    got = jax.jit(lambda scale: dot_product_attention(QUERY, KEY, VALUE, scale=scale))(0.3)
    close(got, jax.nn.dot_product_attention(QUERY, KEY, VALUE, scale=0.3))


def test_drop_in_differs_where_a_query_sees_nothing():
    mask = MASK.at[0, :, 5].set(False)
    out, residual = dot_product_attention(QUERY, KEY, VALUE, mask=mask, return_residual=True)
    assert not np.any(out[0, 5])
    assert np.all(np.isneginf(residual[0, 5]))
    theirs = jax.nn.dot_product_attention(QUERY, KEY, VALUE, mask=mask)
    close(out.at[0, 5].set(0), theirs.at[0, 5].set(0))


def test_drop_in_implementations():
    with pytest.raises(ValueError, match="implementation='flash'"):
        dot_product_attention(QUERY, KEY, VALUE, implementation="flash")
    for call in (dot_product_attention, jax.jit(dot_product_attention, static_argnames="implementation")):
        with pytest.raises(
            UnsupportedError, match=r"cudnn: needs a CUDA GPU of compute capability 8.0 or up"
        ) as raised:
            call(QUERY, KEY, VALUE, implementation="cudnn")
        assert list(raised.value.reasons) == ["cudnn"]
    integers = [x.astype(jnp.int32) for x in (QUERY, KEY, VALUE)]
    for implementation in ("xla", "cudnn"):
        with pytest.raises(TypeError, match="one floating-point dtype"):
            dot_product_attention(*integers, implementation=implementation)


def test_cudnn_is_our_backend_where_it_can_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tilewright.kernels.flash_attention.cudnn.jax_calls.cudnn_version", lambda: 91900)
    arrays = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        for options in ({}, {"is_causal": True, "return_residual": True}):
            (found,) = tilewright.explain(
                lambda *x, options=options: dot_product_attention(*x, implementation="cudnn", **options), *arrays
            )
            assert found.choice.config.backend == "cudnn"
            assert "excluded by platform=cuda:cudnn" in found.choice.rejected["cuda"][0]
        with pytest.raises(UnsupportedError, match="cudnn: computes in float16 or bfloat16"):
            tilewright.explain(lambda *x: dot_product_attention(*x, implementation="cudnn"), QUERY, KEY, VALUE)


def test_base_is_loaded_on_use():
    code = (
        "import sys, tilewright.modules as m; assert 'tilewright.modules.base' not in sys.modules; "
        "assert m.base.KernelConfig().block_q == 128"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nonsense"):
        tilewright.modules.nonsense  # noqa: B018
