"""Numbers as programs hold them: NumPy's and JAX's where Python's are wanted, eagerly and under jit alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.draws import draw
from tilewright.modules import FlashAttention, decode_attention, dot_product_attention, flash_attention
from tilewright.ops import Invocation, Kernel

Q, K, V = (draw(2, 8, 4, 16, seed=i) for i in range(3))


def test_numpy_scalars_are_static_as_pythons_are():
    """Those that `tests/every_op` does not try for every op: of JAX's own dtypes, and in a pair."""
    numpys = {"softmax_scale": np.asarray(jnp.bfloat16(0.25))[()], "sliding_window": (np.int32(3), np.int8(1))}
    wanted = flash_attention(Q, K, V, softmax_scale=0.25, sliding_window=(3, 1))
    for how in (lambda f: f, jax.jit):
        np.testing.assert_allclose(how(lambda *x: flash_attention(*x, **numpys))(Q, K, V), wanted, atol=1e-6)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_learned_scale_works_and_has_a_gradient(how):
    def ours(scale):
        return flash_attention(Q, K, V, softmax_scale=scale, causal=True).sum()

    def jaxs(scale):
        return jax.nn.dot_product_attention(Q, K, V, scale=scale, is_causal=True).sum()

    for scale in (jnp.float32(0.3), jnp.asarray(0.3)):
        np.testing.assert_allclose(how(ours)(scale), how(jaxs)(scale), rtol=1e-4)
        np.testing.assert_allclose(how(jax.grad(ours))(scale), how(jax.grad(jaxs))(scale), rtol=1e-3)


def test_a_scale_array_in_serving():
    lengths = jnp.array([5, 8])
    got = decode_attention(Q[:, 0], K, V, lengths, softmax_scale=jnp.float32(0.3))
    np.testing.assert_allclose(got, decode_attention(Q[:, 0], K, V, lengths, softmax_scale=0.3), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": jnp.bool_(True)}, r"causal must be True or False.*bool\(.*static_argnames='causal'"),
        ({"sliding_window": jnp.int32(3)}, r"sliding_window must be an int.*int\(.*static_argnames='sliding_window'"),
        ({"logits_soft_cap": jnp.float32(3)}, r"logits_soft_cap must be a number.*float\("),
        ({"softmax_scale": jnp.ones(3)}, "softmax_scale must be a number or a real scalar array"),
        ({"softmax_scale": jnp.complex64(3)}, "softmax_scale must be a number or a real scalar array"),
    ],
)
def test_other_arrays_get_an_error_that_says_what_to_do(options, said):
    with pytest.raises(TypeError, match=said):
        flash_attention(Q, K, V, **options)
    with pytest.raises(TypeError, match=said):
        jax.jit(flash_attention)(Q, K, V, **options)


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 1


class RmsNorm(Kernel):
    """The first kernel that a user writes: its eps is a number wherever it comes from."""

    def __init__(self):
        super().__init__("tests.rms_norm")

    def run(self, x, *, cfg, eps=1e-6, weighted=False):
        if weighted:
            raise AssertionError("a NumPy False is false")
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)

    def heuristic_cfg(self, inv):
        return Rows()


@pytest.mark.parametrize(
    "eps", [1e-3, np.float32(1e-3), np.float64(1e-3), jnp.float32(1e-3)], ids=lambda x: str(type(x))
)
def test_eps_of_a_users_kernel(eps):
    norm, x = RmsNorm(), Q[0]
    wanted = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-3)
    for function in (norm, jax.jit(lambda x, **options: norm(x, eps=eps, weighted=np.bool_(False)))):
        np.testing.assert_allclose(function(x, eps=eps, weighted=np.bool_(False)), wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: norm(x, eps=eps).sum())(x).shape, x.shape)


def test_a_numpy_scalar_makes_no_key_of_its_own():
    keys = {
        Invocation(FlashAttention(), (FlashAttention().prepare(Q, K, V, softmax_scale=scale),)).key
        for scale in (0.5, np.float32(0.5), np.float64(0.5))
    }
    assert len(keys) == 1


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8])
def test_the_drop_in_treats_integers_as_jax_does(dtype):
    arrays = [jnp.arange(2 * 4 * 2 * 4).reshape(2, 4, 2, 4).astype(dtype) % 5 for _ in range(3)]
    got, wanted = dot_product_attention(*arrays), jax.nn.dot_product_attention(*arrays)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("window", [(-1, 2), (2, -1), (-2, 5), (1, 1), 3])
@pytest.mark.parametrize("masked", [False, True])
def test_the_drop_in_treats_negative_windows_as_jax_does(window, masked):
    mask = jnp.tril(jnp.ones((8, 8), bool), 2)[None, None] if masked else None
    got = dot_product_attention(Q, K, V, mask=mask, local_window_size=window)
    wanted = jax.nn.dot_product_attention(Q, K, V, mask=mask, local_window_size=window)
    left, right = window if isinstance(window, tuple) else (window, window)
    distance = np.arange(8) - np.arange(8)[:, None]
    visible = (distance >= -left) & (distance <= right) & (True if mask is None else np.asarray(mask[0, 0]))
    rows = visible.any(1)  # of the others ours are zeros
    np.testing.assert_allclose(got[:, rows], wanted[:, rows], atol=1e-5)
    assert not np.any(got[:, ~rows])


def test_a_window_that_is_a_numpy_integer():
    np.testing.assert_allclose(
        dot_product_attention(Q, K, V, local_window_size=np.int64(2)),
        jax.nn.dot_product_attention(Q, K, V, local_window_size=2),
        atol=1e-5,
    )
