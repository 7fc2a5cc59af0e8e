"""The stages of a call as code, traced once per process whichever programs contain them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as jax_core
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from tilewright.ops.kernel.arrays import StaticLeaf, Structure
from tilewright.ops.kernel.kernel import Kernel
from tilewright.ops.kernel.optional import backward_hook, platform_hook
from tilewright.ops.lowering.gradients import select_gradients, wanted_names
from tilewright.ops.lowering.surroundings import choice_settings, without_label, without_source_locations
from tilewright.ops.types import Device, MappedAxis
from tilewright.ops.utils.memory import LruCache
from tilewright.ops.utils.running import running


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a call of a kernel, without its arrays and without its selector.

    Attributes:
      structure: structure of ``(args, kwargs)`` after ``prepare``.
      name: "run", "forward" or "backward"; of a device's part of a split call "results" or "gradients".
      extra: "backward" and "gradients" only: the structure of ``(residuals, cotangents)``, whose arrays follow those
        of the call.
      wanted: backward only: for each array of the call, True if its gradient is needed.
    """

    kernel: Kernel[Any, Any]
    structure: Structure
    name: str = "run"
    extra: Structure | None = None
    wanted: tuple[bool, ...] = ()

    @property
    def num_arrays(self) -> int:
        return sum(leaf is None for leaf in self.structure.leaves)

    def function(self, cfg: object, mapped: Sequence[MappedAxis], device: Device) -> Callable[..., Any]:
        """The stage with a config as a function of the flat operands; its results are a pytree."""
        return map_axes(functools.partial(_STAGES[self.name], self, cfg, device), mapped)


def map_axes(function: Callable[..., Any], mapped: Sequence[MappedAxis]) -> Callable[..., Any]:
    """Maps a function of one element to a function of all elements; all its results are mapped along axis 0."""
    for axis in reversed(mapped):
        function = jax.vmap(function, in_axes=tuple(0 if m else None for m in axis.mapped), axis_size=axis.size)
    return function


def _run_stage(stage: Stage, cfg: object, device: Device, *arrays: jax.Array) -> Any:
    args, kwargs = stage.structure.join(arrays)
    return platform_hook(stage.kernel, cfg, device)(*args, cfg=cfg, **kwargs)


def _forward_stage(stage: Stage, cfg: object, device: Device, *arrays: jax.Array) -> Any:
    args, kwargs = stage.structure.join(arrays)
    forward = stage.kernel.forward_with_residuals
    assert forward is not None  # otherwise the call has no such stage
    return forward(*args, cfg=cfg, **kwargs)


def _of_backward(stage: Stage, operands: Sequence[jax.Array]) -> tuple[Any, Any]:
    """``(args, kwargs)`` and ``(residuals, cotangents)``."""
    arrays, rest = operands[: stage.num_arrays], operands[stage.num_arrays :]
    return stage.structure.join(arrays), ((), ()) if stage.extra is None else stage.extra.join(rest)


def _backward_stage(stage: Stage, cfg: object, device: Device, *operands: jax.Array) -> list[Any]:
    (args, kwargs), (residuals, cotangents) = _of_backward(stage, operands)
    backward = backward_hook(stage.kernel)
    needs = {"wanted": wanted_names(stage.kernel, args, kwargs, stage.wanted)} if _takes_wanted(backward) else {}
    gradients = backward(residuals, cotangents, *args, cfg=cfg, **needs, **kwargs)
    return select_gradients(stage.kernel, args, kwargs, gradients, stage.wanted)


def _takes_wanted(backward: Callable[..., Any]) -> bool:
    parameter = inspect.signature(backward).parameters.get("wanted")
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _results_stage(stage: Stage, cfg: object, device: Device, *arrays: jax.Array) -> Any:
    args, kwargs = stage.structure.join(arrays)
    results = stage.kernel.part_results
    assert results is not None  # otherwise the call has no such stage
    return results(*args, cfg=cfg, **kwargs)


def _gradients_stage(stage: Stage, cfg: object, device: Device, *operands: jax.Array) -> Any:
    (args, kwargs), (residuals, cotangents) = _of_backward(stage, operands)
    gradients = stage.kernel.part_gradients
    assert gradients is not None  # otherwise the call has no such stage
    return gradients(residuals, cotangents, *args, cfg=cfg, **kwargs)


