"""Frequencies of rotary embeddings for contexts longer than a model was first trained with."""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.kernels.op.arguments import flag, number
from tilewright.ops.utils.stable_ids import stable_id

type Rotation = tuple[np.ndarray, float]
"""Frequencies in radians a position, ``float64[dim / 2]``, and the factor by which what was rotated is multiplied."""


def frequencies(base: float, dim: int) -> np.ndarray:
    """The frequencies without scaling, ``base ** (-2i / dim)``."""
    found: np.ndarray = base ** (-np.arange(0, dim, 2) / dim)
    return found


class RopeScaling(abc.ABC):
    """A change of the frequencies. Fields have the names of a model's ``config.json``, and are positive numbers.

    Raises:
      ValueError, TypeError: a field is no finite number, or is negative, or 0 where it is divided by.
    """

    @abc.abstractmethod
    def rotation(self, base: float, dim: int) -> Rotation:
        """The frequencies of ``dim`` elements, and the factor of the result."""

    def __post_init__(self) -> None:
        # Numbers are floats whatever a config spells, so that equal scalings have equal keys.
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _canonical(f"{type(self).__name__}.{field.name}", value))


@functools.cache
def rotation_of(scaling: RopeScaling | None, base: float, dim: int) -> Rotation:
    """The same, also without scaling; computed once, for a call that is not traced reads it twice."""
    return (frequencies(base, dim), 1.0) if scaling is None else scaling.rotation(base, dim)


def _canonical(name: str, value: object) -> float | bool | tuple[float, ...]:
    if isinstance(value, bool | np.bool_):
        return flag(name, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_positive(name, each) for each in value)
    return _positive(name, value)


def _positive(name: str, value: object) -> float:
    found = number(name, value)
    if found < 0.0 or (found == 0.0 and "mscale" not in name):
        raise ValueError(f"{name} must be positive, got {found}")
    return found


