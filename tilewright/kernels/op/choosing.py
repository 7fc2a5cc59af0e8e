"""The choice of a backend and of its params for a call: reasons, preference, given configs, bounds, explanations."""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.kernels.op.backend import Backend, Loaded, one_line
from tilewright.kernels.op.choice import DECLARED, Choice, CommonConfig, PerDirection, Platform
from tilewright.kernels.op.footprint import Footprint, busy_share, launch_reasons
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.op import Op
from tilewright.kernels.op.roofline import Cost, min_ms
from tilewright.kernels.op.xla_flags import wants_repeatable
from tilewright.ops.kernel.builds import Build, missing_builds
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.sources import imported, sources_fingerprint

type AnyBackend = Backend[Any, Any, Any, Any]
type Call = Invocation[Choice, Any]

_REPEATS = "the same bits in every run, as XLA_FLAGS want"
_OP = __name__.rpartition(".")[0]
_KERNELS, _PACKAGE = _OP.rpartition(".")[0], _OP.partition(".")[0]
_PLATFORMS = frozenset(str(platform) for platform in Platform)


@dataclasses.dataclass(frozen=True, eq=False)
class Rejected(Mapping[str, tuple[str, ...]]):
    """Reasons by the names of backends, found also under all words that ``platform`` takes for them.

    Attributes:
      names: the name of the backend that each other word stands for, such as "cuda:cudnn".
    """

    reasons: Mapping[str, tuple[str, ...]]
    names: Mapping[str, str]

    def __getitem__(self, word: str) -> tuple[str, ...]:
        return self.reasons[word if word in self.reasons else self.names.get(word, word)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)


