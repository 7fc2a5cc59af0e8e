"""What docs/adding-an-op.md promises: the op of that page passes the generated suite, which knows nothing of it."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.every_op import test_matrix, test_target_device, test_x64
from tests.every_op.matrix import call_of
from tests.support.command_line import invoke
from tilewright import modules
from tilewright.cli import completion
from tilewright.kernels import OPS, kernel, registered
from tilewright.kernels.op.roofline import Cost
from tools.pages import ROOT, run_examples

MODULE = "examples_of_adding-an-op"


@contextlib.contextmanager
def registered_page(page: str, op: str, kind: str) -> Iterator[types.ModuleType]:
    """A page's examples, run, with its op registered.

    The module has the name that it has in ``tests/test_docs.py``, so that its stable ids are those of the same classes.
    """
    module = types.ModuleType(f"examples_of_{page}")
    sys.modules[module.__name__] = module
    run_examples(ROOT / "docs" / f"{page}.md", module)
    with registered(op, f"{module.__name__}:{kind}"):
        yield module
    del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def page() -> Iterator[types.ModuleType]:
    with registered_page("adding-an-op", "softcap", "Softcap") as module:
        yield module


def generated() -> Iterator[Any]:
    """Every test of the generated suite, with each combination of what else it takes than the op."""
    for module in (test_matrix, test_x64, test_target_device):
        for name, test in vars(module).items():
            if name.startswith("test_") and "op" in inspect.signature(test).parameters:
                yield from combinations(f"{module.__name__.rpartition('.')[2]}.{name}", test)


def combinations(name: str, test: Callable[..., Any]) -> Iterator[Any]:
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize" and mark.args[0] != "op"]
    values = [[(mark.args[0], getattr(v, "values", [v])[0]) for v in mark.args[1]] for mark in marks]
    for chosen in itertools.product(*values):
        yield pytest.param(functools.partial(test, **dict(chosen)), id="-".join([name, *(str(v) for _, v in chosen)]))


def run_generated(test: Any, op: str, request: pytest.FixtureRequest) -> None:
    wanted = inspect.signature(test.func).parameters.keys() - {"op", *test.keywords}
    test(op=op, **{name: request.getfixturevalue(name) for name in wanted})


@pytest.mark.parametrize("test", list(generated()))
def test_the_generated_suite_takes_the_op_of_the_page(test: Any, page: Any, request: pytest.FixtureRequest) -> None:
    run_generated(test, "softcap", request)


@pytest.mark.usefixtures("page")
class TestFound:
    """Nothing but the registry names the op."""

    def test_by_the_command_line(self) -> None:
        assert completion.targets("soft") == ["softcap"]
        text = invoke("explain", "softcap", "--shape", "8,32", "--set", "cap=5.0")
        assert "f32[8,32] cap=5" in text
        assert "softcap backward" in text
        assert "it has dtype, rows, columns, cap" in invoke_error(
            "tune", "softcap", "--shape", "8,32", "--set", "rank=3"
        )
        assert "is not rows,columns" in invoke_error("tune", "softcap", "--shape", "8")
        assert "jnp.tanh" in invoke("bench", "softcap", "--shape", "8,32", "--iters", "1")
        assert "softcap" in invoke("info")

    def test_by_the_capability_table(self) -> None:
        table = runpy.run_path(str(ROOT / "docs" / "capability_table.py"))["capability_table"]()
        assert "| `softcap` | xla |" in table

    def test_by_its_name_among_the_functions(self) -> None:
        assert modules.softcap is importlib.import_module(MODULE).softcap
        assert modules.softcap.__doc__


@pytest.mark.usefixtures("page")
class TestDefaults:
    def test_costs_are_bytes(self) -> None:
        inv = call_of("softcap", dtype="bfloat16", rows=8, columns=32).invocation()
        op = kernel("softcap")
        assert op.cost(inv) == Cost(0.0, 2 * 2 * 8 * 32)
        assert op.cost(inv.backward()) == Cost(0.0, 3 * 2 * 8 * 32)
        assert op.min_cost(inv) == Cost(0.0, 2 * 8 * 32)
        assert op.min_cost(inv.backward()) == Cost(0.0, 0.0)
        assert op.inputs_of(inv) is op.inputs_of(inv)
        assert op.inputs_of(dataclasses.replace(inv)) == op.inputs_of(inv)

    @pytest.mark.parametrize("spec", [P("data", None), P("data", "model"), P(None, ("data", "model"))], ids=str)
    def test_shared_dimensions_are_split_as_the_types_say(self, spec: P) -> None:
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
        x = jnp.linspace(-9.0, 9.0, 64).reshape(4, 16)
        loss = lambda x: jnp.sin(modules.softcap(x, cap=3.0)).sum()
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            out, gradient = (
                jax.jit(modules.softcap, static_argnames="cap")(placed, cap=3.0),
                jax.jit(jax.grad(loss))(placed),
            )
        assert out.sharding.spec == gradient.sharding.spec == spec
        np.testing.assert_allclose(out, modules.softcap(x, cap=3.0), rtol=1e-6)
        np.testing.assert_allclose(gradient, jax.grad(loss)(x), rtol=1e-6)


def invoke_error(*arguments: str) -> str:
    from typer.testing import CliRunner

    from tilewright.cli.app import app

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_no_two_ops_have_one_name() -> None:
    with (
        pytest.raises(ValueError, match="there is an op 'flash_attention' already"),
        registered("flash_attention", "x:Y"),
    ):
        pass
    with registered("other", "json:JSONDecoder"):
        assert "other" in OPS
    assert "other" not in OPS
