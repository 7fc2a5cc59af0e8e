"""A kernel variant without template arguments, for tables that tests make."""

import dataclasses
from typing import Any

from tilewright.kernels.cuda import Predicate, Variant


@dataclasses.dataclass(frozen=True)
class PlainVariant(Variant):
    """A variant whose every property is what it is given."""

    name: str = "plain"
    group: str = "all"
    cpp_class: str = "Plain"
    sort_key: tuple[Any, ...] = ()
    arch_range: tuple[int, int] = (75, 130)
    requirements: tuple[Predicate, ...] = ()
