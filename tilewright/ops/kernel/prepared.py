"""Prepares a call's arguments by its kernel, and makes the invocation."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tilewright.ops.kernel.arrays import abstract, meaningful_sharding, split, unwrapped_arguments
from tilewright.ops.kernel.kernel import Invocation, Kernel, check_kernel, errors_naming
from tilewright.ops.kernel.parts import Arguments


def prepare(kernel: Kernel[Any, Any], args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments:
    """Prepares the arguments of a call; errors about wrong arguments name the kernel."""
    with errors_naming(kernel):
        return kernel.bind(args, kwargs)


def prepared(
    kernel: Kernel[Any, Any], args: Sequence[object], kwargs: Mapping[str, object], *, concrete: bool = True
) -> tuple[Invocation[Any, Any], Arguments | None]:
    """The forward invocation of a call, without arrays, and with ``concrete`` also the prepared arguments."""
    check_kernel(kernel)
    args, kwargs = unwrapped_arguments(tuple(args), dict(kwargs))
    arrays, structure = split((args, kwargs))
    shardings = [meaningful_sharding(array) for array in arrays]
    abstract_calls: list[Any] = []

    def look(traced: list[Any]) -> None:
        # By identity, as the type of a traced array does not show a sharding over automatic axes.
        known = {id(a): s for a, s in zip(traced, shardings, strict=True) if s is not None}
        arguments = prepare(kernel, *structure.join(traced))
        abstract_calls.append(jax.tree.map(lambda leaf: abstract(leaf, known.get(id(leaf))), arguments))

    # In a trace, so that nothing is computed of what `prepare` does to arrays.
    jax.eval_shape(look, [abstract(a) for a in arrays])
    abstract_args, abstract_kwargs = abstract_calls[0]
    inv = Invocation(kernel, tuple(abstract_args), dict(abstract_kwargs))
    if not concrete:
        return inv, None
    real_args, real_kwargs = prepare(kernel, args, kwargs)
    return inv, (tuple(real_args), dict(real_kwargs))
