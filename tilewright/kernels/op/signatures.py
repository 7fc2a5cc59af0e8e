"""Signatures as people and type checkers read them: short names of types, and results that depend on arguments."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

import jax
import jax.typing

type ArrayLike = jax.typing.ArrayLike
type DTypeLike = jax.typing.DTypeLike

WITH_LSE: Mapping[str, Any] = {"": jax.Array, "return_lse": tuple[jax.Array, jax.Array]}
"""The results of a function that returns the log-sum-exp as well if it is asked to: see ``results``."""


def results[F: Callable[..., Any]](by_given: Mapping[str, Any]) -> Callable[[F], F]:
    """Declares what a public function returns, by the arguments that a call gives.

    ``tools.stubs`` writes an overload for each entry, and one for calls of which types do not tell. A call gives a flag
    that is True, and an argument that may be ``None`` and is not.

    Args:
      by_given: the types of results by the names of the arguments that are given, with a space between them:
        "return_lse", "key_scale value_scale". Of all that entries name, those that an entry does not name are not
        given; "?key_scale" may be. "" is the entry of a call that gives none.
    """

    def decorate(function: F) -> F:
        function.__dict__["results_by_given"] = dict(by_given)
        function.__dict__["__signature__"] = readable(inspect.signature(function), results_of(function))
        return function

    return decorate


def results_of(function: Callable[..., Any]) -> Any:
    """The type of a function's results, all that are declared in one union; else its annotation."""
    declared = results_by_given(function)
    if declared:
        return functools.reduce(operator.or_, dict.fromkeys(declared.values()))
    return inspect.signature(function).return_annotation


def results_by_given(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The declaration of ``results``; empty for a function without one."""
    found: Mapping[str, Any] = getattr(function, "results_by_given", {})
    return found


def readable(signature: inspect.Signature, returned: Any) -> inspect.Signature:
    """A signature whose types have their short names, such as ``ArrayLike`` for the union that it is."""
    parameters = [p.replace(annotation=short(p.annotation)) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=returned)


def short(annotation: Any) -> Any:
    """A type in which the long unions of ``jax.typing`` have their names."""
    if get_origin(annotation) is tuple:
        return types.GenericAlias(tuple, tuple(map(short, get_args(annotation))))
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    members = given = get_args(annotation)
    for alias in (ArrayLike, DTypeLike):
        union = get_args(alias.__value__)
        if set(union) <= set(members):
            members = (alias, *(each for each in members if each not in union))
    found = tuple(map(short, members))
    return annotation if found == given else functools.reduce(operator.or_, found)