class ChoosingOp[Inputs: OpInputs, Results](Op[Inputs, Results], abc.ABC):
    """An op whose config is a ``Choice`` among its backends."""

    def heuristic_cfg(self, inv: Call) -> Choice:
        """The best choice that needs no build first, or else the best one."""
        # A build may take minutes of nvcc, so without measurements a call prefers a backend that is built.
        for each in itertools.chain([self.preferred_cfg(inv)], self._by_preference(inv)):
            if not missing_builds(self.config_builds(inv, each)):
                return each
        return self.preferred_cfg(inv)

    def preferred_cfg(self, inv: Call) -> Choice:
        """The best choice, whether it must be built first or not; computed once for what XLA's flags want."""
        key = "preferred repeatable" if wants_repeatable() else "preferred"
        if key not in inv.memo:
            inv.memo[key] = next(self._by_preference(inv))
        found: Choice = inv.memo[key]
        return found

    def config_space(self, inv: Call) -> Iterable[Choice]:
        """The heuristic choice of every backend, so that any budget reaches each; then all their candidates."""
        inputs, choices = self.inputs_of(inv), list(self._by_preference(inv))
        yield from choices
        for choice in choices:
            for params in _candidates(self.backends.of(choice), inputs, inv.target, inv.direction):
                yield dataclasses.replace(choice, params=params)

    # Configs that a caller, a cache or a table gives.

    def config_type(self, inv: Call) -> type[Choice]:
        list(self.backends)  # their modules define the params
        return Choice

    def resolve_config(self, cfg: object, inv: Call) -> Choice | None:
        """Resolves a config that the caller gave, for one direction.

        Takes a ``Choice``, one for each direction, a ``KernelConfig``, or bare params, which go to the first
        backend with that type. A ``Choice`` with the other direction's params leaves this direction to
        selection.

        Raises:
          TypeError: the config is none of these, or has params of another backend.
          UnsupportedError: the backend that it names cannot serve the call.
        """
        if isinstance(cfg, PerDirection):
            part = cfg.forward if inv.direction == "forward" else cfg.backward
            return None if part is None else self.resolve_config(part, inv)
        if isinstance(cfg, CommonConfig):
            found = ((choice, self.backends.of(choice)) for choice in self._by_preference(inv))
            return cfg.chosen(((c, each.platform, _params_types(each, inv.direction)[0]) for c, each in found), inv)
        if isinstance(cfg, Choice):
            return self._checked_choice(self._by_name(cfg, inv), inv)
        for choice in self._by_preference(inv):
            expected, other = _params_types(self.backends.of(choice), inv.direction)
            if isinstance(cfg, expected):
                return dataclasses.replace(choice, params=cfg)
            if isinstance(cfg, other):
                return None
        raise TypeError(
            f"{cfg=} of type {type(cfg).__name__} is no config of {self.name}; give a "
            f"Choice(backend, params), PerDirection(forward, backward), a KernelConfig, or bare params"
        )

    def _by_name(self, choice: Choice, inv: Call) -> Choice:
        """The choice; if it has a platform for a backend, with the first one there that can serve the call."""
        if self.backends.find(choice) is not None:
            return choice
        word = self.backends.word(choice.backend) or choice.backend
        there = [each for each in self.backends if each.is_meant_by(word)]
        able = [each for each in there if not self._reasons_of(each, inv)]
        # Of those that cannot serve the call the first one tells why.
        return next((dataclasses.replace(choice, backend=each.name) for each in able or there), choice)

    def _checked_choice(self, choice: Choice, inv: Call) -> Choice | None:
        backend = self.backends.of(choice)
        expected, other = _params_types(backend, inv.direction)
        # Some backends take params of one type in both directions, and those are for this direction, too.
        if isinstance(choice.params, other) and not isinstance(choice.params, expected):
            return None
        if not isinstance(choice.params, expected):
            raise TypeError(f"{choice.params=} must be of type {expected.__name__} for {choice.backend!r}")
        why = self._backend_reasons(backend, inv)
        if why:
            raise UnsupportedError(f"{self.name} ({inv.direction})", {choice.backend: why})
        return choice

    def config_reasons(self, inv: Call, cfg: object) -> list[str]:
        """Reasons why a config that once fitted this call cannot run it here and now; a cache may hold anything."""
        if not isinstance(cfg, Choice):
            return [f"a Choice was expected, got {type(cfg).__name__}"]
        backend = self.backends.find(cfg)
        if backend is None:
            return [f"{self.name} has no backend {cfg.backend!r} that can be loaded here"]
        inputs = self.inputs_of(inv)
        why, allowed = _reasons(backend, inputs, inv), self._allowed(inv)
        if allowed is not None and not any(map(Loaded(backend.name, backend).is_meant_by, allowed)):
            why = [*why, f"the caller wants one of {', '.join(allowed)}"]
        if why:
            return why
        expected = _params_types(backend, inv.direction)[0]
        if not isinstance(cfg.params, expected):
            return [f"params of type {expected.__name__} were expected, got {cfg.params!r}"]
        # Footprints come last: they are defined only for params that can serve the call.
        why = backend.config_reasons(inputs, inv.target, inv.direction, cfg.params)
        return why or _repeat_reasons(backend, cfg.params) or launch_reasons(self._footprints(inv, cfg), inv.target)

    def adapted_config(self, inv: Call, cfg: Choice) -> Choice:
        """The form of a measured config that repeats bit for bit, if it has one and XLA's flags want that."""
        backend = self.backends.find(cfg)
        fields = dataclasses.fields(cfg.params) if dataclasses.is_dataclass(cfg.params) else ()
        if (
            backend is None
            or not _repeat_reasons(backend, cfg.params)
            or "deterministic" not in {f.name for f in fields}
        ):
            return cfg
        return dataclasses.replace(cfg, params=dataclasses.replace(cfg.params, deterministic=True))

    # Bounds and builds.

    def time_bound_ms(self, inv: Call) -> float:
        """A lower bound of the call's milliseconds on its device; a measurement below it is not credible."""
        return self._min_ms(inv, 1.0)

    def config_bound_ms(self, inv: Call, cfg: Choice) -> float:
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

    def _min_ms(self, inv: Call, share: float) -> float:
        """A lower bound of the call's milliseconds on a share of the device's multiprocessors."""
        min_cost = self.min_cost(inv)
        times = math.prod(axis.size for axis in inv.mapped)
        # Only the arithmetic is slowed by idle multiprocessors. How much bandwidth a few of them can use is not known,
        # and a lower bound must not be too high.
        return min_ms(Cost(times * min_cost.flops / share, times * min_cost.bytes), inv.target)

    def _footprints(self, inv: Call, cfg: Choice) -> Sequence[Footprint]:
        return self.backends.of(cfg).footprints(self.inputs_of(inv), inv.target, inv.direction, cfg.params)

    def config_builds(self, inv: Call, cfg: Choice) -> Sequence[Build]:
        """The builds that a config needs to run the call, already made or not."""
        return self.backends.of(cfg).builds(self.inputs_of(inv), inv.target, inv.direction, cfg.params)

    def all_builds(self, device: Device) -> Sequence[Build]:
        """Every build that `config_builds` may return for calls on a device."""
        return [build for each in self.backends.usable for build in each.all_builds(device)]

    # What a config's measurements and its lowering depend on.

    def source(self, cfg: Choice) -> str:
        """A hash of the modules of the op, of the backend's module, and of all the kernels that this one imports."""
        backend = self.backends.find(cfg)
        if backend is None:
            return ""
        own = frozenset(kind.__module__ for kind in type(self).__mro__ if issubclass(kind, ChoosingOp))
        modules = {type(backend).__module__, backend.late_import.partition(":")[0]}
        return _source(own, frozenset(modules), self._packages(backend))

    def lowering_packages(self, cfg: Choice) -> tuple[str, ...]:
        """The packages whose sources determine the lowering of a config; empty if it must not be stored on disk."""
        backend = None if cfg == DECLARED else self.backends.find(cfg)
        if backend is None or not backend.keeps_lowering:
            return ()
        return tuple(sorted(self._packages(backend)))

    def _packages(self, backend: AnyBackend) -> frozenset[str]:
        """This package and those of the op and its backend, which may be others."""
        return frozenset(kind.__module__.partition(".")[0] for kind in (ChoosingOp, type(self), type(backend)))

    # Reasons and preference.

    def reasons(self, inv: Call) -> dict[str, list[str]]:
        """All reasons why each backend cannot serve a call, whatever platforms the caller allows."""
        return {each.name: self._reasons_of(each, inv) for each in self.backends}

    def _reasons_of(self, loaded: Loaded, inv: Call) -> list[str]:
        return [loaded.error] if loaded.backend is None else self._backend_reasons(loaded.backend, inv)

    def _backend_reasons(self, backend: AnyBackend, inv: Call) -> list[str]:
        return _reasons(backend, self.inputs_of(inv), inv)

    def _allowed(self, inv: Call) -> tuple[str, ...] | None:
        """The platforms and backends that the caller allows, in order of preference; ``None`` for any."""
        return self.inputs_of(inv).platform

    def _by_preference(self, inv: Call) -> Iterator[Choice]:
        """Yields the heuristic choices of every backend that can serve a call, best first.

        A later backend is neither loaded nor asked before it is needed.

        Raises:
          UnsupportedError: no backend can serve the call.
        """
        allowed, inputs, found = self._allowed(inv), self.inputs_of(inv), set[str]()
        # Deprioritised backends come last within a platform only: the caller's order of platforms is never changed.
        for platform in (None,) if allowed is None else allowed:
            last = []
            for loaded in self.backends.best_first(inv.target):
                each = loaded.backend
                if each is None or each.name in found or not (platform is None or loaded.is_meant_by(platform)):
                    continue
                if _reasons(each, inputs, inv):
                    continue
                found.add(each.name)
                if each.deprioritized(inputs, inv.target, inv.direction):
                    last.append(each)
                else:
                    yield _choice_of(each, inputs, inv)
            for each in last:
                yield _choice_of(each, inputs, inv)
        if not found:
            raise self._unsupported(inv)

    def _unsupported(self, inv: Call) -> UnsupportedError:
        allowed, reasons = self._allowed(inv), self.reasons(inv)
        if allowed is not None:
            meant = {each.name for each in self.backends if self._may_be_meant(each, allowed)}
            reasons = {name: why for name, why in reasons.items() if name in meant}
            absent = [word for word in allowed if not any(each.is_meant_by(word) for each in self.backends)]
            reasons |= {str(word): [f"{self.name} has no backend for it here"] for word in absent}
        return UnsupportedError(f"{self.name} ({inv.direction})", {n: why for n, why in reasons.items() if why})

    def _may_be_meant(self, loaded: Loaded, allowed: Sequence[str]) -> bool:
        """True if the caller allows a backend, or might: of one that cannot be loaded the platform is not known."""
        if any(map(loaded.is_meant_by, allowed)):
            return True
        return loaded.backend is None and loaded.name not in _PLATFORMS and not _PLATFORMS.isdisjoint(allowed)

    # Explanations.

    def rejection_reasons(self, inv: Call, cfg: Choice, measured: Sequence[Any]) -> Mapping[str, tuple[str, ...]]:
        """The reasons against every backend but the chosen one, or its result in the call's last tuning."""
        others = {name: tuple(why) for name, why in self.reasons(inv).items() if name != cfg.backend}
        order = [] if all(others.values()) else list(self._by_preference(inv))
        found = {name: why or (self._why_not(name, inv, cfg, order, measured),) for name, why in others.items()}
        return Rejected(found, {each.word: each.name for each in self.backends})

    def _why_not(self, name: str, inv: Call, cfg: Choice, order: Sequence[Choice], measured: Sequence[Any]) -> str:
        """The reason why a backend that can serve a call was not chosen; ``order`` is that without tuning."""
        names = [each.backend for each in order]
        if name not in names:
            return f"supported, but excluded by platform={', '.join(self._allowed(inv) or ())} of the call"
        if result := _measured(name, measured, cfg):
            return result
        choice = order[names.index(name)]
        if cfg.backend not in names[: names.index(name)]:
            commands = dict.fromkeys(
                f"`{each.command(self.name)}`" for each in missing_builds(self.config_builds(inv, choice))
            )
            if commands:
                return f"supported, but nvcc must compile it first: {' and '.join(commands)}"
            return "supported, but not preferred: nothing measured it as faster"
        if self.backends.of(choice).deprioritized(self.inputs_of(inv), inv.target, inv.direction):
            return "supported, but probably slower for these shapes: nothing measured it as faster"
        return f"supported, but behind {cfg.backend} in the order of preference: nothing measured it as faster"


