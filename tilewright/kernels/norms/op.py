"""RMS norm and layer norm: their argument lists, and the parts that they share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.norms.cases import LAYER_CASES, RMS_CASES
from tilewright.kernels.norms.inputs import Kind, NormInputs, NormResults
from tilewright.kernels.op.arguments import (
    PlatformOption,
    as_array,
    has_arithmetic,
    is_floating,
    number,
    to_32_bit,
)
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import results
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.utils.stable_ids import stable_id


class _Norm(PortfolioKernel[NormInputs, NormResults]):
    kind: ClassVar[Kind]
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"x": 1, "residual": 1})

    def __init__(self) -> None:
        backends = ("tilewright.kernels.norms.triton.backend:TritonNorm", "tilewright.kernels.norms.xla:XlaNorm")
        super().__init__(f"{self.kind}_norm", version="1", backends=backends)

    def canonical(
        self,
        x: ArrayLike,
        residual: ArrayLike | None,
        weight: ArrayLike | None,
        bias: ArrayLike | None,
        platform: PlatformOption,
        **numbers: Any,
    ) -> NormInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        x = as_array("x", x)
        if not x.shape or not has_arithmetic(x.dtype):
            raise ValueError(
                f"x must be a floating-point array of 16 bits or more and rank 1 at least, got {x.shape=}, {x.dtype=}"
            )
        if residual is not None:
            residual = as_array("residual", residual)
            if (residual.shape, residual.dtype) != (x.shape, x.dtype):
                raise ValueError(f"residual must be as x, {x.dtype}{x.shape}, got {residual.dtype}{residual.shape}")
        vectors = []
        for name, given in (("weight", weight), ("bias", bias)):
            vector = None if given is None else as_array(name, given)
            if vector is not None and (vector.shape != x.shape[-1:] or not is_floating(vector.dtype)):
                raise ValueError(f"{name} must be floating-point {x.shape[-1:]}, got {vector.dtype}{vector.shape}")
            vectors.append(to_32_bit(vector, x.dtype))
        options: dict[str, Any] = {name: number(name, value) for name, value in numbers.items()}
        if options["eps"] < 0:
            raise ValueError(f"eps must not be negative, got {options['eps']}")
        return NormInputs(x, self.kind, residual, *vectors, platform=self.backends.allowed(platform), **options)

    def results(self, inputs: NormInputs) -> Any:
        x = struct_like(inputs.x)
        return NormResults(x, None if inputs.residual is None else x)  # type: ignore[arg-type]

    def outputs(self, inputs: NormInputs, results: NormResults) -> Any:
        return results.out if inputs.residual is None else (results.out, results.total)

    def reference(self, inputs: NormInputs) -> Any:
        return self.outputs(inputs, NormResults(*norm_reference(inputs, inputs.x.dtype)))


def norm_reference(inputs: NormInputs, compute_dtype: DTypeLike | None = None) -> tuple[Any, Any]:
    """``(out, total)`` in ``compute_dtype``: float32 by default, float64 if x is; differentiable, nothing is rounded.

    ``total`` is x without a residual.
    """
    dtype = jnp.dtype(compute_dtype or jnp.promote_types(inputs.x.dtype, jnp.float32))
    total = inputs.x.astype(dtype)
    if inputs.residual is not None:
        total = total + inputs.residual.astype(dtype)
    centered = total
    if inputs.kind == "layer":
        centered = total - jnp.mean(total, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    out = centered / jnp.sqrt(variance + jnp.asarray(inputs.eps, dtype))
    if inputs.weight is not None:
        out = out * (inputs.weight.astype(dtype) + jnp.asarray(inputs.weight_offset, dtype))
    if inputs.bias is not None:
        out = out + inputs.bias.astype(dtype)
    return out, total


@stable_id("tilewright/norms.RmsNorm")
class RmsNorm(_Norm):
    """RMS norm; see ``rms_norm`` for the arguments."""

    kind = "rms"
    cases = RMS_CASES

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike | None = None,
        *,
        residual: ArrayLike | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> NormInputs:
        return self.canonical(x, residual, weight, None, platform, eps=eps, weight_offset=weight_offset)


@stable_id("tilewright/norms.LayerNorm")
class LayerNorm(_Norm):
    """Layer norm; see ``layer_norm`` for the arguments."""

    kind = "layer"
    cases = LAYER_CASES

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        *,
        residual: ArrayLike | None = None,
        eps: float = 1e-6,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> NormInputs:
        return self.canonical(x, residual, weight, bias, platform, eps=eps)


_RMS_NORM, _LAYER_NORM = RmsNorm(), LayerNorm()
_WITH_SUM = {"": jax.Array, "residual": tuple[jax.Array, jax.Array]}


@public_function(RmsNorm.prepare)
@results(_WITH_SUM)
def rms_norm(*args: Any, **kwargs: Any) -> Any:
    """RMS norm over the last axis, ``x / sqrt(mean(x²) + eps) * (weight + weight_offset)``; sums are in float32.

    The gradient of the weight is summed in one order: it is the same bit for bit in every run.

    Args:
      x: ``[..., columns]``, floating-point.
      weight: ``[columns]``, floating-point of any precision; 1 if ``None``.
      residual: like x; ``x + residual``, rounded to x's dtype, is normed instead, and returned as well.
      eps: added to the mean square.
      weight_offset: 1 where the weight is stored as its difference from one, as in Gemma.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The normed rows in x's shape and dtype; with ``residual`` a pair of these and ``x + residual``.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _RMS_NORM(*args, **kwargs)


@public_function(LayerNorm.prepare)
@results(_WITH_SUM)
def layer_norm(*args: Any, **kwargs: Any) -> Any:
    """Layer norm over the last axis, ``(x - mean) / sqrt(variance + eps) * weight + bias``; sums are in float32.

    Args:
      x, weight, residual, platform, cfg: as for ``rms_norm``.
      bias: ``[columns]``, floating-point of any precision; 0 if ``None``.
      eps: added to the variance.

    Returns:
      As ``rms_norm``.

    Raises:
      ValueError, TypeError, UnsupportedError: as ``rms_norm``.
    """
    return _LAYER_NORM(*args, **kwargs)
