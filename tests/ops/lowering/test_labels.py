"""Labels in what today's JAX prints, and invocations rebuilt from only that text."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ops.kernel.samples import A, B, Config, Pair, Product
from tilewright.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
)
from tilewright.ops.lowering.labels import parse_label
from tilewright.ops.utils.running import device_kernel_name

NAMES = [
    "my_attention",
    "a/b/c",
    "with space",
    'quo"ted',
    "back\\slash",
    "ünïcode 注意",
    "dots.and.end",
    ".end",
    "%41",
    "tilewright.label.x.end",
    "new\nline",
    "<angle>{brace}",
    "x" * 300,
]


def texts(function, *args):
    """Every form in which the program of a function is printed."""
    lowered = jax.jit(function).lower(*args)
    return {
        "stablehlo": lowered.as_text(),
        "stablehlo with locations": lowered.as_text(debug_info=True),
        "hlo": lowered.as_text("hlo"),
        "compiled": lowered.compile().as_text(),
    }


class TestUserLabels:
    @pytest.mark.parametrize("name", NAMES)
    def test_any_name_comes_back(self, name):
        @label(name)
        def f(x):
            return jnp.sin(x) * 2

        for where, text in texts(lambda x: f(x) + 1, A).items():
            assert extract_labels_from_hlo_text(text) == [name], where
        lowered = jax.jit(f).lower(A)
        assert find_labels_in_lowered(lowered) == find_labels_in_lowered(lowered.compile()) == [name]

    @pytest.mark.parametrize(
        "transform",
        [
            jax.jit,
            lambda f: jax.grad(lambda x: f(x).sum()),
            lambda f: jax.vmap(jax.vmap(f)),
            lambda f: jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum()))),
            lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
            lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        ],
    )
    def test_survive_transformations(self, transform):
        @label("inner/one")
        def f(x):
            return jnp.sin(x) @ jnp.cos(x).T @ x if x.ndim == 2 else jnp.sin(x) * x

        lowered = jax.jit(transform(f)).lower(A)
        assert find_labels_in_lowered(lowered) == find_labels_in_lowered(lowered.compile()) == ["inner/one"]

    def test_nest_and_repeat(self):
        @label("outer")
        def outer(x):
            return inner(jnp.cos(x)) + jnp.tan(x)

        @label("inner")
        def inner(x):
            return jnp.sin(x)

        labels = find_labels_in_lowered(jax.jit(lambda x: outer(x) + outer(2 * x)).lower(A))
        assert sorted(labels) == ["inner", "outer"]

    def test_stand_beside_those_of_kernels(self):
        kernel = Product("tests.labels")
        labelled = label("mine")(lambda a: kernel(a, B))
        found = find_labels_in_lowered(jax.jit(labelled).lower(A))
        assert [name for name in found if not name.startswith("tilewright.v1.")] == ["mine"]
        assert len([name for name in found if name.startswith("tilewright.v1.")]) == 1
        assert list(labels_to_configs([*found, "mine"])) == [n for n in found if n.startswith("tilewright.v1.")]


class TestCallLabels:
    @pytest.mark.parametrize(
        "name", ["plain", "with.dots", "a/b", "sp ace", "forward", "x.backward.y", "ünï", "per%cent"]
    )
    def test_are_in_every_text(self, name):
        kernel = Pair(f"tests.labels.{name}")
        function = jax.grad(lambda a: jnp.sin(kernel(a, B, scale=2.0)).sum())
        found = {where: extract_labels_from_hlo_text(text) for where, text in texts(function, A).items()}
        assert {where: len(labels) for where, labels in found.items()} == dict.fromkeys(found, 2)
        assert len({tuple(sorted(labels)) for labels in found.values()}) == 1
        said = [parse_label(text) for text in found["compiled"]]
        assert {each.op for each in said} == {kernel.name}
        assert {each.direction for each in said} == {"forward", "backward"}
        forward = next(each for each in said if each.direction == "forward")
        assert forward.invocation().key == Invocation(kernel, (A, B), {"scale": 2.0}).key
        assert forward.invocation().kernel is kernel
        assert (forward.step, forward.config) == ("heuristic", Config(64))

    def test_carry_everything_of_the_call(self):
        class Many(Kernel):
            def run(self, tree, x, *, cfg, **kwargs):
                return x + tree["w"].astype(x.dtype).sum()

            def heuristic_cfg(self, inv):
                return Config(3)

        kernel, chosen = Many("tests.labels.many"), []
        executor = Executor(ConfigSelectorChain(on_event=lambda selection: chosen.append(selection.key)))
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
        static = {
            "n": 1,
            "f": 1.0,
            "t": True,
            "none": None,
            "s": 'te"xt/\n',
            "e": Config(5),
            "c": jnp.sin,
            "d": (1, [2]),
        }
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), NamedSharding(mesh, P("a", "b")))
            function = jax.vmap(lambda w: executor(kernel, {"w": w}, x, key=jnp.float32(3), **static))
            (text,) = find_labels_in_lowered(jax.jit(function).lower(jnp.ones((3, 2), jnp.int8)))
            again = parse_label(text).invocation()
        assert {again.key} == set(chosen)
        assert again.mapped[0].size == 3
        assert again.abstract_args[1].dtype == jnp.bfloat16

    def test_explicit_configs_are_told(self):
        kernel = Product("tests.labels.explicit")
        (text,) = find_labels_in_lowered(jax.jit(lambda a: kernel(a, B, cfg=Config(7))).lower(A))
        assert (parse_label(text).step, parse_label(text).config) == ("explicit", Config(7))
        assert labels_to_configs([text]) == {text: Config(7)}

    def test_a_config_without_a_json_form_is_chosen_again(self):
        class Odd(Product):
            def heuristic_cfg(self, inv):
                return MARKER

        kernel = Odd("tests.labels.odd")
        (text,) = find_labels_in_lowered(jax.jit(lambda a: kernel(a, B)).lower(A))
        assert parse_label(text).config is None
        assert labels_to_configs([text]) == {text: MARKER}

    def test_damaged_labels_are_errors(self):
        kernel = Product("tests.labels.damaged")
        (text,) = find_labels_in_lowered(jax.jit(lambda a: kernel(a, B)).lower(A))
        *front, payload, _ = text.split(".")
        for wrong in (payload[:-8], payload[8:], "AAAA", payload[::-1], payload[:20] + "xx" + payload[22:], "x" * 5):
            damaged = ".".join([*front, wrong, ""])
            with pytest.raises(ValueError, match="damaged"):
                parse_label(damaged)
            with pytest.raises(ValueError, match="damaged"):
                labels_to_configs([damaged])
        for other in ("", "mine", text[:-1], text + "x", "tilewright.v2" + text[13:]):
            with pytest.raises(ValueError, match="not the label"):
                parse_label(other)
        assert labels_to_configs(["mine", "other"]) == {}

    def test_a_label_whose_kernel_is_gone_is_an_error(self):
        def text():
            class Local(Product):
                pass

            kernel = Local("tests.labels.gone")
            return find_labels_in_lowered(jax.jit(lambda a: Executor(ConfigSelectorChain())(kernel, a, B)).lower(A))[0]

        said = parse_label(text())
        import gc

        jax.clear_caches()
        gc.collect()
        with pytest.raises(ValueError, match="Local"):
            said.invocation()

    def test_symbolic_dimensions_are_named_with_what_runs(self):
        rows, middle = jax.export.symbolic_shape("rows, 3 * half")
        struct, other = jax.ShapeDtypeStruct((rows, middle), A.dtype), jax.ShapeDtypeStruct((middle, 4), A.dtype)
        lowered = jax.jit(lambda a, b: Executor(ConfigSelectorChain())(Product(), a, b)).lower(struct, other)
        (text,) = find_labels_in_lowered(lowered)
        with pytest.raises(ValueError, match=r"symbolic dimensions 3\*half, rows of jax.export, for which it runs by"):
            parse_label(text).invocation()

    def test_wrong_input(self):
        with pytest.raises(TypeError, match="labels="):
            labels_to_configs("tilewright.v1.x.forward.AAAA.")
        with pytest.raises(ValueError, match="name="):
            label("")
        with pytest.raises(TypeError, match="text="):
            extract_labels_from_hlo_text(None)
        with pytest.raises(TypeError, match="lowered="):
            find_labels_in_lowered(None)


class TestNames:
    """The names of calls in programs are for people; a label stands once."""

    def program(self):
        first, second = Pair("tests.names.first"), Product("tests.names.second")
        return jax.grad(lambda a: jnp.sin(second(jnp.sin(first(a, B, scale=2.0)), B.T)).sum())

    def test_are_short_and_say_op_direction_and_choice(self):
        text = jax.jit(self.program()).lower(A).as_text(debug_info=True)
        names = set(re.findall(r"tilewright\.tests\w+\.(?:forward|backward)[\w.]+", text))
        said = {tuple(name.split(".")[1:4]) for name in names}
        assert {("tests_names_first", "forward", "Config"), ("tests_names_first", "backward", "Config")} <= said
        assert all(len(name) < 64 for name in names), names

    def test_what_describes_a_call_stands_once(self):
        lowered = jax.jit(self.program()).lower(A)
        labels = find_labels_in_lowered(lowered)
        for text in (lowered.as_text(debug_info=True), lowered.as_text("hlo"), lowered.compile().as_text()):
            assert len(labels) == 3
            assert [text.count(label) for label in labels] == [1, 1, 1]

    def test_a_call_is_one_line_of_a_jaxpr(self):
        lines = [line for line in str(jax.make_jaxpr(self.program())(A)).splitlines() if "call=" in line]
        assert {line.strip().split()[0] for line in lines} >= {"call=tests.names.first.forward"}
        assert all(len(line) < 120 for line in lines), lines

    def test_locations_and_tracebacks_are_the_callers(self):
        text = jax.jit(self.program()).lower(A).as_text(debug_info=True)
        assert "test_labels.py" in text
        assert "tilewright/ops" not in text
        with pytest.raises(TypeError) as caught:
            jax.jit(lambda a: Pair("tests.names.wrong")(a, jnp.ones((2, 2))))(A)
        frames = [frame.path for frame in caught.traceback]
        assert not any("tilewright/ops" in str(path) for path in frames), frames

    def test_a_profile_has_the_name_of_the_kernel_that_is_traced(self):
        said = []

        class Naming(Pair):
            def run(self, a, b, *, cfg, **kwargs):
                said.append(device_kernel_name("tile"))
                return super().run(a, b, cfg=cfg, **kwargs)

        jax.jit(lambda a: Naming("tests.names/kernel")(a, B)).lower(A)
        assert set(said) == {"tilewright_tests_names_kernel_forward_tile"}
        assert device_kernel_name("forward_wide") == "tilewright_forward_wide"


MARKER = object()

SCRIPT = """
import json, sys
import jax
from tilewright.ops import extract_labels_from_hlo_text
from tilewright.ops.lowering.labels import parse_label