@stable_id("tilewright/rope.LinearScaling")
@dataclasses.dataclass(frozen=True, slots=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv 2306.15595): every frequency is divided by ``factor``."""

    factor: float

    def rotation(self, base: float, dim: int) -> Rotation:
        return frequencies(base, dim) / self.factor, 1.0


@stable_id("tilewright/rope.NtkScaling")
@dataclasses.dataclass(frozen=True, slots=True)
class NtkScaling(RopeScaling):
    """NTK-aware scaling with a fixed base, ``base · factor ** (dim / (dim − 2))``.

    The highest frequency stays as it is, and the lowest is divided by ``factor``.
    """

    factor: float

    def rotation(self, base: float, dim: int) -> Rotation:
        return frequencies(base, dim) * self.factor ** (-np.arange(0, dim, 2) / max(dim - 2, 1)), 1.0


@stable_id("tilewright/rope.YarnScaling")
@dataclasses.dataclass(frozen=True, slots=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): low frequencies are divided by ``factor``, high ones stay, those between are blended.

    Attributes:
      original_max_position_embeddings: the length that the model was trained with first, in tokens.
      beta_fast, beta_slow: rotations over that length; frequencies with more than ``beta_fast`` stay as they are, and
        those with fewer than ``beta_slow`` are divided.
      attention_factor: the factor of the result. ``None`` for ``0.1 · ln(factor) + 1``; with both mscales, as DeepSeek
        has them, ``(0.1 · mscale · ln(factor) + 1) / (0.1 · mscale_all_dim · ln(factor) + 1)``.
      truncate: the blend begins and ends at whole frequencies.
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def rotation(self, base: float, dim: int) -> Rotation:
        def index(rotations: float) -> float:
            wavelength = self.original_max_position_embeddings / rotations
            return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # The width of a ramp of no width is that of other implementations.
        divided = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
        plain = frequencies(base, dim)
        return plain / self.factor * divided + plain * (1.0 - divided), self._magnitude()

    def _magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1.0


@stable_id("tilewright/rope.Llama3Scaling")
@dataclasses.dataclass(frozen=True, slots=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's: low frequencies are divided by ``factor``, high ones stay, those between are blended.

    Attributes:
      low_freq_factor, high_freq_factor: rotations over ``original_max_position_embeddings`` below which a frequency is
        divided, and above which it stays.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def __post_init__(self) -> None:
        RopeScaling.__post_init__(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"{self.low_freq_factor=} must be less than {self.high_freq_factor=}")

    def rotation(self, base: float, dim: int) -> Rotation:
        plain = frequencies(base, dim)
        rotations = self.original_max_position_embeddings * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((rotations - self.low_freq_factor) / width, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1.0 - kept), 1.0


@stable_id("tilewright/rope.LongRopeScaling")
@dataclasses.dataclass(frozen=True, slots=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv 2402.13753): every frequency is divided by a factor of its own.

    Attributes:
      short_factor, long_factor: ``dim / 2`` factors each, for sequences up to ``original_max_position_embeddings``, and
        for longer ones.
      length: of the longest sequence, in tokens; it decides which of the two all sequences have.
      factor: the greatest length over the original one; only for the factor of the result, which is
        ``sqrt(1 + ln(factor) / ln(original_max_position_embeddings))`` unless ``attention_factor`` is given.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: float
    length: float
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        RopeScaling.__post_init__(self)
        if self.factor is None and self.attention_factor is None:
            raise ValueError("LongRopeScaling needs factor (the greatest length over the original) or attention_factor")

    def rotation(self, base: float, dim: int) -> Rotation:
        divisors = self.long_factor if self.length > self.original_max_position_embeddings else self.short_factor
        if len(divisors) != dim // 2:
            raise ValueError(f"LongRopeScaling needs {dim // 2} factors to rotate {dim} elements, got {len(divisors)}")
        magnitude = self.attention_factor
        if magnitude is None:
            growth = math.log(max(self.factor or 1.0, 1.0)) / math.log(self.original_max_position_embeddings)
            magnitude = math.sqrt(1.0 + growth)
        return frequencies(base, dim) / np.asarray(divisors), magnitude


_OF_CONFIGS: Mapping[str, type[RopeScaling]] = MappingProxyType(
    {"linear": LinearScaling, "yarn": YarnScaling, "llama3": Llama3Scaling, "longrope": LongRopeScaling}
)

_ARGUMENTS = MappingProxyType({"rope_theta": "base", "partial_rotary_factor": "fraction"})


def of_config(config: Mapping[str, Any]) -> tuple[RopeScaling | None, dict[str, Any]]:
    """The scaling of a mapping as in a ``config.json`` of Hugging Face, and arguments of ``rope`` that it also holds.

    Raises:
      ValueError: an unknown type, or keys that are missing or that the type does not have.
    """
    given = {key: value for key, value in config.items() if value is not None}
    names = [given.pop(key) for key in ("rope_type", "type") if key in given]
    arguments = {name: given.pop(key) for key, name in _ARGUMENTS.items() if key in given}
    kind = _OF_CONFIGS.get(names[0]) if names else None
    if names[:1] == ["default"] and not given:
        return None, arguments
    if names[:1] == ["dynamic"]:
        raise ValueError(
            "scaling of type 'dynamic' changes the base with the length of each sequence, which is not known while "
            "tracing; pass NtkScaling(factor), which changes it once"
        )
    if kind is None:
        known = ["default", *_OF_CONFIGS]
        raise ValueError(f"scaling must have a 'rope_type' (or 'type') that is one of {known}, got {dict(config)}")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    optional = [field.name for field in fields if field.default is not dataclasses.MISSING]
    missing, unknown = sorted(set(required) - given.keys()), sorted(given.keys() - {*required, *optional})
    if missing or unknown:
        raise ValueError(
            f"scaling of type {names[0]!r} must have {required} and may have {optional}; {missing=}, {unknown=} in "
            f"{dict(config)}"
        )
    return kind(**given), arguments
