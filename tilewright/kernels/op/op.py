"""An op: what it computes, whatever backend runs it."""

import abc
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import jax

from tilewright.kernels.op.backend import Backends, PreferredBackends
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.contents import Check, known_faults, report_on_device
from tilewright.kernels.op.former_keys import former_description
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning, leading_partitioning
from tilewright.ops.kernel.arrays import is_wrapper, unwrapped
from tilewright.ops.kernel.kernel import Invocation, Kernel
from tilewright.ops.kernel.parts import Arguments
from tilewright.ops.types import Direction
from tilewright.ops.utils.promotion import default_promotion


class Op[Inputs: OpInputs, Results](Kernel[Choice, Any], abc.ABC):
    """The declarations of an op; ``portfolio`` has the classes to derive from.

    ``prepare`` makes the inputs, which describe the call from then on. All methods get these: with arrays where results
    are computed, else with ``ShapeDtypeStruct`` in their place.

    Attributes:
      cases: named calls, for the command line, the capability table and tests.
      cuda_tables: the tables of variants of its CUDA C++ kernels, by name, as ``"module:NAME"``.
      core_dims: for each argument the number of trailing core dimensions, in the sense of NumPy's generalised ufuncs;
        the leading dimensions are shared and may be split over mesh axes. Arguments that are not listed are replicated.
      always: the names of optional arrays of the inputs that every call of the op has: in keys they stand by position,
        as those do that calls of all ops with these inputs have.
      contents: for arguments of integers, which numbers a call can mean. Others are an error where they are known.
      differentiable: True if the op has gradients.
      backends: best first.
      preferred: the backends that are better than the others on some devices, whatever their order.
    """

    cases: ClassVar[OpCases[Any]]
    cuda_tables: ClassVar[Mapping[str, str]] = MappingProxyType({})
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({})
    # A heuristic reads the sizes of the call; how well configs of near shapes do was measured for attention alone.
    takes_near_shapes = False
    always: ClassVar[tuple[str, ...]] = ()
    contents: ClassVar[Mapping[str, Check]] = MappingProxyType({})
    differentiable: ClassVar[bool]
    preferred: ClassVar[PreferredBackends] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Here and not by a decorator on each op, which could forget it; backends are called in a context of their own.
        if "reference" in vars(cls):
            cls.reference = default_promotion()(cls.reference)  # type: ignore[method-assign]

    def __init__(self, name: str, *, version: str, backends: Sequence[str]):
        """Backends are given as ``"module:Class"``: a module is imported when its backend is first needed."""
        super().__init__(name, version=version)
        self.backends = Backends(name, backends, self.preferred)

    @abc.abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> Inputs:
        """Checks and canonicalises the arguments of a call; the only place that knows the argument list.

        Its annotation names the class of the inputs. ``platform`` and ``cfg`` are arguments of every op; the executor
        handles the latter.
        """

    @abc.abstractmethod
    def reference(self, inputs: Inputs) -> Any:
        """The oracle: the op's outputs in plain ``jax.numpy``."""

    @abc.abstractmethod
    def results(self, inputs: Inputs) -> Results:
        """The results of every backend, with ``ShapeDtypeStruct`` in place of arrays.

        A call is traced with these; its config is chosen when it is lowered.
        """

    def outputs(self, inputs: Inputs, results: Results) -> Any:
        """The op's outputs, from a backend's results: by default the results."""
        return results

    def completed(self, inputs: Inputs) -> Inputs:
        """The inputs of a backend, from those of a call: by default the same."""
        return inputs

    def sampled(self, inputs: Inputs, key: jax.Array) -> Inputs:
        """Random arrays for abstract inputs: by default normal numbers, and integers that are 0 or 1."""
        (found,), _ = super().sample_inputs(Invocation(self, (inputs,)), key)
        return cast(Inputs, found)

    def flops(self, inputs: Inputs, direction: Direction) -> float:
        """FLOPs of the matmuls of a call: by default it has none."""
        return 0.0

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs and bytes of a call; by default it moves every array once."""
        inputs = self.inputs_of(inv)
        size = array_bytes(inputs) + array_bytes(self.output_shapes(inv))
        if inv.direction == "backward":
            # A gradient for every floating-point operand; the cotangents, which are read, have the sizes of the
            # results.
            size += array_bytes(inputs, floating=True)
        return Cost(self.flops(inputs, inv.direction), float(size))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The minimum cost of any backend, whatever the values in the arrays: see `time_bound_ms`.

        By default the results are written; of the gradients, a caller may need only some.
        """
        return Cost(0.0, float(array_bytes(self.output_shapes(inv))) if inv.direction == "forward" else 0.0)

    def partitioning(self, inputs: Inputs) -> Partitioning | None:
        """The split of the op over explicit mesh axes that the arrays' types imply; ``None`` without such axes.

        By default along leading dimensions, as given by ``core_dims``.

        Raises:
          ValueError: the arrays are split in a way that would need communication.
        """
        return leading_partitioning(inputs, self.core_dims)

    def split_alike(self, inputs: Inputs) -> Sequence[Mapping[str, int]]:
        """Groups of dimensions, by argument, of which `partitioning` takes no split of one alone; by default none."""
        return ()

    # The inputs of a call in the framework's terms: its one argument.

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The inputs of a call; inputs in place of arguments are a call that was prepared before."""
        if len(args) == 1 and not kwargs and isinstance(args[0], OpInputs):
            return tuple(args), {}
        if any(map(is_wrapper, jax.tree.leaves((args, dict(kwargs)), is_leaf=is_wrapper))):
            args, kwargs = jax.tree.map(unwrapped, (args, dict(kwargs)), is_leaf=is_wrapper)
        with default_promotion():
            inputs = self.prepare(*args, **kwargs)
        report_on_device(self.name, self.contents, self._given(args, kwargs))
        return (inputs,), {}

    def check_contents(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_traced: bool) -> None:
        # Of nearly every call this is all: it is in the overhead of a warm one.
        for name, position in self._checked:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None:
                break
        else:
            return
        if found := known_faults(self.contents, self._given(args, kwargs), is_traced=is_traced):
            raise ValueError(f"{self.name}: {'; '.join(found)}")

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return dict(zip(self._positional, args, strict=False)) | dict(kwargs)

    @functools.cached_property
    def _checked(self) -> tuple[tuple[str, int], ...]:
        """The arguments whose contents are checked, with their positions; keywords have one beyond all."""
        names = self._positional
        return tuple((name, names.index(name) if name in names else sys.maxsize) for name in self.contents)

    @functools.cached_property
    def _positional(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.prepare).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        return list(args[0].arrays.items())

    def described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        by_position, by_name = args[0].described
        others = {name: value for name, value in by_name.items() if name not in self.always}
        return (*by_position, *(by_name[name] for name in self.always)), others

    def of_described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        count = len(args) - len(self.always)
        always = dict(zip(self.always, args[count:], strict=True))
        return (self.inputs_type(*args[:count], **always, **kwargs),), {}

    def former_descriptions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        found = former_description(self.name, args[0])
        return [] if found is None else [found]

    @functools.cached_property
    def inputs_type(self) -> type[Inputs]:
        """The class of the inputs."""
        return cast("type[Inputs]", inspect.signature(self.prepare).return_annotation)

    def inputs_of(self, inv: Invocation[Choice, Any]) -> Inputs:
        """The abstract inputs of a call, computed once."""
        if "inputs" not in inv.memo:
            inv.memo["inputs"] = inv.abstract_args[0].structs
        return cast(Inputs, inv.memo["inputs"])

    def output_shapes(self, inv: Invocation[Choice, Any]) -> Any:
        """The abstract outputs of a call, computed once."""
        if "outputs" not in inv.memo:
            inputs = self.inputs_of(inv)
            with default_promotion():
                inv.memo["outputs"] = jax.eval_shape(self.outputs, inputs, self.results(inputs))
        return inv.memo["outputs"]

    def sample_inputs(self, inv: Invocation[Choice, Any], key: jax.Array) -> Arguments:
        with default_promotion():
            return (self.sampled(inv.abstract_args[0], key),), {}
