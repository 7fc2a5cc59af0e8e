"""Auxiliary losses of routers."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.kernels.op.arguments import as_array, has_arithmetic, integer, is_integer
from tilewright.kernels.op.sharding import explicit_mesh
from tilewright.kernels.op.signatures import ArrayLike


def load_balancing_loss(probabilities: ArrayLike, experts: ArrayLike, num_experts: int) -> jax.Array:
    """The loss of Switch Transformer (arXiv 2101.03961) and Mixtral, ``num_experts · Σ f · P`` over the experts.

    ``f`` is the number of choices of an expert per token, and ``P`` its mean probability. With all experts alike it is
    k, the least value of balanced choices. The gradient is that of the probabilities; counts have none.

    Args:
      probabilities: ``[..., num_experts]``, floating-point: the softmax of the router's logits, before the choice.
      experts: ``[..., k]`` integers, the choices of ``top_k_router``; those outside of ``[0, num_experts)`` count for
        no expert.
      num_experts: the number of experts.

    Returns:
      A scalar in float32, or float64 for float64 probabilities; 0 without tokens.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    probabilities, experts = _floating("probabilities", probabilities), as_array("experts", experts)
    num_experts = integer("num_experts", num_experts)
    if not is_integer(experts.dtype):
        raise TypeError(f"experts must hold integers, got {experts.dtype=}")
    if probabilities.shape[-1] != num_experts or experts.shape[:-1] != probabilities.shape[:-1] or not experts.shape:
        raise ValueError(
            f"probabilities must be [..., num_experts] and experts [..., k], got {probabilities.shape=}, "
            f"{experts.shape=}, {num_experts=}"
        )
    mesh = explicit_mesh(experts)
    places = jnp.where(experts < 0, num_experts, experts)
    counts = (
        jnp.zeros(num_experts, jnp.int32)
        .at[places]
        .add(1, mode="drop", out_sharding=None if mesh is None else NamedSharding(mesh, P()))
    )
    tokens = max(probabilities.size // num_experts, 1)
    means = probabilities.sum(range(probabilities.ndim - 1)) / tokens
    return num_experts / tokens * (counts.astype(means.dtype) * means).sum()


def router_z_loss(logits: ArrayLike) -> jax.Array:
    """The mean over tokens of ``logsumexp(logits)²`` (ST-MoE, arXiv 2202.08906), which keeps logits small.

    Args:
      logits: ``[..., experts]``, floating-point.

    Returns:
      A scalar in float32, or float64 for float64 logits; 0 without tokens.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    sums = jax.nn.logsumexp(_floating("logits", logits), axis=-1)
    return (sums * sums).sum() / max(sums.size, 1)


def _floating(name: str, value: ArrayLike) -> jax.Array:
    """An array of rank 1 at least, in float32 or wider."""
    array = as_array(name, value)
    if not array.shape or not array.shape[-1] or not has_arithmetic(array.dtype):
        raise ValueError(
            f"{name} must be a floating-point array of 16 bits or more, [..., experts], got {array.shape=}, "
            f"{array.dtype=}"
        )
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
