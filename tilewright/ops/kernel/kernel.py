"""Kernel, an operation with the configs that it can run with, and Invocation, one call of it."""

import abc
import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, cast

import jax

from tilewright.ops.kernel.arrays import abstract, is_symbolic, random_array
from tilewright.ops.kernel.builds import Build
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.kernel.names import claim
from tilewright.ops.kernel.parts import Arguments, OraclePart, Product
from tilewright.ops.types import Cfg, Device, Direction, MappedAxis, Out
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import source_fingerprint
from tilewright.ops.utils.hook import Hook
from tilewright.ops.utils.serialize import canonical_json, tagged, untagged

_LIVE: "weakref.WeakValueDictionary[tuple[str, str], Kernel[Any, Any]]" = weakref.WeakValueDictionary()


class KernelExecutor(Protocol):
    """The interface of an executor that kernels use."""

    def __call__(self, kernel: "Kernel[Cfg, Out]", *args: object, cfg: object = None, **kwargs: object) -> Out: ...

    def gradients(
        self,
        kernel: "Kernel[Any, Any]",
        wanted: Sequence[str],
        residuals: object,
        cotangents: tuple[Any, ...],
        *args: object,
        cfg: object = None,
        **kwargs: object,
    ) -> list[Any]: ...


DEFAULT_EXECUTOR: Hook[Callable[[], KernelExecutor]] = Hook("the default executor")
"""The executor behind ``kernel(...)``."""


