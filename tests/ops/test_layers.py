"""The order of the layers: imports run one way, those of functions, of type checkers and by strings included."""

import ast
import dataclasses
import functools

import pytest

from tools.counts import ROOT, cycles, imports_of, modules_of, room_cycles


@functools.cache
def modules():
    """All modules by name; to parse them takes seconds, which who only collects tests need not wait."""
    return {module.name: module for module in modules_of(ROOT / "tilewright")}


def room_cycles_of(graph):
    return room_cycles(graph, [name for name, module in modules().items() if module.path.name == "__init__.py"])


# Each imports from its own folder and from those before it.
LAYERS = (
    ("tilewright.errors",),
    ("tilewright.ops.types",),
    ("tilewright.ops.utils",),
    ("tilewright.ops.kernel",),
    ("tilewright.ops.config",),
    ("tilewright.ops.lowering",),
    ("tilewright.ops.tuning",),
    ("tilewright.ops.executor", "tilewright.ops.explained", "tilewright.ops.batch", "tilewright.ops.program"),
    ("tilewright.ops",),
)


def is_in(name, package):
    return name == package or name.startswith(f"{package}.")


@functools.cache
def graph_of_all():
    return {name: imports_of(module, modules()) for name, module in modules().items()}


def layer_of(name):
    """The number of a module's layer; ``None`` if it is not part of the framework."""
    at = (i for i, layer in enumerate(LAYERS) if any(name == part or is_in(name, part) for part in layer))
    return next(at, None) if name == "tilewright.errors" or is_in(name, "tilewright.ops") else None


def wrong_imports(graph):
    """The imports of the framework from later layers, and from what it must not know."""
    for name, imported in sorted(graph.items()):
        mine = layer_of(name)
        for other in sorted(imported) if mine is not None else ():
            theirs = layer_of(other)
            if theirs is None or theirs > mine:
                yield f"{name} imports {other}"


def planted(name, code):
    """The import graph, as if a module held some more code."""
    module = modules()[name]
    changed = dataclasses.replace(module, tree=ast.parse(f"{module.text}\n{code}\n"))
    return graph_of_all() | {name: imports_of(changed, modules())}


def test_there_is_no_cycle_of_modules_and_none_of_rooms():
    assert cycles(graph_of_all()) == []
    assert room_cycles_of(graph_of_all()) == []


def test_every_module_of_the_framework_imports_earlier_layers_alone():
    graph = graph_of_all()
    assert sum(layer_of(name) is not None for name in graph) > 50
    assert list(wrong_imports(graph)) == []


@pytest.mark.parametrize(
    ("importing", "imported"),
    [
        ("tilewright.ops.kernel.kernel", "tilewright.ops.executor"),
        ("tilewright.ops.config.selection", "tilewright.ops.tuning.tuning"),
        ("tilewright.ops.lowering.labels", "tilewright.ops.executor"),
        ("tilewright.ops.utils.device", "tilewright.ops"),
        ("tilewright.ops.tuning.workload", "tilewright.kernels.op.portfolio"),
        ("tilewright.ops.executor", "tilewright.modules.base"),
        ("tilewright.errors", "tilewright.ops.types"),
    ],
)
@pytest.mark.parametrize(
    "code",
    [
        "def late():\n    import {}", "if TYPE_CHECKING:\n    from {} import something",
        "def late():\n    return importlib.import_module('{}')", "LATE = ('{}:Something',)",
    ],
)  # fmt: skip
def test_a_wrong_import_is_found(importing, imported, code):
    graph = planted(importing, code.format(imported))
    assert list(wrong_imports(graph)) == [f"{importing} imports {imported}"]


def test_a_cycle_within_a_layer_is_found():
    graph = planted("tilewright.ops.utils.processes", "import tilewright.ops.utils.fingerprint")
    assert cycles(graph) == [["tilewright.ops.utils.fingerprint", "tilewright.ops.utils.processes"]]


def test_a_cycle_of_two_ops_is_found():
    graph = planted("tilewright.kernels.norms.xla", "import tilewright.kernels.linear_cross_entropy.inputs")
    graph |= {"tilewright.kernels.linear_cross_entropy.options": {"tilewright.kernels.norms.inputs"}}
    assert cycles(graph) == []
    assert room_cycles_of(graph) == [["tilewright.kernels.linear_cross_entropy", "tilewright.kernels.norms"]]


def test_a_backend_that_imports_its_op_is_found():
    graph = planted("tilewright.kernels.norms.triton.backend", "from tilewright.kernels.norms.op import Norm")
    assert room_cycles_of(graph) == [["tilewright.kernels.norms.op", "tilewright.kernels.norms.triton"]]
