"""Parts of a call that its oracle can compute separately."""

import dataclasses
from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class OraclePart:
    """One part of a call.

    Attributes:
      arguments: maps the call's prepared arguments to the part's, in the same structure. Given gradients in place of
        the arrays, it returns those that belong to the part.
      results: maps the call's results to the part's.
      shared: names of arguments whose gradients are sums over several parts; these are not compared.
    """

    arguments: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
    results: Callable[[Any], Any]
    shared: tuple[str, ...] = ()
