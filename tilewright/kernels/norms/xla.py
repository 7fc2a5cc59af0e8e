"""The norms in plain XLA: the backend for every device and for float64."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from tilewright.kernels.norms.inputs import NormInputs, NormResults, normed
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaNorm(Backend[NormInputs, NormResults, FwdParams, BwdParams]):
    """Supports every floating-point dtype and shape; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"residual", "weight", "bias", "eps", "weight_offset"})

    def reasons(self, inputs: NormInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: NormInputs, device: Device, direction: Direction) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: NormInputs, params: FwdParams) -> NormResults:
        dtype = _accumulation_dtype(inputs.x)
        total = None if inputs.residual is None else _rounded_sum(inputs.x, inputs.residual)
        out, _ = _normalized((inputs.x if total is None else total).astype(dtype), inputs)
        if inputs.weight is not None:
            out = out * (inputs.weight.astype(dtype) + inputs.weight_offset)
        if inputs.bias is not None:
            out = out + inputs.bias.astype(dtype)
        return NormResults(out.astype(inputs.x.dtype), total)

    def backward(
        self, inputs: NormInputs, results: NormResults, cotangents: NormResults, params: BwdParams
    ) -> dict[str, Any]:
        """Computes the gradients; x and residual share one array."""
        dtype = _accumulation_dtype(inputs.x)
        value, rstd = _normalized(normed(inputs, results).astype(dtype), inputs)
        d_out = cotangents.out.astype(dtype)
        leading = tuple(range(d_out.ndim - 1))
        gradients: dict[str, Any] = {}
        if inputs.bias is not None:
            gradients["bias"] = jnp.sum(d_out, axis=leading).astype(inputs.bias.dtype)
        if inputs.weight is not None:
            gradients["weight"] = jnp.sum(d_out * value, axis=leading).astype(inputs.weight.dtype)
            d_out = d_out * (inputs.weight.astype(dtype) + inputs.weight_offset)
        # x̂ the normed rows and g = d_out · weight: dx = rstd · (g − x̂ · mean(g ∘ x̂) − mean(g)), the last term for
        # layer norm.
        d_x = d_out - value * jnp.mean(d_out * value, axis=-1, keepdims=True)
        if inputs.kind == "layer":
            d_x = d_x - jnp.mean(d_out, axis=-1, keepdims=True)
        d_x = d_x * rstd
        if cotangents.total is not None:
            d_x = d_x + cotangents.total.astype(dtype)
        gradients["x"] = d_x.astype(inputs.x.dtype)
        if inputs.residual is not None:
            gradients["residual"] = gradients["x"]
        return gradients


def _rounded_sum(x: Any, residual: Any) -> Any:
    """``x + residual``, rounded also where it is promoted to be normed.

    XLA adds bfloat16 in float32, and may drop the rounding if the next operation promotes to float32. It would then
    norm a different total than it returns; where the mean is large they differ by more than a standard deviation.
    """
    if x.dtype != jnp.bfloat16:
        return x + residual
    info = jnp.finfo(x.dtype)
    total = x.astype(jnp.float32) + residual.astype(jnp.float32)
    return lax.reduce_precision(total, info.nexp, info.nmant).astype(x.dtype)


def _accumulation_dtype(x: Any) -> Any:
    """The dtype of statistics and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _normalized(value: Any, inputs: NormInputs) -> tuple[Any, Any]:
    """Rows of mean square 1, and the factor that they were multiplied by."""
    rest: Any = 0.0
    if inputs.kind == "layer":
        value = value - jnp.mean(value, axis=-1, keepdims=True)
        # A mean is rounded like its largest term: with values near 1000 the rest is up to 1e-4.
        rest = jnp.mean(value, axis=-1, keepdims=True)
    variance = jnp.mean(value * value, axis=-1, keepdims=True) - rest * rest
    # A difference of rounded numbers may be negative.
    rstd = lax.rsqrt(jnp.maximum(variance, 0.0) + inputs.eps)
    return (value - rest) * rstd, rstd
