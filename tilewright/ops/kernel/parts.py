"""Parts of a call that its oracle can compute on their own."""

import dataclasses
from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class OraclePart:
    """One part of a call.

    Attributes:
      arguments: from the call's prepared arguments to the part's, of the same structure. Given gradients in the places
        of the arrays, it gives what of them belongs to the part.
      results: from what the call returns to what the part returns.
      shared: positional arguments to whose gradients other parts add; these are not compared.
    """

    arguments: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
    results: Callable[[Any], Any]
    shared: tuple[int, ...] = ()
