"""``permute`` and ``unpermute``: derivatives against a dense formula, what is dropped, and wrong arguments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.permutation.oracle import routing_of
from tests.support.draws import draw
from tilewright.modules import permute, top_k_router, unpermute

TOKENS, D, K, EXPERTS = 11, 8, 3, 5
X = draw(TOKENS, D)
IDS = jnp.asarray(np.random.default_rng(0).integers(-1, EXPERTS + 1, (TOKENS, K)), jnp.int32)
WEIGHTS = draw(TOKENS, K, seed=1)
MATRICES = draw(EXPERTS, D, D, seed=2)


def layer(x: Any, weights: Any, matrices: Any, capacity: int | None = None) -> Any:
    """Experts that are matrices, of every row by selection."""
    rows, sizes, source = permute(x, IDS, EXPERTS, capacity=capacity)
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    products = jnp.einsum("rd,rdn->rn", rows, matrices[jnp.minimum(expert, EXPERTS - 1)])
    return unpermute(jnp.tanh(products), source, weights)


def dense(x: Any, weights: Any, matrices: Any, capacity: int | None = None) -> Any:
    """The same of all pairs of tokens and experts, with a one-hot matrix."""
    kept = np.asarray(routing_of(IDS, EXPERTS, capacity).positions) >= 0
    factors = jnp.einsum("tk,tke->te", weights * kept, jax.nn.one_hot(IDS, EXPERTS, dtype=weights.dtype))
    return jnp.einsum("te,ten->tn", factors, jnp.tanh(jnp.einsum("td,edn->ten", x, matrices)))


@pytest.mark.parametrize("capacity", [None, 4])
def test_derivatives_are_those_of_a_dense_formula_in_float64(capacity: int | None):
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in (X, WEIGHTS, MATRICES)]
        ours, theirs = (functools.partial(each, capacity=capacity) for each in (layer, dense))
        np.testing.assert_allclose(ours(*arrays), theirs(*arrays), rtol=1e-12, atol=1e-14)
        loss = lambda f, *xs: jnp.sum(jnp.sin(f(*xs)))
        for order in (jax.grad, lambda *a, **k: jax.jacfwd(jax.grad(*a, **k), argnums=1)):
            got, want = (order(functools.partial(loss, f), argnums=(0, 1, 2))(*arrays) for f in (ours, theirs))
            for one, other in zip(got, want, strict=True):
                assert one.dtype == jnp.float64
                np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
        tangents = [jnp.cos(x) for x in arrays]
        for one, other in zip(jax.jvp(ours, arrays, tangents), jax.jvp(theirs, arrays, tangents), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap(mapped: tuple[int | None, int | None]):
    x, ids = jnp.stack([X, 2 * X]), jnp.stack([IDS, IDS[::-1]])
    given = [each if axis == 0 else each[0] for each, axis in zip((x, ids), mapped, strict=True)]
    found = jax.vmap(lambda x, ids: permute(x, ids, EXPERTS, capacity=5), mapped)(*given)
    for i in range(2):
        one = [each[i] if axis == 0 else each for each, axis in zip(given, mapped, strict=True)]
        for got, want in zip(found, permute(*one, EXPERTS, capacity=5), strict=True):
            np.testing.assert_array_equal(got[i], want)


def test_no_program_adds_by_scattering_or_keeps_a_one_hot_matrix():
    arrays = X.astype(jnp.bfloat16), WEIGHTS
    program = jax.value_and_grad(lambda x, w: layer(x, w, MATRICES.astype(jnp.bfloat16)).sum(), argnums=(0, 1))
    text = jax.jit(program).lower(*arrays).as_text("hlo")
    scatters = [line for line in text.splitlines() if " scatter(" in line]
    assert scatters
    assert all("unique_indices=true" in line and "s32" in line for line in scatters)
    first, again = (jax.tree.map(np.asarray, jax.jit(program)(*arrays)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_results_of_a_capacity_leave_out_the_last_choices():
    ids = jnp.array([[0, 1], [0, 1], [0, 2], [3, 0]])
    rows, sizes, source = permute(jnp.arange(1.0, 5.0)[:, None], ids, 4, capacity=2)
    assert sizes.tolist() == [2, 2, 1, 1]
    assert source.tolist() == [0, 2, 1, 3, 5, 6, -1, -1]
    assert rows[:, 0].tolist() == [1, 2, 1, 2, 3, 4, 0, 0]
    out = unpermute(rows.at[6:].set(jnp.nan), source, jnp.ones((4, 2)).at[2, 0].set(jnp.nan))
    assert out[:, 0].tolist() == [2, 4, 3, 4]


def test_ids_of_64_bits_do_not_wrap_around():
    with jax.enable_x64(True):
        _, sizes, source = permute(X[:1], jnp.array([[2**32, 1, -(2**40)]]), 2)
    assert sizes.tolist() == [0, 1]
    assert source.tolist() == [1, -1, -1]


def test_with_the_router():
    weights, experts = top_k_router(draw(TOKENS, EXPERTS, seed=4), 2)
    rows, sizes, source = permute(X, experts, EXPERTS)
    assert int(sizes.sum()) == 2 * TOKENS
    np.testing.assert_allclose(unpermute(rows, source, weights), X, rtol=1e-6, atol=1e-6)


ROWS, SOURCE = jnp.ones((6, 4)), jnp.arange(6)


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (ValueError, "x must be a floating-point array of 16 bits", lambda: permute(X.astype(int), IDS, 4)),
        (ValueError, r"x must be .*, got x.shape=\(11,\)", lambda: permute(X[:, 0], IDS, 4)),
        (ValueError, r"experts must be \[tokens, k\] .*experts.shape=\(10, 3\)", lambda: permute(X, IDS[1:], 4)),
        (ValueError, r"experts must be .*experts.shape=\(11, 0\)", lambda: permute(X, IDS[:, :0], 4)),
        (ValueError, r"experts must be .*experts.shape=\(11,\)", lambda: permute(X, IDS[:, 0], 4)),
        (TypeError, "experts must hold integers", lambda: permute(X, WEIGHTS, 4)),
        (ValueError, "num_experts must be at least 1.*num_experts=0", lambda: permute(X, IDS, 0)),
        (ValueError, "capacity at least 1 or None.*capacity=0", lambda: permute(X, IDS, 4, capacity=0)),
        (TypeError, "capacity must be an int, got 2.5", lambda: permute(X, IDS, 4, capacity=2.5)),  # type: ignore[arg-type]
        (ValueError, "rows must be a floating-point array", lambda: unpermute(ROWS[0], SOURCE, jnp.ones((3, 2)))),
        (ValueError, r"weights must be .*weights.shape=\(4, 2\)", lambda: unpermute(ROWS, SOURCE, jnp.ones((4, 2)))),
        (ValueError, r"weights must be .*weights.shape=\(6,\)", lambda: unpermute(ROWS, SOURCE, jnp.ones(6))),
        (ValueError, "weights must be .*int32", lambda: unpermute(ROWS, SOURCE, jnp.ones((3, 2), jnp.int32))),
        (ValueError, r"source must have the shape \(6,\)", lambda: unpermute(ROWS, SOURCE[1:], jnp.ones((3, 2)))),
        (TypeError, "source must hold integers", lambda: unpermute(ROWS, ROWS[:, 0], jnp.ones((3, 2)))),
    ],
)  # fmt: skip
def test_wrong_arguments(error: type[Exception], said: str, call: Any):
    with pytest.raises(error, match=said):
        call()
