"""A kernel with several implementations: its config names the one that runs, and its params."""

import abc
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import jax
import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.kernels.op import repeatable
from tilewright.kernels.op.arguments import is_floating
from tilewright.kernels.op.backend import Implementation, KernelConfig, Platform, one_line
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.declared import Declared
from tilewright.kernels.op.footprint import Footprint, busy_share, launch_reasons
from tilewright.kernels.op.measured import measured_result
from tilewright.kernels.op.roofline import Cost, array_bytes, min_ms
from tilewright.kernels.op.sharding import Partitioning, backward_locally, forward_locally, leading_partitioning
from tilewright.kernels.op.x64 import without_x64
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.builds import Build, missing_builds
from tilewright.ops.kernel.kernel import Invocation, Kernel, errors_naming
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.fingerprint import source_fingerprint
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/portfolio.Choice", formerly=("tilewright.kernels.portfolio:Choice",))
@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that runs, and its params.

    Attributes:
      params: the implementation's own config: frozen, of its ``forward_params`` or ``backward_params`` type.
    """

    platform: Platform
    algorithm: str | None = None
    params: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "platform", Platform(self.platform))  # accepts and checks a plain name

    @property
    def implementation(self) -> str:
        """The implementation's name, such as "xla" or "cuda:cutlass"."""
        return implementation_name(self.platform, self.algorithm)

    def __str__(self) -> str:
        if not dataclasses.is_dataclass(self.params):
            return self.implementation if self.params is None else f"{self.implementation}({self.params})"
        fields = ((field.name, getattr(self.params, field.name)) for field in dataclasses.fields(self.params))
        return f"{self.implementation}({', '.join(f'{name}={value}' for name, value in fields if value is not None)})"


@stable_id("tilewright/portfolio.PerDirection", formerly=("tilewright.kernels.portfolio:PerDirection",))
@dataclasses.dataclass(frozen=True, slots=True)
class PerDirection:
    """An explicit config for each direction; ``None`` leaves a direction to selection."""

    forward: Any = None
    backward: Any = None


DECLARED = Choice(Platform.XLA, "declared")
"""The config of a call that is traced and has none yet."""


def implementation_name(platform: Platform, algorithm: str | None) -> str:
    return str(platform) if algorithm is None else f"{platform}:{algorithm}"


@dataclasses.dataclass(frozen=True, slots=True)
class LazyImplementation:
    """An implementation that is imported when it is first needed."""

    where: str

    def load(self) -> Implementation:
        """Imports the implementation.

        Raises:
          ImportError, OSError: a requirement is missing.
        """
        return _load(self.where)

    @property
    def load_error(self) -> str:
        """The reason why it cannot be loaded; empty if it can."""
        try:
            self.load()
        except (ImportError, OSError) as error:
            return f"cannot be loaded: {error}"
        # Exception: a package of an unexpected version may raise anything; the other backends still run.
        except Exception as error:
            return f"cannot be loaded: {one_line(error)}"
        return ""

    @property
    def module_name(self) -> str:
        """The name of its module or folder, which identifies it if it cannot be loaded."""
        *folders, module = self.where.partition(":")[0].split(".")
        return folders[-1] if module == "backend" else module


def lazy(where: str) -> LazyImplementation:
    """An implementation given as ``"module:Class"``."""
    return LazyImplementation(where)


@functools.cache
def _load(where: str) -> Implementation:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)()


