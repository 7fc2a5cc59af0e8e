"""Flash attention: the argument list, and what all its backends share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from tilewright.kernels import arguments
from tilewright.kernels.arguments import PlatformLike, PrecisionLike
from tilewright.kernels.flash_attention import masking, sampling
from tilewright.kernels.flash_attention.arguments import (
    CausalAlignment,
    alignment,
    bias_array,
    dropout,
    query_key_value,
)
from tilewright.kernels.flash_attention.inputs import AttentionInputs, AttentionOptions
from tilewright.kernels.flash_attention.partitioning import attention_partitioning, with_positions
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.flash_attention.reference import attention_reference
from tilewright.kernels.masks import Mask, TileClass, TileGrid
from tilewright.kernels.portfolio import PortfolioKernel, lazy
from tilewright.kernels.roofline import Cost
from tilewright.kernels.sharding import Partitioning
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import OraclePart
from tilewright.ops.types import Direction

type Output = Float[Array, "*batch q_length heads value_dim"]
type LogSumExp = Float[Array, "*batch heads q_length"]
type Results = tuple[Output, LogSumExp]

BACKWARD_FLOPS = 2.5
"""Matrix products of the backward pass per one of the forward: five to two."""

MOST_LOGIT_BYTES = 2 << 30
"""Of a call's logits in float32: the oracle of more is that of parts, for it holds several arrays of that size."""

COST_BLOCK = 64
"""Tile size with which the visible part of a mask is counted."""


