"""Calls over several devices: tokens split over explicit axes, and a vocabulary that is split over a mesh axis.

With tokens split the matrix is whole on every device. With the vocabulary split, inside ``shard_map`` or by the types
of the matrices, there is one gather of the statistics of each token forward. The gradient of x is a sum over the
devices; that of a device's part of the matrix is complete.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossResults, VocabularyInputs
from tilewright.kernels.linear_cross_entropy.losses import kept_gradients, token_weights_gradient
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.sharding import (
    AxisName,
    GradientParts,
    Partitioning,
    axis_names,
    common_axes,
    explicit_mesh,
    typed_axes,
    typed_spec,
    vary_over,
    varying_axes,
)
from tilewright.ops.utils.promotion import default_promotion


def _token_axes(inputs: VocabularyInputs, arrays: dict[str, Any]) -> tuple[PartitionSpec, tuple[str, ...]]:
    """The mesh axes of every dimension of the tokens, and all their names.

    Raises:
      ValueError: a dimension is split in two ways, or d is.
    """
    by_token = {name: array for name, array in arrays.items() if name not in inputs.vocab_axes}
    split = common_axes(by_token, dict.fromkeys(by_token, len(inputs.token_shape)), whats="tokens", core="d")
    return PartitionSpec(*split if any(split) else ()), tuple(name for axes in split for name in axis_names(axes))


def loss_partitioning(inputs: VocabularyInputs, of_parts: "OfParts") -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    Over axes that split the tokens, too, a matrix is gathered, and its gradient is split again: such an axis gives each
    device other tokens, which need the whole vocabulary. Over other axes each device has its part of the vocabulary.

    Raises:
      ValueError: tokens are split in two ways, or d is.
    """
    arrays = {name: array for name, array in inputs.arrays.items() if array is not None}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    tokens, names = _token_axes(inputs, arrays)
    vocab = _vocabulary_axes(inputs, arrays, names, mesh.shape)
    whole, by_class, scalar = PartitionSpec(), PartitionSpec(vocab or None), inputs.summary == "scalar"
    of_total = None if inputs.summary == "statistics" else whole if scalar else tokens
    kept = scalar and inputs.keeps_gradients
    # An array that the results lack has no spec.
    of_kept = (tokens, _matrix_spec(inputs, vocab), None if inputs.arrays.get("bias") is None else by_class)

    def spec(name: str) -> PartitionSpec:
        if name not in inputs.vocab_axes:
            return tokens
        return by_class if arrays[name].ndim == 1 else _matrix_spec(inputs, vocab)

    def gradient(name: str, array: Any) -> GradientParts:
        by_token = name not in inputs.vocab_axes
        of_matrix = () if kept and not vocab else names  # what the forward pass kept is the sum already
        summed = (vocab if name in dict(inputs.heads) else ()) if by_token else of_matrix
        return GradientParts(spec(name), summed, typed_spec(array))

    def on_results(results: LossResults) -> LossResults:
        if not scalar or not names:
            return results
        # The backward pass scales with the sum of all weights, so both are residuals of the whole call; and a gradient
        # that is kept is that of all tokens.
        parts = {"total": results.total, "count": results.count}
        if kept and not vocab:
            # As gradients are summed (`backward_on_part`): of a bfloat16 matrix in bfloat16.
            dtype = arrays["weight"].dtype if arrays["weight"].dtype == jnp.bfloat16 else inputs.wide
            parts |= {"d_weight": results.d_weight.astype(dtype), "d_bias": results.d_bias}
        found = lax.psum(parts, names)
        wide: dict[str, Any] = {name: None if x is None else x.astype(inputs.wide) for name, x in found.items()}
        return dataclasses.replace(results, **wide)

    def forward(run: Callable[[Any], LossResults], part: Any) -> LossResults:
        return on_results(of_parts.results(run, part, vocab))

    def backward(run: Callable[..., Any], part: Any, results: LossResults, cotangents: LossResults) -> dict[str, Any]:
        if not vocab:
            return of_parts.kept_gradients(part, results, cotangents)
        return of_parts.gradients(run, part, results, cotangents, vocab)

    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(**{name: spec(name) for name in arrays}),
        results=LossResults(
            (tokens, tokens, tokens if inputs.needs_sum else None),
            of_total,
            whole if scalar else None,
            *(of_kept if kept else ()),
        ),
        gradients={name: gradient(name, array) for name, array in arrays.items()},
        # XLA does not split what is left of the call: it is one device's.
        on_part=lambda part: part.replace(is_distributed=False),
        on_results=on_results,
        forward=forward if vocab else None,
        backward=backward if vocab or kept else None,
        shared_with_xla=False,
    )


