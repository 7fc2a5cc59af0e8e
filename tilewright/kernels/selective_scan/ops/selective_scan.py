"""The selective scan: its argument list, its checks and its public function."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, flag
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.contents import Check
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.op.signatures import results
from tilewright.kernels.selective_scan import arguments
from tilewright.kernels.selective_scan.cases import SCAN_CASES, SelectiveScanCase
from tilewright.kernels.selective_scan.inputs import ScanResults, SelectiveScanInputs
from tilewright.kernels.selective_scan.partitioning import scan_partitioning
from tilewright.kernels.selective_scan.reference import scan_reference
from tilewright.kernels.sequences import num_sequences, sequence_arrays, sequence_contents
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/selective_scan.SelectiveScan")
class SelectiveScan(PortfolioKernel[SelectiveScanInputs, ScanResults]):
    """The selective scan of Mamba-1; see ``selective_scan`` for the arguments."""

    cases: ClassVar[OpCases[SelectiveScanCase]] = SCAN_CASES
    contents: ClassVar[Mapping[str, Check]] = sequence_contents("u")
    run_is_forward: ClassVar[bool] = False  # it keeps no states of chunks

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.selective_scan.triton.selective_scan:TritonSelectiveScan",
            "tilewright.kernels.selective_scan.xla.selective_scan:XlaSelectiveScan",
        )
        super().__init__("selective_scan", version="1", backends=backends)

    def prepare(
        self,
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
        initial_state: ArrayLike | None = None,
        return_state: bool = False,
        cum_seqlens: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        seq_lengths: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> SelectiveScanInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        tokens = arguments.tokens_array(u, 3, "[batch, length, channels]")
        batch, length, channels = tokens.shape
        decay = arguments.decay_array(A, tokens)
        b, c = (arguments.by_state(name, value, tokens, decay.shape[1]) for name, value in (("B", B), ("C", C)))
        arguments.same_groups(b, c)
        steps = arguments.like_tokens("delta", delta, tokens)
        if steps is None:
            raise TypeError("delta must be an array, got None")
        sequences: dict[str, Any] = sequence_arrays(batch, length, cum_seqlens, segment_ids, seq_lengths)
        returns = flag("return_state", return_state)
        if segment_ids is not None and (initial_state is not None or returns):
            raise ValueError(
                "a row of segment_ids has several sequences, whose states have no place: give initial_state and "
                "return_state with cum_seqlens, for sequences that are packed into one row"
            )
        shape = (num_sequences(batch, sequences["cum_seqlens"]), channels, decay.shape[1])
        return SelectiveScanInputs(
            tokens,
            steps,
            decay,
            b,
            c,
            D=arguments.channel_vector("D", D, tokens),
            z=arguments.like_tokens("z", z, tokens),
            delta_bias=arguments.channel_vector("delta_bias", delta_bias, tokens),
            delta_softplus=flag("delta_softplus", delta_softplus),
            initial_state=arguments.initial_states(initial_state, shape, tokens),
            return_state=returns,
            platform=self.backends.allowed(platform),
            **sequences,
        )

    def results(self, inputs: SelectiveScanInputs) -> Any:
        def states(*leading: int) -> Any:
            return jax.ShapeDtypeStruct((*leading, inputs.channels, inputs.state), inputs.dtype)

        return ScanResults(
            jax.ShapeDtypeStruct(inputs.u.shape, inputs.u.dtype),  # type: ignore[arg-type]
            states(inputs.sequences) if inputs.return_state else None,
            states(inputs.batch, inputs.chunks) if inputs.keeps else None,
        )

    def outputs(self, inputs: SelectiveScanInputs, results: ScanResults) -> Any:
        return (results.out, results.state) if inputs.return_state else results.out

    def residuals(self, results: ScanResults) -> ScanResults:
        """The states before the chunks."""
        return ScanResults(None, None, results.chunk_states)

    def cotangents(self, inputs: SelectiveScanInputs, residuals: Any, cotangents: tuple[Any, ...]) -> ScanResults:
        d_out, *d_state = cotangents
        return ScanResults(d_out, d_state[0] if d_state else None, None)

    def run(self, inputs: SelectiveScanInputs, *, cfg: Choice) -> Any:
        return super().run(inputs.replace(keeps=False), cfg=cfg)

    def reference(self, inputs: SelectiveScanInputs) -> Any:
        out, state = scan_reference(inputs)
        return self.outputs(inputs, ScanResults(out.astype(inputs.u.dtype), state, None))

    def sampled(self, inputs: SelectiveScanInputs, key: jax.Array) -> SelectiveScanInputs:
        """Normal arrays with a decay as Mamba's layers have it; sequences of about the same length."""
        drawn = super().sampled(inputs, key)
        length = inputs.length
        found: dict[str, Any] = {
            "A": -jnp.broadcast_to(jnp.arange(1, inputs.state + 1, dtype=inputs.A.dtype), inputs.A.shape)
        }
        if not inputs.delta_softplus:
            found["delta"] = 0.1 * jnp.abs(drawn.delta)
        if inputs.cum_seqlens is not None:
            found["cum_seqlens"] = jnp.linspace(0, length, inputs.sequences + 1).astype(jnp.int32)
        if inputs.segment_ids is not None:
            found["segment_ids"] = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) // 512, (inputs.batch, length))
        if inputs.seq_lengths is not None:
            found["seq_lengths"] = jnp.full(inputs.batch, length, jnp.int32)
        return drawn.replace(**found)

    def partitioning(self, inputs: SelectiveScanInputs) -> Partitioning | None:
        """Splits by rows of the batch and by channels, as in the types of the arrays."""
        return scan_partitioning(inputs)


