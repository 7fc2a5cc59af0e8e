"""What an invocation says of a call, and under which key."""

import dataclasses
import enum
import functools
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ops.kernel.samples import Config, Pair, Product, operands
from tilewright.ops import (
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    clear_invocations,
    default_key_builder_with_sharding,
    device_fingerprint,
    get_invocations,
    record_invocation,
)
from tilewright.ops.types import Device, MappedAxis
from tilewright.ops.utils.serialize import canonical_json


class Anything(Kernel):
    """Takes any static arguments."""

    def __init__(self, name="tests.anything", **kwargs):
        super().__init__(name, **kwargs)

    def run(self, x, *, cfg, **kwargs):
        return x

    def heuristic_cfg(self, inv):
        return Config()


def chosen_keys(call):
    """The keys under which a chain looks a call up."""
    keys = []
    executor = Executor(ConfigSelectorChain(on_event=lambda selection: keys.append(selection.key)))
    call(executor)
    return keys


kernel = Anything()
x = jnp.ones((4, 2))


def static(**kwargs):
    return default_key_builder_with_sharding(kernel, (x,), kwargs)


class TestInvocation:
    def test_is_frozen_and_abstract(self):
        inv = Invocation(kernel, (x, {"y": np.ones(3)}, 7), {"scale": 1.0, "z": x})
        first, second, third = inv.abstract_args
        assert (first.shape, second["y"].dtype, third) == (
            (4, 2),
            np.dtype(np.float64 if jax.config.x64_enabled else np.float32),
            7,
        )
        assert inv.abstract_kwargs["scale"] == 1.0
        assert isinstance(inv.abstract_kwargs["z"], jax.ShapeDtypeStruct)
        with pytest.raises(dataclasses.FrozenInstanceError):
            inv.direction = "backward"
        assert inv.abstract().args == inv.abstract_args
        assert inv.abstract().key == inv.key
        assert inv.backward().direction == "backward"

    def test_metadata_takes_no_part_in_the_key(self):
        assert Invocation(kernel, (x,), metadata={"a": object()}).key == Invocation(kernel, (x,)).key

    def test_weak_types_are_kept(self):
        weak, strong = jnp.asarray(1.0), jnp.float32(1.0)
        assert weak.weak_type
        assert Invocation(kernel, (weak,)).abstract_args[0].weak_type
        assert not Invocation(kernel, (strong,)).abstract_args[0].weak_type
        assert Invocation(kernel, (weak,)).key != Invocation(kernel, (strong,)).key

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"kernel": "flash"}, "kernel='flash'"),
            ({"args": x}, "self.args="),
            ({"kwargs": 3}, "self.kwargs=3"),
            ({"direction": "sideways"}, "self.direction='sideways'"),
        ],
    )
    def test_wrong_input(self, wrong, message):
        with pytest.raises((TypeError, ValueError), match=message):
            Invocation(**({"kernel": kernel, "args": (x,)} | wrong))


class TestKey:
    def test_is_canonical_json_that_names_everything(self):
        said = json.loads(Invocation(kernel, (x,), {"scale": 2}).key)
        assert said == {
            "op": "tests.anything",
            "version": "0",
            "direction": "forward",
            "device": device_fingerprint(),
            "args": {"$tuple": [{"$array": {"shape": [4, 2], "dtype": "float32", "weak_type": False}}]},
            "kwargs": {"scale": 2},
        }
        assert canonical_json(said) == Invocation(kernel, (x,), {"scale": 2}).key

    def test_parts_that_tell_calls_apart(self):
        mapped = (MappedAxis(3, (True,)),)
        other = Device("gpu", "H100", fingerprint="gpu:H100")
        calls = [
            Invocation(kernel, (x,)),
            Invocation(kernel, (x.T,)),
            Invocation(kernel, (x.astype(jnp.bfloat16),)),
            Invocation(kernel, (x,), {"y": x}),
            Invocation(kernel, (x, x)),
            Invocation(kernel, (x,), direction="backward"),
            Invocation(kernel, (x,), mapped=mapped),
            Invocation(kernel, (x,), device=other),
            Invocation(Anything(version="1"), (x,)),
            Invocation(Anything("tests.other"), (x,)),
            Invocation(kernel, ([x],)),
            Invocation(kernel, ((x,),)),
        ]
        assert len({inv.key for inv in calls}) == len(calls)

    def test_values_do_not_matter(self):
        assert (
            Invocation(kernel, (x,)).key
            == Invocation(kernel, (2 * x,)).key
            == Invocation(kernel, (np.ones((4, 2), np.float32),)).key
        )

    def test_static_arguments_count_by_type_and_value(self):
        values = [
            1, 1.0, True, "1", None, (1,), (1.0,), -0.0, 0.0, 0, False, b"1", frozenset({1}), Config(1),
            [1, 2], (1, 2), {"a": 1, "b": 2}, Color.RED, Color.BLUE, jnp.float32, jnp.float16, jnp.sin, jnp.cos,
        ]  # fmt: skip
        assert len({static(v=value) for value in values}) == len(values)
        for value in values:
            assert static(v=value) == static(v=value)
        assert f"{__name__}:module_level" in static(v=module_level)

    def test_static_arguments_of_equal_value_run_their_own_program(self):
        class Scaled(Anything):
            def run(self, x, *, cfg, scale):
                return jnp.full((), scale) if scale == 0 else x * scale

        executor, each = Executor(ConfigSelectorChain()), Scaled()
        ints = jnp.arange(3)
        assert executor(each, ints, scale=1).dtype == ints.dtype
        assert executor(each, ints, scale=1.0).dtype == jnp.float32
        assert executor(each, ints, scale=True).dtype == ints.dtype
        assert not jnp.signbit(executor(each, ints, scale=0.0))
        assert jnp.signbit(executor(each, ints, scale=-0.0))

    @pytest.mark.parametrize("nameless", [lambda x: x, functools.partial(print, 1)])
    def test_a_callable_without_a_name_is_an_error_that_says_so(self, nameless):
        executor = Executor(ConfigSelectorChain())
        for call in (
            lambda: static(v=nameless),
            lambda: Invocation(kernel, (x,), {"v": nameless}).key,
            lambda: executor(kernel, x, v=nameless),
            lambda: jax.jit(lambda x: executor(kernel, x, v=nameless))(x),
            lambda: executor.choose_config(kernel, x, v=nameless),
            lambda: executor.explain(kernel, x, v=nameless),
        ):
            with pytest.raises(TypeError, match=r"qualified name|found again"):
                call()

    def test_an_unhashable_static_argument_is_an_error(self):
        for call in (lambda: static(v={1, 2}), lambda: kernel(x, v=bytearray(b"1"))):
            with pytest.raises(TypeError, match="hashable, got"):
                call()


