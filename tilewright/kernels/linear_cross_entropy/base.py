"""The base class of the vocabulary losses: from the statistics of a backend to the loss, on one device and on several.

A loss defines ``prepare``, ``cases``, its oracle, and the calls of its parts if the vocabulary is split.
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.inputs import LossResults, VocabularyInputs
from tilewright.kernels.linear_cross_entropy.losses import of_sums, reduced
from tilewright.kernels.linear_cross_entropy.shards import (
    OfParts,
    loss_partitioning,
    of_all_devices,
)
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import AxisName, Partitioning, devices_along, gathered
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import Product
from tilewright.ops.types import Direction
from tilewright.ops.utils.promotion import default_promotion


class VocabularyLoss[Inputs: VocabularyInputs](PortfolioKernel[Inputs, LossResults], abc.ABC):
    """A loss over the logits of linear heads.

    With ``axis_name`` a call of the kernel returns the statistics of a device's part of the vocabulary.

    Attributes:
      positional: the names of the positional arguments.
    """

    positional: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def merged(self, inputs: Inputs, parts: jax.Array, vocab: int) -> tuple[Any, Any, Any]:
        """The statistics of the whole vocabulary, of so many classes, from ``[devices, statistics, *tokens]``."""

    @abc.abstractmethod
    def statistics_cotangents(
        self, inputs: Inputs, results: LossResults, cotangents: LossResults, vocab: int
    ) -> tuple[Any, Any, Any]:
        """The cotangents of the statistics of the whole vocabulary, of so many classes, from those of the results."""

    def part(self, inputs: Inputs, axis_name: AxisName) -> Inputs:
        """The call of one device whose part of the vocabulary the inputs have: by default with these."""
        return inputs

    def whole(self, inputs: Inputs, given: Mapping[str, Any], vocab: int) -> Inputs:
        """The inputs with what ``prepare`` made for a part of the vocabulary made for all of it: by default nothing."""
        return inputs

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """The loss over a vocabulary that ``axis_name`` splits, or the types of the arrays."""
        if args and isinstance(args[0], VocabularyInputs):
            return None  # prepared inputs are those of a part
        given = dict(zip(self.positional, args, strict=False)) | dict(kwargs)
        axis_name = given.get("axis_name")
        if axis_name is None:
            return None
        (inputs,), _ = self.bind(args, kwargs)
        inputs = self.whole(inputs, given, inputs.vocab * devices_along(axis_name, "vocabulary"))
        return functools.partial(self._of_parts, cfg, inputs, axis_name)

    @default_promotion()
    def _of_parts(self, cfg: Any, inputs: Inputs, axis_name: AxisName) -> Any:
        """The loss over a vocabulary that is split over a mesh axis, from each device's statistics.

        Args:
          inputs: a device's part, with labels of the whole vocabulary.
        """
        rows = {name: of_all_devices(inputs.arrays[name], axis_name) for name, _ in inputs.heads}
        part = self.part(inputs, axis_name).replace(is_part=True, **rows)
        # The loss from here on is JAX's to differentiate: its transposes of the gather fit both kinds of shard_map.
        statistics, loss = self.merged_loss(inputs, self(part, cfg=cfg), axis_name)
        if inputs.reduction != "none":
            loss = reduced(inputs, loss.sum(), inputs.weights().sum())
        return (loss, statistics[0]) if inputs.return_lse else loss

    def merged_loss(self, inputs: Inputs, statistics: Sequence[Any], axis_name: AxisName) -> tuple[Any, jax.Array]:
        """The statistics of the whole vocabulary from those of its parts, and the weighted loss of each token."""
        vocab = inputs.vocab * lax.axis_size(axis_name)
        merged = self.merged(inputs, gathered(jnp.stack(statistics), axis_name), vocab)
        return merged, jnp.where(inputs.valid, inputs.losses(merged, vocab), 0) * inputs.weights()

    def results(self, inputs: Inputs) -> Any:
        token, scalar = (jax.ShapeDtypeStruct(shape, inputs.wide) for shape in (inputs.token_shape, ()))
        statistics = (token, token, token if inputs.needs_sum else None)
        if inputs.summary == "statistics":
            return LossResults(statistics)
        return LossResults(statistics, token) if inputs.summary == "none" else LossResults(statistics, scalar, scalar)

    def outputs(self, inputs: Inputs, results: LossResults) -> Any:
        """The loss, and lse if it is wanted; or the statistics."""
        if results.total is None:
            return tuple(each for each in results.statistics if each is not None)
        loss = reduced(inputs, results.total, results.count)
        return (loss, results.statistics[0]) if inputs.return_lse else loss

    def cotangents(self, inputs: Inputs, residuals: LossResults, cotangents: tuple[Any, ...]) -> LossResults:
        """Selects those of the statistics, or of lse, the sum of the losses and that of the weights."""
        if residuals.total is None:
            first, second, *third = cotangents
            return LossResults((first, second, third[0] if third else None))
        of_loss, *of_lse = cotangents
        return LossResults((of_lse[0] if of_lse else None, None, None), *of_sums(inputs, residuals, of_loss))

    def product(self, inputs: Inputs) -> Product:
        """Rows times the matrix of the head with gradients: the logits, which a plain loss would have in memory."""
        (x, matrix), (x_name, name) = inputs.head_arrays[0], inputs.heads[0]
        rows = jax.ShapeDtypeStruct((inputs.tokens, x.shape[-1]), x.dtype)
        first = 1 if inputs.vocab_first else 0
        return Product(rows, struct_like(matrix), ((1,), (first,)), sources=((x_name,), (name,)))

    def partitioning(self, inputs: Inputs) -> Partitioning | None:
        """Splits by tokens and by vocabulary, as in the types of the arrays."""
        return loss_partitioning(inputs, OfParts(self))

    def sampled(self, inputs: Inputs, key: jax.Array) -> Inputs:
        """Normal arrays, and logits of about 1."""
        # Otherwise a token's largest logit has all the probability, and nothing else would be checked.
        found = super().sampled(inputs, key)
        matrices = {name: (found.arrays[name], max(found.arrays[x].shape[-1], 1) ** -0.5) for x, name in inputs.heads}
        return found.replace(**{name: (x * scale).astype(x.dtype) for name, (x, scale) in matrices.items()})

    def flops(self, inputs: Inputs, direction: Direction) -> float:
        """FLOPs of a matmul for each head; backward of three for the first, and of one for others, which are constant.

        Of gradients that the forward pass computes, too: a program that does not use them does not have them, and these
        are the FLOPs by which a rate is computed, whichever form the gradients have.
        """
        first, *others = (2.0 * inputs.tokens * inputs.vocab * x.shape[-1] for x, _ in inputs.head_arrays)
        return sum(others, first if direction == "forward" else 3 * first)

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Nothing: no token may count."""
        return Cost(0.0, 0.0)


def logits_of(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, inputs: VocabularyInputs, dtype: DTypeLike
) -> Any:
    """``[*tokens, vocab]`` in memory, after the soft cap, for an oracle."""
    logits = jnp.matmul(x.astype(dtype), weight.astype(dtype).T if inputs.vocab_first else weight.astype(dtype))
    logits = logits if bias is None else logits + bias.astype(dtype)
    cap = inputs.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