_SELECTIVE_SCAN = SelectiveScan()


@public_function(SelectiveScan.prepare)
@results({"": jax.Array, "return_state": tuple[jax.Array, jax.Array]})
def selective_scan(*args: Any, **kwargs: Any) -> Any:
    """The selective scan of Mamba-1 (arXiv 2312.00752): a linear recurrence of each channel whose factors are inputs.

    For a token t, a channel d and an element n of its state ``h``, which begins with zeros or ``initial_state``::

        h[d, n] = exp(delta[t, d] · A[d, n]) · h[d, n] + delta[t, d] · B[t, n] · u[t, d]
        out[t, d] = (sum over n of C[t, n] · h[d, n] + D[d] · u[t, d]) · silu(z[t, d])

    with ``softplus(delta + delta_bias)`` in place of delta. All of it is computed in float32, or in float64 for float64
    u, and rounded once. Arrays are channel-last: where ``selective_scan_fn`` of mamba-ssm takes ``[batch, channels,
    length]``, transpose u, delta and z to ``[batch, length, channels]``, and B and C to ``[batch, length, (groups,)
    state]``. There is no complex A.

    Results never depend on later tokens. With ``cum_seqlens`` they do not depend, bit for bit, on the other sequences
    nor on the place in the row. With ``segment_ids`` chunks of the computation begin at fixed places, so that the place
    of a segment changes its rounding.

    Args:
      u: ``[batch, length, channels]``, floating-point of 16 bits or more.
      delta: ``[batch, length, channels]``: the step of each token, of any such dtype.
      A: ``[channels, state]``; negative in a model.
      B, C: ``[batch, length, state]``, or ``[batch, length, groups, state]`` for groups of neighbouring channels.
      D: ``[channels]``: the skip connection; none if ``None``.
      z: like u: the gate; none if ``None``.
      delta_bias: ``[channels]``, added to delta.
      delta_softplus: softplus of delta (and its bias) is the step.
      initial_state: ``[sequences, channels, state]``: the states before the first tokens.
      return_state: also return the states behind the last tokens.
      cum_seqlens: ``[sequences + 1]`` integers: boundaries of sequences that are packed into the one row of a batch.
        The first may be more than 0, and the last less than the length.
      segment_ids: ``[batch, length]`` integers: a state begins anew where the id changes; tokens of negative ids are
        padding. There are no initial or final states.
      seq_lengths: ``[batch]`` integers: the tokens of each row; those behind them are padding.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      out in u's shape and dtype, zeros for tokens that belong to no sequence, whatever these hold. With
      ``return_state`` a pair of it and the states, ``[sequences, channels, state]`` float32 (or float64), where
      sequences are those of ``cum_seqlens`` or the rows. The state of an empty sequence is its initial one. Gradients
      flow through both, to every floating-point argument.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _SELECTIVE_SCAN(*args, **kwargs)
