"""Flash attention: the argument list, and the parts that all its backends share."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.flash_attention import masking, sampling
from tilewright.kernels.flash_attention.arguments import (
    alignment,
    bias_array,
    dropout,
    query_key_value,
)
from tilewright.kernels.flash_attention.cases import CASES
from tilewright.kernels.flash_attention.contents import CONTENTS
from tilewright.kernels.flash_attention.distributed.explicit import attention_on_explicit_axes, keys_travel
from tilewright.kernels.flash_attention.distributed.op import ContextParallelOp
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import cleared
from tilewright.kernels.flash_attention.options import AttentionOptions
from tilewright.kernels.flash_attention.partitioning import (
    attention_partitioning,
    with_bias_positions,
    with_positions,
)
from tilewright.kernels.flash_attention.position_bias import PositionBias, is_position_bias, position_bias
from tilewright.kernels.flash_attention.reference import attention_reference
from tilewright.kernels.masks import Mask, TileClass, TileGrid
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.backend import PreferredBackends
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function, with_defaults
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import OraclePart, Product
from tilewright.ops.utils.stable_ids import stable_id

type Output = Float[Array, "*batch q_length heads value_dim"]
type LogSumExp = Float[Array, "*batch heads q_length"]
type Results = tuple[Output, LogSumExp]

BACKWARD_FLOPS = 2.5
"""Matmul FLOPs of the backward pass relative to the forward pass: five matmuls to two."""

MAX_LOGIT_BYTES = 2 << 30
"""Maximum bytes of a call's float32 logits for the oracle of the whole call, which holds several such arrays.
"""

COST_BLOCK = 64
"""Tile size at which the visible share of a mask is counted."""


@stable_id(
    "tilewright/flash_attention.FlashAttention", formerly=("tilewright.kernels.flash_attention.op:FlashAttention",)
)
class FlashAttention(PortfolioKernel[AttentionInputs, Results]):
    """Attention in memory linear in the lengths; see ``flash_attention`` for the arguments."""

    cases = CASES
    contents = CONTENTS
    takes_near_shapes = True
    cuda_tables = MappingProxyType(
        {
            f"flash_attention_{name}": f"tilewright.kernels.flash_attention.cuda.{table}"
            for name, table in (
                ("hopper_wide_forward", "hopper_variants:WIDE_FORWARD"),
                ("ampere_forward", "ampere_variants:FORWARD"),
                ("ampere_backward", "ampere_variants:BACKWARD"),
                ("forward", "cutlass_variants:FORWARD"),
                ("backward", "cutlass_variants:BACKWARD"),
            )
        }
    )

    # Kernels with the instructions of these GPUs, before those in CUDA C++ with Ampere's: on a B200 FlashAttention-4's
    # authors measured up to 1613 TFLOP/s, 1.3 times cuDNN's speed and 2.7 times Triton's, where Ampere's instructions
    # reached 380 (flash-attention#1589).
    preferred: ClassVar[PreferredBackends] = MappingProxyType(dict.fromkeys((10, 11), ("fa4", "cudnn", "triton")))

    def __init__(self) -> None:
        super().__init__(
            "flash_attention",
            version="1",
            backends=(
                "tilewright.kernels.flash_attention.hopper.backend:PallasGpuFlashAttention",
                "tilewright.kernels.flash_attention.tpu.backend:TpuFlashAttention",
                "tilewright.kernels.flash_attention.cuda.backend:CudaFlashAttention",
                "tilewright.kernels.flash_attention.cudnn.backend:CudnnFlashAttention",
                "tilewright.kernels.flash_attention.fa4.backend:Fa4FlashAttention",
                # Behind XLA, except where it is known to be faster: see its deprioritized.
                "tilewright.kernels.flash_attention.triton.backend:TritonFlashAttention",
                "tilewright.kernels.flash_attention.xla.backend:XlaFlashAttention",
            ),
        )

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | AlibiBias | RelativeBias | None = None,
        mask: ArrayLike | Mask | None = None,
        **options: Unpack[AttentionOptions],
    ) -> AttentionInputs:
        """Checks a call.

        Everything that masks a key for a query is combined into one mask. Arrays keep their values and are not copied;
        those without a batch dimension get one, which ``outputs`` removes.
        """
        given = with_defaults(AttentionOptions, options)
        queries, keys, values, unbatched = query_key_value(query, key, value)
        batch, q_length, heads, _ = queries.shape
        shape = masking.ScoreShape(batch, heads, q_length, keys.shape[1], unbatched)
        prob, seed = dropout(given["dropout_prob"], given["dropout_seed"])
        bottom_right = alignment(given["causal_alignment"])
        combined, positions = masking.call_mask(
            shape,
            mask=mask,
            causal=arguments.flag("causal", given["causal"]),
            sliding_window=given["sliding_window"],
            bottom_right=bottom_right,
            segment_ids=(given["q_segment_ids"], given["kv_segment_ids"]),
            lengths=(given["query_seq_lengths"], given["key_value_seq_lengths"]),
            cum_seqlens=(given["cum_seqlens_q"], given["cum_seqlens_k"]),
            has_position_bias=is_position_bias(bias),
        )
        queries, scale = _scaled(queries, given["softmax_scale"], combined, keys.shape[1])
        combined = with_positions(combined, queries, keys)
        added: Any = None
        if isinstance(bias, AlibiBias | RelativeBias):
            added = with_bias_positions(position_bias(bias, shape, positions, bottom_right), queries, keys)
        elif bias is not None:
            added = bias_array(bias, shape.sizes)
        sinks = None if given["softmax_aux"] is None else arguments.sinks_array(given["softmax_aux"], heads)
        added, combined, sinks = jax.tree.map(lambda x: arguments.to_32_bit(x, queries.dtype), (added, combined, sinks))
        of_positions = added if isinstance(added, PositionBias) else None
        return AttentionInputs(
            queries,
            keys,
            values,
            scale,
            bias=None if of_positions is not None else added,
            position_bias=of_positions,
            mask=combined,
            softmax_aux=sinks,
            dropout_seed=seed,
            logits_soft_cap=arguments.soft_cap(given["logits_soft_cap"]),
            dropout_prob=prob,
            precision=arguments.matmul_precision(given["precision"]),
            return_lse=arguments.flag("return_lse", given["return_lse"]),
            unbatched=unbatched,
            platform=self.backends.allowed(given["platform"]),
        )

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """`context_parallel_attention` where the types of query, key and value split all of their lengths alike."""
        if not keys_travel({**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}):
            return None
        return functools.partial(attention_on_explicit_axes, CONTEXT_PARALLEL_ATTENTION, *args, cfg=cfg, **kwargs)

    def outputs(self, inputs: AttentionInputs, results: Results) -> Output | Results:
        """The caller's results, from ``(out, lse)``."""
        out, lse = (result[0] for result in results) if inputs.unbatched else results
        return (out, lse) if inputs.return_lse else out

    def cotangents(
        self, inputs: AttentionInputs, residuals: Results, cotangents: tuple[Array, ...]
    ) -> tuple[Array, Array | None]:
        """The inverse of ``outputs``: ``(d_out, d_lse)`` from one cotangent per output."""
        d_out, d_lse = cotangents if inputs.return_lse else (cotangents[0], None)
        if inputs.unbatched:
            d_out, d_lse = d_out[None], None if d_lse is None else d_lse[None]
        return d_out, d_lse

    def results(self, inputs: AttentionInputs) -> Any:
        """``(out, lse)``: the output in the query's dtype, the log-sum-exp in that of sums."""
        batch, q_length, heads, _ = inputs.query.shape
        out = (batch, q_length, heads, inputs.value.shape[3])
        lse = jax.ShapeDtypeStruct((batch, heads, q_length), accumulation_dtype(inputs.query.dtype))
        return jax.ShapeDtypeStruct(out, inputs.query.dtype), lse

    def product(self, inputs: AttentionInputs) -> Product:
        """Probabilities times values, of every head."""
        batch, heads, q_length, kv_length = inputs.score_shape
        probabilities = jax.ShapeDtypeStruct((batch, heads, q_length, kv_length), inputs.dtype)
        values = jax.ShapeDtypeStruct((batch, heads, kv_length, inputs.value_dim), inputs.value.dtype)
        sources = (("query", "key"), ("value",))
        return Product(probabilities, values, ((3,), (2,)), ((0, 1), (0, 1)), sources)

    def argument_gradients(self, inputs: AttentionInputs, gradients: dict[str, Any]) -> dict[str, Any]:
        """The gradients with that of a bias of positions in the structure of its field."""
        values = gradients.pop("position_bias", None)
        if inputs.position_bias is None or values is None:
            return gradients
        return gradients | {"position_bias": dataclasses.replace(inputs.position_bias, values=values, q_positions=None)}

    def reference(self, inputs: AttentionInputs) -> Output | Results:
        """The oracle, computed in the query's dtype: promote narrow arrays for exact results."""
        out, lse = attention_reference(inputs, inputs.query.dtype)
        return self.outputs(inputs, (out, lse.astype(jnp.promote_types(lse.dtype, jnp.float32))))

    def oracle_parts(self, invocation: Invocation[Any, Any]) -> list[OraclePart]:
        """The query heads of one key head, of the first and the last batch element; empty for small calls."""
        inputs = self.inputs_of(invocation)
        if 4 * math.prod(inputs.score_shape) <= MAX_LOGIT_BYTES:
            return []
        coordinates = [(0, 0), (inputs.batch - 1, inputs.kv_heads - 1)]
        # Dropout counts from the first head of the first element, and the oracle counts from the start of its part.
        chosen = dict.fromkeys(coordinates[:1] if inputs.dropout else coordinates)
        return [oracle_part(inputs, *coordinate) for coordinate in chosen]

    def sampled(self, inputs: AttentionInputs, key: jax.Array) -> AttentionInputs:
        """Normal arrays, a few segments, lengths of at least half, a mask with a tenth masked."""
        draw = sampling.sampler(key, inputs.q_length, inputs.kv_length)
        seed = draw.seed(inputs.dropout_seed)
        position_bias = None if inputs.position_bias is None else draw.position_bias(inputs.position_bias)
        floats = {name: draw.normal(getattr(inputs, name)) for name in ("query", "key", "value", "bias", "softmax_aux")}
        mask = None if inputs.mask is None else draw.mask(inputs.mask)
        return inputs.replace(dropout_seed=seed, position_bias=position_bias, mask=mask, **floats)

    def partitioning(self, inputs: AttentionInputs) -> Partitioning | None:
        """Splits by batch, heads and lengths, as in the types of query, key and value."""
        return attention_partitioning(inputs)

    def split_alike(self, inputs: AttentionInputs) -> Sequence[Mapping[str, int]]:
        """Keys and values by their length."""
        return ({"key": 1, "value": 1},)

    def tolerance_factor(self, invocation: Invocation[Any, Any]) -> float:
        """The tolerance factor, which is larger with a soft cap, since that flattens the logits."""
        return 3.0 if self.inputs_of(invocation).logits_soft_cap else 2.0

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of the tiles that a static mask leaves visible, and bytes of every array read or written once."""
        inputs = self.inputs_of(inv)
        flops = matmul_flops(inputs, TileClass.PARTIAL)
        item = inputs.dtype.itemsize
        rows = inputs.batch * inputs.q_length * inputs.heads
        query, out = rows * inputs.head_dim * item, rows * inputs.value_dim * item
        columns = inputs.batch * inputs.kv_length * inputs.kv_heads
        keys_and_values = columns * (inputs.head_dim + inputs.value_dim) * item
        lse = 4 * rows
        bias, masks = (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))
            for arrays in ((inputs.bias, inputs.position_bias), inputs.mask)
        )
        if inv.direction == "forward":
            return Cost(flops, float(query + keys_and_values + out + lse + bias + masks))
        # Reads all of these and d_out, and writes the gradients.
        return Cost(BACKWARD_FLOPS * flops, float(2 * (query + keys_and_values + out + bias) + lse + masks))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of the tiles that are visible whatever the mask's arrays hold, and bytes of the results."""
        inputs = self.inputs_of(inv)
        flops = matmul_flops(inputs, TileClass.FULL)
        if inv.direction == "backward":
            # A caller may need a single gradient: its matmul and that of the logits.
            return Cost(flops, 0.0)
        rows = inputs.batch * inputs.q_length * inputs.heads
        return Cost(flops, float(rows * (inputs.value_dim * inputs.dtype.itemsize + 4)))


