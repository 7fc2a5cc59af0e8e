"""Linear attention in plain XLA: the backend for every device and for float64."""

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import jax

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.reference import linear_attention_reference
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

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
)


class XlaLinearAttention(Backend[LinearAttentionInputs, LinearAttentionResults, FwdParams, BwdParams]):
    """Supports every floating-point dtype and shape."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(_OPTIONS)

    def reasons(self, inputs: LinearAttentionInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(
        self, inputs: LinearAttentionInputs, device: Device, direction: Direction
    ) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: LinearAttentionInputs, params: FwdParams) -> LinearAttentionResults:
        return _rounded(inputs)

    def backward(
        self, inputs: LinearAttentionInputs, results: Any, cotangents: LinearAttentionResults, params: BwdParams
    ) -> dict[str, Any]:
        """Differentiates the forward pass, which is computed again."""
        of = {name: getattr(inputs, name) for name in inputs.gradients}
        found, pull_back = jax.vjp(lambda arrays: _rounded(inputs.replace(**arrays)), of)
        given = [
            jax.numpy.zeros_like(x) if each is None else each
            for x, each in zip(found, cotangents, strict=True)
            if x is not None
        ]
        (gradients,) = pull_back(jax.tree.unflatten(jax.tree.structure(found), given))
        return cast(dict[str, Any], gradients)


def _rounded(inputs: LinearAttentionInputs) -> LinearAttentionResults:
    out, state = linear_attention_reference(inputs)
    return LinearAttentionResults(cast(jax.Array, out).astype(inputs.value.dtype), state)
