"""Kernel, the unit that declares how it runs and what may be tuned, and Invocation, one call of it."""

import abc
import contextlib
import dataclasses
import functools
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic

import jax
import jax.numpy as jnp

from tilewright.ops.kernel.arrays import abstract, is_symbolic
from tilewright.ops.types import Cfg, Device, Direction, MappedAxis, Out
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.serialize import canonical_json, tagged, untagged

_LIVE: "weakref.WeakValueDictionary[tuple[str, str], Kernel[Any, Any]]" = weakref.WeakValueDictionary()
# The class that has a name and version, and what holds configs by them. A name stays taken when its kernels are gone:
# their configs are still there.
_OWNERS: "dict[tuple[str, str], tuple[str, weakref.ref[type]]]" = {}
_MEMORIES: "weakref.WeakSet[RemembersConfigs]" = weakref.WeakSet()

PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "gpu": ("triton", "cuda", "pallas", "xla"),
    "tpu": ("pallas", "xla"),
    "cpu": ("xla",),
}
"""The platforms of each kind of device, most specific first."""


class Kernel(abc.ABC, Generic[Cfg, Out]):
    """An operation that can run in several ways and knows which ways are worth trying.

    ``run`` and ``heuristic_cfg`` must be implemented; ``prepare``, ``config_space`` and ``sample_inputs`` have
    defaults. The rest is optional and exists only where a subclass defines it:

    - ``run_triton``, ``run_pallas``, ``run_cuda``, ``run_xla``: like ``run``, for one platform.
    - ``custom_vjp(primals, cfg, kwargs, cotangents)``: gradients, recomputing what they need.
    - ``forward_with_residuals(*args, cfg, **kwargs) -> (out, residuals)`` and
      ``backward(residuals, cotangents, *args, cfg, **kwargs)``: gradients from what the forward kept.
    - ``reference(*args, **kwargs)``: a plain ``jax.numpy`` oracle; tuning checks every candidate against it.
    - ``oracle_parts(invocation) -> [OraclePart]``: where the reference of the whole call would not fit into memory, the
      parts to check instead; none for the whole.
    - ``tolerance_factor(invocation) -> float``: how many times the oracle's error in the input dtype is allowed; 2.
    - ``time_bound_ms(invocation) -> float``: below what no measurement of a call can be believed; 0 if that is unknown.
    - ``not_taken(invocation, cfg, measured) -> {name: reasons}``: for ``explain``; ``measured`` are the ``Candidate``s
      of the call's last tuning, if the disk cache has one.
    - ``config_reasons(invocation, cfg) -> [reason]``: why a config cannot run the call; a cached one with reasons is a
      miss, and a candidate with reasons is not measured.
    - ``config_bound_ms(invocation, cfg) -> float``: what a call takes at the least with a config that can run it; a
      candidate that cannot be faster than another was is not measured.
    - ``config_builds(invocation, cfg) -> [Build]``: what a compiler of minutes must have made before a config that can
      run the call runs, made already or not. Without tuning what is not made is not chosen; tuning makes it beside.
    - ``preferred_cfg(invocation) -> Cfg``: what ``heuristic_cfg`` would return if everything were built.
    - ``source() -> str``: a hash of the code that its configs depend on, where the class's own source is not all of it.
    - ``run_is_forward``: true where ``run`` returns what ``forward_with_residuals`` does without the residuals, so that
      both can share what they are lowered to.
    - ``lowering_packages(cfg) -> (name, ...)``: the top-level packages whose sources decide, beside JAX, what a config
      is lowered to; it is then kept on disk for other processes.
    - ``argument_names``: of the prepared positional arguments, where the signature of ``run`` does not say them.

    ``cotangents`` is a tuple with one entry per output. Gradients come as a tuple with one entry per positional
    argument (``None`` for an argument that has none), or as a dict by argument name, which may also name keyword
    arrays. Without either form JAX differentiates ``run``, with a config chosen when that happens: a ``vmap`` around
    the derivative is not seen. The shapes of outputs and residuals must not depend on the config, and ``run`` must be
    traceable by ``jax.jit``.

    All kernels of one class and name share their configs. What else tells two of them apart, such as a number given to
    ``__init__`` on which the best config depends, belongs into the name.

    Attributes:
      name: stands for the kernel in cache keys and in the labels of lowered programs.
      version: a new one makes every cached config miss.

    Raises:
      ValueError: another class has the name and version. A class that was defined again, as when a notebook's cell runs
        twice, takes the place of the one before, whose configs in memory are forgotten.
    """

    def __init__(self, name: str | None = None, *, version: str = "0"):
        if not (name is None or isinstance(name, str)) or not isinstance(version, str):
            raise TypeError(f"{name=} and {version=} of a kernel must be strings")
        self.name = name or f"{type(self).__module__}.{type(self).__qualname__}"
        self.version = version
        _claim(self.name, version, type(self))
        _LIVE[self.name, version] = self

    @abc.abstractmethod
    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Computes the operation with one config."""

    @abc.abstractmethod
    def heuristic_cfg(self, inv: "Invocation[Cfg, Out]") -> Cfg:
        """The config to use when nothing was measured; reads shapes, dtypes and the device only."""

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Validates and canonicalises the arguments of a call; the one place that owns the argument list."""
        return args, kwargs

    def config_space(self, inv: "Invocation[Cfg, Out]") -> Iterable[Cfg]:
        """The configs worth measuring."""
        return [self.heuristic_cfg(inv)]

    def sample_inputs(self, inv: "Invocation[Cfg, Out]", key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arrays of the invocation's shapes; integers are 0 or 1."""
        leaves, treedef = jax.tree_util.tree_flatten((inv.abstract_args, inv.abstract_kwargs))
        keys = jax.random.split(key, max(1, len(leaves)))
        drawn = [random_array(k, leaf) for k, leaf in zip(keys, leaves, strict=False)]
        return jax.tree_util.tree_unflatten(treedef, drawn)

    def directed_cfg(self, cfg: Any, inv: "Invocation[Cfg, Out]") -> Cfg | None:
        """What a config that the caller gave means for an invocation; ``None`` leaves its direction to selection."""
        return cfg

    def __call__(self, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        from tilewright.ops.executor import default_executor  # the executor is built on this module

        return default_executor()(self, *args, cfg=cfg, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, version={self.version!r})"


class RemembersConfigs(abc.ABC):
    """Something that holds configs in memory by the keys of invocations."""

    @abc.abstractmethod
    def forget(self, name: str, version: str) -> None:
        """Drops the configs of the kernels of that name and version."""


def remembers_configs(memory: RemembersConfigs) -> None:
    """Has an object told, as long as it lives, when a kernel's class is replaced."""
    _MEMORIES.add(memory)


def key_is_of(key: Any, name: str, version: str) -> bool:
    """Whether a key is that of an invocation of a kernel of that name and version."""
    try:
        described = json.loads(key)
    except (TypeError, ValueError):
        return False
    return isinstance(described, dict) and (described.get("op"), described.get("version")) == (name, version)


def _claim(name: str, version: str, kind: type) -> None:
    """Makes a class the owner of a name and version.

    Raises:
      ValueError: a class of another qualified name is.
    """
    qualified = f"{kind.__module__}:{kind.__qualname__}"
    owner, known = _OWNERS.get((name, version), (qualified, None))
    if owner != qualified:
        raise ValueError(
            f"the kernel {qualified} has the {name=} and {version=} of {owner}, whose configs it would share; "
            "give it another name or version"
        )
    if known is None or known() is not kind:
        _OWNERS[name, version] = (qualified, weakref.ref(kind))
    if known is not None and known() is not kind:
        for memory in list(_MEMORIES):
            memory.forget(name, version)


def random_array(key: jax.Array, leaf: Any) -> Any:
    """A concrete array for a ``ShapeDtypeStruct``: normal, 0 or 1, or keys; any other leaf as it is."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, leaf.shape) if leaf.shape else key
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or jnp.issubdtype(leaf.dtype, jnp.floating):
        wide = leaf.dtype if leaf.dtype.itemsize >= 2 else jnp.dtype(jnp.bfloat16)  # fp8 has no generator
        return jax.random.normal(key, leaf.shape, wide).astype(leaf.dtype)
    if leaf.dtype == jnp.bool_:
        return jax.random.bernoulli(key, 0.5, leaf.shape)
    return jax.random.randint(key, leaf.shape, 0, 2).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True)
class Invocation(Generic[Cfg, Out]):
    """One call of a kernel: what selection sees.

    The executor fills ``args`` and ``kwargs`` with what ``prepare`` returned, a ``ShapeDtypeStruct`` in place of each
    array, so an invocation that is kept keeps no array alive.

    Attributes:
      metadata: anything the caller wants to remember; takes no part in the key.
      direction: what the config is for.
      mapped: the ``vmap`` axes around the call, outermost first; shapes in ``args`` are those of one element.
      device: where it will run; ``None`` is the default device.
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
        return jax.tree.map(abstract, tuple(self.args))

    @functools.cached_property
    def abstract_kwargs(self) -> dict[str, Any]:
        return jax.tree.map(abstract, dict(self.kwargs))

    @functools.cached_property
    def memo(self) -> dict[str, Any]:
        """What its kernel has worked out about the call, to do so once; takes no part in comparisons."""
        return {}

    @functools.cached_property
    def target(self) -> Device:
        """The device, the default one where none was named."""
        return self.device or current_device()

    @property
    def device_fingerprint(self) -> str:
        return self.target.fingerprint

    @functools.cached_property
    def is_symbolic(self) -> bool:
        """True with symbolic dimensions of ``jax.export``: no such call was ever measured, nor can it be."""
        leaves = jax.tree.leaves((self.abstract_args, self.abstract_kwargs))
        sizes = (size for leaf in leaves for size in getattr(leaf, "shape", ()))
        return is_symbolic(*sizes, *(axis.size for axis in self.mapped))

    @functools.cached_property
    def key(self) -> str:
        """What the caches know the call by: canonical JSON.

        Raises:
          TypeError: a static argument has no form by which another process could recognise it, such as a lambda.
        """
        return canonical_json(
            {
                "op": self.kernel.name,
                "version": self.kernel.version,
                "direction": self.direction,
                "device": self.device_fingerprint,
                **self.description,
            }
        )

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """The arguments as plain JSON data, from which ``abstract_args`` and ``abstract_kwargs`` can be rebuilt."""
        mapped = [[tagged(axis.size), [int(m) for m in axis.mapped]] for axis in self.mapped]
        return {
            "args": tagged(self.abstract_args),
            "kwargs": tagged(self.abstract_kwargs),
            **({"mapped": mapped} if mapped else {}),
        }

    @classmethod
    def of_description(
        cls, kernel: Kernel[Any, Any], said: Mapping[str, Any], direction: Direction, device: Device | None = None
    ) -> "Invocation[Any, Any]":
        """The invocation whose ``description`` is given.

        Raises:
          ValueError: it is malformed, or names something that cannot be found.
        """
        mapped = tuple(MappedAxis(size, tuple(bool(m) for m in which)) for size, which in said.get("mapped", ()))
        args, kwargs = untagged(said["args"]), untagged(said["kwargs"])
        return cls(kernel, args, kwargs, direction=direction, mapped=mapped, device=device)

    def abstract(self) -> "Invocation[Cfg, Out]":
        """The same invocation without array values."""
        return dataclasses.replace(self, args=self.abstract_args, kwargs=self.abstract_kwargs)

    def backward(self) -> "Invocation[Cfg, Out]":
        """The invocation of the backward pass of this call."""
        return dataclasses.replace(self, direction="backward")


def check_kernel(kernel: Any) -> None:
    """Raises unless it is an instance of ``Kernel``."""
    if not isinstance(kernel, Kernel):
        raise TypeError(f"{kernel=} must be an instance of a subclass of Kernel")


def platform_hook(kernel: Kernel[Any, Any], cfg: Any, device: Device) -> Callable[..., Any]:
    """The most specific ``run_<platform>`` for the config's platform or else the device's; ``run`` if there is none."""
    wanted = getattr(cfg, "platform", None)
    names = PLATFORMS.get(device.kind, ()) if wanted in (None, "auto") else (str(wanted),)
    for name in names:
        hook = optional_method(kernel, f"run_{name}")
        if hook is not None:
            return hook
    return kernel.run


@contextlib.contextmanager
def naming(kernel: Kernel[Any, Any]) -> Iterator[None]:
    """What is raised for wrong arguments names the kernel."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if error.args and isinstance(error.args[0], str) and not error.args[0].startswith(kernel.name):
            error.args = (f"{kernel.name}: {error.args[0]}", *error.args[1:])
        raise


def optional_method(kernel: Kernel[Any, Any], name: str) -> Any:
    """A method that a kernel may or may not define; ``None`` if it does not."""
    return getattr(kernel, name, None)


def gradient_form(kernel: Kernel[Any, Any]) -> str | None:
    """ "residuals", "recomputing", or ``None`` where JAX differentiates ``run``.

    Raises:
      TypeError: a kernel defines half of the pair.
    """
    forward, backward = (optional_method(kernel, name) is not None for name in ("forward_with_residuals", "backward"))
    if forward != backward:
        raise TypeError(f"{kernel!r} must define both forward_with_residuals and backward, or neither")
    if forward:
        return "residuals"
    return "recomputing" if optional_method(kernel, "custom_vjp") is not None else None


def argument_names(kernel: Kernel[Any, Any], count: int) -> tuple[str, ...]:
    """The names of the first ``count`` positional arguments after ``prepare``."""
    own = getattr(kernel, "argument_names", None)
    if own is not None:
        return own[:count]
    for method in (kernel.run, kernel.prepare):
        parameters = list(inspect.signature(method).parameters.values())
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(names) >= count:
            return tuple(names[:count])
    return tuple(f"args[{i}]" for i in range(count))


def live_kernel(name: str, version: str) -> Kernel[Any, Any] | None:
    """The newest living kernel of that name and version in this process."""
    return _LIVE.get((name, version))
