"""The typed and the tagged JSON forms."""

import dataclasses
import enum
import functools
import json
import math
import os
import subprocess
import sys
import types
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.serialize import (
    canonical_json,
    from_json,
    qualified_name,
    resolve,
    stable_json,
    tagged,
    to_json,
    untagged,
)


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.StrEnum):
    LOW = "low"


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    """The same fields as Tile."""

    rows: int
    columns: int = 8


type Params = Tile | Twin | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    params: Params = None
    level: Level = Level.LOW
    colour: Colour | None = None
    mode: Literal["fast", "exact"] = "fast"
    window: int | tuple[int, int] | None = None
    scale: float = 1.0
    number: int | float = 1
    grid: tuple[Tile, ...] = ()
    pair: tuple[int, str] = (1, "a")
    anything: Any = None
    names: dict[str, Tile] = dataclasses.field(default_factory=dict)
    dtype: np.dtype | None = None
    limited: Annotated[int, "positive"] = 1

    def __post_init__(self):
        if self.limited <= 0:
            raise ValueError(f"{self.limited=} must be positive")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["segments"], meta_fields=["window"])
@dataclasses.dataclass(frozen=True)
class MaskLike:
    segments: jax.Array
    window: int | None = None


@dataclasses.dataclass
class Mutable:
    items: list[int]


def function(x):
    return x


class Holder:
    @classmethod
    def make(cls):
        return cls()

    def method(self):
        return None

    @dataclasses.dataclass(frozen=True)
    class Inner:
        value: int


CONFIGS = [
    FwdParams(),
    BwdParams(num_warps=4),
    Tile(3),
    Config(),
    Config(params=Tile(1), level=Level.LOW, colour=Colour.RED, mode="exact", window=(3, 4)),
    Config(params=Twin(1), window=5, scale=math.inf, number=2.0),
    Config(number=2, grid=(Tile(1), Tile(2, 3)), pair=(2, "b"), names={"a": Tile(9), "$b": Tile(8)}),
    Config(anything=((1, (2.5, None)), [Tile(1), Colour.PAIR], {"k": Point(1)}, {1: b"x"}), colour=Colour.PAIR),
    Config(dtype=np.dtype(jnp.bfloat16), anything=function),
    Holder.Inner(3),
]

PLAIN = [
    None, True, 0, -(2**70), 1.5, 1e300, math.inf, "", "käse\ud800", (), (1, (2, "x")), [1, [2]], {"a": (1,)},
    {1: 2, (3, 4): "x"}, {"$tuple": [1]}, {"$": {}}, Colour.RED, Level.LOW, 1 + 2j, b"\x00\xff",
    complex(math.inf, -0.0),
    {1, 2}, frozenset({"a", "b"}), Point(1, 2.5), Mutable([1]), function, Holder, int, len, math.sin, np.sum,
    jnp.exp, jax.nn.relu, jax.nn.gelu, jnp.add, np.add, Holder.make, jax.lax.Precision.HIGHEST, np.floating,
    jax.lax.DotAlgorithmPreset.F32_F32_F32, np.dtype(jnp.bfloat16), np.dtype("float8_e5m2"), np.dtype(jnp.int4),
    jax.random.key(0).dtype, np.float32(0.1), ml_dtypes.bfloat16(1.5), np.complex64(1 + 2j),
]  # fmt: skip


def name_of(value):
    """The same in every process: sets print in any order, functions with their address."""
    return f"{type(value).__name__}-{getattr(value, '__name__', '')}"


@pytest.mark.parametrize("config", CONFIGS + PLAIN, ids=name_of)
class TestRoundTrip:
    def test_typed(self, config):
        again = from_json(to_json(config), type(config)) if not callable(config) else config
        assert again == config
        assert type(again) is type(config)

    def test_tagged(self, config):
        data = json.loads(canonical_json(tagged(config)))
        again = untagged(data)
        assert again == config
        assert type(again) is type(config)
        assert canonical_json(tagged(again)) == canonical_json(data)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.sampled_from([Colour.RED, Level.LOW, np.dtype("int8"), function]) | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text("$ab"), inner)
    | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
    | st.builds(Config, anything=inner, window=st.none() | st.integers() | st.tuples(st.integers(), st.integers())),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(JSON_LIKE)
def test_any_nested_value_round_trips(value):
    data = json.loads(canonical_json(tagged(value)))
    assert untagged(data) == value
    assert stable_json(untagged(data)) == stable_json(value)
    assert from_json(to_json(Config(anything=value)), Config).anything == value


def test_stable_json_depends_on_the_value_alone():
    assert stable_json({"b": 1, "a": (1, 2)}) == '{"a":{"$tuple":[1,2]},"b":1}'
    assert stable_json({2: "x", 1: "y"}) == stable_json({1: "y", 2: "x"})
    assert stable_json({1, 5, 3}) == stable_json({5, 3, 1})
    assert len({stable_json(value) for value in (1, 1.0, True, "1", [(1,)], [[1]], None)}) == 7
    assert stable_json(CONFIGS[4]) == stable_json(dataclasses.replace(CONFIGS[4]))
    assert stable_json(Tile(3)) == '{"columns":8,"rows":3}'