@functools.cache
def _source(own: frozenset[str], backend: frozenset[str], packages: frozenset[str]) -> str:
    """A hash of an op's own modules, and of those of a backend with all that they import from some packages."""

    def counts(module: str) -> bool:
        top = module.partition(".")[0]
        if top != _PACKAGE:
            return top in packages
        # What all ops are made with makes none of their configs faster than another.
        return module.startswith(f"{_KERNELS}.") and not f"{module}.".startswith(f"{_OP}.")

    found = imported(backend, counts)
    return sources_fingerprint(found | imported(own, lambda module: module in own and counts(module)))


def _reasons(backend: AnyBackend, inputs: OpInputs, inv: Call) -> list[str]:
    if inv.is_symbolic and not backend.symbolic_dimensions:
        return ["its programs are for given shapes, got symbolic dimensions of jax.export"]
    try:
        why = backend.not_supported_reasons(inputs, inv.target, inv.direction)
        if why or not wants_repeatable() or _first_params(backend, inputs, inv.target, inv.direction) is not None:
            return why
        return [f"none of its configs gives {_REPEATS}"]
    # Exception: a probe queries drivers and libraries, which may raise anything; the other backends still run.
    except Exception as error:
        return [f"its probe failed: {one_line(error)}"]


def _choice_of(backend: AnyBackend, inputs: OpInputs, inv: Call) -> Choice:
    """A backend's heuristic choice."""
    params = _first_params(backend, inputs, inv.target, inv.direction)
    return Choice(backend.name, params)


