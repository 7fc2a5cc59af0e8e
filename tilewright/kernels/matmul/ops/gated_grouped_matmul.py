"""The gated grouped matmul: two grouped matmuls of the same rows, and a gated activation."""

from typing import Any, ClassVar

import jax
from jax.typing import ArrayLike

from tilewright.kernels.matmul.arguments import CONTENTS, floating, grouping
from tilewright.kernels.matmul.cases import GATED_CASES
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.op import MatmulKernel
from tilewright.kernels.numerics.activations import Activation, activation_name
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.public import public_function
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.GatedGroupedMatmul")
class GatedGroupedMatmul(MatmulKernel):
    """Two grouped matmuls and a gated activation; see ``gated_grouped_matmul`` for the arguments."""

    cases = GATED_CASES
    contents = CONTENTS
    run_is_forward: ClassVar[bool] = False  # it keeps no pre-activations
    always: ClassVar[tuple[str, ...]] = ("up", "group_sizes")

    def __init__(self) -> None:
        super().__init__(
            "gated_grouped_matmul",
            version="1",
            backends=(
                "tilewright.kernels.matmul.hopper.backend:HopperGatedGroupedMatmul",
                # As for ``grouped_matmul``, which was measured: the loops of XLA are those of this op, too.
                "tilewright.kernels.matmul.triton.backend:TritonGatedGroupedMatmul",
                "tilewright.kernels.matmul.xla.ragged_dot:GatedRaggedDot",
                "tilewright.kernels.matmul.xla.backend:XlaGatedGroupedMatmul",
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
        transpose_rhs: bool = False,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> MatmulInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        rows, transposed = floating("lhs", lhs, "[m, k]"), arguments.flag("transpose_rhs", transpose_rhs)
        layout = "[groups, n, k]" if transposed else "[groups, k, n]"
        gates, ups = (floating(name, x, layout) for name, x in (("gate", gate), ("up", up)))
        sizes, offset = grouping(rows, {"gate": gates, "up": ups}, group_sizes, group_offset, 2 if transposed else 1)
        if ups.shape != gates.shape:
            raise ValueError(f"gate and up must have the same shape, got {gates.shape=}, {ups.shape=}")
        return MatmulInputs(
            rows,
            gates,
            out_dtype=result_dtype(None, rows.dtype, gates.dtype, ups.dtype).name,
            up=ups,
            group_sizes=sizes,
            group_offset=offset,
            activation=activation_name(activation),
            transpose_rhs=transposed,
            platform=self.backends.allowed(platform),
        )


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
      transpose_rhs: gate and up are ``[groups, n, k]``, and so are their gradients.
      group_sizes: ``[groups]`` integers.
      activation: "silu", "gelu" (exact), "gelu_tanh" (the default of ``jax.nn.gelu``), "relu", "sigmoid", "tanh" or
        "identity".
      group_offset: the group of the first matrix, as in ``grouped_matmul``; rows of groups without one give zeros.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[m, n]``, in the dtype of the operands.

    Raises:
      ValueError, TypeError, UnsupportedError: as ``grouped_matmul``.
    """
    return _GATED_GROUPED_MATMUL(lhs, gate, up, group_sizes, **options)
