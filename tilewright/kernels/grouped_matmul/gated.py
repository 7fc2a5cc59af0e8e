"""The gated grouped matmul: its argument list, and the parts that all its backends share."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tilewright.kernels.grouped_matmul.arguments import (
    check_matrices,
    check_sizes_on_host,
    floating,
    offset_array,
    sizes_array,
)
from tilewright.kernels.grouped_matmul.cases import GATED_CASES, group_offset_of, group_sizes
from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs, GatedOptions, GatedProblem, gated_reference
from tilewright.kernels.grouped_matmul.partitioning import gated_partitioning
from tilewright.kernels.numerics.activations import Activation, activation_name
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.portfolio import Choice, PortfolioKernel, lazy
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning, typed_axes
from tilewright.kernels.op.x64 import without_x64
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.GatedGroupedMatmul")
class GatedGroupedMatmul(PortfolioKernel[GatedInputs, GatedProblem, Any]):
    """Two grouped matmuls and a gated activation; see ``gated_grouped_matmul`` for the arguments."""

    cases = GATED_CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"lhs": 1})
    run_is_forward: ClassVar[bool] = False  # it keeps no pre-activations

    def __init__(self) -> None:
        super().__init__(
            "gated_grouped_matmul",
            version="1",
            implementations=(
                lazy("tilewright.kernels.grouped_matmul.hopper.gated:HopperGatedGroupedMatmul"),
                # As for ``grouped_matmul``, which was measured: the loops of XLA are those of this op, too.
                lazy("tilewright.kernels.grouped_matmul.triton.gated:TritonGatedGroupedMatmul"),
                lazy("tilewright.kernels.grouped_matmul.xla.gated:XlaGatedGroupedMatmul"),
            ),
        )

    def prepare(
        self,
        lhs: ArrayLike,
        gate: ArrayLike,
        up: ArrayLike,
        group_sizes: ArrayLike,
        *,
        activation: Activation = "silu",
        group_offset: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks a call; reads only types, shapes and dtypes."""
        rows = floating("lhs", lhs, 2, "[m, k]")
        gates, ups = (floating(name, x, 3, "[groups, k, n]") for name, x in (("gate", gate), ("up", up)))
        sizes = sizes_array(group_sizes)
        offset = None if group_offset is None else offset_array(group_offset)
        check_matrices("gate", gates, rows.shape[1], sizes.shape[0], 1, offset is not None)
        if ups.shape != gates.shape:
            raise ValueError(f"gate and up must have the same shape, got {gates.shape=}, {ups.shape=}")
        options: dict[str, Any] = {
            "out_dtype": result_dtype(None, rows.dtype, gates.dtype, ups.dtype).name,
            "activation": activation_name(activation),
            "platform": arguments.platforms(platform),
        }
        split = (x for x in (gates, ups) if not isinstance(x, jax.ShapeDtypeStruct))
        if offset is None and any(typed_axes(x)[0] is not None for x in split):
            offset = jnp.int32(0)
        if offset is not None:
            options["group_offset"] = offset
        return (rows, gates, ups, sizes), options

    def inputs(
        self,
        lhs: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        group_sizes: jax.Array,
        *,
        out_dtype: str,
        activation: str,
        group_offset: jax.Array | None = None,
        **_: Any,
    ) -> GatedInputs:
        """The prepared arguments in the form that backends take."""
        return GatedInputs(lhs, gate, up, group_sizes, group_offset, GatedOptions(out_dtype, activation))

    def problem(self, *args: Any, **kwargs: Any) -> GatedProblem:
        """The sizes of prepared arguments, abstract or concrete."""
        return GatedProblem.of(self.inputs(*args, **kwargs))

    def reference(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The oracle on prepared arguments: promote narrow arrays for exact results."""
        inputs = self.inputs(*args, **kwargs)
        return gated_reference(inputs).astype(inputs.options.out_dtype)

    def results(self, inputs: GatedInputs) -> Any:
        """The output, and both pre-activations if they are kept."""
        out = jax.ShapeDtypeStruct((inputs.lhs.shape[0], inputs.gate.shape[2]), inputs.options.out_dtype)
        return (out, out, out) if inputs.keeps else (out, None, None)

    def run(self, *args: Any, cfg: Choice, **kwargs: Any) -> Any:
        """The result, without pre-activations in memory where the backend can do without."""
        with without_x64(args, kwargs):
            inputs = dataclasses.replace(self.inputs(*args, **kwargs), keeps=False)
            return self.forward_results(inputs, cfg)[0]

    def forward_with_residuals(self, *args: object, cfg: Choice, **kwargs: object) -> tuple[Any, Any]:
        """The result, and both pre-activations."""
        _, results = super().forward_with_residuals(*args, cfg=cfg, **kwargs)
        return results[0], results[1:]

    def cotangents(
        self, inputs: GatedInputs, results: Any, cotangents: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def differentiated(self, inputs: GatedInputs, wanted: frozenset[str]) -> GatedInputs:
        """The inputs, with the names of the operands whose gradients are used."""
        return dataclasses.replace(inputs, gradients=wanted & inputs.gradients)

    def partitioning(self, inputs: GatedInputs) -> Partitioning | None:
        """Splits by rows, n and matrices, as in the types of lhs, gate and up."""
        return gated_partitioning(inputs)

    def sample_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal arrays, and unequal groups that have all rows."""
        args, kwargs = super().sample_inputs(inv, key)
        problem = self.problem_of(inv)
        with jax.ensure_compile_time_eval():
            random = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        if "group_offset" in kwargs:
            kwargs["group_offset"] = group_offset_of(random, problem.groups, problem.matrices)
        return (*args[:3], group_sizes(random, problem.rows, problem.groups)), kwargs

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs if every row has a group, and bytes of every array once."""
        problem = self.problem_of(inv)
        flops = 4.0 * problem.rows * problem.k * problem.n
        out = problem.rows * problem.n * jnp.dtype(problem.options.out_dtype).itemsize
        operands = array_bytes(inv.abstract_args)
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        return Cost(2 * flops, float(2 * operands + 3 * out))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The bytes of the result: groups may be empty, and one gradient alone may be used."""
        problem = self.problem_of(inv)
        out = problem.rows * problem.n * jnp.dtype(problem.options.out_dtype).itemsize
        return Cost(0.0, float(out) if inv.direction == "forward" else 0.0)


_GATED_GROUPED_MATMUL = GatedGroupedMatmul()


@public_function(GatedGroupedMatmul.prepare)
def gated_grouped_matmul(*args: Any, **kwargs: Any) -> jax.Array:
    """The first half of an expert's gated MLP, for all experts: ``act(lhs · gate) * (lhs · up)`` by groups of rows.

    Rows, groups and their sizes are those of ``grouped_matmul``: rows behind the last group give zeros. Sums and the
    activation are in float32. The pre-activations are kept for the backward pass, in the dtype of the result; a config
    of the backward pass may recompute them instead, and under ``jax.jit`` they are then not kept.

    Args:
      lhs: ``[m, k]``, rows sorted by group.
      gate, up: ``[groups, k, n]``, or fewer matrices with ``group_offset``.
      group_sizes: ``[groups]`` integers.
      activation: "silu", "gelu" (exact), "gelu_tanh" (the default of ``jax.nn.gelu``), "relu" or "identity".
      group_offset: the group of the first matrix, as in ``grouped_matmul``; rows of groups without one give zeros.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[m, n]``, in the dtype of the operands.

    Raises:
      ValueError, TypeError, UnsupportedError: as ``grouped_matmul``.
    """
    check_sizes_on_host(args[3] if len(args) > 3 else kwargs.get("group_sizes"))
    return _GATED_GROUPED_MATMUL(*args, **kwargs)