class Portfolio[Inputs, Problem, Results](Kernel[Choice, Any], abc.ABC):
    """A kernel whose config is a ``Choice`` among implementations: ``PortfolioKernel`` or ``InferenceKernel``.

    An op defines ``inputs``, ``reference`` and ``prepare``, whose keyword arguments include ``platform`` (``None`` or a
    tuple of platforms in order of preference). All methods below take the result of ``prepare``. The other methods have
    defaults that suit an op with few arrays and no matmuls.

    Attributes:
      cases: named calls, for the command line, the capability table and tests.
      cuda_tables: the tables of variants of its CUDA C++ kernels, by name, as ``"module:NAME"``.
      core_dims: for each argument the number of trailing core dimensions, in the sense of NumPy's generalised ufuncs;
        the leading dimensions are shared and may be split over mesh axes. Arguments that are not listed are replicated.
      differentiable: True if the op has gradients.
      implementations: best first.
    """

    cases: ClassVar[OpCases[Any]]
    cuda_tables: ClassVar[Mapping[str, str]] = MappingProxyType({})
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({})
    differentiable: ClassVar[bool]

    def __init__(self, name: str, *, version: str, implementations: Sequence[LazyImplementation]):
        super().__init__(name, version=version)
        self.implementations = tuple(implementations)
        parameters = inspect.signature(self.inputs).parameters.values()
        self.argument_names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    @abc.abstractmethod
    def inputs(self, *args: Any, **kwargs: Any) -> Inputs:
        """The prepared arguments in the form that implementations take: a pytree with the names of the arguments."""

    @abc.abstractmethod
    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The oracle."""

    @abc.abstractmethod
    def results(self, inputs: Inputs) -> Results:
        """The results of every backend for ``inputs``, with ``ShapeDtypeStruct`` in place of arrays.

        Reads shapes, dtypes and options only. A call is traced with these; its config is chosen when it is lowered.
        """

    def gradients_of(self, inputs: Inputs) -> dict[str, Any]:
        """The gradients of every backend for ``inputs`` by name, in the same form: of each floating-point array."""
        named = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(cast(Any, inputs))}
        return {name: struct_like(x) for name, x in named.items() if is_floating(getattr(x, "dtype", np.bool_))}

    def problem(self, *args: Any, **kwargs: Any) -> Problem:
        """The facts about a call, from abstract prepared arguments, by which implementations give reasons and params.

        By default the inputs, with shapes in place of arrays.
        """
        return cast(Problem, self.inputs(*args, **kwargs))

    def outputs(self, inputs: Inputs, results: Results, *args: Any, **kwargs: Any) -> Any:
        """The op's outputs, from an implementation's results: by default the results."""
        return results

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs and bytes of a call; by default it has no matmuls, and moves every array once."""
        operands, results = (inv.abstract_args, inv.abstract_kwargs), self.output_shapes(inv)
        size = array_bytes(operands) + array_bytes(results)
        if inv.direction == "backward":
            # A gradient for every floating-point operand; the cotangents, which are read, have the sizes of the
            # results.
            size += array_bytes(operands, floating=True)
        return Cost(0.0, float(size))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The minimum cost of any implementation, whatever the values in the arrays: see `time_bound_ms`.

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

    def problem_of(self, inv: Invocation[Choice, Any]) -> Problem:
        """The problem of a call, computed once and kept on the invocation."""
        if "problem" not in inv.memo:
            inv.memo["problem"] = self.problem(*inv.abstract_args, **inv.abstract_kwargs)
        return inv.memo["problem"]

    def output_shapes(self, inv: Invocation[Choice, Any]) -> Any:
        """The abstract outputs of a call, computed once."""
        if "outputs" not in inv.memo:
            inputs = jax.tree.map(struct_like, self.inputs(*inv.abstract_args, **inv.abstract_kwargs))
            outputs = functools.partial(self.outputs, **inv.abstract_kwargs)
            inv.memo["outputs"] = jax.eval_shape(outputs, inputs, self.results(inputs))
        return inv.memo["outputs"]

    def forward_results(self, inputs: Inputs, cfg: Choice) -> Results:
        """Runs the chosen implementation, on each device's part if the arrays' types split the call."""
        implementation = self._implementation(cfg)
        forward = functools.partial(implementation.forward, params=cfg.params)
        return forward_locally(forward, self._partitioning(inputs, implementation.platform), inputs)

    def _partitioning(self, inputs: Inputs, platform: Platform) -> Partitioning | None:
        with errors_naming(self):
            found = self.partitioning(inputs)
        if found is None or platform is Platform.XLA:
            return found
        return dataclasses.replace(found, shared_with_xla=False)

    # Methods that the framework calls.

    def types_cfg(self) -> Choice:
        """A config that stands for any: its code has the declared results."""
        return DECLARED

    def heuristic_cfg(self, inv: Invocation[Choice, Any]) -> Choice:
        """The best choice that needs no build first, or else the best one."""
        first = None
        # A build may take minutes of nvcc, so without measurements a call prefers what is ready.
        for each in self._by_preference(inv):
            if not missing_builds(self.config_builds(inv, each)):
                return each
            first = first or each
        assert first is not None  # _by_preference raises if there is none
        return first

    def preferred_cfg(self, inv: Invocation[Choice, Any]) -> Choice:
        """The best choice, whether it must be built first or not."""
        return next(self._by_preference(inv))

    def config_space(self, inv: Invocation[Choice, Any]) -> Iterable[Choice]:
        """The heuristic choice of every implementation, so that any budget reaches each; then all their candidates."""
        problem, choices = self.problem_of(inv), self._supported(inv)
        yield from choices
        for choice in choices:
            for params in repeatable.all_params(self._implementation(choice), problem, inv.target, inv.direction):
                yield dataclasses.replace(choice, params=params)

    def resolve_config(self, cfg: object, inv: Invocation[Choice, Any]) -> Choice | None:
        """Resolves a config that the caller gave, for one direction.

        Takes a ``Choice``, one for each direction, a ``KernelConfig``, or bare params, which go to the first
        implementation with that type. A ``Choice`` with the other direction's params leaves this direction to
        selection.

        Raises:
          TypeError: the config is none of these, or has params of another implementation.
          UnsupportedError: the implementation that it names cannot serve the call.
        """
        if isinstance(cfg, PerDirection):
            part = cfg.forward if inv.direction == "forward" else cfg.backward
            return None if part is None else self.resolve_config(part, inv)
        if isinstance(cfg, KernelConfig):
            return self._of_kernel_config(cfg, inv)
        if isinstance(cfg, Choice):
            return self._checked_choice(cfg, inv)
        for choice in self._supported(inv):
            expected, other = _params_types(self._implementation(choice), inv.direction)
            if isinstance(cfg, expected):
                return dataclasses.replace(choice, params=cfg)
            if isinstance(cfg, other):
                return None
        raise TypeError(
            f"{cfg=} of type {type(cfg).__name__} is no config of {self.name}; give a "
            f"Choice(platform, algorithm, params), PerDirection(forward, backward), a KernelConfig, or bare params"
        )

    def rejection_reasons(
        self, inv: Invocation[Choice, Any], cfg: Choice, measured: Sequence[Any]
    ) -> Mapping[str, tuple[str, ...]]:
        """The reasons against every implementation but the chosen one, or its result in the call's last tuning."""
        others = {name: tuple(why) for name, why in self.reasons(inv).items() if name != cfg.implementation}
        order = [] if all(others.values()) else self._supported(inv)
        return {name: why or (self._why_not(name, inv, cfg, order, measured),) for name, why in others.items()}

    def _why_not(
        self, name: str, inv: Invocation[Choice, Any], cfg: Choice, order: Sequence[Choice], measured: Sequence[Any]
    ) -> str:
        """The reason why an implementation that can serve a call was not chosen; ``order`` is that without tuning."""
        names = [each.implementation for each in order]
        if name not in names:
            return f"supported, but excluded by platform={', '.join(inv.abstract_kwargs['platform'])} of the call"
        if result := measured_result(name, measured, cfg):
            return result
        choice = order[names.index(name)]
        if cfg.implementation not in names[: names.index(name)]:
            commands = dict.fromkeys(
                f"`{each.command(self.name)}`" for each in missing_builds(self.config_builds(inv, choice))
            )
            if commands:
                return f"supported, but nvcc must compile it first: {' and '.join(commands)}"
            return "supported, but not preferred: nothing measured it as faster"
        if self._implementation(choice).deprioritized(self.problem_of(inv), inv.target, inv.direction):
            return "supported, but probably slower for these shapes: nothing measured it as faster"
        return f"supported, but behind {cfg.implementation} in the order of preference: nothing measured it as faster"

    def config_reasons(self, inv: Invocation[Choice, Any], cfg: object) -> list[str]:
        """Reasons why a config that once fitted this call cannot run it here and now; a cache may hold anything."""
        if not isinstance(cfg, Choice):
            return [f"a Choice was expected, got {type(cfg).__name__}"]
        lazy_implementation = self._lazy_implementation(cfg)
        if lazy_implementation is None:
            return [f"{self.name} has no implementation {cfg.implementation!r} that can be loaded here"]
        problem = self.problem_of(inv)
        why = self._reasons_of(lazy_implementation, inv, problem)[1]
        allowed = inv.abstract_kwargs.get("platform")
        if allowed is not None and cfg.platform not in allowed:
            why = [*why, f"the caller wants one of the platforms {', '.join(allowed)}"]
        if why:
            return why
        implementation = lazy_implementation.load()
        expected = _params_types(implementation, inv.direction)[0]
        if not isinstance(cfg.params, expected):
            return [f"params of type {expected.__name__} were expected, got {cfg.params!r}"]
        # Footprints come last: they are defined only for params that can serve the problem.
        given = problem, inv.target, inv.direction, cfg.params
        why = implementation.config_reasons(*given) or repeatable.params_reasons(implementation, cfg.params)
        return why or launch_reasons(self._footprints(inv, cfg), inv.target)

    def adapted_config(self, inv: Invocation[Choice, Any], cfg: Choice) -> Choice:
        """The form of a measured config that repeats bit for bit, if it has one and XLA's flags want that."""
        found = self._lazy_implementation(cfg)
        return cfg if found is None else dataclasses.replace(cfg, params=repeatable.repeating(found.load(), cfg.params))

    def time_bound_ms(self, inv: Invocation[Choice, Any]) -> float:
        """A lower bound of the call's milliseconds on its device; a measurement below it is not credible."""
        return self._min_ms(inv, 1.0)

    def config_bound_ms(self, inv: Invocation[Choice, Any], cfg: Choice) -> float:
        """A lower bound of the call's milliseconds with a config that can run it.

        At least `time_bound_ms`: the call's arithmetic runs on no more multiprocessors than its grid has blocks.
        """
        times = math.prod(axis.size for axis in inv.mapped)
        # Elements of a mapped call may run at the same time.
        all_blocks = [
            dataclasses.replace(each, blocks=None if each.blocks is None else times * each.blocks)
            for each in self._footprints(inv, cfg)
        ]
        return self._min_ms(inv, busy_share(all_blocks, inv.target))

    def _min_ms(self, inv: Invocation[Choice, Any], share: float) -> float:
        """A lower bound of the call's milliseconds on a share of the device's multiprocessors."""
        min_cost = self.min_cost(inv)
        times = math.prod(axis.size for axis in inv.mapped)
        # Only the arithmetic is slowed by idle multiprocessors. How much bandwidth a few of them can use is not known,
        # and a lower bound must not be too high.
        return min_ms(Cost(times * min_cost.flops / share, times * min_cost.bytes), inv.target)

    def _footprints(self, inv: Invocation[Choice, Any], cfg: Choice) -> Sequence[Footprint]:
        return self._implementation(cfg).footprints(self.problem_of(inv), inv.target, inv.direction, cfg.params)

    def config_builds(self, inv: Invocation[Choice, Any], cfg: Choice) -> Sequence[Build]:
        """The builds that a config needs to run the call, already made or not."""
        return self._implementation(cfg).builds(self.problem_of(inv), inv.target, inv.direction, cfg.params)

    def loaded(self) -> list[Implementation]:
        """The implementations that can be loaded here."""
        return [each.load() for each in self.implementations if not each.load_error]

    def all_builds(self, device: Device) -> Sequence[Build]:
        """Every build that `config_builds` may return for calls on a device."""
        return [build for each in self.loaded() for build in each.all_builds(device)]

    def source(self) -> str:
        """A hash of the code of all implementations that can be loaded here."""
        loaded = [type(each) for each in self.loaded()]
        modules = [inspect.getmodule(kind) for kind in (type(self), *loaded)]
        return "".join(source_fingerprint(module)[:16] for module in modules)

    def lowering_packages(self, cfg: Choice) -> tuple[str, ...]:
        """The packages whose sources determine the lowering of a config; empty if it must not be stored on disk."""
        implementation = self._implementation(cfg)
        if not implementation.keeps_lowering:
            return ()
        # The op and its backend may be of packages other than this one.
        kinds = (Portfolio, type(self), type(implementation))
        return tuple(sorted({kind.__module__.partition(".")[0] for kind in kinds}))

    # The table of implementations.

    def reasons(self, inv: Invocation[Choice, Any]) -> dict[str, list[str]]:
        """All reasons why each implementation cannot serve a call, whatever platforms the caller allows."""
        problem = self.problem_of(inv)
        return dict(self._reasons_of(each, inv, problem) for each in self.implementations)

    def _reasons_of(
        self, implementation: LazyImplementation, inv: Invocation[Choice, Any], problem: Problem
    ) -> tuple[str, list[str]]:
        """The name of one implementation, and all reasons why it cannot serve a call."""
        if implementation.load_error:
            return implementation.module_name, [implementation.load_error]
        each = implementation.load()
        name = implementation_name(each.platform, each.algorithm)
        if inv.is_symbolic and not each.symbolic_dimensions:
            return name, ["its programs are for given shapes, got symbolic dimensions of jax.export"]
        try:
            why = each.not_supported_reasons(problem, inv.target, inv.direction)
            return name, why or repeatable.backend_reasons(each, problem, inv.target, inv.direction)
        # Exception: a probe queries drivers and libraries, which may raise anything; the other backends still run.
        except Exception as error:
            return name, [f"its probe failed: {one_line(error)}"]

    def _supported(self, inv: Invocation[Choice, Any]) -> list[Choice]:
        """The heuristic choices of every implementation that can serve a call, best first."""
        return list(self._by_preference(inv))

    def _by_preference(self, inv: Invocation[Choice, Any]) -> Iterator[Choice]:
        """Yields those choices lazily: a later implementation is neither loaded nor asked before it is needed.

        Raises:
          UnsupportedError: no implementation can serve the call.
        """
        allowed, problem, found = inv.abstract_kwargs.get("platform"), self.problem_of(inv), False
        # Deprioritised backends come last within a platform only: the caller's order of platforms is never changed.
        for platform in (None,) if allowed is None else allowed:
            last = []
            for lazy_implementation in self.implementations:
                if lazy_implementation.load_error:
                    continue
                each = lazy_implementation.load()
                if platform not in (None, each.platform) or self._reasons_of(lazy_implementation, inv, problem)[1]:
                    continue
                found = True
                if each.deprioritized(problem, inv.target, inv.direction):
                    last.append(each)
                else:
                    yield _choice_of(each, problem, inv)
            for each in last:
                yield _choice_of(each, problem, inv)
        if not found:
            raise self._unsupported(inv)

    def _unsupported(self, inv: Invocation[Choice, Any]) -> UnsupportedError:
        allowed, reasons = inv.abstract_kwargs.get("platform"), self.reasons(inv)
        if allowed is not None:
            absent = set(allowed) - {each.platform for each in self.loaded()}
            # A backend that cannot be loaded has its module's name, which need not begin with a platform: its reason
            # stays.
            reasons = {n: why for n, why in reasons.items() if n.partition(":")[0] not in _NAMES - set(allowed)}
            reasons |= {str(platform): [f"{self.name} has no implementation for it here"] for platform in absent}
        return UnsupportedError(f"{self.name} ({inv.direction})", {n: why for n, why in reasons.items() if why})

    def _lazy_implementation(self, choice: Choice) -> LazyImplementation | None:
        """The implementation that a choice names, if it can be loaded here."""
        for lazy_implementation in self.implementations:
            if not lazy_implementation.load_error:
                each = lazy_implementation.load()
                if (each.platform, each.algorithm) == (choice.platform, choice.algorithm):
                    return lazy_implementation
        return None

    @functools.cached_property
    def _declared(self) -> Implementation:
        return Declared(self.results, self.gradients_of)

    def _implementation(self, choice: Choice) -> Implementation:
        if choice is DECLARED:
            return self._declared
        found = self._lazy_implementation(choice)
        if found is None:
            raise ValueError(f"{self.name} has no implementation {choice.implementation!r} that can be loaded here")
        return found.load()

    def _checked_choice(self, choice: Choice, inv: Invocation[Choice, Any]) -> Choice | None:
        expected, other = _params_types(self._implementation(choice), inv.direction)
        # Some backends take params of one type in both directions, and those are for this direction, too.
        if isinstance(choice.params, other) and not isinstance(choice.params, expected):
            return None
        if not isinstance(choice.params, expected):
            raise TypeError(f"{choice.params=} must be of type {expected.__name__} for {choice.implementation!r}")
        lazy_implementation = self._lazy_implementation(choice)
        assert lazy_implementation is not None  # otherwise _implementation would have raised
        why = self._reasons_of(lazy_implementation, inv, self.problem_of(inv))[1]
        if why:
            raise UnsupportedError(f"{self.name} ({inv.direction})", {choice.implementation: why})
        return choice

    def _of_kernel_config(self, cfg: KernelConfig, inv: Invocation[Choice, Any]) -> Choice:
        params: FwdParams | BwdParams
        common = {"q_blocksize": cfg.block_q, "kv_blocksize": cfg.block_k}
        warps = {"num_warps": cfg.num_warps, "num_stages": cfg.num_stages}
        params = FwdParams(**common, **warps) if inv.direction == "forward" else BwdParams(**common, **warps)
        for choice in self._supported(inv):
            named = cfg.platform in (None, "auto", choice.platform) and cfg.algorithm in (None, choice.algorithm)
            if named and isinstance(params, _params_types(self._implementation(choice), inv.direction)[0]):
                return dataclasses.replace(choice, params=params)
        raise UnsupportedError(
            f"{self.name} ({inv.direction})",
            {str(cfg.platform): [f"no implementation that takes the block sizes of {cfg} can serve the call"]},
        )


