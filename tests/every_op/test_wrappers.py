"""What stands for an array by ``__jax_array__`` is one, for every array argument of every op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tilewright
from tests.every_op.matrix import call_of, every_op
from tilewright.kernels import kernel
from tilewright.ops import default_executor
from tilewright.ops.executor import default_key_builder_with_sharding


class Held:
    """Holds an array, and is no pytree."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array

    __hash__ = None


every = pytest.mark.parametrize("op", every_op())
of_every_kind = pytest.mark.parametrize("wrap", [nnx.Param, Held])


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@of_every_kind
@every
def test_results_are_those_of_the_array(op, wrap):
    function, arrays = call_of(op).on_arrays()
    wanted = function(*arrays)
    equal(function(*map(wrap, arrays)), wanted)
    equal(jax.jit(lambda *xs: function(*map(wrap, xs)))(*arrays), wanted)


@of_every_kind
@every
def test_gradients_are_those_of_the_array(op, wrap):
    call = call_of(op)
    if not call.differentiable:
        return
    function, arrays = call.on_arrays()
    floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(*given):
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(function(*given)))

    wanted = jax.grad(loss, floating)(*arrays)
    equal(jax.grad(lambda *xs: loss(*map(wrap, xs)), floating)(*arrays), wanted)
    if wrap is nnx.Param:  # a pytree, which can be differentiated itself
        found = nnx.grad(loss, argnums=tuple(floating))(
            *(wrap(x) if i in floating else x for i, x in enumerate(arrays))
        )
        equal([x[...] for x in found], list(wanted))


@of_every_kind
@every
def test_calls_are_explained_and_found_under_the_same_keys(op, wrap):
    call = call_of(op)
    function, arrays = call.on_arrays()
    wrapped = list(map(wrap, arrays))
    keys = [[each.choice.key for each in tilewright.explain(function, *given)] for given in (arrays, wrapped)]
    assert keys[0] == keys[1] != []
    args, kwargs = (
        jax.tree.map(lambda x: wrap(x) if isinstance(x, jax.Array) else x, each) for each in (call.args, call.kwargs)
    )
    assert default_key_builder_with_sharding(kernel(op), args, kwargs) == keys[0][0]
    explained = default_executor().explain(kernel(op), *args, quiet=True, **kwargs)
    assert explained.forward.key == keys[0][0]
