"""Computing for real while a program is traced."""

import contextvars

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from tests.support.threads import together
from tilewright.ops.utils.untraced import measurement_lock, run_untraced

VARIABLE = contextvars.ContextVar("tests_variable", default=0)


def test_results_are_concrete_inside_any_trace():
    found = []

    def function(x):
        found.append(run_untraced(lambda cancelled: float(jnp.sum(jnp.ones(3)))))
        return x * 2

    traced = [
        str(jax.make_jaxpr(jax.vmap(jax.grad(lambda x, f=f: f(x).sum())))(jnp.ones((2, 3))))
        for f in (function, lambda x: x * 2)
    ]
    assert found == [3.0]
    assert traced[0] == traced[1]
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert run_untraced(lambda cancelled: jax.sharding.get_abstract_mesh().empty)


def test_settings_of_the_caller_hold():
    def look(cancelled):
        assert not cancelled.is_set()
        return jnp.asarray(1.0).dtype, jnp.ones(1).devices(), jax.config.jax_default_matmul_precision, VARIABLE.get()

    device = jax.devices()[2]
    token = VARIABLE.set(7)
    try:
        with jax.enable_x64(True), jax.default_device(device), jax.default_matmul_precision("highest"):
            assert run_untraced(look) == (jnp.float64, {device}, "highest", 7)
    finally:
        VARIABLE.reset(token)
    assert run_untraced(look)[0] == jnp.float32


def test_errors_come_back():
    def fail(cancelled):
        raise LookupError("inside")

    with pytest.raises(LookupError, match="inside"):
        run_untraced(fail)


def test_turns_are_taken_by_threads_and_shared_within_one():
    inside, most = [], []

    def work(_):
        with measurement_lock(), measurement_lock():
            inside.append(1)
            most.append(len(inside))
            run_untraced(lambda cancelled: measurement_lock().__enter__())
            inside.pop()

    together(work, range(8))
    assert most == [1] * 8
