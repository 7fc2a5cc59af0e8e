"""The requirements of a kernel variant, as predicates that are evaluated in Python and in C++ alike."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

DEVICE_FIELDS = ("capability", "shared_memory", "multiprocessors")
FACT_FIELDS = ("shared_bytes", "threads", "alignment")

_WORDS = MappingProxyType(
    {
        "<": "less than",
        "<=": "at most",
        ">": "more than",
        ">=": "at least",
        "==": "equal to",
        "!=": "other than",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """The values that predicates are evaluated on.

    Attributes:
      problem: the table's fields.
      device: every one of ``DEVICE_FIELDS``.
      facts: every one of ``FACT_FIELDS`` of the compiled kernel; empty until it is compiled.
    """

    problem: Mapping[str, int]
    device: Mapping[str, int]
    facts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field of the problem."""

    name: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a field's name must be an identifier, got name={self.name!r}")

    def value(self, values: Values) -> int:
        return values.problem[self.name]

    def cpp(self) -> str:
        return f"problem.{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceField:
    """A device property: "capability" (90 for 9.0), "shared_memory" (opt-in bytes per block), "multiprocessors"."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in DEVICE_FIELDS:
            raise ValueError(f"a device has {DEVICE_FIELDS}, got name={self.name!r}")

    def value(self, values: Values) -> int:
        return values.device[self.name]

    def cpp(self) -> str:
        return f"device.{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """A property of the compiled kernel: "shared_bytes", "threads" of a block, "alignment"."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in FACT_FIELDS:
            raise ValueError(f"a compiled kernel has {FACT_FIELDS}, got name={self.name!r}")

    def value(self, values: Values) -> int:
        return values.facts[self.name]

    def cpp(self) -> str:
        return f"facts.{self.name}"


type Operand = Field | DeviceField | Fact | int
type Operator = Literal["<", "<=", ">", ">=", "==", "!="]


class Predicate(abc.ABC):
    """One requirement, with the same meaning in both languages."""

    __slots__ = ()

    @abc.abstractmethod
    def operands(self) -> Iterator[Operand]:
        """Every operand that it reads."""

    @abc.abstractmethod
    def holds(self, values: Values) -> bool:
        """True if it is met."""

    @abc.abstractmethod
    def cpp(self) -> str:
        """A C++ expression over ``problem``, ``device`` and ``facts``, in parentheses."""

    @abc.abstractmethod
    def text(self) -> str:
        """The requirement as text, such as "head_dim must be at most 64"."""

    @property
    def needs_facts(self) -> bool:
        """True if it can be decided only for a compiled kernel."""
        return any(isinstance(operand, Fact) for operand in self.operands())

    def reason(self, values: Values) -> str:
        """The reason why it is not met, such as "head_dim must be at most 64, got head_dim=80"."""
        named = {each.name: each.value(values) for each in self.operands() if not isinstance(each, int)}
        return f"{self.text()}, got {', '.join(f'{name}={value}' for name, value in named.items())}"


@dataclasses.dataclass(frozen=True, slots=True)
class Compare(Predicate):
    """``left operator right``."""

    left: Operand
    operator: Operator
    right: Operand

    def __post_init__(self) -> None:
        _check_operands(self.left, self.right)
        if self.operator not in _WORDS:
            raise ValueError(f"the operator must be one of {list(_WORDS)}, got {self.operator!r}")

    def operands(self) -> Iterator[Operand]:
        yield from (self.left, self.right)

    def holds(self, values: Values) -> bool:
        left, right = _value(self.left, values), _value(self.right, values)
        match self.operator:
            case "<":
                return left < right
            case "<=":
                return left <= right
            case ">":
                return left > right
            case ">=":
                return left >= right
            case "==":
                return left == right
            case "!=":
                return left != right

    def cpp(self) -> str:
        return f"({_cpp(self.left)} {self.operator} {_cpp(self.right)})"

    def text(self) -> str:
        return f"{_operand_text(self.left)} must be {_WORDS[self.operator]} {_operand_text(self.right)}"


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleOf(Predicate):
    """``value`` is a multiple of ``of``; false if ``of`` is not positive."""

    value: Operand
    of: Operand

    def __post_init__(self) -> None:
        _check_operands(self.value, self.of)

    def operands(self) -> Iterator[Operand]:
        yield from (self.value, self.of)

    def holds(self, values: Values) -> bool:
        of = _value(self.of, values)
        return of > 0 and _value(self.value, values) % of == 0

    def cpp(self) -> str:
        of = _cpp(self.of)
        return f"({of} > 0 && {_cpp(self.value)} % {of} == 0)"

    def text(self) -> str:
        return f"{_operand_text(self.value)} must be a multiple of {_operand_text(self.of)}"


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class AnyOf(Predicate):
    """At least one of several predicates."""

    predicates: tuple[Predicate, ...]

    def __init__(self, *predicates: Predicate) -> None:
        if not predicates:
            raise ValueError("AnyOf needs at least one predicate, or nothing could meet it")
        object.__setattr__(self, "predicates", predicates)

    def operands(self) -> Iterator[Operand]:
        for predicate in self.predicates:
            yield from predicate.operands()

    def holds(self, values: Values) -> bool:
        return any(predicate.holds(values) for predicate in self.predicates)

    def cpp(self) -> str:
        return f"({' || '.join(predicate.cpp() for predicate in self.predicates)})"

    def text(self) -> str:
        return ", or ".join(predicate.text() for predicate in self.predicates)


def one_of(operand: Field | DeviceField, choices: Iterable[int]) -> Predicate:
    """``operand`` is one of several numbers."""
    return AnyOf(*(Compare(operand, "==", choice) for choice in choices))


def without_smaller_bounds(requirements: Iterable[Predicate]) -> list[Predicate]:
    """Requirements of several variants, in order, without an upper bound that another exceeds: ``width <= 64`` beside
    ``width <= 256``.
    """
    found = list(requirements)
    largest: dict[Operand, int] = {}
    for each in found:
        if isinstance(each, Compare) and each.operator == "<=" and isinstance(each.right, int):
            largest[each.left] = max(each.right, largest.get(each.left, each.right))
    return [
        each
        for each in found
        if not (isinstance(each, Compare) and each.operator == "<=" and isinstance(each.right, int))
        or each.right == largest[each.left]
    ]


def _check_operands(*operands: Operand) -> None:
    for operand in operands:
        # C++ reads them as int64; the least one has no literal.
        if isinstance(operand, int) and not -(1 << 63) < operand < 1 << 63:
            raise ValueError(f"{operand} has no place in 64 bits")
    if all(isinstance(operand, int) for operand in operands):
        raise ValueError(f"numbers alone require nothing of a call, got {operands}")


def _value(operand: Operand, values: Values) -> int:
    return operand if isinstance(operand, int) else operand.value(values)


def _cpp(operand: Operand) -> str:
    return str(int(operand)) if isinstance(operand, int) else operand.cpp()


def _operand_text(operand: Operand) -> str:
    return str(operand) if isinstance(operand, int) else operand.name