@dataclasses.dataclass(frozen=True)
class OfParts:
    """The loss of a device's tokens over a vocabulary that the types of arrays split, or XLA does.

    Attributes:
      op: the loss.
    """

    op: Any

    def results(self, run: Callable[[Any], LossResults], part: Any, axes: tuple[str, ...]) -> LossResults:
        """The results; ``run`` computes those of inputs whose vocabulary is a part."""
        found = run(self._part(part, axes)).statistics
        statistics, loss = self.op.merged_loss(part, [x for x in found if x is not None], axes)
        lse, second, third = (None if x is None else jnp.where(part.valid, x, 0) for x in statistics)
        results = LossResults((lse, second, third))
        if part.summary == "none":
            return dataclasses.replace(results, total=loss)
        # Gradients need the statistics of the whole vocabulary: the backward pass computes them, and reads no others.
        declared = self.op.results(part)
        d_x, d_weight, d_bias = (
            None if x is None else jnp.zeros(x.shape, x.dtype)
            for x in (declared.d_x, declared.d_weight, declared.d_bias)
        )
        return LossResults(results.statistics, loss.sum(), part.weights().sum(), d_x, d_weight, d_bias)

    def kept_gradients(self, part: Any, results: LossResults, cotangents: LossResults) -> dict[str, Any]:
        """The gradients from those that the forward pass kept of all tokens."""
        found = {name: x for name, x in kept_gradients(results, cotangents).items() if x is not None}
        return found | {"token_weights": token_weights_gradient(part, results, cotangents)}

    def gradients(
        self,
        run: Callable[..., dict[str, Any]],
        part: Any,
        results: LossResults,
        cotangents: LossResults,
        axes: tuple[str, ...],
    ) -> dict[str, Any]:
        """The gradients of a device's part; ``run`` computes them from cotangents of the statistics."""
        vocab = part.vocab * lax.axis_size(axes)
        of_statistics = self.op.statistics_cotangents(part, results, cotangents, vocab)
        # A part's own kernels, with the log-sum-exp of the whole: their probabilities are those of the whole softmax.
        whole = LossResults(results.statistics)
        found = run(self._part(part, axes), whole, LossResults(of_statistics))
        given = token_weights_gradient(part, results, cotangents, vocab)
        return found if given is None else found | {"token_weights": given}

    def _part(self, part: Any, axes: tuple[str, ...]) -> Any:
        return self.op.part(part, axes).replace(is_part=True, is_distributed=False)


def _vocabulary_axes(
    inputs: VocabularyInputs, arrays: Mapping[str, Any], token_names: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes over which the vocabulary stays split."""
    if not inputs.splits_vocabulary:
        return ()
    axes = {name: axis for name, axis in inputs.vocab_axes.items() if name in arrays}
    split = [names for name, axis in axes.items() if (names := axis_names(typed_axes(arrays[name])[axis]))]
    found = tuple(name for name in split[0] if name not in token_names) if split else ()
    return found if inputs.vocab % math.prod(sizes[name] for name in found) == 0 else ()


def _matrix_spec(inputs: VocabularyInputs, vocab: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(vocab if axis == inputs.vocab_axis and vocab else None for axis in range(2)))


def of_all_devices(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """An operand that is the same along an axis; its gradient is summed over the devices in float32 or wider."""
    axes = varying_axes(lax.axis_index(axis_name)) - varying_axes(x)
    # Without checked types the transpose of ``shard_map`` sums, in the operand's dtype.
    return _of_all_devices(x, axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _of_all_devices(x: jax.Array, axes: frozenset[str]) -> Any:
    return vary_over(axes, x)


@default_promotion()
def _of_all_devices_backward(axes: frozenset[str], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(accumulation_dtype(gradient.dtype))
    return (lax.psum(wide, tuple(sorted(axes))).astype(gradient.dtype),)


_of_all_devices.defvjp(lambda x, axes: (_of_all_devices(x, axes), None), _of_all_devices_backward)


def local_labels(labels: jax.Array, part: int, axis_name: AxisName) -> jax.Array:
    """Labels in a device's part of the vocabulary; labels of other parts are not ignored.

    Args:
      labels: canonical, with ``IGNORED``, of the whole vocabulary.
      part: classes of each device.
    """
    # A label of another part is past the classes of this one: its logit comes from the device that has it.
    own = labels - lax.axis_index(axis_name).astype(jnp.int32) * part
    inside = (own >= 0) & (own < part)
    return jnp.where(labels == IGNORED, IGNORED, jnp.where(inside, own, part))
