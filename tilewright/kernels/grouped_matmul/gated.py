"""The gated grouped matmul: its argument list, and the parts that all its backends share."""

from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.grouped_matmul.arguments import (
    check_matrices,
    check_sizes_on_host,
    floating,
    offset_array,
    sizes_array,
)
from tilewright.kernels.grouped_matmul.cases import GATED_CASES, generator_of, group_offset_of, group_sizes
from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs, gated_reference
from tilewright.kernels.grouped_matmul.partitioning import gated_partitioning
from tilewright.kernels.numerics.activations import Activation, activation_name
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.backend import lazy
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning, typed_axes
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.GatedGroupedMatmul")
class GatedGroupedMatmul(PortfolioKernel[GatedInputs, Any]):
    """Two grouped matmuls and a gated activation; see ``gated_grouped_matmul`` for the arguments."""

    cases = GATED_CASES
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
    ) -> GatedInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        rows = floating("lhs", lhs, 2, "[m, k]")
        gates, ups = (floating(name, x, 3, "[groups, k, n]") for name, x in (("gate", gate), ("up", up)))
        sizes = sizes_array(group_sizes)
        offset = None if group_offset is None else offset_array(group_offset)
        check_matrices("gate", gates, rows.shape[1], sizes.shape[0], 1, offset is not None)
        if ups.shape != gates.shape:
            raise ValueError(f"gate and up must have the same shape, got {gates.shape=}, {ups.shape=}")
        split = (x for x in (gates, ups) if not isinstance(x, jax.ShapeDtypeStruct))
        if offset is None and any(typed_axes(x)[0] is not None for x in split):
            offset = jnp.int32(0)
        return GatedInputs(
            rows,
            gates,
            ups,
            sizes,
            out_dtype=result_dtype(None, rows.dtype, gates.dtype, ups.dtype).name,
            activation=activation_name(activation),
            group_offset=offset,
            platform=arguments.platforms(platform),
        )

    def reference(self, inputs: GatedInputs) -> jax.Array:
        """The oracle: promote narrow arrays for exact results."""
        return gated_reference(inputs).astype(inputs.out_dtype)

    def results(self, inputs: GatedInputs) -> Any:
        """The output, and both pre-activations if they are kept."""
        out = jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)
        return (out, out, out) if inputs.keeps else (out, None, None)

    def outputs(self, inputs: GatedInputs, results: Any) -> jax.Array:
        return cast(jax.Array, results[0])

    def run(self, inputs: GatedInputs, *, cfg: Choice) -> Any:  # type: ignore[override]
        """The result, without pre-activations in memory where the backend can do without."""
        return super().run(inputs.replace(keeps=False), cfg=cfg)

    def residuals(self, results: Any) -> Any:
        """Both pre-activations."""
        return results[1:]

    def cotangents(self, inputs: GatedInputs, residuals: Any, cotangents: tuple[Any, ...]) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def partitioning(self, inputs: GatedInputs) -> Partitioning | None:
        """Splits by rows, n and matrices, as in the types of lhs, gate and up."""
        return gated_partitioning(inputs)

    def sampled(self, inputs: GatedInputs, key: jax.Array) -> GatedInputs:
        """Normal arrays, unequal groups that have all rows, and an offset at which every matrix has a group."""
        random = generator_of(key)
        drawn = {"group_sizes": group_sizes(random, inputs.rows, inputs.groups)}
        if inputs.group_offset is not None:
            drawn["group_offset"] = group_offset_of(random, inputs.groups, inputs.matrices)
        return super().sampled(inputs, key).replace(**drawn)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs if every row has a group, and bytes of every array once."""
        inputs = self.inputs_of(inv)
        flops = 4.0 * inputs.rows * inputs.k * inputs.n
        operands, out = array_bytes(inputs), _out_bytes(inputs)
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        return Cost(2 * flops, float(2 * operands + 3 * out))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The bytes of the result: groups may be empty, and one gradient alone may be used."""
        return Cost(0.0, float(_out_bytes(self.inputs_of(inv))) if inv.direction == "forward" else 0.0)


def _out_bytes(inputs: GatedInputs) -> int:
    return inputs.rows * inputs.n * jnp.dtype(inputs.out_dtype).itemsize


_GATED_GROUPED_MATMUL = GatedGroupedMatmul()


@public_function(GatedGroupedMatmul.prepare)
def gated_grouped_matmul(
    lhs: ArrayLike, gate: ArrayLike, up: ArrayLike, group_sizes: ArrayLike, **options: Any
) -> jax.Array:
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
    check_sizes_on_host(group_sizes)
    return _GATED_GROUPED_MATMUL(lhs, gate, up, group_sizes, **options)
