"""The logits of a tile in XLA attention: scale, bias, soft cap and mask, and the dropout of their probabilities."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.results import hides
from tilewright.kernels.flash_attention.xla.position_bias import TiledBias
from tilewright.kernels.flash_attention.xla.tiles import Tiling, pad_axis, read
from tilewright.kernels.masks import Index, Mask
from tilewright.kernels.numerics.dropout import head_keys, keep_mask_tile
from tilewright.kernels.numerics.softmax import accumulation_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """The logits of one step's tiles, and their dropout.

    ``query`` and ``key`` are tiled; ``factor`` is the part of the softmax scale that is not folded into ``query``.
    """

    tiling: Tiling
    inputs: AttentionInputs
    query: Any
    key: Any
    bias: Any
    position_bias: TiledBias | None
    mask: Mask | None
    factor: float
    dropout_keys: Any

    @classmethod
    def of(cls, inputs: AttentionInputs, tiling: Tiling, step: Index) -> "Scores":
        take = functools.partial(tiling.take, step=step, batch_axis=0, head_axis=2)
        folded = scale_is_folded(inputs.softmax_scale, inputs.query.dtype)
        query = take(inputs.query)
        mask = tiling.take_mask(inputs.mask, step)
        if mask is not None:
            # Tiles are cut at traced positions, and a dynamic slice beyond the end of an array would be shifted.
            mask = mask.pad(tiling.grid.q_length + tiling.q_padding, tiling.grid.kv_length + tiling.kv_padding)
        keys = None
        if inputs.dropout_seed is not None and inputs.dropout:
            batch_start, head_start = tiling.starts(step)
            batch = batch_start + jnp.arange(tiling.batch_size)[:, None, None]
            heads = head_start + jnp.arange(tiling.head_size)[:, None]
            query_heads = heads * tiling.group + jnp.arange(tiling.group)
            if inputs.dropout_origin is not None:
                batch, query_heads = batch + inputs.dropout_origin[0], query_heads + inputs.dropout_origin[1]
            keys = head_keys(inputs.dropout_seed, batch, query_heads)
        return cls(
            tiling=tiling,
            inputs=inputs,
            query=tiling.q_tiles(query * jnp.asarray(inputs.softmax_scale, query.dtype) if folded else query),
            key=tiling.kv_tiles(take(inputs.key)),
            bias=pad_scores(tiling.take(inputs.bias, step, batch_axis=0, head_axis=1), tiling),
            position_bias=TiledBias.of(inputs.position_bias, tiling, step, accumulation_dtype(query.dtype)),
            mask=mask,
            factor=1.0 if folded else inputs.softmax_scale,
            dropout_keys=keys,
        )

    def logits(self, row: Index, column: Index, masked: bool) -> tuple[Any, float, Any]:
        """``(x, factor, slope)``: the logits are ``factor · x``, −inf if masked; slope is the soft cap's derivative or
        None.
        """
        inputs = self.inputs
        x = jnp.einsum(
            "bhgqd,bhkd->bhgqk",
            read(self.query, row),
            read(self.key, column),
            precision=inputs.precision,
            preferred_element_type=accumulation_dtype(self.query.dtype),
        )
        factor, slope = self.factor, None
        # Bias and cap are of scaled logits; and a masked logit is −∞, which a factor that is not positive would change
        # later.
        has_bias = self.bias is not None or self.position_bias is not None
        if has_bias or inputs.logits_soft_cap is not None or factor <= 0.0:
            x, factor = x * factor if factor != 1.0 else x, 1.0
        hidden = None
        if self.bias is not None:
            bias = self._split_heads(score_tile(self.bias, self.tiling, row, column))
            x, hidden = x + bias.astype(x.dtype), hides(bias)
        if self.position_bias is not None:
            bias = self._split_heads(self.position_bias.tile(row, column))
            x, hidden = x + bias, hides(bias) if self.position_bias.bias.kind == "relative" else None
        if inputs.logits_soft_cap is not None:
            tanh = jnp.tanh(x / inputs.logits_soft_cap)
            x, slope = tanh * inputs.logits_soft_cap, 1.0 - tanh * tanh
        if hidden is not None:
            x = jnp.where(hidden, -jnp.inf, x)
        if masked:
            x = jnp.where(self._visible(row, column), x, -jnp.inf)
        return x, factor, slope

    def keep(self, row: Index, column: Index) -> Any:
        """Marks the elements that dropout keeps."""
        grid = self.tiling.grid
        block = (grid.block_q, grid.block_k)
        prob = self.inputs.drawn_dropout
        starts = row * grid.block_q, column * grid.block_k
        return keep_mask_tile(self.dropout_keys, *starts, block, prob, multiples=block)

    def _visible(self, row: Index, column: Index) -> Any:
        grid = self.tiling.grid
        visible = jnp.ones((1, 1, 1, 1, 1), bool)
        if self.mask is not None:
            tile = self.mask.tile(row * grid.block_q, grid.block_q, column * grid.block_k, grid.block_k)
            visible = self._split_heads(tile)
        if self.tiling.is_ragged:
            columns = column * grid.block_k + jnp.arange(grid.block_k, dtype=jnp.int32)
            visible = visible & (columns < grid.kv_length)
        return visible

    def _split_heads(self, tile: jax.Array) -> Any:
        batch, heads, *rest = tile.shape
        if heads == 1:
            return tile[:, :, None]
        return tile.reshape(batch, heads // self.tiling.group, self.tiling.group, *rest)


def scale_is_folded(scale: float, dtype: DTypeLike) -> bool:
    """True if multiplying the query by the scale beforehand rounds no more than the matmul does."""
    if jnp.dtype(dtype).itemsize >= 4:
        return True
    # ±0.5 is the mantissa of powers of two, which round nothing. In float16 they may leave the range of its exponents.
    return jnp.dtype(dtype) == jnp.bfloat16 and abs(math.frexp(scale)[0]) == 0.5


def pad_scores(array: jax.Array | None, tiling: Tiling) -> Any:
    """A bias with its full dimensions padded to whole tiles."""
    if array is None:
        return None
    for axis, padding in ((2, tiling.q_padding), (3, tiling.kv_padding)):
        array = array if array.shape[axis] == 1 else pad_axis(array, axis, padding)
    return array


def score_tile(array: jax.Array, tiling: Tiling, row: Index, column: Index) -> Any:
    """One tile of a padded ``[b, h, q|1, kv|1]`` array."""
    for axis, start, size in _score_slices(array, tiling, row, column):
        array = (
            lax.slice_in_dim(array, start, start + size, axis=axis)
            if isinstance(start, int)
            else lax.dynamic_slice_in_dim(array, start, size, axis)
        )
    return array


def _score_slices(array: jax.Array, tiling: Tiling, row: Index, column: Index) -> list[tuple[int, Index, int]]:
    grid = tiling.grid
    slices = [(2, row * grid.block_q, grid.block_q), (3, column * grid.block_k, grid.block_k)]
    return [entry for entry in slices if array.shape[entry[0]] != 1]
