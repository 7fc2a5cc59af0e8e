"""The interface of one backend of an op, and the backends that an op has."""

import abc
import dataclasses
import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Never

from tilewright.kernels.op.choice import Choice, Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.op.inputs import OpInputs
from tilewright.ops.kernel.builds import Build
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

type PreferredBackends = Mapping[int, Sequence[str]]
"""Names of backends by the major number of the compute capability on which they go before the others, best first."""

_PLATFORMS = tuple(str(platform) for platform in Platform if platform is not Platform.MESH)


class Backend[Inputs: OpInputs, Results, Forward, Backward](abc.ABC):
    """One backend of one op: final, stateless, without knowledge of selection.

    ``Inputs`` and ``Results`` are the op's types, ``Forward`` and ``Backward`` the types of either direction's params.
    All methods but ``forward`` and ``backward`` get inputs with ``ShapeDtypeStruct`` in place of arrays.

    Attributes:
      name: the one that it has among the backends of its op: a language, a hardware or a library, such as "hopper".
      platform: the word that callers give for it, and for other backends in its language.
      serves: the names of the options that it computes, of both directions or by direction. A call with another option
        is declined: an option is a field of the inputs with a default, and with a value that is not that default.
      forward_params: type of the params of ``forward``.
      backward_params: type of the params of ``backward``.
      forward_mode: True if JAX can differentiate ``forward`` in forward mode.
      symbolic_dimensions: True if shapes may have symbolic dimensions of ``jax.export``.
      late_import: a module that is imported with the first call, since that is too slow for programs that do not run
        this backend; or ``"module:function"`` if the function imports the rest.
      keeps_lowering: store the lowering on disk. That is worth it if lowering takes long, and possible if running the
        lowered code needs nothing from the process that lowered it.
    """

    name: ClassVar[str]
    platform: ClassVar[Platform]
    serves: ClassVar[frozenset[str] | Mapping[Direction, frozenset[str]]] = frozenset()
    forward_params: ClassVar[type] = FwdParams
    backward_params: ClassVar[type] = BwdParams
    forward_mode: ClassVar[bool] = False
    symbolic_dimensions: ClassVar[bool] = False
    late_import: ClassVar[str] = ""
    keeps_lowering: ClassVar[bool] = False

    @abc.abstractmethod
    def reasons(self, inputs: Inputs, device: Device, direction: Direction) -> list[str]:
        """Every reason why this backend cannot serve a call, beside the options that ``serves`` does not name."""

    @abc.abstractmethod
    def candidates(self, inputs: Inputs, device: Device, direction: Direction) -> Iterable[Forward | Backward]:
        """The params worth measuring, best guess first; asked about supported calls only, as ``heuristic`` is."""

    def heuristic(self, inputs: Inputs, device: Device, direction: Direction) -> Forward | Backward:
        """The params to use when nothing was measured: by default the first candidate."""
        return next(iter(self.candidates(inputs, device, direction)))

    def not_supported_reasons(self, inputs: Inputs, device: Device, direction: Direction) -> list[str]:
        """Every reason why this backend cannot serve a call; empty if it can."""
        return [*self.option_reasons(inputs, direction), *self.reasons(inputs, device, direction)]

    def option_reasons(self, inputs: Inputs, direction: Direction) -> list[str]:
        """A reason for each option of a call that this backend does not compute."""
        missing = [name for name in inputs.given() if name not in self.served(direction)]
        return [f"does not serve {_option(name, getattr(inputs, name))}" for name in missing]

    def served(self, direction: Direction) -> frozenset[str]:
        """The names of the options that it computes in a direction."""
        serves = self.serves
        return serves if isinstance(serves, frozenset) else serves.get(direction, frozenset())

    def config_reasons(
        self, inputs: Inputs, device: Device, direction: Direction, params: Forward | Backward
    ) -> list[str]:
        """Every reason why params of the right type cannot serve a supported call; none by default."""
        return []

    def repeats(self, params: Forward | Backward) -> bool:
        """True if params give the same bits in every run: by default what their ``deterministic`` says, if any."""
        return bool(getattr(params, "deterministic", True))

    def deprioritized(self, inputs: Inputs, device: Device, direction: Direction) -> bool:
        """True if other backends are probably faster for the call: they are preferred without measurements."""
        return False

    def footprints(
        self, inputs: Inputs, device: Device, direction: Direction, params: Forward | Backward
    ) -> Sequence[Footprint]:
        """The resources of each matmul kernel that the params launch; empty if unknown."""
        return ()

    def builds(
        self, inputs: Inputs, device: Device, direction: Direction, params: Forward | Backward
    ) -> Sequence[Build]:
        """The builds that params need to run, already made or not; none by default.

        If several may be needed in turn, depending on a compiled variant's facts, the first one not known to be
        unsuitable.
        """
        return ()

    def all_builds(self, device: Device) -> Sequence[Build]:
        """Every build that `builds` may return for calls on a device; none by default."""
        return ()

    @abc.abstractmethod
    def forward(self, inputs: Inputs, params: Forward) -> Results:
        """Computes the results that the op declares (``Op.results``), which are the residuals of all its backends.

        On explicit mesh axes ``inputs`` is one device's part.
        """

    @abc.abstractmethod
    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: Backward) -> dict[str, Any]:
        """Computes ``inputs.gradients``, by field, from any backend's forward results.

        ``cotangents`` has the structure of the results, with ``None`` where nothing flows back. Gradients of fields
        that are not wanted may be among those returned.
        """


