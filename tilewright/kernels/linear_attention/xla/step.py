"""A step of linear attention for every device, in plain JAX."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.step_inputs import StepInputs, Stepped, gates_of, read, stepped
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaLinearAttentionStep(InferenceBackend[StepInputs, Stepped, FwdParams]):
    """Serves every call.

    After t tokens the state is ``decay ⊙ S + Σ left rightᵀ``, with S as it was read, and a pair of vectors for each
    write and each removal. So the products of all tokens with S are one pass over it, whatever their number, and the
    new state is another one. Without ``state_indices`` it is written in place; else XLA writes the new states one
    behind the other first, and then scatters them.
    """

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "log_decay", "beta", "removal_read", "removal_write", "bonus", "state_indices", "write_indices",
            "qk_l2norm", "l2norm_eps", "state_layout",
        }
    )  # fmt: skip

    def forward_reasons(self, inputs: StepInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: StepInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: StepInputs, params: FwdParams) -> Stepped:
        """The output of every token, and the pool."""
        if inputs.is_empty():
            return jnp.zeros(inputs.value.shape, inputs.value.dtype), inputs.state_pool
        given = gates_of(inputs)
        state = read(inputs)
        by_query, by_removed, left = _probes(given, inputs.tokens)
        read_by_query, read_by_removed = _products(state, by_query), _products(state, by_removed)
        outs: list[jax.Array] = []
        pairs: list[tuple[jax.Array, jax.Array]] = []
        for t in range(inputs.tokens):
            query, key, value = (given[name][:, t] for name in ("query", "key", "value"))
            # Of S by one product for all tokens, of the pairs by products of vectors.
            decay = None if given["decay"] is None else given["decay"][:, t]
            decayed = [(side if decay is None else decay * side, right) for side, right in pairs]
            if given["beta"] is not None:
                value = given["beta"][:, t] * (value - (read_by_removed[t] + _of_pairs(decayed, key)))
            new = [(key, value)]
            if given["removal"] is not None:
                a, b = (x[:, t] for x in given["removal"])
                new.append((b, read_by_removed[t] + _of_pairs(pairs, a)))
            if given["bonus"] is None:
                seen = decayed + new
            else:
                seen = [*pairs, (given["bonus"] * key, value)]
            outs.append(inputs.scale * (read_by_query[t] + _of_pairs(seen, query)))
            pairs = decayed + new
        state = state if left is None else left[..., None] * state
        for side, right in pairs:
            state = state + side[..., :, None] * right[..., None, :]
        return stepped(inputs, jnp.stack(outs, axis=1), state)


def _probes(given: dict[str, Any], tokens: int) -> tuple[list[jax.Array], list[jax.Array], jax.Array | None]:
    """The vectors by which each token reads S: for its output, and for what it removes; and what is left of S.

    S stands behind all decays up to a token, which multiply the vectors in place of it.
    """
    by_query: list[jax.Array] = []
    by_removed: list[jax.Array] = []
    left: jax.Array | None = None
    for t in range(tokens):
        before = left
        if given["decay"] is not None:
            decay = given["decay"][:, t]
            left = decay if left is None else left * decay
        by_query.append(_times(left if given["bonus"] is None else before, given["query"][:, t]))
        if given["beta"] is not None:
            by_removed.append(_times(left, given["key"][:, t]))
        if given["removal"] is not None:
            by_removed.append(_times(before, given["removal"][0][:, t]))
    return by_query, by_removed, left


def _times(factor: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if factor is None else factor * x


def _products(state: jax.Array, vectors: list[jax.Array]) -> list[jax.Array]:
    # Sums and no matmul: XLA makes one pass of several over the same operand, with the gather from the pool in it.
    return [jnp.sum(state * vector[..., None], axis=-2) for vector in vectors]


def _of_pairs(pairs: list[tuple[jax.Array, jax.Array]], by: jax.Array) -> Any:
    """``(Σ left rightᵀ)ᵀ by`` over the pairs."""
    return sum(jnp.sum(by * left, axis=-1, keepdims=True) * right for left, right in pairs)