said = [parse_label(text) for text in extract_labels_from_hlo_text(sys.stdin.read())]
invocations = [each.invocation() for each in said]
print(json.dumps({"keys": [inv.key for inv in invocations], "configs": [repr(each.config) for each in said]}))
assert not any(isinstance(leaf, jax.Array) for inv in invocations for leaf in jax.tree.leaves((inv.args, inv.kwargs)))
from tilewright.ops import Autotuner, ConfigSelectorChain, Tuner
result = Autotuner(Tuner(0, 1), chooser=ConfigSelectorChain()).tune(*invocations)
assert all(candidate.check == "passed" for call in result for candidate in call.candidates), result
"""


def test_another_process_rebuilds_the_calls_from_the_text_alone():
    kernel, chosen = Pair(), []
    executor = Executor(ConfigSelectorChain(on_event=lambda selection: chosen.append(selection.key)))
    function = jax.vmap(jax.grad(lambda a: jnp.sin(executor(kernel, a, B, scale=2.0)).sum()))
    text = jax.jit(function).lower(jnp.stack([A, A])).as_text(debug_info=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=text, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said["keys"]) == set(chosen)
    assert sorted(said["configs"]) == ["Config(block=32, platform='auto')", "Config(block=64, platform='auto')"]


def test_labels_do_not_depend_on_the_policy():
    kernel = Product("tests.labels.policy")
    found = [
        parse_label(find_labels_in_lowered(jax.jit(lambda a: Executor(chain)(kernel, a, B)).lower(A))[0])  # noqa: B023
        for chain in (ConfigSelectorChain(), ConfigSelectorChain(policy=AutotunePolicy(False)))
    ]
    assert found[0] == found[1]