def _first_params(backend: AnyBackend, inputs: OpInputs, device: Device, direction: Direction) -> Any:
    """The heuristic params, or the first candidate if they do not repeat as they should; None if none does."""
    params = backend.heuristic(inputs, device, direction)
    if not _repeat_reasons(backend, params):
        return params
    return next(_candidates(backend, inputs, device, direction), None)


def _candidates(backend: AnyBackend, inputs: OpInputs, device: Device, direction: Direction) -> Iterator[Any]:
    """The candidates, without those that do not repeat if they should."""
    candidates = backend.candidates(inputs, device, direction)
    return (params for params in candidates if not _repeat_reasons(backend, params))


def _repeat_reasons(backend: AnyBackend, params: Any) -> list[str]:
    """A reason against params that do not repeat, if XLA's flags want that."""
    return [f"it does not give {_REPEATS}"] if wants_repeatable() and not backend.repeats(params) else []


def _params_types(backend: AnyBackend, direction: Direction) -> tuple[type, type]:
    """The types of params for the direction and for the other one."""
    both = (backend.forward_params, backend.backward_params)
    return both if direction == "forward" else both[::-1]


def _measured(name: str, measured: Sequence[Any], chosen: object) -> str:
    """The result of one backend's candidates in a tuning, relative to the chosen one; empty without any."""
    candidates = [each for each in measured if each.config.backend == name]
    if not candidates:
        return ""
    chosen_ms = next((each.time_ms for each in measured if each.config == chosen and each.eligible), None)
    times = [each.time_ms for each in candidates if each.eligible]
    if not times:
        failed = [each for each in candidates if not each.dropped]
        how = f"every candidate failed: {failed[0].error}" if failed else f"not measured: {candidates[0].error}"
        return f"supported, but {how}"
    distance = "" if not chosen_ms else f", {min(times) / chosen_ms:.3g} times the chosen one's"
    return f"supported, and measured at {min(times):.4g} ms at best{distance}"