def test_stable_json_is_the_same_in_another_process(tmp_path):
    code = "from tilewright.ops.utils.serialize import stable_json; print(stable_json(frozenset('abcdefgh')))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert other.stdout.strip() == stable_json(frozenset("abcdefgh"))


class TestTypedErrors:
    @pytest.mark.parametrize(
        ("text", "kind", "message"),
        [
            ('{"rows": 1, "depth": 2}', Tile, r"Tile has no field \['depth'\]"),
            ('{"grid": [{"rows": 1}, {"rows": 2, "x": 0}]}', Config, r"Config\.grid\[1\] has no field \['x'\]"),
            ('{"names": {"a": {"rows": 1, "x": 0}}}', Config, r"Config\.names\['a'\] has no field \['x'\]"),
            ('{"anything": {"$dataclass": "HERE:Tile", "fields": {"x": 0}}}', Config, "unexpected keyword"),
            ('{"params": {"$dataclass": "HERE:Twin", "fields": {"x": 0}}}', Config, r"params has no field"),
            ('{"params": {"$dataclass": "HERE:Config", "fields": {}}}', Config, r"Config\.params: expected"),
            ('{"params": {"rows": 1}}', Config, r"Config\.params="),
            ('{"columns": 1}', Tile, "Tile.*missing.*rows"),
            ('{"rows": "1"}', Tile, r"Tile\.rows='1'.*Expected `int`"),
            ('{"rows": true}', Tile, r"Tile\.rows=True"),
            ('{"mode": "slow"}', Config, r"Config\.mode='slow'"),
            ('{"window": [1]}', Config, r"Config\.window: expected 2 items"),
            ('{"window": [1, "2"]}', Config, r"Config\.window\[1\]='2'"),
            ('{"pair": {"$tuple": [1]}, "dtype": {"$tuple": [1]}}', Config, r"Config\.dtype: expected"),
            ('{"dtype": "int8"}', Config, r"Config\.dtype='int8'"),
            ('{"limited": 0}', Config, r"self\.limited=0"),
            ('{"scale": NaN}', Config, "NaN is not JSON"),
            ("[1]", Tile, r"Tile=\[1\]"),
            ("{", Tile, "Expecting"),
            ("", FwdParams, "Expecting"),
            ('{"q_blocksize": 0}', FwdParams, r"q_blocksize=0"),
        ],
    )
    def test_each_names_the_field(self, text, kind, message):
        with pytest.raises(ValueError, match=message):
            from_json(text.replace("HERE", __name__), kind)

    @pytest.mark.parametrize("value", [object(), lambda: 0, np.dtype(">f4"), np.dtype([("a", "i4")])])
    def test_what_has_no_form_is_refused(self, value):
        for write in (to_json, stable_json, tagged):
            with pytest.raises(TypeError):
                write(Config(anything=value))


class TestCallables:
    @pytest.mark.parametrize(
        "value",
        [lambda x: x, functools.partial(function, 1), Holder().method, Holder().method.__func__.__get__(Holder())],
    )
    def test_one_that_cannot_be_found_again_is_refused_by_name(self, value):
        with pytest.raises(TypeError, match="no qualified name") as error:
            tagged({"activation": (1, value)})
        assert repr(value) in str(error.value)

    def test_nested_functions_and_classes(self):
        def inner():
            return None

        class Local:
            pass

        with pytest.raises(TypeError, match=r"<locals>.*no qualified name"):
            tagged(inner)
        with pytest.raises(TypeError, match="cannot be found again"):
            tagged(Local)
        assert qualified_name(Local).endswith("<locals>.Local")

    def test_a_function_behind_a_decorated_name_is_refused(self):
        stranger = types.FunctionType((lambda: 0).__code__, globals(), "function")
        stranger.__qualname__ = "function"
        with pytest.raises(TypeError, match="no qualified name"):
            tagged(stranger)

    def test_resolve(self):
        assert resolve(qualified_name(Holder.Inner)) is Holder.Inner
        assert resolve("json.decoder:JSONDecoder.decode") is json.JSONDecoder.decode
        for wrong in ("json", "json:", ":x", "no_such_module:x", "json:nothing", f"{__name__}:f.<locals>.g", ""):
            with pytest.raises(ValueError, match=r"qualified name|cannot find"):
                resolve(wrong)