class FlashAttention(PortfolioKernel):
    """Attention in memory linear in the lengths; see ``flash_attention`` for the arguments."""

    def __init__(self) -> None:
        super().__init__(
            "flash_attention",
            version="1",
            implementations=(
                lazy("tilewright.kernels.flash_attention.hopper.backend:PallasGpuFlashAttention"),
                lazy("tilewright.kernels.flash_attention.cuda.backend:CudaFlashAttention"),
                lazy("tilewright.kernels.flash_attention.cudnn.backend:CudnnFlashAttention"),
                lazy("tilewright.kernels.flash_attention.fa4.backend:Fa4FlashAttention"),
                lazy("tilewright.kernels.flash_attention.xla.backend:XlaFlashAttention"),
                # Proven by an emulation alone so far: what nobody asked for or measured does not run by it.
                lazy("tilewright.kernels.flash_attention.triton.backend:TritonFlashAttention"),
            ),
        )

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | Mask | None = None,
        *,
        causal: bool = False,
        causal_alignment: CausalAlignment = "top_left",
        sliding_window: int | tuple[int | None, int | None] | None = None,
        softmax_scale: ArrayLike | None = None,
        logits_soft_cap: float | None = None,
        softmax_aux: ArrayLike | None = None,
        q_segment_ids: ArrayLike | None = None,
        kv_segment_ids: ArrayLike | None = None,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        cum_seqlens_q: ArrayLike | None = None,
        cum_seqlens_k: ArrayLike | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: ArrayLike | None = None,
        return_lse: bool = False,
        precision: PrecisionLike = None,
        platform: PlatformLike | Sequence[PlatformLike] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks a call and gives ``(query, key, value, bias, mask, softmax_aux)`` and the options, canonical.

        Everything that hides a key from a query becomes one mask. Arrays keep their values and are not copied;
        those without a batch dimension get one, which ``outputs`` takes away again.
        """
        queries, keys, values, unbatched = query_key_value(query, key, value)
        batch, q_length, heads, _ = queries.shape
        shape = masking.ScoreShape(batch, heads, q_length, keys.shape[1], unbatched)
        queries, scale = arguments.scaled(queries, softmax_scale)
        prob, seed = dropout(dropout_prob, dropout_seed)
        combined = masking.call_mask(
            shape,
            mask=mask,
            causal=arguments.flag("causal", causal),
            sliding_window=sliding_window,
            bottom_right=alignment(causal_alignment),
            segment_ids=(q_segment_ids, kv_segment_ids),
            lengths=(query_seq_lengths, key_value_seq_lengths),
            cum_seqlens=(cum_seqlens_q, cum_seqlens_k),
        )
        combined = with_positions(combined, queries)
        bias = None if bias is None else bias_array(bias, shape.sizes)
        sinks = None if softmax_aux is None else arguments.sinks_array(softmax_aux, heads)
        bias, combined, sinks = jax.tree.map(lambda x: arguments.narrowed(x, queries.dtype), (bias, combined, sinks))
        return (queries, keys, values, bias, combined, sinks), {
            "dropout_seed": seed,
            "softmax_scale": scale,
            "logits_soft_cap": arguments.soft_cap(logits_soft_cap),
            "dropout_prob": prob,
            "precision": arguments.matmul_precision(precision),
            "return_lse": arguments.flag("return_lse", return_lse),
            "unbatched": unbatched,
            "platform": arguments.platforms(platform),
        }

    def inputs(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any,
        mask: Mask | None,
        softmax_aux: Any,
        *,
        dropout_seed: Any,
        softmax_scale: float,
        logits_soft_cap: float | None,
        dropout_prob: float,
        precision: Any,
        **_: Any,
    ) -> AttentionInputs:
        """Prepared arguments as the backends take them."""
        options = AttentionOptions(softmax_scale, logits_soft_cap, dropout_prob, precision)
        return AttentionInputs(query, key, value, bias, mask, softmax_aux, dropout_seed, options)

    def problem(self, *args: Any, **kwargs: Any) -> AttentionProblem:
        """The sizes of prepared arguments, abstract or not."""
        return AttentionProblem.of(self.inputs(*args, **kwargs), lse_wanted=kwargs["return_lse"])

    def outputs(
        self, inputs: AttentionInputs, results: Results, *, return_lse: bool, unbatched: bool, **_: Any
    ) -> Output | Results:
        """What the caller gets of ``(out, lse)``."""
        out, lse = (result[0] for result in results) if unbatched else results
        return (out, lse) if return_lse else out

    def cotangents(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, ...],
        *,
        return_lse: bool,
        unbatched: bool,
        **_: Any,
    ) -> tuple[Array, Array | None]:
        """The inverse of ``outputs``: ``(d_out, d_lse)`` from one cotangent per output."""
        d_out, d_lse = cotangents if return_lse else (cotangents[0], None)
        if unbatched:
            d_out, d_lse = d_out[None], None if d_lse is None else d_lse[None]
        return d_out, d_lse

    def reference(self, *args: Any, **kwargs: Any) -> Output | Results:
        """The oracle on prepared arguments, computed in the query's dtype: widen narrow arrays for exact results."""
        inputs = self.inputs(*args, **kwargs)
        out, lse = attention_reference(inputs, inputs.query.dtype)
        return self.outputs(inputs, (out, lse.astype(jnp.promote_types(lse.dtype, jnp.float32))), **kwargs)

    def oracle_parts(self, invocation: Invocation[Any, Any]) -> list[OraclePart]:
        """The heads of one head of keys, of the first batch element and of the last, where all logits are too many."""
        args, kwargs = invocation.abstract_args, invocation.abstract_kwargs
        problem = self.problem(*args, **kwargs)
        if 4 * math.prod(problem.score_shape) <= MOST_LOGIT_BYTES:
            return []
        places = [(0, 0), (problem.batch - 1, problem.kv_heads - 1)]
        # What is dropped counts from the first head of the first element, for which the oracle takes its part.
        chosen = dict.fromkeys(places[:1] if problem.dropout else places)
        return [oracle_part(problem, *place, unbatched=kwargs["unbatched"]) for place in chosen]

    def sample_inputs(self, invocation: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal arrays, a few segments, lengths of at least half, a mask that hides a tenth."""
        query, keys, value, bias, mask, softmax_aux = invocation.abstract_args
        kwargs = dict(invocation.abstract_kwargs)
        draw = sampling.sampler(key, query.shape[1], keys.shape[1])
        kwargs["dropout_seed"] = draw.seed(kwargs["dropout_seed"])
        floats = [draw.normal(struct) for struct in (query, keys, value, bias, softmax_aux)]
        return (*floats[:4], None if mask is None else draw.mask(mask), floats[4]), kwargs

    def partitioning(self, inputs: AttentionInputs) -> Partitioning | None:
        """By batch, heads and the length of the queries, as the types of query, key and value say."""
        return attention_partitioning(inputs)

    def tolerance_factor(self, invocation: Invocation[Any, Any]) -> float:
        """The numerics policy allows more where a soft cap flattens the logits."""
        return 3.0 if invocation.abstract_kwargs["logits_soft_cap"] else 2.0

    def cost(self, problem: AttentionProblem, direction: Direction) -> Cost:
        """FLOPs of the tiles that a static mask leaves, and bytes of every array read or written once."""
        flops = product_flops(problem, TileClass.PARTIAL)
        item = problem.dtype.itemsize
        rows = problem.batch * problem.q_length * problem.heads
        query, out = rows * problem.head_dim * item, rows * problem.value_dim * item
        columns = problem.batch * problem.kv_length * problem.kv_heads
        keys_and_values = columns * (problem.head_dim + problem.value_dim) * item
        lse = 4 * rows
        bias = 0 if problem.bias is None else problem.bias.size * problem.bias.dtype.itemsize
        masks = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(problem.mask))
        if direction == "forward":
            return Cost(flops, float(query + keys_and_values + out + lse + bias + masks))
        # Reads all of that and d_out, and writes the gradients.
        return Cost(BACKWARD_FLOPS * flops, float(2 * (query + keys_and_values + out + bias) + lse + masks))

    def least_cost(self, problem: AttentionProblem, direction: Direction) -> Cost:
        """FLOPs of the tiles that are visible whatever the mask's arrays hold, and bytes of the results."""
        flops = product_flops(problem, TileClass.FULL)
        if direction == "backward":
            # A caller may want one gradient of all: its product and that of the logits.
            return Cost(flops, 0.0)
        rows = problem.batch * problem.q_length * problem.heads
        return Cost(flops, float(rows * (problem.value_dim * problem.dtype.itemsize + 4)))


def oracle_part(problem: AttentionProblem, element: int, kv_head: int, *, unbatched: bool = False) -> OraclePart:
    """The query heads of one head of keys, of one batch element, as a call of its own.

    Args:
      unbatched: whether the caller gets results without a batch dimension.
    """
    groups = problem.groups
    heads = slice(kv_head * groups, (kv_head + 1) * groups)

    def of(array: Any, axes: Mapping[int, slice]) -> Any:
        """The slices of the axes that are not broadcast."""
        if array is None:
            return None
        return array[tuple(axes.get(i, slice(None)) if n > 1 else slice(None) for i, n in enumerate(array.shape))]

    one = slice(element, element + 1)

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, key, value, bias, mask, sinks = args
        keys = {0: one, 2: slice(kv_head, kv_head + 1)}
        parts = (of(query, {0: one, 2: heads}), of(key, keys), of(value, keys), of(bias, {0: one, 1: heads}))
        mine = None if mask is None else mask.take(element, 1, heads.start, groups)
        return (*parts, mine, of(sinks, {0: heads})), kwargs

    def of_result(array: Any, head_axis: int) -> Any:
        return of(array, {head_axis - 1: heads} if unbatched else {0: one, head_axis: heads})

    def results(returned: Any) -> Any:
        if isinstance(returned, tuple):
            return of_result(returned[0], 2), of_result(returned[1], 1)
        return of_result(returned, 2)

    alone = problem.batch == 1 and problem.kv_heads == 1
    bias_alone = problem.bias is not None and problem.bias.shape[:2] == (problem.batch, problem.heads)
    shared = [position for position, is_alone in ((3, alone or bias_alone), (5, problem.batch == 1)) if not is_alone]
    return OraclePart(arguments, results, tuple(shared))


def product_flops(problem: AttentionProblem, least: TileClass) -> float:
    """Of the forward pass's two matrix products, in tiles of which a static mask leaves so much."""
    scores = math.prod(problem.score_shape) * visible_share(problem, least)
    return 2.0 * scores * (problem.head_dim + problem.value_dim)


def visible_share(problem: AttentionProblem, least: TileClass) -> float:
    """The part of the scores in tiles of which the mask, as far as it is static, leaves so much."""
    if problem.mask is None or problem.q_length == 0 or problem.kv_length == 0:
        return 1.0
    grid = TileGrid(problem.q_length, problem.kv_length, COST_BLOCK, COST_BLOCK)
    visible = np.asarray(problem.mask.classify(grid, static_only=True)) >= least
    (q_first, q_last), (kv_first, kv_last) = grid.q_bounds, grid.kv_bounds
    area = np.outer(q_last - q_first + 1, kv_last - kv_first + 1)
    return float((visible * area).sum() / (np.prod(visible.shape[:2]) * problem.q_length * problem.kv_length))