def module_level(x):
    return x


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class TestKeyBuilder:
    """It gives the very key that the chain looks up."""

    def test_eager_and_traced(self):
        a, b = operands((4, 3), (3, 2))
        product = Product("tests.keys")
        wanted = default_key_builder_with_sharding(product, (a, b), {"scale": 2.0})
        for call in (
            lambda e: e(product, a, b, scale=2.0),
            lambda e: e(product, np.asarray(a), np.asarray(b), scale=2.0),
            lambda e: jax.jit(lambda a, b: e(product, a, b, scale=2.0))(a, b),
            lambda e: jax.jit(lambda a, b: e(product, a, b, scale=2.0))(np.asarray(a), b),
            lambda e: jax.vmap(jax.jit(lambda a: a))(a) + e(product, a, b, scale=2.0)[0, 0],
            lambda e: e.choose_config(product, a, b, scale=2.0),
            lambda e: e.compile(product, a, b, scale=2.0),
            lambda e: e.compile(product, jax.ShapeDtypeStruct(a.shape, a.dtype), b, scale=2.0),
        ):
            assert chosen_keys(call) == [wanted]

    def test_both_directions(self):
        a, b = operands((4, 3), (3, 2))
        pair = Pair("tests.keys.pair")
        wanted = [default_key_builder_with_sharding(pair, (a, b), {}, direction=d) for d in ("forward", "backward")]
        for transform in (lambda f: f, jax.jit):
            got = chosen_keys(lambda e, t=transform: t(jax.grad(lambda a: e(pair, a, b).sum()))(a))
            assert list(dict.fromkeys(got)) == wanted

    def test_prepared_arguments_count(self):
        class Prepared(Anything):
            def prepare(self, x, factor=1.0):
                return (x.astype(jnp.bfloat16),), {"factor": factor}

        each = Prepared("tests.prepared")
        key = default_key_builder_with_sharding(each, (x,), {"factor": 2.0})
        assert key == default_key_builder_with_sharding(each, (x, 2.0))
        assert "bfloat16" in key
        assert chosen_keys(lambda e: e(each, x, 2.0)) == [key]

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_sharded(self, kind):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            spread = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("data", None)))
            key = default_key_builder_with_sharding(kernel, (spread,), {})
            assert '"sharding":"[data=8](data)"' in key
            assert key != default_key_builder_with_sharding(kernel, (jnp.ones((16, 4)),), {})
            assert chosen_keys(lambda e: e(kernel, spread)) == [key]
            if kind == AxisType.Explicit:
                assert chosen_keys(lambda e: jax.jit(lambda x: e(kernel, x))(spread)) == [key]


class TestNoArrayIsKeptAlive:
    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.grad(lambda a: f(a).sum())])
    def test_by_a_call_or_its_record(self, transform):
        pair, executor = Pair("tests.alive"), Executor(ConfigSelectorChain(autotune=True))
        (b,) = operands((3, 2))
        (a,) = operands((4, 3), seed=1)
        try:
            record_invocation(pair, Invocation(pair, (a, b)))
            result = transform(lambda a: executor(pair, a, b))(a)
            alive = [weakref.ref(a), weakref.ref(result)]
            assert all(isinstance(leaf, jax.ShapeDtypeStruct) for inv in get_invocations() for leaf in inv.args)
            del a, result
            gc.collect()
            assert [ref() for ref in alive] == [None, None]
        finally:
            clear_invocations()
