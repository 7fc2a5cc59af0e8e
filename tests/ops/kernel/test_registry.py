"""Recording of invocations."""

import jax
import jax.numpy as jnp
import pytest

from tests.ops.kernel.samples import A, B, Pair, Product
from tests.support.threads import together
from tilewright.ops import (
    Invocation,
    autotune_recorded,
    clear_invocations,
    default_executor,
    get_invocations,
    record_invocation,
)


@pytest.fixture(autouse=True)
def cleared():
    clear_invocations()
    yield
    clear_invocations()


def test_remembers_what_was_given_without_arrays():
    kernel = Product("tests.registry")
    inv = Invocation(kernel, (A, B), {"scale": 2.0})
    record_invocation(kernel, inv)
    (found,) = get_invocations()
    assert found.key == inv.key
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in found.args)
    record_invocation(kernel, inv)
    assert len(get_invocations()) == 1


def test_from_then_on_every_call_of_the_kernel():
    kernel, other = Pair("tests.registry.pair"), Product("tests.registry.other")
    kernel(A[:5], B)
    assert get_invocations() == []
    record_invocation(kernel, Invocation(kernel, (A, B)))
    kernel(A[:4], B)
    other(A, B)
    jax.jit(jax.vmap(jax.grad(lambda a: jnp.sin(kernel(a, B)).sum())))(jnp.stack([A] * 3))
    found = [(inv.direction, inv.args[0].shape[0], [axis.size for axis in inv.mapped]) for inv in get_invocations()]
    assert found == [("forward", 6, []), ("forward", 4, []), ("forward", 6, [3]), ("backward", 6, [3])]
    clear_invocations()
    kernel(A[:3], B)
    assert get_invocations() == []


def test_what_was_recorded_can_be_tuned():
    kernel = Pair("tests.registry.tuned")
    record_invocation(kernel, Invocation(kernel, (A, B)))
    jax.grad(lambda a: jnp.sin(kernel(a[:4], B)).sum())(A)
    result = autotune_recorded(get_invocations())
    assert [e.direction for e in result] == ["forward", "forward", "backward"]
    assert all(c.check == "passed" for e in result for c in e.candidates)
    assert default_executor().explain(kernel, A, B, quiet=True).step == "memory"


def test_threads_may_record_at_once():
    kernel = Product("tests.registry.threads")
    record_invocation(kernel, Invocation(kernel, (A, B)))

    def work(rows):
        kernel(A[:rows], B)
        get_invocations()

    together(work, (1, 2, 3, 4) * 4)
    assert sorted(inv.args[0].shape[0] for inv in get_invocations()) == [1, 2, 3, 4, 6]


def test_wrong_input():
    kernel, other = Product("tests.registry"), Product("tests.registry.other")
    with pytest.raises(ValueError, match=r"tests\.registry\.other"):
        record_invocation(other, Invocation(kernel, (A, B)))
    for wrong in (None, (A, B), "inv"):
        with pytest.raises(TypeError, match="inv="):
            record_invocation(kernel, wrong)
