"""The loss over a vocabulary as programs for TPUs: with its gradients, and each of its kernels alone."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.backend import head_of
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.tpu.backend import TpuLinearCrossEntropy
from tilewright.kernels.linear_cross_entropy.tpu.kernels import logit_gradients, softmax_sums
from tilewright.modules import linear_cross_entropy
from tilewright.ops.utils.known_devices import find_device

OP, BACKEND = LinearCrossEntropy(), TpuLinearCrossEntropy()


def _operands(tokens: int, d: int, vocab: int, dtype: str, *, vocab_first: bool = False) -> tuple[Any, ...]:
    struct = jax.ShapeDtypeStruct
    return (
        struct((tokens, d), jnp.dtype(dtype)),
        struct((vocab, d) if vocab_first else (d, vocab), jnp.dtype(dtype)),
        struct((tokens,), jnp.int32),
    )


def call(tokens: int, d: int, vocab: int, dtype: str = "bfloat16", **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The loss with the gradients of x and weight."""
    operands = _operands(tokens, d, vocab, dtype, vocab_first=options.get("vocab_first", False))
    return jax.value_and_grad(lambda *given: linear_cross_entropy(*given, **options), (0, 1)), operands


def statistics(tpu: str, tokens: int, d: int, vocab: int) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of lse and the labels' logits, with the tile of the heuristic."""

    def run(*given: jax.Array) -> Any:
        inputs = OP.prepare(*given)
        tile = BACKEND.heuristic(inputs, find_device(tpu).device, "forward").statistics
        return softmax_sums(head_of(inputs), inputs.x, inputs.labels, sums_logits=False, tile=tile)

    return run, _operands(tokens, d, vocab, "bfloat16")


def gradients(tpu: str, tokens: int, d: int, vocab: int) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of the logits' gradients, of a block that is the whole vocabulary, with the tile of the heuristic."""

    def run(x: jax.Array, weight: jax.Array, labels: jax.Array, numbers: jax.Array, bounds: jax.Array) -> jax.Array:
        inputs = OP.prepare(x, weight, labels)
        tile = BACKEND.heuristic(inputs, find_device(tpu).device, "backward").gradient
        return logit_gradients(
            head_of(inputs), x, labels, numbers, bounds,
            size=vocab, sums_logits=False, epsilon=None, tile=tile, dtype=x.dtype,
        )  # fmt: skip

    numbers, bounds = jax.ShapeDtypeStruct((tokens, 4), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    return run, (*_operands(tokens, d, vocab, "bfloat16"), numbers, bounds)
