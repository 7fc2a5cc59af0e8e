"""Finds every group that holds the first variant for some problem, without trying all problems.

A problem's fields are given values one after another, of each field those that its requirements tell apart. What
matters of the fields given so far is which variants are still possible, and the values that requirements compare with
fields yet to come; what leads to the same is one state.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tilewright.kernels.cuda import AnyOf, DeviceField, Field, Group, MultipleOf, Predicate, Values, VariantTable
from tilewright.kernels.cuda.table import Variant

DEFAULT_BOUNDS = (1, 1 << 31)
"""The default bounds of a field: those of a size."""

type Bounds = Mapping[str, tuple[int, int]]
"""The least and the greatest value of fields."""

type _Place = tuple[VariantTable, Variant]


def first_groups(tables: Sequence[VariantTable], device: Mapping[str, int], bounds: Bounds) -> list[Group]:
    """The groups with a variant that is the first for some problem, of tables that are asked one after another.

    What compiled kernels say of themselves is taken to meet the requirements, for nothing is compiled.

    Args:
      device: the values of ``DeviceField``.
    """
    capability = device["capability"]
    places = [(table, variant) for table in tables for variant in table.for_capability(capability)]
    asked = [_asked(variant, device) for _, variant in places]
    wanted = {i: predicates for i, predicates in enumerate(asked) if predicates is not None}
    every = list(dict.fromkeys(predicate for predicates in wanted.values() for predicate in predicates))
    fields = _adjacent(list(dict.fromkeys(name for predicate in every for name in _fields(predicate))), every)

    states: set[tuple[tuple[int, ...], tuple[tuple[str, int], ...]]] = {(tuple(wanted), ())}
    for position, name in enumerate(fields):
        known = frozenset(fields[: position + 1])
        decided = [each for each in every if name in _fields(each) and _fields(each) <= known]
        unsettled = {other for each in every if not _fields(each) <= known for other in _fields(each) & known}
        settled = {i for i, predicates in wanted.items() if all(_fields(each) <= known for each in predicates)}
        following = set()
        for (alive, kept), value in itertools.product(states, _representatives(name, every, device, bounds)):
            problem = dict(kept) | {name: value}
            met = {each: each.holds(Values(problem, device)) for each in decided}
            left = [i for i in alive if all(met.get(each, True) for each in wanted[i])]
            certain = next((n for n, i in enumerate(left) if i in settled), len(left))  # what comes after it never runs
            if left:
                kept_now = tuple((other, problem[other]) for other in sorted(unsettled))
                following.add((tuple(left[: certain + 1]), kept_now))
        states = following
    found = {_group(places[alive[0]], capability) for alive, _ in states if alive}
    order = {_group(place, capability): None for place in places}
    return [group for group in order if group in found]


def _group(place: _Place, capability: int) -> Group:
    table, variant = place
    return Group(table, variant.group, capability)


def _asked(variant: Variant, device: Mapping[str, int]) -> tuple[Predicate, ...] | None:
    """The requirements of a problem that a variant has; ``None`` if the device does not do."""
    known = [each for each in variant.requirements if not each.needs_facts]
    if not all(each.holds(Values({}, device)) for each in known if not _fields(each)):
        return None
    return tuple(each for each in known if _fields(each))


def _fields(predicate: Predicate) -> frozenset[str]:
    return frozenset(operand.name for operand in predicate.operands() if isinstance(operand, Field))


def _adjacent(fields: list[str], every: Iterable[Predicate]) -> list[str]:
    """The fields, those together that are compared with each other."""
    order: list[str] = []
    for name in fields:
        together = {other for predicate in every if name in _fields(predicate) for other in _fields(predicate)}
        order += [other for other in fields if other in together | {name} and other not in order]
    return order


def _representatives(name: str, every: Iterable[Predicate], device: Mapping[str, int], bounds: Bounds) -> list[int]:
    """Values of a field such that every combination of answers of the requirements has one."""
    related = {name}
    for predicate in every:
        if related & _fields(predicate):
            related |= _fields(predicate)
    about = [predicate for predicate in every if related & _fields(predicate)]
    numbers = {value for predicate in about for value in _numbers(predicate, device)}
    divisors = {value for predicate in about for value in _divisors(predicate, device)}
    multiples = {math.lcm(*some) for n in range(len(divisors) + 1) for some in itertools.combinations(divisors, n)}
    low, high = bounds.get(name, DEFAULT_BOUNDS)
    near = {number + step for number in numbers | {low, high} for step in (-1, 0, 1)}
    near |= {value // each * each + step * each for value in near for each in multiples for step in (-1, 0, 1)}
    values = sorted(value for value in near if low <= value <= high)
    if len(related) > 1:
        return values
    # One value is enough for all that the requirements do not tell apart.
    alike = {tuple(each.holds(Values({name: value}, device)) for each in about): value for value in reversed(values)}
    return sorted(alike.values())


def _numbers(predicate: Predicate, device: Mapping[str, int]) -> Iterator[int]:
    for operand in predicate.operands():
        if isinstance(operand, int):
            yield operand
        elif isinstance(operand, DeviceField):
            yield device[operand.name]


def _divisors(predicate: Predicate, device: Mapping[str, int]) -> Iterator[int]:
    """The numbers that must divide a value.

    Raises:
      NotImplementedError: it must be a multiple of another field's value; there are too many of these.
    """
    match predicate:
        case AnyOf():
            for each in predicate.predicates:
                yield from _divisors(each, device)
        case MultipleOf(of=int() as number):
            yield number
        case MultipleOf(of=DeviceField() as of):
            yield device[of.name]
        case MultipleOf():
            raise NotImplementedError(predicate.text())
