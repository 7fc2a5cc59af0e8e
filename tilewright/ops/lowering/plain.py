"""The passes of a call in plain operations of JAX, by the kernel's reference: for derivatives of these passes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.lowering.call import Call
from tilewright.ops.lowering.stages import Results


def plain_pass(call: Call, known: Results) -> Callable[..., list[jax.Array | None]]:
    """A pass as a function of its flat operands that JAX can differentiate in both modes, as often as asked.

    Its results are those that the call returns; ``None`` stands for residuals, on which nothing depends: the plain
    backward pass does not read them.

    Args:
      known: the results of the call's code.
    """
    if call.stage == "backward":
        return _backward(call)
    num_outputs = call.tree(known).num_leaves if call.stage == "run" else known.tree.children()[0].num_leaves
    outputs_from = {source: i for i, (source, _) in enumerate(known.sources[:num_outputs])}

    def forward(*arrays: jax.Array) -> list[jax.Array | None]:
        outputs = _outputs(call, arrays)
        found: list[jax.Array | None] = []
        for i in call.picked(known):
            output = i if i < num_outputs else outputs_from.get(i)
            aval = known.avals[i]
            found.append(None if output is None else outputs[output].reshape(aval.shape).astype(aval.dtype))
        return found

    return forward


def _outputs(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The outputs of a call, in at least float32."""
    reference = call.kernel.reference
    assert reference is not None  # otherwise there is no plain form
    args, kwargs = call.structure.join([_widened(x) for x in arrays])
    return jax.tree.leaves(reference(*args, **kwargs))


def _widened(array: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if is_narrow else array


def _backward(call: Call) -> Callable[..., list[jax.Array | None]]:
    """The gradients as JAX's derivative of the outputs."""
    extra = call.extra
    assert extra is not None  # it has the cotangents

    def backward(*operands: jax.Array) -> list[jax.Array | None]:
        _, cotangents = extra.join(operands[call.num_arrays :])
        given = jax.tree.leaves(cotangents, is_leaf=lambda x: x is None)
        arrays = _alike(operands)[: call.num_arrays]
        wanted = [i for i, is_wanted in enumerate(call.wanted) if is_wanted]

        def outputs(*values: jax.Array) -> list[jax.Array]:
            for i, value in zip(wanted, values, strict=True):
                arrays[i] = value
            pairs = zip(_outputs(call, arrays), given, strict=True)
            return [x.astype(cotangent.dtype) for x, cotangent in pairs if cotangent is not None]

        pull_back = jax.vjp(outputs, *(arrays[i] for i in wanted))[1]
        return list(pull_back([x for x in given if x is not None]))

    return backward


def _alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands as varying over the same manual axes, so that JAX sums no gradient over devices: the caller does."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    every = frozenset[Any]().union(*varying)
    return [
        jax.lax.pcast(x, tuple(every - own), to="varying") if every - own else x
        for x, own in zip(operands, varying, strict=True)
    ]
