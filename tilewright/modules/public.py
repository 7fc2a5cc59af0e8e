"""How a kernel becomes a function."""

import inspect
from collections.abc import Callable
from typing import Any


def public_function[F: Callable[..., Any]](prepare: Callable[..., Any]) -> Callable[[F], F]:
    """Gives a function the argument list of a kernel's ``prepare``, and ``cfg``: the list is written once, there."""

    def decorate(function: F) -> F:
        _, *parameters = inspect.signature(prepare).parameters.values()  # without self
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        returns = inspect.signature(function).return_annotation
        function.__signature__ = inspect.Signature([*parameters, cfg], return_annotation=returns)  # type: ignore[attr-defined]
        return function

    return decorate