_STAGES = {
    "run": _run_stage,
    "forward": _forward_stage,
    "backward": _backward_stage,
    "results": _results_stage,
    "gradients": _gradients_stage,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A stage with everything that determines its results for given operands.

    Attributes:
      avals: abstract values of all operands, with the mapped axes in front.
    """

    stage: Stage
    cfg: StaticLeaf
    avals: tuple[Any, ...]
    mapped: tuple[MappedAxis, ...]
    device: Device

    @property
    def function(self) -> Callable[..., Any]:
        return self.stage.function(self.cfg.value, self.mapped, self.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """Properties of a program's results that are known without running it.

    Attributes:
      avals: abstract values of the flat results.
      tree: structure of the stage's return value.
      effects: the program's effects; a frozen set.
      sources: for each result the index of the first equal one, or of the one that it is a reshape of, and the reshape.
      chooses: True if the program calls other kernels, whose configs are chosen when it is lowered.
      has_kernels: True if it contains a kernel or a foreign call, which XLA cannot look into, and therefore not split.
    """

    avals: tuple[Any, ...]
    tree: jax.tree_util.PyTreeDef
    effects: Any
    sources: tuple[tuple[int, "Reshaping | None"], ...]
    chooses: bool = False
    has_kernels: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reshaping:
    """The equation that makes one result from another."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]

    def __call__(self, array: jax.Array) -> jax.Array:
        shaped: jax.Array = self.primitive.bind(array, **dict(self.params))
        return shaped


_TRACES: LruCache[tuple[Any, Results]] = LruCache("tilewright's traces of kernels", 64)


def traced(program: Program) -> tuple[Any, Results]:
    """A program as a closed jaxpr, and the properties of its results."""
    key = (program, choice_settings())
    known = _TRACES.get(key)
    return _TRACES.put(key, _trace(program)) if known is None else known


def _trace(program: Program) -> tuple[Any, Results]:
    tree: list[Any] = []

    def flat(*operands: jax.Array) -> list[Any]:
        results = program.function(*operands)
        tree.append(jax.tree.structure(results))
        return jax.tree.leaves(results)

    direction = "backward" if program.stage.name in ("backward", "gradients") else "forward"
    with without_label(), without_source_locations(), running(program.stage.kernel.name, direction):
        jaxpr = _without_references(jax.make_jaxpr(flat)(*program.avals))
    chooses = _contains(jaxpr.jaxpr, lambda primitive: primitive in CHOOSING)
    has_kernels = _contains(jaxpr.jaxpr, lambda primitive: primitive.name in KERNELS)
    sources, effects = tuple(_sources(jaxpr.jaxpr)), frozenset(jaxpr.effects)
    return jaxpr, Results(tuple(jaxpr.out_avals), tree[0], effects, sources, chooses, has_kernels)


CHOOSING: set[Any] = set()
"""The primitives whose lowering chooses a config."""


def _contains(jaxpr: Jaxpr, is_wanted: Callable[[Any], bool]) -> bool:
    """True if an equation of a jaxpr, or of one in it, has a primitive that is wanted."""
    inner = (part for eqn in jaxpr.eqns for part in jax_core.jaxprs_in_params(eqn.params))
    return any(is_wanted(eqn.primitive) for eqn in jaxpr.eqns) or any(_contains(part, is_wanted) for part in inner)


KERNELS = frozenset({
    "pallas_call", "core_map", "mpmd_map", "ffi_call", "triton_kernel_call", "tilewright_triton",
})  # fmt: skip
"""The names of the primitives of kernels."""


def _without_references(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr with the references that it creates itself discharged to values.

    JAX discharges those of a whole program, but does not look into other primitives (``jax.new_ref`` in a kernel).
    """
    if jax_core.internal_mutable_array_effect not in jaxpr.effects:
        return jaxpr
    from jax._src.state.discharge import discharge_state  # there is no public name for it

    return discharge_state(jaxpr)


def _sources(jaxpr: Jaxpr) -> list[tuple[int, Reshaping | None]]:
    """The index of the result that each result of a jaxpr comes from, and the reshape that makes it, if any."""
    first: dict[int, int] = {}
    for i, variable in enumerate(jaxpr.outvars):
        first.setdefault(id(variable), i)
    reshapes = {id(eqn.outvars[0]): eqn for eqn in jaxpr.eqns if eqn.primitive in RESHAPES}

    def origin(variable: object) -> Any:
        eqn = reshapes.get(id(variable))
        return eqn.invars[0] if eqn is not None and len(eqn.invars) == 1 and id(eqn.invars[0]) in first else None

    def source(variable: object) -> tuple[int, Reshaping | None]:
        made_of = origin(variable)
        if made_of is None or origin(made_of) is not None:
            return first[id(variable)], None
        eqn = reshapes[id(variable)]
        return first[id(made_of)], Reshaping(eqn.primitive, tuple(sorted(eqn.params.items())))

    return [source(variable) for variable in jaxpr.outvars]


RESHAPES = (jax.lax.reshape_p, jax.lax.squeeze_p)
