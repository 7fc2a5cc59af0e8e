"""The causal convolution: its argument list, its checks and its public function."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tilewright.kernels.causal_conv1d.arguments import (
    activation_of,
    state_array,
    tokens_array,
    weight_arrays,
)
from tilewright.kernels.causal_conv1d.cases import CASES, ConvCase, uneven
from tilewright.kernels.causal_conv1d.distributed import convolution_on_explicit_axes
from tilewright.kernels.causal_conv1d.inputs import ConvActivation, ConvInputs, ConvResults, results_of
from tilewright.kernels.causal_conv1d.reference import conv_reference
from tilewright.kernels.op.arguments import PlatformOption, flag
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.contents import Check
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import Partitioning, SplitDimensions
from tilewright.kernels.op.signatures import results
from tilewright.kernels.sequences import num_sequences, sequence_arrays, sequence_contents
from tilewright.kernels.split_sequences import splits_tokens
from tilewright.ops.utils.stable_ids import stable_id

_ROOM = "tilewright.kernels.causal_conv1d"
_LAYOUTS = {"x": "btc", "weight": "cw", "bias": "c", "segment_ids": "bt", "seq_lengths": "b", "cum_seqlens": "n"}


@stable_id("tilewright/causal_conv1d.CausalConv1d")
class CausalConv1d(PortfolioKernel[ConvInputs, ConvResults]):
    """Causal depthwise convolution; see ``causal_conv1d`` for the arguments."""

    cases: ClassVar[OpCases[ConvCase]] = CASES
    contents: ClassVar[Mapping[str, Check]] = sequence_contents("x")

    def __init__(self) -> None:
        backends = (f"{_ROOM}.triton.backend:TritonConv", f"{_ROOM}.xla:XlaConv")
        super().__init__("causal_conv1d", version="1", backends=backends)

    def prepare(
        self,
        x: ArrayLike,
        weight: ArrayLike,
        bias: ArrayLike | None = None,
        *,
        activation: ConvActivation | None = None,
        initial_state: ArrayLike | None = None,
        return_state: bool = False,
        cum_seqlens: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        seq_lengths: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> ConvInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        x = tokens_array(x, (3,), "[batch, length, channels]")
        kernel, added = weight_arrays(x, weight, bias)
        batch, length, channels = x.shape
        described = sequence_arrays(batch, length, cum_seqlens, segment_ids, seq_lengths)
        return_state = flag("return_state", return_state)
        if segment_ids is not None and (return_state or initial_state is not None):
            raise ValueError(
                "a row of segment_ids may have any number of sequences, so initial_state and return_state have no "
                "meaning; describe the sequences by cum_seqlens"
            )
        state = None
        if initial_state is not None:
            count = num_sequences(batch, described["cum_seqlens"])
            shape, layout = (count, channels, kernel.shape[1] - 1), "[sequences, channels, width - 1]"
            state = state_array("initial_state", initial_state, shape, layout, x)
        return ConvInputs(
            x,
            kernel,
            added,
            state,
            described["cum_seqlens"],
            described["segment_ids"],
            described["seq_lengths"],
            activation=activation_of(activation),
            return_state=return_state,
            platform=self.backends.allowed(platform),
        )

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """`context_parallel_causal_conv1d` where the type of x splits its length."""
        if not splits_tokens(*args[:1], kwargs.get("x")):
            return None
        return functools.partial(convolution_on_explicit_axes, self, self.prepare(*args, **kwargs), cfg)

    def results(self, inputs: ConvInputs) -> Any:
        return results_of(inputs)

    def outputs(self, inputs: ConvInputs, results: ConvResults) -> Any:
        return (results.out, results.state) if inputs.return_state else results.out

    def residuals(self, results: ConvResults) -> Any:
        """Nothing: the backward pass reads the inputs."""
        return ConvResults(None, None)  # type: ignore[arg-type]

    def cotangents(self, inputs: ConvInputs, residuals: Any, cotangents: tuple[Any, ...]) -> ConvResults:
        return ConvResults(cotangents[0], cotangents[1] if inputs.return_state else None)

    def reference(self, inputs: ConvInputs) -> Any:
        found = conv_reference(inputs)
        return self.outputs(inputs, ConvResults(found.out.astype(inputs.x.dtype), found.state))

    def sampled(self, inputs: ConvInputs, key: jax.Array) -> ConvInputs:
        """Also sequences of random lengths that fill the rows."""
        drawn, random = super().sampled(inputs, key), generator_of(key)
        batch, length, _ = inputs.x.shape
        if inputs.cum_seqlens is not None:
            drawn = drawn.replace(cum_seqlens=jnp.asarray(uneven(random, length, inputs.sequences)))
        if inputs.seq_lengths is not None:
            drawn = drawn.replace(seq_lengths=jnp.asarray(random.integers(length // 2, length + 1, batch, np.int32)))
        return drawn

    def partitioning(self, inputs: ConvInputs) -> Partitioning | None:
        """By channels, and by rows of the batch with the states of their sequences."""
        states = "bcw" if inputs.cum_seqlens is None else "ncw"
        given = ConvResults("btc", states if inputs.return_state else None)  # type: ignore[arg-type]
        split = SplitDimensions.of(inputs, _LAYOUTS | {"initial_state": states}, {"b": "rows", "c": "channels"})
        return None if split is None else split.partitioning(inputs, given)


CAUSAL_CONV1D = CausalConv1d()


@public_function(CausalConv1d.prepare)
@results({"": jax.Array, "return_state": tuple[jax.Array, jax.Array]})
def causal_conv1d(*args: Any, **kwargs: Any) -> Any:
    """Causal depthwise convolution, ``y_t = act(bias + Σ_j weight_j · x_{t - width + 1 + j})`` in each channel.

    The convolution before the layers of Mamba, Gated DeltaNet and Kimi Linear. Sums are in float32 (float64 for
    float64). A window never reaches into another sequence: what is before the first token are zeros, or the initial
    state. Results of a sequence do not depend on other sequences, nor on its place among them, and a token's result
    not on later tokens. The gradients of weight and bias are summed in one order.

    Args:
      x: ``[batch, length, channels]``, floating-point.
      weight: ``[channels, width]``, floating-point of any precision; the last column is that of the token itself.
      bias: ``[channels]``, floating-point of any precision; 0 if ``None``.
      activation: ``"silu"``, also called ``"swish"``, or ``None``.
      initial_state: ``[sequences, channels, width - 1]``: the last inputs before each sequence, the oldest first.
        There is a sequence for each row of the batch, or with ``cum_seqlens`` for each that these describe.
      return_state: also return the last ``width - 1`` inputs of each sequence, which continue it as ``initial_state``
        or in ``causal_conv1d_step``. Those of a sequence that is shorter begin with inputs of its initial state.
      cum_seqlens: ``[sequences + 1]`` integers, increasing: where sequences packed into one row begin and end. Batch
        must be 1. What is before the first or behind the last number is padding.
      segment_ids: ``[batch, length]`` integers: a sequence ends where the id changes; negative ids are padding. Not
        with states.
      seq_lengths: ``[batch]`` integers: the tokens of each row; those behind them are padding.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      An array like x; with ``return_state`` a pair of it and ``[sequences, channels, width - 1]`` in x's dtype, or in
      a wider one that ``initial_state`` has. Results of padding are 0, and what it holds, NaN included, reaches
      nothing.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return CAUSAL_CONV1D(*args, **kwargs)
