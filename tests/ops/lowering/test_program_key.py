"""What a lowered kernel on disk is known by: everything that it depends on, and nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.ops.kernel.samples import Config, Pair
from tilewright.kernels.masks import CausalMask
from tilewright.ops.kernel.arrays import StaticLeaf, split
from tilewright.ops.lowering import program_key
from tilewright.ops.lowering.lowering import KnownProgram
from tilewright.ops.lowering.program_key import read, written
from tilewright.ops.lowering.stages import Program, Stage, traced
from tilewright.ops.lowering.surroundings import is_dumping
from tilewright.ops.types import Device, MappedAxis
from tilewright.ops.utils.serialize import canonical_json

DEVICE = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 132, "gpu:NVIDIA H100 80GB HBM3:9.0")


class Kept(Pair):
    def lowering_packages(self, cfg):
        return ("tilewright",)


@dataclasses.dataclass(frozen=True)
class Outside:
    """A static argument of a type whose code is not part of the kernel's sources."""

    number: int = 0


def module_level(x: Any) -> Any:
    return x


def program(kernel: Any = None, *, stage: str = "run", arrays: Any = None, cfg: Any = None, **changes: Any) -> Program:
    a = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    kwargs = {"scale": 1.0, **changes.pop("kwargs", {})}
    operands, structure = split(((arrays or (a, a)), kwargs))
    avals = changes.pop("avals", tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in operands))
    code = Stage(kernel or Kept("tests.key"), structure, stage, wanted=changes.pop("wanted", ()))
    made = Program(code, StaticLeaf(cfg or Config()), avals, (), DEVICE)
    return dataclasses.replace(made, **changes)


def description(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
    return KnownProgram(program(*args, **kwargs)).description


def key_of(*args: Any, **kwargs: Any) -> str:
    return canonical_json(description(*args, **kwargs))


A = jax.core.ShapedArray((4, 4), jnp.dtype(jnp.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": Kept("tests.key", version="1")},
        {"kernel": Kept("tests.other")},
        {"stage": "forward"},
        {"cfg": Config(32)},
        {"cfg": Config(platform="xla")},
        {"wanted": (True, False)},
        {"kwargs": {"scale": 1}},
        {"kwargs": {"scale": True}},
        {"kwargs": {"scale": -1.0}},
        {"kwargs": {"more": None}},
        {"avals": (A, jax.core.ShapedArray((4, 5), A.dtype))},
        {"avals": (A, jax.core.ShapedArray((4, 4), jnp.dtype(jnp.bfloat16)))},
        {"avals": (A, jax.core.ShapedArray((4, 4), A.dtype, weak_type=True))},
        {"mapped": (MappedAxis(4, (True, False)),)},
        {"mapped": (MappedAxis(4, (False, True)),)},
        {"device": dataclasses.replace(DEVICE, name="NVIDIA H200")},
        {"device": dataclasses.replace(DEVICE, capability=(8, 0))},
        {"device": dataclasses.replace(DEVICE, cores=114)},
    ],
    ids=str,
)
def test_another_program_has_another_key(changes):
    assert key_of(**changes) != key_of()


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("d",), (AxisType.Auto,))),
    ],
    ids=["x64", "precision", "threefry", "promotion", "mesh"],
)
def test_another_setting_has_another_key(setting):
    before = key_of()
    with setting():
        assert key_of() != before
    assert key_of() == before


def test_a_variable_that_kernels_read_has_another_key(monkeypatch):
    before = key_of()
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    assert key_of() != before


def test_another_toolchain_or_source_has_another_key(monkeypatch):
    before = key_of()
    monkeypatch.setattr(program_key, "toolchain_fingerprint", lambda: {"jax": "0.99"})
    toolchain = key_of()
    monkeypatch.setattr(program_key, "packages_fingerprint", lambda names: "another")
    assert len({before, toolchain, key_of()}) == 3


@pytest.mark.parametrize(
    "value",
    [module_level, Outside(), lambda x: x, object()],
    ids=["a function by name", "a type from elsewhere", "a lambda", "no JSON form"],
)
def test_what_the_key_cannot_tell_is_not_kept(value):
    assert description(kwargs={"scale": value}) is None


def test_an_array_in_a_static_value_is_not_kept():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Table:
        values: Any

    assert description(kwargs={"scale": Table(np.ones(3))}) is None


def test_masks_are_told():
    """Static parts of a pytree whose type belongs to the kernel's sources."""
    keys = {key_of(kwargs={"mask": CausalMask(offset)}) for offset in (0, 1)}
    assert len(keys) == 2


def test_sharded_types_symbolic_sizes_and_dumps_are_not_kept(monkeypatch):
    mesh = jax.sharding.AbstractMesh((2,), ("d",), (AxisType.Explicit,))
    split_type = jax.core.ShapedArray((4, 4), A.dtype, sharding=NamedSharding(mesh, PartitionSpec("d", None)))
    assert description(avals=(split_type, A)) is None
    (size,) = jax.export.symbolic_shape("n")
    assert description(avals=(jax.core.ShapedArray((size, 4), A.dtype), A)) is None
    assert not is_dumping()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    assert description() is None


def test_a_reshaped_result_comes_back():
    class Reshapes(Kept):
        def forward_with_residuals(self, a, b, *, cfg, scale=1.0):
            out = a @ b
            return out, (out.reshape(2, 8), out[None])

    results = traced(program(Reshapes("tests.key.reshapes"), stage="forward"))[1]
    assert [index for index, _ in results.sources] == [0, 0, 2]
    assert results.sources[1][1] is not None
    assert read(written(results)) == results


def test_results_of_unknown_types_do_not_come_back():
    @jax.tree_util.register_pytree_node_class
    class Node:
        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            made = cls()
            (made.x,) = children
            return made

    class Returns(Kept):
        def run(self, a, b, *, cfg, scale=1.0):
            return Node.tree_unflatten(None, (a @ b,))

    assert written(traced(program(Returns("tests.key.node")))[1]) is None


def test_damaged_results_are_none():
    about = written(traced(program(stage="forward"))[1])
    for name, value in (("tree", {"$dataclass": "os:system", "fields": {}}), ("sources", [[0, ["exec", []]]] * 3)):
        assert read({**about, name: value}) is None
    assert read({}) is read({"avals": 1, "tree": [], "sources": 2}) is None
