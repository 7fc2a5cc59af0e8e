"""The results of a call that ``jax.checkpoint`` keeps: policies are asked as of the matmul that the call stands for.

A call that is differentiated is followed by one equation with its outputs and residuals, the identity. Where a policy
decides what is kept, that equation asks it about each array, by its name and as the result of ``dot_general``. Outputs
that a kernel derives from residuals are computed from these where the policy keeps them, without another call.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src.ad_checkpoint import name_p
from jax._src.interpreters.partial_eval import Offloadable, SaveableType  # the answers of policies
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from tilewright.ops.kernel.arrays import Structure
from tilewright.ops.kernel.kernel import Kernel
from tilewright.ops.kernel.parts import Product
from tilewright.ops.lowering.stages import Reshaping


@dataclasses.dataclass(frozen=True, slots=True)
class Derivation:
    """The outputs of a call as a function of its residuals.

    Attributes:
      residuals: the structure of the residuals.
      sources: for each residual, the index among the arrays of the equation, and the reshape that makes it of that.
      mapped: the number of mapped axes of the call, in front of all arrays.
      outer: the number of mapped axes in front of these, by which the equation was mapped later.
    """

    kernel: Kernel[Any, Any]
    structure: Structure
    avals: tuple[jax.ShapeDtypeStruct, ...]
    residuals: jax.tree_util.PyTreeDef
    sources: tuple[tuple[int, Reshaping | None], ...]
    mapped: int
    outer: int = 0

    def __call__(self, arrays: Mapping[int, jax.Array]) -> list[jax.Array]:
        return _vmapped(self._of_call, self.outer)(*(arrays[i] for i, _ in self.sources))

    def _of_call(self, *arrays: jax.Array) -> list[jax.Array]:
        reshapes = (reshaped for _, reshaped in self.sources)
        given = [
            array if reshaped is None else reshaped(array) for array, reshaped in zip(arrays, reshapes, strict=True)
        ]
        return _vmapped(self._of_element, self.mapped)(*given)

    def _of_element(self, *leaves: jax.Array) -> list[jax.Array]:
        args, kwargs = self.structure.join(self.avals)
        derive = self.kernel.outputs_of_residuals
        assert derive is not None  # otherwise there is no derivation
        return jax.tree.leaves(derive(self.residuals.unflatten(leaves), *args, **kwargs))


def _vmapped(function: Callable[..., list[jax.Array]], depth: int) -> Callable[..., list[jax.Array]]:
    for _ in range(depth):
        function = jax.vmap(function)
    return function


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Kept:
    """The outputs and residuals of a call, as policies are told of them.

    Attributes:
      names: for each array.
      outputs: for each array, True if it is an output that is no residual.
      product: the matmul whose results they are; ``None`` if there is none.
      derivation: how the outputs are made of the residuals; ``None`` if they are not.
    """

    op: str
    names: tuple[str, ...]
    outputs: tuple[bool, ...]
    product: Product | None = None
    derivation: Derivation | None = None

    def __repr__(self) -> str:
        return ", ".join(self.names)

    def verdict(self, index: int, aval: Any, policy: Callable[..., Any]) -> Any:
        """The answer of a policy for an array, as named or else as the result of a matmul; falsy: compute it again."""
        by_name = _wish(policy(name_p, aval, name=self.names[index]))
        # What is derived from the operands of another matmul is a result of none.
        if by_name or self.product is None or (self.derivation is not None and self.outputs[index]):
            return by_name
        return _wish(policy(jax.lax.dot_general_p, self.product.lhs, self.product.rhs, **self.product.params))


def _wish(answer: Any) -> Any:
    """The answer of a policy: True to keep, False to compute again, or the memories that it names."""
    return answer if isinstance(answer, bool | Offloadable) else isinstance(answer, SaveableType)


# The equation.


def keep(kept: Kept, arrays: Sequence[Any]) -> list[Any]:
    """The arrays, of which a policy decides under the names of the call."""
    return list(_results_of(kept.op).bind(*arrays, kept=kept))


@functools.cache
def _results_of(op: str) -> Primitive:
    """The primitive of an op: JAX says what is kept by the name of the primitive that returned it."""
    primitive = Primitive(f"{op}_results")
    primitive.multiple_results = True
    primitive.def_impl(_same)
    primitive.def_abstract_eval(_same)
    mlir.register_lowering(primitive, lambda ctx, *operands, kept: list(operands))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _partial_eval
    return primitive


def _same(*arrays: Any, kept: Kept) -> list[Any]:
    return list(arrays)


def _jvp(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], *, kept: Kept) -> Any:
    return primitive.bind(*primals, kept=kept), list(tangents)


def _batched(primitive: Primitive, arrays: Sequence[Any], dims: Sequence[Any], *, kept: Kept) -> Any:
    # All results of a call are mapped, along axis 0.
    if kept.derivation is not None:
        deeper = dataclasses.replace(kept.derivation, outer=kept.derivation.outer + 1)
        kept = dataclasses.replace(kept, derivation=deeper)
    return primitive.bind(*arrays, kept=kept), list(dims)


def _partial_eval(
    policy: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """Splits the equation into what is computed once, and what is computed again from what is kept.

    Returns both equations, for each result whether it is known only in the second part and whether it is computed
    there, and the variables that are kept.
    """
    kept: Kept = eqn.params["kept"]
    count = len(eqn.outvars)
    absent = [not known for known in instantiated]
    if any(unknown):
        return None, eqn, [True] * count, [True] * count, list(itertools.compress(eqn.invars, absent))
    wishes = [kept.verdict(i, v.aval, policy) for i, v in enumerate(eqn.outvars)]
    moved = [i for i, wish in enumerate(wishes) if isinstance(wish, Offloadable)]
    derivation, derived, used = kept.derivation, list[int](), list[int]()
    # Of residuals that are not kept the call runs again, and makes its outputs.
    if derivation is not None and all(wishes[i] for i, _ in derivation.sources):
        derived = [i for i, wish in enumerate(wishes) if kept.outputs[i] and not wish]
        used = sorted({i for i, _ in derivation.sources if wishes[i] is True}) if derived else []
    again = [i for i, wish in enumerate(wishes) if not wish and i not in derived]

    def offloaded(*arrays: jax.Array) -> list[jax.Array]:
        return [*arrays, *(jax.device_put(arrays[i], _memory(wishes[i].dst)) for i in moved)]

    def computed_again(*arrays: jax.Array) -> list[jax.Array]:
        known = dict(zip((*again, *moved, *used), arrays, strict=True))
        known |= {i: jax.device_put(known[i], _memory(wishes[i].src)) for i in moved}
        if derivation is not None and derived:
            known |= dict(zip(derived, derivation(known), strict=True))
        return [known[i] for i in (*moved, *derived, *again)]

    first, copies = eqn, []
    if moved:
        first, made = _equation(eqn, offloaded, eqn.invars)
        copies = made[count:]
        first = first.replace(outvars=[*eqn.outvars, *copies])
    missing = [eqn.invars[i] for i in again if absent[i]]
    second = None
    if moved or derived or again:
        operands = [*(eqn.invars[i] for i in again), *copies, *(eqn.outvars[i] for i in used)]
        second, _ = _equation(eqn, computed_again, operands)
        second = second.replace(outvars=[eqn.outvars[i] for i in (*moved, *derived, *again)])
    is_again = [wish is not True for wish in wishes]
    return first, second, [False] * count, is_again, [*missing, *copies, *(eqn.outvars[i] for i in used)]


def _equation(eqn: Any, function: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The equation of a call of a function in place of another equation, and variables for its results."""
    function.__name__ = f"{eqn.params['kept'].op}_kept"
    made = jax.make_jaxpr(jax.jit(function))(*(v.aval for v in operands)).eqns[0]
    changed = {"primitive": made.primitive, "params": made.params, "effects": made.effects}
    return eqn.replace(invars=list(operands), **changed), list(made.outvars)


def _memory(kind: str) -> Any:
    """The memory space of a memory kind."""
    return jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host