class InferenceBackend[Inputs: OpInputs, Results, Forward](Backend[Inputs, Results, Forward, Never], abc.ABC):
    """A backend of an op without gradients."""

    @abc.abstractmethod
    def forward_reasons(self, inputs: Inputs, device: Device) -> list[str]:
        """Every reason why this backend cannot serve a call, beside the options that ``serves`` does not name."""

    def reasons(self, inputs: Inputs, device: Device, direction: Direction) -> list[str]:
        if direction == "backward":
            return ["the op is for inference and has no backward pass"]
        return self.forward_reasons(inputs, device)

    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: Never) -> dict[str, Any]:
        raise NotImplementedError("the op is for inference and has no backward pass")


def _option(name: str, value: object) -> str:
    """An option of a call in words: arrays by their names only."""
    return f"{name}={value}" if value is None or isinstance(value, bool | int | float | str) else name


def one_line(error: Exception) -> str:
    """An exception's type and message in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def load_failure(error: Exception) -> str:
    """The reason why a module cannot be loaded."""
    return f"cannot be loaded: {error if isinstance(error, ImportError | OSError) else one_line(error)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A backend after the attempt to import it.

    Attributes:
      name: the backend's; that of its module or folder if it cannot be loaded.
      error: the reason why it cannot be loaded; empty if it can.
    """

    name: str
    backend: Backend[Any, Any, Any, Any] | None
    error: str = ""

    @property
    def word(self) -> str:
        """The backend with its platform, which is not known of one that cannot be loaded."""
        return self.name if self.backend is None else f"{self.backend.platform}:{self.name}"

    def is_meant_by(self, word: str) -> bool:
        """True if a word of ``Backends.allowed`` means the backend, or its whole platform."""
        if self.backend is None:
            return word.rpartition(":")[2] == self.name
        return word in (self.backend.platform, self.word)


def _room(where: str) -> str:
    """The name of the module of ``"module:Class"``, or of its folder."""
    *folders, module = where.partition(":")[0].split(".")
    return folders[-1] if module == "backend" else module


# Failures are kept as well: what cannot be imported here is not tried again in every call.
@functools.cache
def loaded(where: str) -> Loaded:
    """The backend ``"module:Class"``, imported once a process, or the reason why it cannot be loaded here."""
    path, _, kind = where.partition(":")
    try:
        backend = getattr(importlib.import_module(path), kind)()
    # Exception: a package of an unexpected version may raise anything; the other backends still run.
    except Exception as error:
        return Loaded(_room(where), None, load_failure(error))
    return Loaded(backend.name, backend)


