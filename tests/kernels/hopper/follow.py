"""What the warpgroups of a Mosaic GPU kernel do to barriers and shared memory, from its jaxpr.

Known integers are computed, other data is left unknown.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.state import indexing
from jax._src.state import types as state_types

from tests.support import interpreted_panels
from tilewright.ops.utils.target import traced_as

type Region = tuple[int, tuple[tuple[int, int], ...]]  # buffer, and start and size along each dimension


def follow_kernels(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    check: Callable[[list["Warpgroup"]], None],
    max_programs: int | None,
) -> int:
    """Hands the warpgroups of every block of every kernel to ``check``; returns the number of kernels."""
    with traced_as("NVIDIA H100 80GB HBM3"), interpreted_panels.patched():
        closed = jax.make_jaxpr(function)(*arguments)
    values = [_UNKNOWN if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in jax.tree.leaves(arguments)]
    host = Host(max_programs, check)
    host.run(closed.jaxpr, closed.consts, values)
    return host.kernels


class _Unknown:
    def __repr__(self) -> str:
        return "?"


_UNKNOWN = _Unknown()


@dataclasses.dataclass(frozen=True, slots=True)
class _Reference:
    """A buffer: device memory with its contents if known, or scratch."""

    identity: int
    space: Any
    contents: Any = _UNKNOWN


def _truncated(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _bitwise(on_bool: Callable[[Any, Any], Any], on_int: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: on_bool(left, right) if isinstance(left, bool) else on_int(left, right)


_SCALARS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "abs": abs,
    "div": _truncated,
    "rem": lambda left, right: left - right * _truncated(left, right),
    "sign": lambda value: (value > 0) - (value < 0),
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda value: not value if isinstance(value, bool) else ~value,
    "shift_left": operator.lshift,
    "shift_right_arithmetic": operator.rshift,
    "shift_right_logical": operator.rshift,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, value, high: min(max(low, value), high),
    "squeeze": lambda value: value,
    "reshape": lambda value: value,
    "broadcast_in_dim": lambda value: value,
    "copy": lambda value: value,
    "layout_cast": lambda value: value,
}

_EVENTS = frozenset(
    (
        "mpmd_map",
        "barrier_wait",
        "barrier_arrive",
        "barrier_arrive_and_wait",
        "copy_gmem_to_smem",
        "copy_smem_to_gmem",
        "wait_smem_to_gmem",
        "wgmma_ref",
        "wgmma_wait",
        "wgmma_accumulator_deref",
        "wgmma_accumulator_deref_p",
    )
)
_INNER = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jax.extend.core.ClosedJaxpr) else (jaxpr, ())


def _inner_jaxprs(equation: Any) -> Iterator[Any]:
    for parameter in equation.params.values():
        for candidate in parameter if isinstance(parameter, tuple | list) else (parameter,):
            inner = getattr(candidate, "jaxpr", candidate)
            if isinstance(inner, jax.extend.core.Jaxpr):
                yield inner


def _has_events(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in _EVENTS or any(map(_has_events, _inner_jaxprs(equation))) for equation in jaxpr.eqns
    )


class _Follower:
    """Follows a jaxpr: integers are known, other data is not."""

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        environment = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> Any:
            return self.literal(atom.val) if isinstance(atom, jax.extend.core.Literal) else environment[atom]

        for equation in jaxpr.eqns:
            out = self.equation(equation, [read(atom) for atom in equation.invars])
            environment.update(zip(equation.outvars, out, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        name, parameters = equation.primitive.name, equation.params
        unknown = [_UNKNOWN] * len(equation.outvars)
        if name == "cond":
            if isinstance(values[0], _Unknown):
                self._refuse_events(equation)
                return unknown
            return self.run(*_open(parameters["branches"][int(values[0])]), values[1:])
        if name == "scan":
            return self._scan(equation, values)
        if name == "while":
            return self._while(equation, values)
        for key in _INNER:
            if key in parameters and name not in ("run_scoped", "run_state", "custom_jvp_call"):
                return self.run(*_open(parameters[key]), values)
        if name == "custom_jvp_call":
            return self.run(*_open(parameters["call_jaxpr"]), values)
        if any(isinstance(value, _Unknown | _Reference) for value in values):
            return unknown
        return self.evaluate(equation, values)

    def literal(self, value: Any) -> Any:
        return value

    def evaluate(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        raise NotImplementedError

    def _refuse_events(self, equation: Any) -> None:
        if any(map(_has_events, _inner_jaxprs(equation))):
            where = source_info_util.summarize(equation.source_info)
            raise NotImplementedError(f"{equation.primitive.name} at {where} depends on data and uses barriers")

    def _scan(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        jaxpr, consts = _open(equation.params["jaxpr"])
        carried = len(equation.outvars)
        if len(jaxpr.invars) != len(values) or len(jaxpr.outvars) != carried:
            raise NotImplementedError("a scan over arrays")
        if not _has_events(jaxpr):
            return [_UNKNOWN] * carried
        fixed, carry = values[: len(values) - carried], values[len(values) - carried :]
        if [out.aval.shape for out in equation.outvars] != [out.aval.shape for out in jaxpr.outvars]:
            raise NotImplementedError("a scan over arrays")
        for _ in range(equation.params["length"]):
            carry = self.run(jaxpr, consts, [*fixed, *carry])
        return carry

    def _while(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        parameters = equation.params
        to_condition, to_body = parameters["cond_nconsts"], parameters["body_nconsts"]
        condition, body = _open(parameters["cond_jaxpr"]), _open(parameters["body_jaxpr"])
        fixed, carry = values[to_condition : to_condition + to_body], values[to_condition + to_body :]
        if not _has_events(body[0]):
            return [_UNKNOWN] * len(carry)
        while True:
            (going,) = self.run(*condition, [*values[:to_condition], *carry])
            if isinstance(going, _Unknown):
                self._refuse_events(equation)
            if not going:
                return carry
            carry = self.run(*body, [*fixed, *carry])


class Host(_Follower):
    """The function that calls the kernels: its integer arrays are computed."""

    def __init__(self, max_programs: int | None, check: Callable[[list["Warpgroup"]], None]) -> None:
        self.max_programs, self.check, self.kernels = max_programs, check, 0

    def equation(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        if equation.primitive.name != "mpmd_map":
            # Whole loops and calls at once: kernels begin from what they compute.
            if not any(map(_has_events, _inner_jaxprs(equation))) and not any(
                isinstance(value, _Unknown) for value in values
            ):
                return self.evaluate(equation, values)
            return super().equation(equation, values)
        (jaxpr,), (mesh,) = equation.params["jaxprs"], equation.params["meshes"]
        if mesh.cluster:
            raise NotImplementedError("clusters")
        self.kernels += 1
        programs = list(itertools.product(*map(range, mesh.grid)))
        chosen = len(programs) if self.max_programs is None else min(self.max_programs, len(programs))
        for index in sorted({round(place) for place in np.linspace(0, len(programs) - 1, chosen)}):
            place = dict(zip(mesh.grid_names, programs[index], strict=True))
            threads = [
                Warpgroup(f"{equation.params['name']}{place}", {**place, mesh.thread_name: thread}, thread)
                for thread in range(mesh.num_threads or 1)
            ]
            contents = [*values, *[_UNKNOWN] * (len(jaxpr.invars) - len(values))]
            for thread in threads:
                references = [
                    _Reference(-1 - i, gpu_core.GMEM, content) for i, content in enumerate(contents)
                ]  # scratch counts from 0
                thread.run(*_open(jaxpr), references)
            self.check(threads)
        return [_UNKNOWN] * len(equation.outvars)

    def evaluate(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        out = equation.primitive.bind(*values, **equation.params)
        return out if equation.primitive.multiple_results else [out]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What a warpgroup does; ``reads`` and ``writes`` are of shared memory."""

    kind: str
    where: Any
    barrier: tuple[int, int] | None = None  # array and index in it
    arrivals: int = 0  # that complete the barrier
    keep: int = 0  # operations that may stay in flight at a wait
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class Warpgroup(_Follower):
    """One warpgroup of one block: leaves its events."""

    def __init__(self, name: str, coordinates: dict[str, int], thread: int) -> None:
        self.name, self.coordinates, self.thread = name, coordinates, thread
        self.events: list[Event] = []
        self._scratch: dict[Any, int] = {}

    def literal(self, value: Any) -> Any:
        return value.item() if getattr(value, "ndim", 1) == 0 else value

    def evaluate(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if len(equation.outvars) != 1:
            return [_UNKNOWN] * len(equation.outvars)
        (variable,) = equation.outvars
        if variable.aval.shape or np.issubdtype(variable.aval.dtype, np.floating):
            return [_UNKNOWN] * len(equation.outvars)
        if name == "convert_element_type":
            return [bool(values[0]) if variable.aval.dtype == bool else int(values[0])]
        return [_SCALARS[name](*values)] if name in _SCALARS else [_UNKNOWN]

    def equation(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        name, parameters = equation.primitive.name, equation.params
        if name == "axis_index":
            return [self.coordinates[parameters["axis_name"]]]
        if name in ("run_scoped", "run_state"):
            return self._scope(equation, values)
        if name.startswith("wgmma_accumulator_deref"):
            if parameters["wait_n"] is not None:
                self._add("wgmma_wait", equation, keep=parameters["wait_n"])
            return [_UNKNOWN]
        handler = _HANDLERS.get(name)
        if handler is None:
            return super().equation(equation, values)
        return handler(self, equation, values) or [_UNKNOWN] * len(equation.outvars)

    def _add(self, kind: str, equation: Any, **details: Any) -> None:
        self.events.append(Event(kind, equation.source_info, **details))

    def _scope(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        jaxpr = equation.params["jaxpr"]
        if equation.primitive.name == "run_scoped":
            scratch = [self._reference(variable) for variable in jaxpr.invars]
            return self.run(jaxpr, values, scratch)
        arguments = [
            value if isinstance(value, _Reference) else self._reference(variable)
            for variable, value in zip(jaxpr.invars, values, strict=True)
        ]
        self.run(jaxpr, (), arguments)
        if any(not isinstance(value, _Reference) for value in values):
            self._add("wgmma_wait", equation)  # an accumulator's value is read when its scope ends
        return [_UNKNOWN] * len(equation.outvars)

    def _reference(self, variable: Any) -> _Reference:
        # The same variable is the same scratch in every warpgroup.
        return _Reference(id(variable), variable.aval.memory_space)

    def _barrier(self, equation: Any, operands: list[Any], tree: str) -> dict[str, Any]:
        (variable,) = [invar for invar in equation.invars if _is_barrier(invar)]
        reference, *leaves = operands
        shape = variable.aval.shape
        region = _region(reference, jax.tree.unflatten(equation.params[tree], leaves), shape)
        index = 0
        for (start, size), extent in zip(region[1], shape, strict=True):
            if size != 1 and extent != 1:
                raise NotImplementedError(f"a barrier of {shape} is used with an unknown index")
            index = index * extent + start
        return {"barrier": (reference.identity, index), "arrivals": variable.aval.dtype.num_arrivals}

    def wait(self, equation: Any, values: list[Any]) -> None:
        self._add("wait", equation, **self._barrier(equation, values, "transforms_treedef"))

    def arrive(self, equation: Any, values: list[Any]) -> None:
        if equation.params["has_user_predicate"]:
            *values, predicate = values
            if isinstance(predicate, _Unknown):
                raise NotImplementedError("an arrival whose predicate depends on data")
            if not predicate:
                return
        self._add("arrive", equation, **self._barrier(equation, values, "transforms_treedef"))

    def copy_in(self, equation: Any, values: list[Any]) -> None:
        parameters = equation.params
        trees = [parameters[f"{side}_transforms_treedef"] for side in ("src", "dst", "barrier")]
        if parameters["has_user_predicate"]:
            *values, predicate = values
            if isinstance(predicate, _Unknown):
                raise NotImplementedError("a copy whose predicate depends on data")
            if not predicate:
                return
        if parameters["collective_axes"] or not parameters["has_barrier"]:
            raise NotImplementedError("a collective copy, or one without a barrier")
        _, destination, barrier, *leaves = values
        _, to, at = _split(leaves, trees)
        details = self._barrier(equation, [barrier, *jax.tree.leaves(at)], "barrier_transforms_treedef")
        self._add("copy_in", equation, writes=(_region(destination, to, _logical(equation.invars[1], to)),), **details)

    def copy_out(self, equation: Any, values: list[Any]) -> None:
        parameters = equation.params
        trees = [parameters[f"{side}_transforms_treedef"] for side in ("src", "dst")]
        leaves = values[2:-1] if parameters["has_user_predicate"] else values[2:]
        taken, _ = _split(leaves, trees)
        self._add("copy_out", equation, reads=(_region(values[0], taken, _logical(equation.invars[0], taken)),))

    def wait_out(self, equation: Any, values: list[Any]) -> None:
        del values
        self._add("wait_out", equation, keep=equation.params["n"])

    def fence(self, equation: Any, values: list[Any]) -> None:
        del values
        self._add("fence", equation)

    def wgmma(self, equation: Any, values: list[Any]) -> None:
        trees = [equation.params[f"{operand}_transforms_tree"] for operand in ("acc", "a", "b")]
        transforms = _split(values[3:], [tree or jax.tree.structure(()) for tree in trees])
        reads = tuple(
            _region(value, applied, _logical(variable, applied))
            for value, applied, variable in zip(values[1:3], transforms[1:], equation.invars[1:3], strict=True)
            if isinstance(value, _Reference)
        )
        self._add("wgmma", equation, reads=reads)

    def wgmma_wait(self, equation: Any, values: list[Any]) -> None:
        del values
        self._add("wgmma_wait", equation, keep=equation.params["n"])

    def get(self, equation: Any, values: list[Any]) -> Sequence[Any] | None:
        reference, *leaves = values
        transforms = jax.tree.unflatten(equation.params["tree"], leaves)
        shape = _logical(equation.invars[0], transforms)
        if reference.space == gpu_core.SMEM:
            self._add("access", equation, reads=(_region(reference, transforms, shape),))
            return None
        aval = equation.outvars[0].aval
        if reference.space != gpu_core.GMEM or isinstance(reference.contents, _Unknown) or aval.shape:
            return None
        starts = [start for start, _ in _region(reference, transforms, shape)[1]]
        known = all(not isinstance(leaf, _Unknown) for leaf in leaves)
        contents = np.asarray(reference.contents)
        integral = contents.dtype == bool or np.issubdtype(contents.dtype, np.integer)
        return [contents[tuple(starts)].item()] if known and integral else None

    def swap(self, equation: Any, values: list[Any]) -> None:
        reference, _, *leaves = values
        if reference.space == gpu_core.SMEM:
            transforms = jax.tree.unflatten(equation.params["tree"], leaves)
            region = _region(reference, transforms, _logical(equation.invars[0], transforms))
            self._add("access", equation, writes=(region,))


_HANDLERS: dict[str, Callable[..., Any]] = {
    "barrier_wait": Warpgroup.wait,
    "barrier_arrive": Warpgroup.arrive,
    "copy_gmem_to_smem": Warpgroup.copy_in,
    "copy_smem_to_gmem": Warpgroup.copy_out,
    "wait_smem_to_gmem": Warpgroup.wait_out,
    "commit_smem": Warpgroup.fence,
    "wgmma_ref": Warpgroup.wgmma,
    "wgmma_wait": Warpgroup.wgmma_wait,
    "get": Warpgroup.get,
    "load": Warpgroup.get,
    "swap": Warpgroup.swap,
    "store": Warpgroup.swap,
}


def _is_barrier(variable: Any) -> bool:
    return isinstance(variable.aval, state_types.AbstractRef) and isinstance(
        variable.aval.dtype, gpu_core.BarrierType | gpu_core.ClusterBarrierType
    )


def _split(leaves: Sequence[Any], trees: Sequence[Any]) -> list[Any]:
    parts, first = [], 0
    for tree in trees:
        parts.append(jax.tree.unflatten(tree, leaves[first : first + tree.num_leaves]))
        first += tree.num_leaves
    return parts


def _logical(variable: Any, transforms: Sequence[Any]) -> tuple[int, ...]:
    """The shape that the first index is an index of: tiling and swizzle come before it."""
    for transform in transforms:
        if isinstance(transform, indexing.NDIndexer):
            return tuple(transform.shape)
    return tuple(variable.aval.shape)


def _region(reference: _Reference, transforms: Sequence[Any], shape: tuple[int, ...]) -> Region:
    """What a view covers; an index that is not known covers its whole dimension."""
    ranges = [(0, extent) for extent in shape]
    alive = list(range(len(shape)))
    for transform in transforms:
        if not isinstance(transform, indexing.NDIndexer):
            if ranges != [(0, extent) for extent in shape]:
                break  # a view of another shape: what is known so far covers it
            continue
        left = []
        for dimension, index in zip(alive, transform.indices, strict=True):
            first = ranges[dimension][0]
            if isinstance(index, indexing.Slice):
                left.append(dimension)
                if not isinstance(index.start, _Unknown) and isinstance(index.size, int):
                    ranges[dimension] = (first + int(index.start), index.size)
            elif not isinstance(index, _Unknown):
                ranges[dimension] = (first + int(index), 1)
        alive = left
    return reference.identity, tuple(ranges)
