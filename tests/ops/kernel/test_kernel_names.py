"""One name is one kernel: two classes never share configs, and a class that is defined again starts anew."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.ops import ConfigCache, ConfigSelectorChain, Executor, Invocation, Kernel


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int


@dataclasses.dataclass(frozen=True)
class Columns:
    columns: int


def make_double(qualname="Double", config=Rows(1), name="tests.names", version="0"):
    """A new class each time, as a notebook's cell makes one."""

    class Double(Kernel):
        def __init__(self):
            super().__init__(name, version=version)

        def run(self, x, *, cfg):
            return 2 * x

        def heuristic_cfg(self, inv):
            return config

    Double.__qualname__ = qualname
    return Double()


def test_another_class_of_the_same_name_and_version_is_an_error_that_names_both():
    first = make_double()
    with pytest.raises(ValueError, match=r"test_kernel_names:Halve .*tests\.names.*test_kernel_names:Double"):
        make_double("Halve", Columns(1))
    assert first(jnp.ones(2)).tolist() == [2, 2]
    assert make_double("Halve", version="1").version == "1"
    assert make_double("Halve", name="tests.other_name").name == "tests.other_name"


def test_the_name_stays_taken_when_its_kernel_is_gone():
    make_double()
    with pytest.raises(ValueError, match="whose configs it would share"):
        make_double("Halve")


def test_a_class_that_is_defined_again_forgets_the_configs_in_memory():
    chain = ConfigSelectorChain(ConfigCache())
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)
    inv = Invocation(make_double(), (struct,))
    other = Invocation(make_double(name="tests.other_name"), (struct,))
    for each in (inv, other):
        chain.cache.put(each.key, Rows(8), origin="autotune")
    again = make_double(config=Columns(2))
    assert Invocation(again, (struct,)).key == inv.key
    assert Executor(chain).choose_config(again, jnp.ones(4)) == Columns(2)
    assert chain.cache.get(other.key) == Rows(8)


def test_a_second_kernel_of_one_class_keeps_them():
    chain = ConfigSelectorChain(ConfigCache())
    first = make_double()
    inv = Invocation(first, (jax.ShapeDtypeStruct((4,), jnp.float32),))
    chain.cache.put(inv.key, Rows(8), origin="autotune")
    assert Executor(chain).choose_config(type(first)(), jnp.ones(4)) == Rows(8)


def test_tuning_one_notebook_cell_after_another_measures_the_new_one():
    tilewright.tune(make_double(), jnp.ones(4))
    assert make_double(config=Columns(3))(jnp.ones(4)).tolist() == [2] * 4
    chosen = tilewright.ops.default_executor().explain(make_double(config=Columns(3)), jnp.ones(4), quiet=True).config
    assert chosen == Columns(3)