class Kernel(abc.ABC, Generic[Cfg, Out]):
    """An operation that can run in several ways, with the configs worth trying.

    ``run`` and ``heuristic_cfg`` must be implemented; the other methods have defaults. The following are optional, and
    ``None`` where a subclass does not define them:

    - ``run_triton``, ``run_pallas``, ``run_cuda``, ``run_xla``: like ``run``, for one platform.
    - ``custom_vjp(primals, cfg, kwargs, cotangents)``: gradients, recomputing what they need.
    - ``forward_with_residuals(*args, cfg, **kwargs) -> (out, residuals)`` and
      ``backward(residuals, cotangents, *args, cfg, **kwargs)``: gradients from what the forward kept. If it has a
      keyword parameter ``wanted``, it gets the names of the arguments whose gradients are used; others may be None.
    - ``part_results(*args, cfg, **kwargs)`` and ``part_gradients(residuals, cotangents, *args, cfg, **kwargs)``: what a
      device computes of its part of a call that is split over automatic mesh axes; see ``automatic_cfg``.
    - ``outputs_of_residuals(residuals, *args, **kwargs)``: the outputs, if they are elementwise in the residuals; the
      arrays of the call are abstract. ``jax.checkpoint`` then keeps only these.
    - ``reference(*args, **kwargs)``: a plain ``jax.numpy`` oracle; tuning checks every candidate against it.

    ``cotangents`` is a tuple with one entry per output. Gradients are returned as a tuple with one entry per positional
    argument (``None`` for an argument without a gradient), or as a dict by argument name, which may also name keyword
    arrays. Without either form JAX differentiates ``run`` with a config that is chosen at that time: a ``vmap`` around
    the derivative is not seen. The shapes of outputs and residuals must not depend on the config, and ``run`` must be
    traceable by ``jax.jit``.

    All kernels of one class and name share their configs. Anything else on which the best config depends, such as a
    number given to ``__init__``, must be part of the name.

    Attributes:
      name: identifies the kernel in cache keys and in the labels of lowered programs.
      version: changing it invalidates every cached config.
      run_is_forward: True if ``run`` returns what ``forward_with_residuals`` returns without the residuals, so that
        both can share one lowering.
      linear: the names of arguments in which the outputs are linear, by factors that have no gradient. So no derivative
        reads them: it gets zeros in their place, and nothing keeps them for a backward pass.

    Raises:
      ValueError: another class has the name and version. A class that is defined again, as when a notebook cell runs
        twice, replaces the previous one, whose configs are removed from memory.
    """

    run_is_forward: ClassVar[bool] = False
    linear: ClassVar[frozenset[str]] = frozenset()

    reference: Callable[..., Any] | None = None
    forward_with_residuals: Callable[..., tuple[Any, Any]] | None = None
    backward: Callable[..., Any] | None = None
    outputs_of_residuals: Callable[..., Any] | None = None
    part_results: Callable[..., Any] | None = None
    part_gradients: Callable[..., Any] | None = None
    custom_vjp: Callable[..., Any] | None = None
    run_triton: Callable[..., Any] | None = None
    run_pallas: Callable[..., Any] | None = None
    run_cuda: Callable[..., Any] | None = None
    run_xla: Callable[..., Any] | None = None

    def __init__(self, name: str | None = None, *, version: str = "0"):
        if not (name is None or isinstance(name, str)) or not isinstance(version, str):
            raise TypeError(f"{name=} and {version=} of a kernel must be strings")
        self.name = name or f"{type(self).__module__}.{type(self).__qualname__}"
        self.version = version
        claim(self.name, version, type(self))
        _LIVE[self.name, version] = self

    @abc.abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Out:
        """Computes the operation with one config, the keyword argument ``cfg``."""

    @abc.abstractmethod
    def heuristic_cfg(self, inv: "Invocation[Cfg, Out]") -> Cfg:
        """The config to use when nothing was measured; may read only shapes, dtypes and the device."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Validates and canonicalises the arguments of a call; the only place that knows the argument list.

        Returns ``(args, kwargs)``, all of which is in the key.
        """
        return args, kwargs

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """A function that computes a call by calls of other kernels on the devices' parts of its arrays.

        ``None``, the default, for a call that is computed as it is. Asked with the caller's arguments, whose types may
        split them over a mesh such that devices must exchange more than sums.
        """
        return None

    # The form of a call: positional and keyword arguments, unless a class of kernels has one of its own.

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """The prepared arguments of a call, with which ``run`` and all other methods are called."""
        given, named = self.prepare(*args, **kwargs)
        return tuple(given), dict(named)

    def named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Prepared arguments by the names by which gradients are returned, in the order of a call's arrays."""
        return [*zip(self._names(len(args)), args, strict=True), *kwargs.items()]

    def _names(self, count: int) -> list[str]:
        """The names of the first ``count`` positional arguments after ``prepare``."""
        for method in (self.run, self.prepare):
            parameters = inspect.signature(method).parameters.values()
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            if len(names) >= count:
                return names[:count]
        return [f"args[{i}]" for i in range(count)]

    def described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The part of the prepared arguments that is in the key, in positional and named values."""
        return args, kwargs

    def of_described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The inverse of ``described``."""
        return args, kwargs

    def former_descriptions(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Arguments]:
        """The forms of ``described`` in keys of earlier versions, the latest first."""
        return ()

    def config_space(self, inv: "Invocation[Cfg, Out]") -> Iterable[Cfg]:
        """The configs worth measuring."""
        return [self.heuristic_cfg(inv)]

    def sample_inputs(self, inv: "Invocation[Cfg, Out]", key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arrays of the invocation's shapes; integers are 0 or 1."""
        leaves, treedef = jax.tree_util.tree_flatten((inv.abstract_args, inv.abstract_kwargs))
        keys = jax.random.split(key, max(1, len(leaves)))
        drawn = [random_array(k, leaf) for k, leaf in zip(keys, leaves, strict=False)]
        args, kwargs = jax.tree_util.tree_unflatten(treedef, drawn)
        return args, kwargs

    def resolve_config(self, cfg: object, inv: "Invocation[Cfg, Out]") -> Cfg | None:
        """Translates a config given by the caller for an invocation; ``None`` leaves its direction to selection."""
        return cast("Cfg", cfg)

    def config_type(self, inv: "Invocation[Cfg, Out]") -> type[Cfg]:
        """The type of a call's configs, to read them from a file; imports the classes of their fields."""
        return type(self.heuristic_cfg(inv))

    def types_cfg(self, *, is_split: bool) -> Cfg | None:
        """A config that stands for any in a trace, if the kernel declares its results; ``None``: the heuristic does.

        Its code has the outputs and residuals of every config's and is never lowered, so it need not compute them.

        Args:
          is_split: True if the type of an array is split over mesh axes, and so may be the results'.
        """
        return None

    def automatic_cfg(self, selector: Any) -> Cfg | None:
        """A config whose code is split by XLA over automatic mesh axes; ``None`` if the kernel cannot say how.

        Args:
          selector: chooses the configs of a device's part.
        """
        return None

    def xla_split_cfg(self, inv: "Invocation[Cfg, Out]") -> Cfg | None:
        """A config of operations that XLA splits over automatic mesh axes by itself; ``None`` if all of them are.

        It takes the place of ``automatic_cfg`` on devices whose compiler does not ask how a call is split.
        """
        return None

    def check_contents(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_traced: bool) -> None:
        """Raises for arguments whose numbers are known and that no call can mean; called at every call.

        It must not wait for a device, nor take long.

        Args:
          is_traced: True if an array of the call is traced; then it must read no array of JAX.
        """

    # Tuning, checking and explaining a call.

    measured_with_gradients: ClassVar[bool] = False
    """True if a candidate's time is that of its results and of JAX's derivative of it together."""

    takes_near_shapes: ClassVar[bool] = True
    """True if the config that a table which ships has for a near shape is a better guess than the heuristic's."""

    def unmeasurable(self, inv: "Invocation[Cfg, Out]") -> str:
        """The reason why a call cannot be measured in this process; empty if it can."""
        return ""

    def measured_on(self, inv: "Invocation[Cfg, Out]") -> jax.sharding.Mesh | None:
        """The mesh on which a call of each of its devices is measured, inside ``shard_map``; ``None``: one device."""
        return None

    def config_reasons(self, inv: "Invocation[Cfg, Out]", cfg: object) -> Sequence[str]:
        """Reasons why a config cannot run the call; a cached config with reasons is a miss, a candidate is not
        measured.
        """
        return ()

    def adapted_config(self, inv: "Invocation[Cfg, Out]", cfg: Cfg) -> Cfg:
        """The config that runs in place of one that was measured elsewhere: that one, by default."""
        return cfg

    def config_bound_ms(self, inv: "Invocation[Cfg, Out]", cfg: Cfg) -> float:
        """A lower bound of the call's time in milliseconds with a config that can run it; 0 if unknown.

        A candidate whose bound exceeds another's measured time is not measured.
        """
        return 0.0

    def time_bound_ms(self, inv: "Invocation[Cfg, Out]") -> float:
        """A lower bound in milliseconds below which a measurement is not credible; 0 if unknown."""
        return 0.0

    def config_builds(self, inv: "Invocation[Cfg, Out]", cfg: Cfg) -> Sequence[Build]:
        """The builds, taking a compiler minutes, that a config which can run the call needs, already made or not.

        Without tuning, a config with missing builds is not chosen; tuning makes them in the background.
        """
        return ()

    def preferred_cfg(self, inv: "Invocation[Cfg, Out]") -> Cfg | None:
        """The config that ``heuristic_cfg`` would return if everything were built; ``None`` if it is the same."""
        return None

    def oracle_parts(self, inv: "Invocation[Cfg, Out]") -> Sequence[OraclePart]:
        """The parts to check separately if the reference of the whole call would not fit into memory; empty for the
        whole.
        """
        return ()

    def tolerance_factor(self, inv: "Invocation[Cfg, Out]") -> float:
        """The allowed error as a multiple of the oracle's own error in the input dtype."""
        return 2.0

    def rejection_reasons(
        self, inv: "Invocation[Cfg, Out]", cfg: Cfg, measured: Sequence[Candidate]
    ) -> Mapping[str, Sequence[str]]:
        """The reasons why each other backend was not chosen, for ``explain``.

        Args:
          measured: the candidates of the call's last tuning, if the disk cache has one.
        """
        return {}

    def advice(self, inv: "Invocation[Cfg, Out]", cfg: Cfg) -> Sequence[str]:
        """Changes to a call that would make it faster, one sentence each, for ``explain``."""
        return ()

    # Dependencies of its configs and its code.

    def source(self, cfg: Cfg) -> str:
        """A hash of the code that the time of a config depends on; by default of the source of its class."""
        return source_fingerprint(type(self))

    def lowering_packages(self, cfg: Cfg) -> tuple[str, ...]:
        """The top-level packages besides JAX whose sources determine the lowering of a config.

        The lowering is then stored on disk for other processes; without packages it is not.
        """
        return ()

    # Differentiation.

    def product(self, *args: Any, **kwargs: Any) -> Product | None:
        """The matmul whose results a policy of ``jax.checkpoint`` shall take the outputs and residuals for, if any.

        Its arguments are the prepared ones, with abstract arrays.
        """
        return None

    def no_gradient(self) -> str:
        """The reason why calls cannot be differentiated; empty if they can."""
        return ""

    def forward_mode_cfg(self, inv: "Invocation[Cfg, Out]") -> Cfg | None:
        """A config whose code JAX can differentiate in forward mode; ``None`` if there is none.

        Only used for kernels with gradients of their own.
        """
        return None

    def __call__(self, *args: object, cfg: object = None, **kwargs: object) -> Out:
        return DEFAULT_EXECUTOR.function()(self, *args, cfg=cfg, **kwargs)

    def gradients(
        self,
        wanted: Sequence[str],
        residuals: object,
        cotangents: tuple[Any, ...],
        *args: object,
        cfg: object = None,
        **kwargs: object,
    ) -> list[Any]:
        """The gradients of the arguments ``wanted``, in the order of the call's arrays, from given residuals.

        For a caller that knows more than one call does, such as the softmax's statistics over several of them. The
        config is that of the call's backward pass.

        Args:
          residuals: in the form that ``forward_with_residuals`` returns.
          cotangents: one for each output.
        """
        run = DEFAULT_EXECUTOR.function().gradients
        return run(self, wanted, residuals, cotangents, *args, cfg=cfg, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, version={self.version!r})"


@dataclasses.dataclass(frozen=True)
class Invocation(Generic[Cfg, Out]):
    """One call of a kernel, as selection sees it.

    The executor sets ``args`` and ``kwargs`` to the result of ``prepare``, with a ``ShapeDtypeStruct`` in place of each
    array, so that a stored invocation keeps no array alive.

    Attributes:
      metadata: any value of the caller's; not part of the key.
      direction: the direction that the config is for.
      mapped: the ``vmap`` axes around the call, outermost first; shapes in ``args`` are those of one element.
      device: the device that it will run on; ``None`` is the default device.
    """

    kernel: Kernel[Cfg, Out]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Any = None
    direction: Direction = "forward"
    mapped: tuple[MappedAxis, ...] = ()
    device: Device | None = None

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        if not isinstance(self.args, tuple | list) or not isinstance(self.kwargs, Mapping):
            raise TypeError(f"{self.args=} must be a tuple and {self.kwargs=} a mapping")
        if self.direction not in ("forward", "backward"):
            raise ValueError(f"{self.direction=} must be 'forward' or 'backward'")

    @functools.cached_property
    def abstract_args(self) -> tuple[Any, ...]:
        args: tuple[Any, ...] = jax.tree.map(abstract, tuple(self.args))
        return args

    @functools.cached_property
    def abstract_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = jax.tree.map(abstract, dict(self.kwargs))
        return kwargs

    @functools.cached_property
    def memo(self) -> dict[str, Any]:
        """The kernel's memo of facts about the call, computed once; not compared."""
        return {}

    @functools.cached_property
    def target(self) -> Device:
        """The device, or the default one if none was given."""
        return self.device or current_device()

    @property
    def device_fingerprint(self) -> str:
        return self.target.fingerprint

    @functools.cached_property
    def is_symbolic(self) -> bool:
        """True with symbolic dimensions of ``jax.export``: such a call cannot be measured."""
        leaves = jax.tree.leaves((self.abstract_args, self.abstract_kwargs))
        sizes = (size for leaf in leaves for size in getattr(leaf, "shape", ()))
        return is_symbolic(*sizes, *(axis.size for axis in self.mapped))

    @functools.cached_property
    def key(self) -> str:
        """The key of the call in the caches, as canonical JSON.

        Raises:
          TypeError: a static argument, such as a lambda, has no form by which another process could recognise it.
        """
        return self._key(self.description)

    @functools.cached_property
    def former_keys(self) -> tuple[str, ...]:
        """The keys of the call in earlier versions, the latest first."""
        former = self.kernel.former_descriptions(self.abstract_args, self.abstract_kwargs)
        return tuple(self._key(self._described(*arguments)) for arguments in former)

    def _key(self, description: Mapping[str, Any]) -> str:
        kernel = self.kernel
        facts = {"op": kernel.name, "version": kernel.version, "direction": self.direction}
        return canonical_json({**facts, "device": self.device_fingerprint, **description})

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """The arguments as plain JSON data, from which ``abstract_args`` and ``abstract_kwargs`` can be rebuilt."""
        return self._described(*self.kernel.described(self.abstract_args, self.abstract_kwargs))

    def _described(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        mapped = [[tagged(axis.size), [int(m) for m in axis.mapped]] for axis in self.mapped]
        return {
            "args": tagged(args),
            "kwargs": tagged(dict(kwargs)),
            **({"mapped": mapped} if mapped else {}),
        }

    @classmethod
    def of_description(
        cls,
        kernel: Kernel[Any, Any],
        description: Mapping[str, Any],
        direction: Direction,
        device: Device | None = None,
    ) -> "Invocation[Any, Any]":
        """Rebuilds the invocation from its ``description``.

        Raises:
          ValueError: the description is malformed, or names something that cannot be found.
        """
        mapped = tuple(MappedAxis(size, tuple(bool(m) for m in flags)) for size, flags in description.get("mapped", ()))
        args, kwargs = kernel.of_described(untagged(description["args"]), untagged(description["kwargs"]))
        return cls(kernel, args, kwargs, direction=direction, mapped=mapped, device=device)

    def abstract(self) -> "Invocation[Cfg, Out]":
        """A copy of the invocation without array values."""
        return dataclasses.replace(self, args=self.abstract_args, kwargs=self.abstract_kwargs)

    def backward(self) -> "Invocation[Cfg, Out]":
        """The invocation of the backward pass of this call."""
        return dataclasses.replace(self, direction="backward")


def check_kernel(kernel: object) -> None:
    """Raises unless it is an instance of ``Kernel``."""
    if not isinstance(kernel, Kernel):
        raise TypeError(f"{kernel=} must be an instance of a subclass of Kernel")


@contextlib.contextmanager
def errors_naming(kernel: Kernel[Any, Any]) -> Iterator[None]:
    """Prefixes the kernel's name to errors about wrong arguments."""
    with errors_naming_function(kernel.name):
        yield


@contextlib.contextmanager
def errors_naming_function(name: str) -> Iterator[None]:
    """Prefixes a function's name to errors about wrong arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if error.args and isinstance(error.args[0], str) and not error.args[0].startswith(name):
            error.args = (f"{name}: {error.args[0]}", *error.args[1:])
        raise


def live_kernel(name: str, version: str) -> Kernel[Any, Any] | None:
    """The newest live kernel of that name and version in this process."""
    return _LIVE.get((name, version))