class PortfolioKernel[Inputs, Problem, Results](Portfolio[Inputs, Problem, Results], abc.ABC):
    """A portfolio with gradients, each of which an implementation computes from any other's forward results."""

    differentiable: ClassVar[bool] = True
    run_is_forward: ClassVar[bool] = True

    def cotangents(
        self, inputs: Inputs, results: Results, cotangents: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> Any:
        """Maps the cotangents of ``outputs`` to those of an implementation's results.

        By default the outputs are the first arrays of the results; the others serve the backward pass only, and have
        none.
        """
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, [*cotangents, *[None] * (len(leaves) - len(cotangents))])

    def forward_mode_cfg(self, inv: Invocation[Choice, Any]) -> Choice:
        """The best config whose code JAX can differentiate in forward mode.

        Raises:
          TypeError: no implementation on the caller's platforms has such code.
        """
        for choice in self._supported(inv):
            if self._implementation(choice).forward_mode:
                return choice
        raise TypeError(
            f"{self.name} has no forward-mode derivative (jax.jvp, jax.linearize, jax.jacfwd, jax.hessian) on "
            f"platform={inv.abstract_kwargs.get('platform')}; use platform='xla' or None, or reverse mode (jax.grad, "
            "jax.vjp, jax.jacrev)"
        )

    def run(self, *args: object, cfg: Choice, **kwargs: object) -> Any:
        return self.forward_with_residuals(*args, cfg=cfg, **kwargs)[0]

    def forward_with_residuals(self, *args: object, cfg: Choice, **kwargs: object) -> tuple[Any, Results]:
        with without_x64(args, kwargs):
            inputs = self.inputs(*args, **kwargs)
            results = self.forward_results(inputs, cfg)
            return self.outputs(inputs, results, **kwargs), results

    def differentiated(self, inputs: Inputs, wanted: frozenset[str]) -> Inputs:
        """The inputs of a backward pass of which only the gradients of the arguments ``wanted`` are used.

        By default they do not say so, and every gradient is computed.
        """
        return inputs

    def argument_gradients(self, inputs: Inputs, gradients: dict[str, Any]) -> dict[str, Any]:
        """The gradients by argument, from those by field of the inputs: by default these have the same names."""
        return gradients

    def backward(
        self,
        residuals: Results,
        cotangents: tuple[Any, ...],
        *args: object,
        cfg: Choice,
        wanted: frozenset[str] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        with without_x64(args, kwargs):
            inputs = self.inputs(*args, **kwargs)
            inputs = inputs if wanted is None else self.differentiated(inputs, wanted)
            result_cotangents = self.cotangents(inputs, residuals, cotangents, **kwargs)
            implementation = self._implementation(cfg)
            backward = functools.partial(implementation.backward, params=cfg.params)
            partitioning = self._partitioning(inputs, implementation.platform)
            gradients = backward_locally(backward, partitioning, inputs, residuals, result_cotangents)
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        return self.argument_gradients(inputs, found)


class InferenceKernel[Inputs, Problem, Results](Portfolio[Inputs, Problem, Results], abc.ABC):
    """A portfolio without gradients: differentiating it raises ``TypeError``."""

    differentiable: ClassVar[bool] = False

    def run(self, *args: object, cfg: Choice, **kwargs: object) -> Any:
        with without_x64(args, kwargs):
            inputs = self.inputs(*args, **kwargs)
            return self.outputs(inputs, self.forward_results(inputs, cfg), **kwargs)

    def no_gradient(self) -> str:
        """The reason why a call cannot be differentiated."""
        return f"{self.name} is for inference and has no gradient; see flash_attention for training"


def _choice_of(implementation: Implementation, problem: object, inv: Invocation[Choice, Any]) -> Choice:
    """An implementation's heuristic choice."""
    params = repeatable.first_params(implementation, problem, inv.target, inv.direction)
    return Choice(implementation.platform, implementation.algorithm, params)


_NAMES = frozenset(str(platform) for platform in Platform)


def _params_types(implementation: Implementation, direction: Direction) -> tuple[type, type]:
    """The types of params for the direction and for the other one."""
    both = (implementation.forward_params, implementation.backward_params)
    return both if direction == "forward" else both[::-1]