_FLASH_ATTENTION = FlashAttention()
_POSITIONAL = ("query", "key", "value", "bias", "mask")


@stable_id("tilewright/flash_attention.ContextParallelAttention")
class ContextParallelAttention(ContextParallelOp):
    """Attention over a split sequence, by calls of ``flash_attention``."""

    kernel = _FLASH_ATTENTION


CONTEXT_PARALLEL_ATTENTION = ContextParallelAttention()
"""The one kernel behind the public function and behind calls whose types split all lengths alike."""


@public_function(FlashAttention.prepare, attention_fn=True)
@results(WITH_LSE)
def flash_attention(*args: Any, **kwargs: Any) -> Output | Results:
    """Exact attention, softmax(scale · query · keyᵀ + bias) · value, in memory linear in the lengths.

    Runs on the default executor, eagerly and under every JAX transform. Gradients with respect to query, key, value,
    bias and softmax_aux are exact. Logits and sums are float32. Where types split query, key and value by their length
    over the same explicit mesh axes, the call is `context_parallel_attention`; where they split the keys alone, devices
    attend to their own keys, and results are combined by their log-sum-exp.

    Args:
      query: ``[batch, q_length, heads, head_dim]``; the batch dimension may be absent from all arrays of a call.
      key: ``[batch, kv_length, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``, and consecutive query heads
        share a key head (GQA, arXiv 2305.13245).
      value: ``[batch, kv_length, kv_heads, value_dim]``.
      bias: added to the scaled logits; broadcastable to ``[batch, heads, q_length, kv_length]``. An entry of −inf, or
        at or below half of float32's lowest number, masks its key, with a soft cap, too. Or a
        ``kernels.biases.AlibiBias`` or ``RelativeBias``, which is computed from positions, in memory linear in the
        lengths.
      mask: True where a query attends to a key, broadcastable to the same shape; or a ``kernels.masks.Mask``.
        All ways to mask combine: a key is visible where each of them says so.
      causal: query ``i`` sees the keys up to ``i``, as the alignment counts them.
      causal_alignment: "top_left" puts the first query at the first key; "bottom_right" the last at the last, of each
        batch element if there are lengths and of each sequence if they are packed. Segment ids do not move it.
      sliding_window: ``(left, right)`` keys visible to either side, both ends inclusive, None for no bound;
        ``w`` means ``(w, w)``, or ``(w, 0)`` when causal. Counted from the same alignment.
      softmax_scale: 1/√head_dim by default. A JAX array is an operand: multiplied into the query in the query's dtype,
        with a gradient.
      logits_soft_cap: ``c · tanh(logits / c)`` after scale and bias (Gemma 2, arXiv 2408.00118).
      softmax_aux: extra logits without values, ``[heads]`` or ``[heads, n]`` (attention sinks, arXiv 2309.17453).
      q_segment_ids: ``[batch, q_length]`` integers; a query sees the keys with its own number.
      kv_segment_ids: ``[batch, kv_length]``.
      query_seq_lengths: ``[batch]`` integers; later queries attend to nothing. What no call can mean, here and in the
        three below, is an error in NumPy arrays, in lists, and in an eager call on a CPU, and is logged for other
        arrays if TILEWRIGHT_DEBUG is 1.
      key_value_seq_lengths: ``[batch]``; later keys are invisible. What query, key, value and the gradient of the
        output hold beyond the lengths, or outside of packed sequences, reaches no result and no gradient, NaN included;
        what masks and segment ids make invisible has to be finite.
      cum_seqlens_q: ``[sequences + 1]`` boundaries of sequences laid end to end in a batch of one, from 0 to the
        length; what lies outside attends to nothing. Pass the very same array as ``cum_seqlens_k`` for self-attention.
      cum_seqlens_k: the boundaries among the keys.
      dropout_prob: the part of the normalised probabilities to drop, in [0, 1); rounded to a multiple of 2⁻¹⁶.
      dropout_seed: an int, ``uint32[2]`` or a ``jax.random`` key; with ``(batch, head, row, column)`` it decides
        what is dropped, on every backend alike.
      return_lse: also return the natural log-sum-exp of the logits, float32 ``[batch, heads, q_length]``.
      precision: precision of the matmuls, as for ``jax.numpy.matmul``.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.
      dropout_rng: no option: Flax passes its generator by this name, and a call with one is an error that names
        ``tilewright.integrations.flax.dot_product_attention``.

    Returns:
      ``[batch, q_length, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. A query that
      attends to nothing gives zeros, −inf (the log-sum-exp of its sinks if there are any) and zero gradients. One whose
      log-sum-exp is below −2²⁴, since a bias lowers all of its keys, has zero gradients, too: it no longer tells how
      many keys there are.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.

    The algorithm is that of FlashAttention-2 (arXiv 2307.08691).
    """
    return _FLASH_ATTENTION(*args, **kwargs)


