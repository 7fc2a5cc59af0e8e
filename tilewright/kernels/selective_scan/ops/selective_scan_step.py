"""One token of each sequence through a selective scan: the argument list, its checks and the public function."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, flag, has_arithmetic, to_32_bit
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.selective_scan import arguments
from tilewright.kernels.selective_scan.cases import STEP_CASES, SelectiveScanStepCase
from tilewright.kernels.selective_scan.inputs import SelectiveScanStepInputs
from tilewright.kernels.selective_scan.partitioning import step_partitioning
from tilewright.kernels.selective_scan.reference import step_reference
from tilewright.kernels.state_pools import slot_arrays
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id

type Stepped = tuple[jax.Array, jax.Array]
"""The output and the pool."""


@stable_id("tilewright/selective_scan.SelectiveScanStep")
class SelectiveScanStep(InferenceKernel[SelectiveScanStepInputs, Stepped]):
    """One token of each sequence; see ``selective_scan_step`` for the arguments."""

    cases: ClassVar[OpCases[SelectiveScanStepCase]] = STEP_CASES

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.selective_scan.triton.selective_scan_step:TritonSelectiveScanStep",
            "tilewright.kernels.selective_scan.xla.selective_scan_step:XlaSelectiveScanStep",
        )
        super().__init__("selective_scan_step", version="1", backends=backends)

    def prepare(
        self,
        state_pool: ArrayLike,
        u: ArrayLike,
        delta: ArrayLike,
        A: ArrayLike,
        B: ArrayLike,
        C: ArrayLike,
        D: ArrayLike | None = None,
        z: ArrayLike | None = None,
        delta_bias: ArrayLike | None = None,
        delta_softplus: bool = False,
        *,
        state_indices: ArrayLike | None = None,
        write_indices: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> SelectiveScanStepInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        pool = as_array("state_pool", state_pool)
        if len(pool.shape) != 3 or not has_arithmetic(pool.dtype):
            raise ValueError(
                "state_pool must be a floating-point array of 16 bits or more, [slots, channels, state], got "
                f"{pool.shape=}, {pool.dtype=}"
            )
        tokens = arguments.tokens_array(u, 2, "[rows, channels]")
        rows = tokens.shape[0]
        decay = arguments.decay_array(A, tokens)
        if pool.shape[1:] != decay.shape:
            raise ValueError(
                f"state_pool must have the shape [slots, channels, state] with A's {decay.shape}, got {pool.shape=}"
            )
        steps = arguments.like_tokens("delta", delta, tokens)
        if steps is None:
            raise TypeError("delta must be an array, got None")
        b, c = (arguments.by_state(name, value, tokens, decay.shape[1]) for name, value in (("B", B), ("C", C)))
        arguments.same_groups(b, c)
        reads, writes = slot_arrays(rows, pool.shape[0], state_indices, write_indices)
        return SelectiveScanStepInputs(
            to_32_bit(pool, tokens.dtype),
            tokens,
            steps,
            decay,
            b,
            c,
            D=arguments.channel_vector("D", D, tokens),
            z=arguments.like_tokens("z", z, tokens),
            delta_bias=arguments.channel_vector("delta_bias", delta_bias, tokens),
            delta_softplus=flag("delta_softplus", delta_softplus),
            state_indices=reads,
            write_indices=writes,
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: SelectiveScanStepInputs) -> Any:
        return struct_like(inputs.u), struct_like(inputs.state_pool)

    def reference(self, inputs: SelectiveScanStepInputs) -> Any:
        out, pool = step_reference(inputs)
        return out.astype(inputs.u.dtype), pool

    def no_gradient(self) -> str:
        return f"{self.name} is for inference and has no gradient; see selective_scan for training"

    def sampled(self, inputs: SelectiveScanStepInputs, key: jax.Array) -> SelectiveScanStepInputs:
        """Normal arrays with a decay as Mamba's layers have it; every row has a slot of its own while they last."""
        drawn = super().sampled(inputs, key)
        found: dict[str, Any] = {
            "A": -jnp.broadcast_to(jnp.arange(1, inputs.state + 1, dtype=inputs.A.dtype), inputs.A.shape)
        }
        if not inputs.delta_softplus:
            found["delta"] = 0.1 * jnp.abs(drawn.delta)
        slots = jnp.arange(inputs.rows, dtype=jnp.int32) % max(inputs.state_pool.shape[0], 1)
        found |= {name: slots for name in ("state_indices", "write_indices") if getattr(inputs, name) is not None}
        return drawn.replace(**found)

    def partitioning(self, inputs: SelectiveScanStepInputs) -> Partitioning | None:
        """Splits by channels, as in the types of the arrays."""
        return step_partitioning(inputs)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Bytes of the tokens, and of the states of the rows, which are read once and written once."""
        inputs = self.inputs_of(inv)
        states = 2 * inputs.rows * inputs.channels * inputs.state * inputs.state_pool.dtype.itemsize
        others = array_bytes(inputs) - array_bytes(inputs.state_pool)
        return Cost(0.0, float(states + others + array_bytes(inputs.u)))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if all rows are padding, and the pool donated: writing the output."""
        return Cost(0.0, float(array_bytes(self.inputs_of(inv).u)))


_SELECTIVE_SCAN_STEP = SelectiveScanStep()


@public_function(SelectiveScanStep.prepare)
def selective_scan_step(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence through the selective scan of Mamba-1, for decoding; states are in a pool.

    The recurrence is that of ``selective_scan``, and so are the dtypes: float32 inside, or float64 for float64 u. For a
    scan's final states as a pool, and a row for each, ``state_pool`` is what ``selective_scan`` returned.

    Args:
      state_pool: ``[slots, channels, state]``, float32, bfloat16 or float16 (or float64). Donate it to the ``jit``
        around, or it is copied.
      u: ``[rows, channels]``, floating-point of 16 bits or more: a token of each sequence.
      delta: ``[rows, channels]``.
      A: ``[channels, state]``.
      B, C: ``[rows, state]``, or ``[rows, groups, state]`` for groups of neighbouring channels.
      D: ``[channels]``: the skip connection; none if ``None``.
      z: like u: the gate; none if ``None``.
      delta_bias: ``[channels]``, added to delta.
      delta_softplus: softplus of delta (and its bias) is the step.
      state_indices: ``[rows]`` integers: the slot of each row's state. A row of −1, or of another slot that does not
        exist, is padding: its output is 0 and nothing is written. By default row i has slot i. Rows of the same slot
        read the same state, and the new one of any of them stays.
      write_indices: ``[rows]`` integers: the slots that new states are written to instead; where one does not exist,
        nothing is written. No row may read a slot that another one writes.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The output in u's shape and dtype, and the pool; slots that no row writes are as they were.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _SELECTIVE_SCAN_STEP(*args, **kwargs)
