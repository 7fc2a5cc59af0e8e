"""RMS norm and layer norm: their argument lists, and what their backends share."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.flash_attention.arguments import PlatformLike, as_array, is_floating, narrowed, platforms
from tilewright.kernels.norms.inputs import Kind, NormInputs, NormOptions, NormProblem, NormResults
from tilewright.kernels.norms.reference import norm_reference
from tilewright.kernels.portfolio import PortfolioKernel, lazy
from tilewright.kernels.roofline import Cost
from tilewright.kernels.sharding import GradientParts, Partitioning, explicit_mesh, typed_axes, typed_spec
from tilewright.ops.core.kernel import Invocation
from tilewright.ops.core.types import Direction

type Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Norm(PortfolioKernel):
    """What both ops are; prepared arguments are ``(x, residual, weight, bias)``."""

    kind: ClassVar[Kind]

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            version="1",
            implementations=(
                lazy("tilewright.kernels.norms.triton:TritonNorm"),
                lazy("tilewright.kernels.norms.xla:XlaNorm"),
            ),
        )

    def inputs(
        self, x: Any, residual: Any, weight: Any, bias: Any, *, eps: float, weight_offset: float, **_: Any
    ) -> NormInputs:
        return NormInputs(x, residual, weight, bias, NormOptions(self.kind, eps, weight_offset))

    def problem(self, *args: Any, **kwargs: Any) -> NormProblem:
        return NormProblem.of(self.inputs(*args, **kwargs))

    def outputs(self, inputs: NormInputs, results: NormResults, **_: Any) -> Any:
        """``out``, or ``(out, x + residual)``."""
        return results.out if inputs.residual is None else (results.out, results.total)

    def cotangents(
        self, inputs: NormInputs, results: NormResults, cotangents: tuple[Any, ...], **_: Any
    ) -> NormResults:
        """The inverse of ``outputs``."""
        return NormResults(cotangents[0], None if inputs.residual is None else cotangents[1])

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The oracle, computed in x's dtype: widen narrow arrays for exact results."""
        inputs = self.inputs(*args, **kwargs)
        out, total = norm_reference(inputs, inputs.x.dtype)
        return out if inputs.residual is None else (out, total)

    def sample_inputs(self, invocation: Invocation[Any, Any], key: jax.Array) -> Call:
        """Normal arrays."""
        random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        drawn = jax.tree.map(
            lambda x: jnp.asarray(random.standard_normal(x.shape, np.float32), x.dtype), invocation.abstract_args
        )
        return drawn, dict(invocation.abstract_kwargs)

    def cost(self, problem: NormProblem, direction: Direction) -> Cost:
        """Every array once: x and out; with a residual that and the sum, backward x (or the sum), d_out and d_x."""
        tall = 2 * (1 + problem.has_residual) if direction == "forward" else 3 + problem.has_residual
        dtypes = [each for each in (problem.weight_dtype, problem.bias_dtype) if each is not None]
        vectors = (1 if direction == "forward" else 2) * problem.columns * sum(each.itemsize for each in dtypes)
        return Cost(0.0, float(tall * problem.rows * problem.row_bytes + vectors))

    def least_cost(self, problem: NormProblem, direction: Direction) -> Cost:
        """Backward a caller may want the gradient of the bias alone."""
        return self.cost(problem, direction) if direction == "forward" else Cost(0.0, 0.0)

    def partitioning(self, inputs: NormInputs) -> Partitioning | None:
        """By any axis but the last, as the type of x says.

        Raises:
          ValueError: the last axis is split.
        """
        arrays = [array for array in (inputs.x, inputs.residual) if array is not None]
        mesh = explicit_mesh(*arrays)
        if mesh is None:
            return None
        if any(typed_axes(array)[-1] is not None for array in arrays):
            raise ValueError(f"the last axis is what is normed and cannot be split, got {typed_axes(inputs.x)}")
        rows, whole = PartitionSpec(*typed_axes(inputs.x)), PartitionSpec()
        summed = tuple(
            name for axes in rows if axes is not None for name in (axes if isinstance(axes, tuple) else (axes,))
        )
        given = {"x": inputs.x, "residual": inputs.residual, "weight": inputs.weight, "bias": inputs.bias}
        specs: dict[str, Any] = {
            name: None if array is None else rows if name in ("x", "residual") else whole
            for name, array in given.items()
        }
        gradients = {
            name: GradientParts(specs[name], summed if specs[name] is whole else (), typed_spec(array))
            for name, array in given.items()
            if array is not None
        }
        results: Any = NormResults(rows, None if inputs.residual is None else rows)  # type: ignore[arg-type]
        return Partitioning(mesh, NormInputs(**specs, options=inputs.options), results, gradients)

    def _prepared(
        self, x: Any, weight: Any, bias: Any, residual: Any, eps: float, weight_offset: float, platform: Any
    ) -> Call:
        x = as_array("x", x)
        if len(x.shape) < 1 or x.shape[-1] == 0 or not is_floating(x.dtype):
            raise ValueError(f"x must be floating-point of rank 1 or more with columns, got {x.shape=}, {x.dtype=}")
        if residual is not None:
            residual = as_array("residual", residual)
            if residual.shape != x.shape or residual.dtype != x.dtype:
                raise ValueError(
                    f"residual must be like x, got {residual.shape=}, {residual.dtype=}, {x.shape=}, {x.dtype=}"
                )
        vectors = {"weight": weight, "bias": bias}
        for name, vector in vectors.items():
            if vector is not None:
                vector = as_array(name, vector)
                if vector.shape != x.shape[-1:] or not is_floating(vector.dtype):
                    raise ValueError(
                        f"{name} must be floating-point of shape {x.shape[-1:]}, got {vector.shape}, {vector.dtype}"
                    )
                vectors[name] = narrowed(vector, x.dtype)
        for name, value in (("eps", eps), ("weight_offset", weight_offset)):
            if not math.isfinite(value) or (name == "eps" and value < 0):
                raise ValueError(f"{name}={value} must be finite, and eps not negative")
        options = {"eps": float(eps), "weight_offset": float(weight_offset), "platform": platforms(platform)}
        return (x, residual, vectors["weight"], vectors["bias"]), options


class RmsNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) * (weight + weight_offset)`` over the last axis."""

    kind: ClassVar[Kind] = "rms"

    def __init__(self) -> None:
        super().__init__("rms_norm")

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike | None = None,
        *,
        residual: ArrayLike | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        platform: PlatformLike | Sequence[PlatformLike] | None = None,
    ) -> Call:
        """Checks a call; arrays keep their values and are not copied."""
        return self._prepared(x, weight, None, residual, eps, weight_offset, platform)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axis."""

    kind: ClassVar[Kind] = "layer"

    def __init__(self) -> None:
        super().__init__("layer_norm")

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        *,
        residual: ArrayLike | None = None,
        eps: float = 1e-6,
        platform: PlatformLike | Sequence[PlatformLike] | None = None,
    ) -> Call:
        """Checks a call; arrays keep their values and are not copied."""
        return self._prepared(x, weight, bias, residual, eps, 0.0, platform)