def _scaled(queries: jax.Array, softmax_scale: Any, mask: Mask | None, kv_length: int) -> tuple[jax.Array, float]:
    """`arguments.scaled`, without what lies outside of the lengths: NaN there must not reach an array's gradient."""
    if mask is not None and isinstance(softmax_scale, jax.Array) and masking.may_lie_outside(mask):

        def clear(queries: jax.Array, mask: Mask) -> jax.Array:
            return cleared(queries, masking.inside_rows(mask, queries.shape[1], kv_length)[0])

        queries = arguments.apply(functools.partial(clear, mask=mask), queries)
    return arguments.scaled(queries, softmax_scale)


def oracle_part(inputs: AttentionInputs, element: int, kv_head: int) -> OraclePart:
    """The query heads of one key head in one batch element, as a call of its own."""
    unbatched = inputs.unbatched
    groups = inputs.groups
    heads = slice(kv_head * groups, (kv_head + 1) * groups)

    def of(array: jax.Array | None, axes: Mapping[int, slice]) -> Any:
        """Slices the axes that are not broadcast."""
        if array is None:
            return None
        return array[tuple(axes.get(i, slice(None)) if n > 1 else slice(None) for i, n in enumerate(array.shape))]

    batch_slice = slice(element, element + 1)

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (call,) = args
        keys, bias = {0: batch_slice, 2: slice(kv_head, kv_head + 1)}, call.position_bias
        if bias is not None:
            positions = of(bias.q_positions, {0: batch_slice})
            bias = dataclasses.replace(bias, values=of(bias.values, {0: heads}), q_positions=positions)
        part = call.replace(
            query=of(call.query, {0: batch_slice, 2: heads}),
            key=of(call.key, keys),
            value=of(call.value, keys),
            bias=of(call.bias, {0: batch_slice, 1: heads}),
            position_bias=bias,
            mask=None if call.mask is None else call.mask.take(element, 1, heads.start, groups),
            softmax_aux=of(call.softmax_aux, {0: heads}),
        )
        return (part,), kwargs

    def of_result(array: jax.Array, head_axis: int) -> Any:
        return of(array, {head_axis - 1: heads} if unbatched else {0: batch_slice, head_axis: heads})

    def results(returned: Any) -> Any:
        if isinstance(returned, tuple):
            return of_result(returned[0], 2), of_result(returned[1], 1)
        return of_result(returned, 2)

    # An argument that other parts read as well has a gradient which is a sum over all of them.
    single_part = inputs.batch == 1 and inputs.kv_heads == 1
    bias_unshared = inputs.bias is not None and inputs.bias.shape[:2] == (inputs.batch, inputs.heads)
    if inputs.position_bias is not None:
        bias_unshared = inputs.batch == 1 and inputs.position_bias.values.shape[0] == inputs.heads
    sole = {"bias": single_part or bias_unshared, "softmax_aux": inputs.batch == 1}
    sole["position_bias"] = sole["bias"]
    return OraclePart(arguments, results, tuple(name for name, is_sole in sole.items() if not is_sole))


def matmul_flops(inputs: AttentionInputs, min_class: TileClass) -> float:
    """FLOPs of the forward pass's two matmuls, in tiles of at least this class under the static mask."""
    scores = math.prod(inputs.score_shape) * visible_share(inputs, min_class)
    return 2.0 * scores * (inputs.head_dim + inputs.value_dim)


def visible_share(inputs: AttentionInputs, min_class: TileClass) -> float:
    """The share of the scores in tiles of at least this class, as far as the mask is static."""
    if inputs.mask is None or inputs.q_length == 0 or inputs.kv_length == 0:
        return 1.0
    grid = TileGrid(inputs.q_length, inputs.kv_length, COST_BLOCK, COST_BLOCK)
    visible = np.asarray(inputs.mask.classify(grid, static_only=True)) >= min_class
    (q_first, q_last), (kv_first, kv_last) = grid.q_bounds, grid.kv_bounds
    # Ragged tiles count by what they have.
    area = np.outer(q_last - q_first + 1, kv_last - kv_first + 1)
    return float((visible * area).sum() / (np.prod(visible.shape[:2]) * inputs.q_length * inputs.kv_length))
