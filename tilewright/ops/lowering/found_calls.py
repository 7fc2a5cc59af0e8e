"""The calls of kernels in a traced function, and in the code that the configs chosen for them have."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core as jax_core
from jax.extend.core import Jaxpr

from tilewright.ops.config.chooser import ConfigChooser
from tilewright.ops.config.context import inspection_only
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.lowering.call import call_p
from tilewright.ops.lowering.lowering import results_of
from tilewright.ops.lowering.stages import traced
from tilewright.ops.utils.device import current_device


@dataclasses.dataclass(frozen=True, slots=True)
class FoundCall:
    """One call of a kernel, in one direction.

    Attributes:
      chooser: what chooses its config.
      cfg: the config that the caller gave; ``None`` if the chooser chooses.
    """

    chooser: ConfigChooser
    inv: Invocation[Any, Any]
    cfg: object


def found_calls(function: Callable[..., Any], structs: Sequence[Any]) -> list[FoundCall]:
    """The calls of a function, each followed by those that the code of its config makes; measures nothing."""
    with inspection_only():
        return _distinct(_calls_in(jax.make_jaxpr(function)(*structs).jaxpr))


def backward_calls(function: Callable[..., Any], structs: Sequence[Any]) -> list[FoundCall]:
    """The backward passes of a function's calls in its derivative by all of its floating arrays."""
    differentiated = [i for i, struct in enumerate(structs) if jnp.issubdtype(struct.dtype, jnp.inexact)]

    def gradients(*operands: jax.Array) -> Any:
        def along(*values: jax.Array) -> Any:
            given = dict(zip(differentiated, values, strict=True))
            return function(*(given.get(i, operand) for i, operand in enumerate(operands)))

        results, pull_back = jax.vjp(along, *(operands[i] for i in differentiated))
        return pull_back(results)  # cotangents of the right types, split as the results are

    # JAX differentiates the code of a call without gradients of its own. The config of that code is chosen meanwhile:
    # of the call itself nothing is left in the jaxpr.
    return [each for each in found_calls(gradients, structs) if each.inv.direction == "backward"]


def _distinct(calls: Iterable[FoundCall]) -> list[FoundCall]:
    return list({(each.inv.key, each.inv.direction, repr(each.cfg)): each for each in calls}.values())


def _calls_in(jaxpr: Jaxpr) -> list[FoundCall]:
    device, found = current_device(), list[FoundCall]()
    for eqn in jaxpr.eqns:
        avals = [each.aval for each in eqn.invars]
        if eqn.primitive is call_p:
            call, mapped = eqn.params["call"], eqn.params["mapped"]
            chooser, cfg = call.selector.chooser, call.selector.explicit
            each = FoundCall(chooser, call.invocation(avals, mapped, device), cfg)
            program = call.program(chooser.lookup(each.inv, cfg=cfg).config, avals, mapped, device)
            found += [each, *(_calls_in(traced(program)[0].jaxpr) if results_of(program).chooses else ())]
        elif eqn.primitive.name == "shard_map":
            found += _inside_shard_map(eqn.params, avals)
        else:
            found += [each for inner in jax_core.jaxprs_in_params(eqn.params) for each in _calls_in(inner)]
    return found


def _inside_shard_map(params: Mapping[str, Any], avals: Sequence[Any]) -> list[FoundCall]:
    """The calls inside of a ``shard_map``, whose axes must be bound while the code of a call is traced."""
    found: list[FoundCall] = []

    def inside(*_: object) -> tuple[()]:
        found.extend(_calls_in(params["jaxpr"]))
        return ()

    names = ("mesh", "in_specs", "check_vma")
    options = {name: params[name] for name in names} | {"axis_names": params["newly_manual_axes"], "out_specs": ()}
    jax.eval_shape(jax.shard_map(inside, **options), *avals)
    return found
