"""Linear attention in plain XLA: the backend for every device and for float64."""

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults, with_identity
from tilewright.kernels.linear_attention.xla.chunks import chunked_attention
from tilewright.kernels.linear_attention.xla.params import XlaLinearAttentionParams, candidate_params
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction

_OPTIONS = (
    "log_decay",
    "beta",
    "removal_read",
    "removal_write",
    "bonus",
    "initial_state",
    "cum_seqlens",
    "segment_ids",
    "seq_lengths",
    "qk_l2norm",
    "l2norm_eps",
    "only_maps",
)


class XlaLinearAttention(
    Backend[LinearAttentionInputs, LinearAttentionResults, XlaLinearAttentionParams, XlaLinearAttentionParams]
):
    """Supports every floating-point dtype and shape."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaLinearAttentionParams
    backward_params: ClassVar[type] = XlaLinearAttentionParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(_OPTIONS)

    def reasons(self, inputs: LinearAttentionInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(
        self, inputs: LinearAttentionInputs, device: Device, direction: Direction
    ) -> Iterable[XlaLinearAttentionParams]:
        return candidate_params(inputs, device)

    def forward(self, inputs: LinearAttentionInputs, params: XlaLinearAttentionParams) -> LinearAttentionResults:
        return _attended(inputs, params)

    def backward(
        self,
        inputs: LinearAttentionInputs,
        results: LinearAttentionResults,
        cotangents: LinearAttentionResults,
        params: XlaLinearAttentionParams,
    ) -> dict[str, Any]:
        """Pulls cotangents back through the chunks, whose states are computed again.

        The derivatives of the triangular systems and of the loop over states are theirs: products of an inverse, and
        the same loop backwards. All else is matmuls and factors of all chunks at once.
        """
        floats = {name: getattr(inputs, name) for name in inputs.gradients}
        found, pull_back = jax.vjp(lambda arrays: _attended(inputs.replace(**arrays), params), floats)
        given = jax.tree.map(lambda x, each: jnp.zeros_like(x) if each is None else each, found, cotangents)
        (gradients,) = pull_back(given)
        return cast(dict[str, Any], gradients)


def _attended(inputs: LinearAttentionInputs, params: XlaLinearAttentionParams) -> LinearAttentionResults:
    if inputs.only_maps:
        return LinearAttentionResults(None, chunked_attention(with_identity(inputs), params).state)
    return chunked_attention(inputs, params)
