"""Every op for devices that are not here: what is explained is what is lowered, and nothing else."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.every_op.matrix import call_of, every_op
from tests.kernels.conftest import H100
from tilewright.kernels import OPS, kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.cuda.kernel import recording_groups
from tilewright.kernels.op.choice import DECLARED, Choice
from tilewright.modules import rms_norm
from tilewright.ops import default_executor, find_labels_in_lowered
from tilewright.ops.lowering.labels import is_call_label, parse_label
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.target import traced_as

V6E = find_device("TPU v6e").device

ROOT = Path(__file__).parents[2]
DEVICES = {"NVIDIA A100-SXM4-80GB": "cuda", "NVIDIA H200": "cuda", "TPU v5 lite": "tpu"}


def abstract(arrays: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


@pytest.mark.usefixtures("without_builds")
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("op", every_op())
def test_it_is_explained_and_lowered(op: str, name: str):
    call = call_of(op, "bfloat16")
    function, arrays = call.training()
    structs = abstract(arrays)
    with tilewright.target_device(name):
        explained = {(each.op, each.direction): each for each in tilewright.explain(function, *structs)}
        lowered = jax.jit(function).lower(*structs)
    labels = [parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)]
    assert lowered._lowering._platforms == (DEVICES[name],)  # type: ignore[attr-defined]
    assert {(label.invocation().kernel.name, label.direction): label.config for label in labels} == {
        key: each.config for key, each in explained.items()
    }
    assert (op, "forward") in explained
    assert ((op, "backward") in explained) == call.differentiable
    for each in explained.values():
        assert f'"{DEVICES[name].replace("cuda", "gpu")}:{name}' in each.choice.key
        assert each.step == "heuristic"
        backend = each.config.backend
        assert backend in {backend.name for backend in call.kernel.backends.usable}
        if DEVICES[name] == "tpu":
            assert backend not in ("hopper", "triton", "cuda")
        if "H200" not in name:
            assert backend != "hopper"


def types_of(op: Any, inputs: Any, choice: Choice, direction: Direction) -> Any:
    """Shapes and dtypes of a backend's results, or of its gradients; `DECLARED` has those that the op declares."""
    if direction == "forward":
        found = jax.eval_shape(lambda inputs: op.forward_results(inputs, choice), inputs)
    else:
        results = op.results(inputs)
        cotangents = tuple(jax.tree.leaves(jax.eval_shape(op.outputs, inputs, results)))
        backward = lambda *operands: op.backward(*operands, cfg=choice)
        found = jax.eval_shape(backward, op.residuals(results), cotangents, inputs)
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), found)


@pytest.mark.parametrize("name", every_op())
def test_backends_give_what_the_op_declares(name: str, monkeypatch: pytest.MonkeyPatch):
    """A call is traced with the declared types; here kernels are traced, too, and neither compiled nor run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)  # with several a vocabulary may be split, which few serve
    op, seen = kernel(name), set()
    cases = [dataclasses.replace(op.cases.small, dtype=dtype) for dtype in ("float32", "bfloat16")]
    if "bfloat16" in op.cases.options:
        cases.append(dataclasses.replace(op.cases.options["bfloat16"], **op.cases.brief))
    directions: tuple[Direction, ...] = ("forward", "backward")
    for case in cases:
        args, kwargs = case.arguments()
        inputs = jax.eval_shape(lambda op=op, args=args, kwargs=kwargs: op.completed(op.bind(args, kwargs)[0][0]))
        for backend, direction, device in itertools.product(op.backends.usable, directions, (H100, V6E)):
            if not backend.not_supported_reasons(inputs, device, direction):
                seen.add(backend.name)
                with traced_as(device.name), recording_groups():
                    choice = Choice(backend.name, backend.heuristic(inputs, device, direction))
                    got, want = (types_of(op, inputs, each, direction) for each in (choice, DECLARED))
                assert got == want, (backend.name, direction, device.name)
    assert seen >= {backend.name for backend in op.backends.usable} - {"cudnn", "fa4"}


@pytest.mark.parametrize("op", every_op())
def test_explaining_takes_neither_a_plugin_nor_a_compiler(op: str):
    """Triton's kernels cannot even be lowered without the plugin."""
    pytest.importorskip("triton")
    called = call_of(op, "bfloat16")
    function, arrays = called.on_arrays(platform=("triton", "xla"))
    with tilewright.target_device("NVIDIA A100-SXM4-80GB"):
        (call,) = tilewright.explain(function, *abstract(arrays))
    assert call.config.backend == ("triton" if "triton" in called.platforms else "xla")


@pytest.mark.parametrize("op", every_op())
def test_a_call_there_is_an_error(op: str):
    function, arrays = call_of(op).on_arrays()
    with tilewright.target_device("NVIDIA H200"), pytest.raises(tilewright.TargetDeviceError, match="nothing runs"):
        function(*arrays)
    function(*arrays)


@pytest.mark.usefixtures("without_builds")
def test_the_capability_page_names_the_backends_that_come_first_on_an_h100() -> None:
    page = (ROOT / "docs" / "capabilities.md").read_text()
    sentence = page.partition("On an H100 the preferred backend is ")[2].partition(".")[0]
    by_op: dict[str, str] = {}
    for word in re.findall(r"`(\w+)`", sentence):
        if word in OPS:
            by_op[word] = backend
        else:
            backend = word
    assert {"flash_attention", "grouped_matmul", "linear_cross_entropy", "matmul", "rms_norm"} <= by_op.keys()
    for op, backend in by_op.items():
        cases = kernel(op).cases
        arrays, options = cases.options.get("bfloat16", cases.small).abstract_arguments()
        with tilewright.target_device("NVIDIA H100 80GB HBM3"):
            chosen = default_executor().explain(kernel(op), *arrays, quiet=True, **options)
        assert {each.config.backend for each in chosen.choices} == {backend}, op


@pytest.mark.parametrize("count", [1, 2])
def test_arguments_on_a_mesh_of_automatic_axes_are_explained(count: int):
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count) as target:
        mesh = target.make_mesh((count, 1), ("data", "model"), (AxisType.Auto,) * 2)
        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
        (call,) = tilewright.explain(rms_norm, x)
    assert call.config.backend == "triton"