class Backends:
    """The backends of an op, best first; each is imported when it is first reached.

    Attributes:
      where: ``"module:Class"`` of each.
      preferred: those that go before the others on some devices, by the names of their modules or folders.

    Raises:
      ValueError: one is not given in this form.
    """

    def __init__(self, op: str, where: Sequence[str], preferred: PreferredBackends = MappingProxyType({})) -> None:
        if wrong := [each for each in where if not isinstance(each, str) or not all(each.partition(":"))]:
            raise ValueError(f'the backends of {op} must be strings "module:Class", got {wrong}')
        # A dict, as mapping proxies cannot be sent to the process in which an op is tuned.
        self._op, self.where, self.preferred = op, tuple(where), dict(preferred)

    def __iter__(self) -> Iterator[Loaded]:
        # Lazily, so that a backend behind the one that serves a call is not imported.
        return map(loaded, self.where)

    def best_first(self, device: Device) -> Iterator[Loaded]:
        """The backends in the order of preference on a device, each imported when it is reached."""
        preferred = self.preferred.get(device.capability[0], ()) if device.capability else ()
        places = {name: place for place, name in enumerate(preferred)}
        return map(loaded, sorted(self.where, key=lambda where: places.get(_room(where), len(places))))

    def allowed(self, given: object) -> tuple[str, ...] | None:
        """The platforms and backends that may run a call, in order of preference; ``None`` for any.

        This is the one place that reads such words: of platforms ("cuda"), of backends as they are listed by
        explanations and errors ("cudnn"), and of both ("cuda:cudnn"). A word that is both a platform and a backend
        means the platform; "cuda:cuda" is the backend.

        Args:
          given: a word, a sequence of words, ``None`` or "auto": a caller's ``platform``.

        Returns:
          A ``Platform`` for a platform, and the platform and the name for a backend; for one that cannot be loaded,
          and whose platform is not known, the word as it is.

        Raises:
          ValueError: the op has nothing of such a name, which the message lists.
        """
        if given is None or given == "auto":
            return None
        words = (given,) if isinstance(given, str) else given
        found = [self.word(word) for word in words] if isinstance(words, Sequence) else []
        if not found or None in found:
            raise ValueError(
                f"platform={given!r} must be None, 'auto', one of {list(_PLATFORMS)}, one of the backends of "
                f"{self._op}, {[each.word for each in self]}, or a non-empty sequence of them"
            )
        return tuple(word for word in found if word is not None)

    def word(self, given: object) -> str | None:
        """The canonical form of one word of ``allowed``; ``None`` if it means nothing here."""
        if not isinstance(given, str) or given in _PLATFORMS:
            return Platform(given) if isinstance(given, str) else None
        platform, colon, name = given.rpartition(":")
        for each in self:
            fits = not colon or platform == (each.backend.platform if each.backend else platform)
            if each.name == name and fits:
                return given if each.backend is None else each.word
        return None

    @property
    def usable(self) -> Iterator[Backend[Any, Any, Any, Any]]:
        """The backends that can be loaded here."""
        return (each.backend for each in self if each.backend is not None)

    def find(self, choice: Choice) -> Backend[Any, Any, Any, Any] | None:
        """The backend that a choice names, if it can be loaded here."""
        return next((each for each in self.usable if each.name == choice.backend), None)

    def named(self, name: str) -> Backend[Any, Any, Any, Any]:
        """The backend in the module or folder of that name; the others are not imported.

        Raises:
          ValueError: there is none that can be loaded here.
        """
        found = next((loaded(where) for where in self.where if _room(where) == name), None)
        if found is None or found.backend is None:
            why = "" if found is None else f": {found.error}"
            raise ValueError(f"{self._op} has no backend {name!r} that can be loaded here{why}")
        return found.backend

    def of(self, choice: Choice) -> Backend[Any, Any, Any, Any]:
        """The backend that a choice names.

        Raises:
          ValueError: there is none that can be loaded here.
        """
        found = self.find(choice)
        if found is None:
            here = ", ".join(each.word for each in self if each.backend is not None)
            raise ValueError(f"{self._op} has no backend {choice.backend!r} that can be loaded here, only {here}")
        return found
