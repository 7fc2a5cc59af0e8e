"""The gated linear unit: two matmuls of the same rows, and a gated activation."""

from typing import Any, ClassVar

import jax
from jax.typing import ArrayLike

from tilewright.kernels.matmul.arguments import floating
from tilewright.kernels.matmul.cases import GLU_CASES
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.op import MatmulKernel
from tilewright.kernels.numerics.activations import Activation, activation_name, gated
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.public import public_function
from tilewright.kernels.weight_only.op import packed_matmul
from tilewright.kernels.weight_only.weights import PackedWeight
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.Glu")
class Glu(MatmulKernel):
    """A gated linear unit; see ``glu`` for the arguments."""

    cases = GLU_CASES
    run_is_forward: ClassVar[bool] = False  # it keeps no pre-activations
    always: ClassVar[tuple[str, ...]] = ("up",)

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.matmul.hopper.backend:HopperGlu",
            "tilewright.kernels.matmul.xla.backend:XlaGlu",
            "tilewright.kernels.matmul.triton.backend:TritonGlu",
        )
        super().__init__("glu", version="1", backends=backends)

    def prepare(
        self,
        x: ArrayLike,
        gate: ArrayLike | PackedWeight,
        up: ArrayLike | PackedWeight,
        *,
        activation: Activation = "silu",
        transpose_rhs: bool = False,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> MatmulInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        rows, transposed = floating("x", x, "[..., k]"), arguments.flag("transpose_rhs", transpose_rhs)
        gates, ups = (arguments.as_array(*each) for each in (("gate", gate), ("up", up)))
        for name, matrix in (("gate", gates), ("up", ups)):
            k = matrix.shape[-1:] if transposed else matrix.shape[:1]
            is_matrix = len(matrix.shape) == 2 and arguments.is_floating(matrix.dtype)
            if not is_matrix or k != rows.shape[-1:] or matrix.shape != gates.shape:
                layout = "[n, k], as transpose_rhs=True says," if transposed else "[k, n]"
                raise ValueError(
                    f"{name} must be a floating-point array {layout} with k={rows.shape[-1]}, and gate and up alike, "
                    f"got {gates.shape=}, {ups.shape=}, {matrix.dtype=}"
                )
        return MatmulInputs(
            rows,
            gates,
            out_dtype=result_dtype(None, rows.dtype, gates.dtype, ups.dtype).name,
            up=ups,
            activation=activation_name(activation),
            transpose_rhs=transposed,
            platform=self.backends.allowed(platform),
        )


_GLU = Glu()


@public_function(Glu.prepare)
def glu(*args: Any, **kwargs: Any) -> jax.Array:
    """The first half of a gated MLP, ``act(x · gate) * (x · up)``, with sums and the activation in float32.

    The pre-activations are kept for the backward pass, in the dtype of the result; a config of the backward pass may
    recompute them instead, and under ``jax.jit`` they are then not kept.

    Args:
      x: ``[..., k]``, floating-point.
      gate, up: ``[k, n]``; or both a ``PackedWeight``, whose matmuls are two calls of ``weight_only_matmul``.
      activation: "silu", "gelu" (exact), "gelu_tanh" (the default of ``jax.nn.gelu``), "relu", "sigmoid" (the first
        GLU, arXiv 1612.08083), "tanh" or "identity".
      transpose_rhs: gate and up are ``[n, k]``, and so are their gradients.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[..., n]``, in the dtype of the operands.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    packed = [isinstance(each, PackedWeight) for each in (*args[1:], kwargs.get("gate"), kwargs.get("up"))]
    if any(packed):
        return _of_packed(*args, **kwargs)
    return _GLU(*args, **kwargs)


def _of_packed(
    x: ArrayLike,
    gate: PackedWeight,
    up: PackedWeight,
    *,
    activation: Activation = "silu",
    transpose_rhs: bool = False,
    **options: Any,
) -> jax.Array:
    """Both matmuls with sums in float32, and the activation by XLA."""
    if not (isinstance(gate, PackedWeight) and isinstance(up, PackedWeight)) or gate.shape != up.shape or transpose_rhs:
        shapes = [each.shape if isinstance(each, PackedWeight) else type(each).__name__ for each in (gate, up)]
        raise ValueError(f"gate and up must both be packed weights of one shape, not transposed, got {shapes}")
    name, dtype = activation_name(activation), arguments.as_array("x", x).dtype
    wide = result_dtype(None, dtype, "float32")
    products = [packed_matmul(x, each, preferred_element_type=wide, **options) for each in (gate, up)]
    return gated(name, *products).astype(dtype)
