"""A vocabulary that is split over a mesh axis inside ``shard_map``: every device's statistics, made those of all.

One gather of the statistics of each token forward. The gradient of x is a sum over devices, which ``shard_map`` adds up
where x is the same on all of them; that of a device's part of the matrix is complete.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED
from tilewright.kernels.sharding import varying_axes


def gathered(array: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
    """The arrays of all devices along a new first axis, equal on all devices, and typed so where types say it."""
    # A loss that were typed as different on each device could not be returned as one.
    return lax.all_gather(array, axis_name, to="invarying" if varying_axes(array) else "varying")


def local_labels(labels: jax.Array, part: int, axis_name: str | tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Labels in a device's part of the vocabulary, for statistics of which none is ignored; and which are wrong.

    Args:
      labels: canonical, with ``IGNORED``, of the whole vocabulary.
      part: classes of each device.
    """
    count = lax.axis_size(axis_name)
    wrong = (labels < 0) & (labels != IGNORED) | (labels >= part * count)
    # A label of another part is no class of this one: its logit comes from the device that has it.
    own = labels - lax.axis_index(axis_name).astype(jnp.int32) * part
    inside = (own >= 0) & (own < part)
    return jnp.where(labels == IGNORED, IGNORED, jnp.where(inside, own, part)), wrong


def merged_lse(lses: jax.Array) -> jax.Array:
    """lse of the whole vocabulary from those of its parts, along axis 0."""
    return jax.nn.logsumexp(lses, 0)