class TestArrays:
    def check(self, value, shape, dtype, weak_type=False):
        data = tagged(value)
        assert data == {"$array": {"shape": list(shape), "dtype": dtype, "weak_type": weak_type}}
        again = untagged(json.loads(canonical_json(data)))
        assert isinstance(again, jax.ShapeDtypeStruct)
        assert (again.shape, again.dtype.name, again.weak_type) == (shape, dtype, weak_type)
        assert tagged(again) == data

    def test_every_kind_of_array(self):
        self.check(jnp.ones((2, 3), jnp.bfloat16), (2, 3), "bfloat16")
        self.check(np.ones((2, 0), np.float64), (2, 0), "float64")
        self.check(jax.ShapeDtypeStruct((4,), jnp.float8_e4m3fn), (4,), "float8_e4m3fn")
        self.check(jnp.asarray(1.0), (), "float32", weak_type=True)
        self.check(jax.ShapeDtypeStruct((), jnp.int4, weak_type=True), (), "int4", weak_type=True)
        for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
            key = jax.random.key(0, impl=implementation)
            self.check(key, (), key.dtype.name)
        assert untagged(tagged(np.zeros((3,), jax.dtypes.float0))).dtype == jax.dtypes.float0

    def test_tracers_are_described_not_read(self):
        seen = []

        def f(x, y):
            seen.append(tagged((x, MaskLike(y, 3))))
            return x

        jax.jit(jax.vmap(f, in_axes=(0, None)))(jnp.ones((5, 2)), jnp.zeros((7,), jnp.int32))
        jax.grad(lambda x: f(x, x).sum())(jnp.ones((2,)))
        mask = {"$dataclass": f"{__name__}:MaskLike", "fields": {"segments": None, "window": 3}}
        for data, segments in zip(seen, [((7,), "int32"), ((2,), "float32")], strict=True):
            array = {"$array": {"shape": list(segments[0]), "dtype": segments[1], "weak_type": False}}
            expected = {**mask, "fields": {"segments": array, "window": 3}}
            assert data["$tuple"][0] == {"$array": {"shape": [2], "dtype": "float32", "weak_type": False}}
            assert data["$tuple"][1] == expected
        assert isinstance(untagged(seen[0])[1].segments, jax.ShapeDtypeStruct)

    def test_symbolic_shapes_are_written_but_not_rebuilt(self):
        (size,) = jax.export.symbolic_shape("batch")
        data = tagged(jax.ShapeDtypeStruct((size, 2), jnp.float32))
        assert data["$array"]["shape"] == ["batch", 2]
        with pytest.raises(ValueError, match="expressions"):
            untagged(data)
        assert tagged((size * 2, 3)) == {"$tuple": [{"$dimension": "2*batch"}, 3]}
        with pytest.raises(ValueError, match="expression"):
            untagged(tagged(size))


class TestUntaggedErrors:
    @pytest.mark.parametrize(
        "data",
        [
            {"$nothing": 1}, {"$tuple": 3}, {"$tuple": [], "extra": 1}, {"$enum": f"{__name__}:Colour", "name": "BLUE"},
            {"$enum": f"{__name__}:Tile", "name": "rows"}, {"$enum": f"{__name__}:Colour"}, {"$dataclass": "x"},
            {"$dataclass": "os:system", "fields": {}},
            {"$dataclass": f"{__name__}:Tile", "fields": {"rows": 1, "z": 2}},
            {"$dataclass": f"{__name__}:Tile", "fields": {}}, {"$dataclass": f"{__name__}:Tile", "fields": 7},
            {"$dataclass": f"{__name__}:Gone", "fields": {}}, {"$dataclass": 5, "fields": {}},
            {"$namedtuple": "builtins:tuple", "fields": {}}, {"$callable": "math:pi"}, {"$callable": "no.such:x"},
            {"$dtype": "float77"}, {"$dtype": "key<none>"}, {"$dtype": 5}, {"$float": "x"}, {"$bytes": "zz"},
            {"$array": {"shape": [1], "dtype": "float32"}}, {"$array": {"shape": 3, "dtype": "x", "weak_type": False}},
            {"$scalar": {"dtype": "int8", "value": 1000}}, {"$complex": [1, 2, 3]}, {"$dict": [[1]]}, {"$set": [[1]]},
            object(),
        ],
    )  # fmt: skip
    def test_each_is_a_value_error(self, data):
        with pytest.raises(ValueError, match=r"."):
            untagged(data)

    def test_a_resolver_decides_what_can_be_named(self):
        def none(name):
            raise ValueError(f"{name} may not be named")

        with pytest.raises(ValueError, match="Tile may not be named"):
            untagged(tagged(Tile(1)), resolve=none)

    def test_flags_without_a_name_are_refused(self):
        assert untagged(tagged(Flags.A)) is Flags.A
        with pytest.raises(TypeError):
            tagged(Flags.A | Flags.B)

    def test_found_collects_the_types(self):
        found = {}
        tagged([Tile(1), Config(params=Twin(1)), Colour.RED, Point(1)], found=found)
        assert {Tile, Config, Twin, Colour, Point} <= set(found.values())
