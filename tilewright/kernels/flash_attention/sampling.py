"""Random inputs with the shapes of a call, for tuning without real values, and for tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.masks import (
    AndMask,
    CausalMask,
    ExplicitMask,
    LengthMask,
    Mask,
    OrMask,
    SegmentMask,
    WindowMask,
)
from tilewright.kernels.op.cases import generator_of

type Shaped = jax.Array | jax.ShapeDtypeStruct

SEGMENTS = 4
"""Segments drawn per sequence, if it is long enough."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """Draws arrays; integer leaves of a mask are valid.

    ``q_length`` and ``kv_length`` are the lengths of the scores that a mask is drawn for.
    """

    generator: np.random.Generator
    q_length: int
    kv_length: int

    def normal(self, struct: Shaped | None) -> jax.Array | None:
        if struct is None:
            return None
        # Not in `jax.ensure_compile_time_eval`, where the random bits would be computed early, as a constant.
        return jax.random.normal(self._key(), struct.shape, jnp.float32).astype(struct.dtype)

    def position_bias(self, bias: PositionBias) -> PositionBias:
        """``bias`` with slopes in (0, 1), most of them small, or normal values, and valid positions."""
        values = self.normal(bias.values)
        assert values is not None
        if bias.kind == "alibi":
            values = jnp.exp2(-4.0 * jnp.abs(values.astype(jnp.float32))).astype(values.dtype)
        positions = _count(bias.q_positions, self.kv_length - self.q_length)
        return dataclasses.replace(bias, values=values, q_positions=positions)

    def seed(self, struct: Shaped | None) -> np.ndarray | None:
        return None if struct is None else self.generator.integers(0, 1 << 32, struct.shape).astype(struct.dtype)

    def mask(self, mask: Mask) -> Mask:
        """``mask`` with arrays in place of ``jax.ShapeDtypeStruct``."""
        match mask:
            case AndMask(masks) | OrMask(masks):
                return dataclasses.replace(mask, masks=tuple(self.mask(part) for part in masks))
            case CausalMask() | WindowMask():
                # Query positions without key positions mean an alignment other than top-left.
                shift = 0 if mask.kv_positions is not None else self.kv_length - self.q_length
                return dataclasses.replace(
                    mask,
                    q_positions=_count(mask.q_positions, shift),
                    kv_positions=_count(mask.kv_positions, 0),
                )
            case SegmentMask(q_segment_ids, kv_segment_ids):
                rows = np.broadcast_shapes(q_segment_ids.shape[:1], kv_segment_ids.shape[:1])
                segments = min(SEGMENTS, max(q_segment_ids.shape[1], kv_segment_ids.shape[1], 1))
                # The same fractions on both sides, so that each segment has queries and keys.
                cuts = np.sort(self.generator.uniform(size=(*rows, segments - 1)), axis=-1)
                return SegmentMask(_segment_ids(q_segment_ids, cuts), _segment_ids(kv_segment_ids, cuts))
            case LengthMask(q_lengths, kv_lengths):
                return LengthMask(self._lengths(q_lengths, self.q_length), self._lengths(kv_lengths, self.kv_length))
            case ExplicitMask(array):
                return ExplicitMask(jax.random.bernoulli(self._key(), 0.9, array.shape))
        raise TypeError(f"no rule to draw arrays for {mask=}")

    def _key(self) -> jax.Array:
        return jax.random.key(int(self.generator.integers(0, 1 << 31)))

    def _lengths(self, struct: Shaped | None, length: int) -> jax.Array | None:
        """Lengths from half to the full length, at least 1."""
        if struct is None:
            return None
        low = min(max(length // 2, 1), length)
        return _device_array(self.generator.integers(low, length + 1, struct.shape), struct.dtype)


def sampler(key: jax.Array, q_length: int, kv_length: int) -> Sampler:
    return Sampler(generator_of(key), q_length, kv_length)


def _device_array(values: np.ndarray, dtype: np.dtype) -> jax.Array:
    return jnp.asarray(values.astype(dtype))


def _count(struct: Shaped | None, shift: int) -> jax.Array | None:
    if struct is None:
        return None
    return _device_array(np.broadcast_to(np.arange(struct.shape[1]) + shift, struct.shape), struct.dtype)


def _segment_ids(struct: Shaped, cuts: np.ndarray) -> jax.Array:
    rows, length = struct.shape
    starts = np.round(cuts[:rows] * length).astype(np.int64)
    ids = (np.arange(length)[None, :, None] >= starts[:, None, :]).sum(-1)
    return _device_array(np.broadcast_to(ids, struct.shape), struct.dtype)
