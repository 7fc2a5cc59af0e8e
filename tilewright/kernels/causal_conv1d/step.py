"""The step of the causal convolution in decoding: its argument list, its checks and its public function."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.causal_conv1d.arguments import (
    activation_of,
    state_array,
    tokens_array,
    weight_arrays,
)
from tilewright.kernels.causal_conv1d.cases import STEP_CASES, ConvStepCase
from tilewright.kernels.causal_conv1d.inputs import MAX_STEP, ConvActivation, StepInputs
from tilewright.kernels.causal_conv1d.reference import step_reference
from tilewright.kernels.op.arguments import PlatformOption, reshape
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import Partitioning, SplitDimensions
from tilewright.kernels.state_pools import slot_arrays
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id

_ROOM = "tilewright.kernels.causal_conv1d"
_LAYOUTS = {"x": "btc", "conv_pool": "scw", "weight": "cw", "bias": "c", "state_indices": "b", "write_indices": "b"}


@stable_id("tilewright/causal_conv1d_step.CausalConv1dStep")
class CausalConv1dStep(InferenceKernel[StepInputs, tuple[Any, Any]]):
    """Some tokens of each sequence; see ``causal_conv1d_step`` for the arguments."""

    cases: ClassVar[OpCases[ConvStepCase]] = STEP_CASES

    def __init__(self) -> None:
        backends = (f"{_ROOM}.triton.backend:TritonConvStep", f"{_ROOM}.xla:XlaConvStep")
        super().__init__("causal_conv1d_step", version="1", backends=backends)

    def prepare(
        self,
        x: ArrayLike,
        conv_pool: ArrayLike,
        weight: ArrayLike,
        bias: ArrayLike | None = None,
        *,
        activation: ConvActivation | None = None,
        state_indices: ArrayLike | None = None,
        write_indices: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> StepInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        x = tokens_array(x, (2, 3), "[batch, channels] or [batch, tokens, channels]")
        kernel, added = weight_arrays(x, weight, bias)
        single = len(x.shape) == 2
        if single:
            x = reshape(x, (x.shape[0], 1, x.shape[1]))
        batch, tokens, channels = x.shape
        if not isinstance(tokens, int) or not 1 <= tokens <= MAX_STEP:
            raise ValueError(f"a step takes 1 to {MAX_STEP} tokens of a sequence, got {x.shape=}; see causal_conv1d")
        layout = "[slots, channels, width - 1]"
        pool = state_array("conv_pool", conv_pool, (None, channels, kernel.shape[1] - 1), layout, x)
        read, write = slot_arrays(batch, pool.shape[0], state_indices, write_indices)
        return StepInputs(
            x,
            pool,
            kernel,
            added,
            read,
            write,
            activation=activation_of(activation),
            single=single,
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: StepInputs) -> Any:
        return struct_like(inputs.x), struct_like(inputs.conv_pool)

    def outputs(self, inputs: StepInputs, results: tuple[Any, Any]) -> Any:
        y, pool = results
        return y[:, 0] if inputs.single else y, pool

    def reference(self, inputs: StepInputs) -> Any:
        return self.outputs(inputs, step_reference(inputs))

    def sampled(self, inputs: StepInputs, key: jax.Array) -> StepInputs:
        """Also a slot of its own for each row, as far as there are enough."""
        drawn, slots, rows = super().sampled(inputs, key), inputs.conv_pool.shape[0], inputs.x.shape[0]
        order = generator_of(key).permutation(max(slots, rows))[:rows].astype("int32")
        given = {
            name: jnp.asarray(order) for name in ("state_indices", "write_indices") if getattr(inputs, name) is not None
        }
        return drawn.replace(**given)

    def partitioning(self, inputs: StepInputs) -> Partitioning | None:
        """By channels: a row may have any slot."""
        split = SplitDimensions.of(inputs, _LAYOUTS, {"c": "channels"})
        return None if split is None else split.partitioning(inputs, ("btc", "scw"))

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Bytes of the tokens and of their states, read and written."""
        inputs = self.inputs_of(inv)
        state = inputs.x.shape[0] * inputs.x.shape[2] * (inputs.width - 1) * inputs.conv_pool.dtype.itemsize
        fixed = sum(each.size * each.dtype.itemsize for each in (inputs.weight, inputs.bias) if each is not None)
        return Cost(0.0, float(2 * inputs.x.size * inputs.x.dtype.itemsize + 2 * state + fixed))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The bytes of the results of tokens: all rows may be padding, and the pool donated."""
        x = self.inputs_of(inv).x
        return Cost(0.0, float(x.size * x.dtype.itemsize))


_CAUSAL_CONV1D_STEP = CausalConv1dStep()


@public_function(CausalConv1dStep.prepare)
def causal_conv1d_step(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of the next tokens of sequences in decoding, from a pool of their last inputs.

    ``causal_conv1d`` with ``return_state`` gives the states that a pool begins with. For inference: it has no gradient.

    Args:
      x: ``[batch, channels]``, or ``[batch, tokens, channels]`` with up to 8 tokens of each sequence, which are
        taken in order; floating-point.
      conv_pool: ``[slots, channels, width - 1]``: the last inputs of sequences, the oldest first, in any floating-point
        dtype. Donate it to the ``jit`` around, or it is copied.
      weight: ``[channels, width]``, floating-point of any precision.
      bias: ``[channels]``, floating-point of any precision; 0 if ``None``.
      activation: ``"silu"``, also called ``"swish"``, or ``None``.
      state_indices: ``[batch]`` integers: the slot of each row. A row whose slot does not exist, such as −1, is
        padding: its result is 0 and it writes nothing. By default row i has slot i.
      write_indices: ``[batch]`` integers: the slot that the new state is written to, by default the one that was read;
        where it does not exist nothing is written. No two rows may write one slot, and no row one that another reads.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``(y, pool)``: the results of the tokens, like x, and the pool with the states after all of them.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _CAUSAL_CONV1D_STEP(*args, **kwargs)
