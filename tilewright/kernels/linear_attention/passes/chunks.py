"""A call with decays of heads as Triton kernels take it, chunk by chunk, for backends on GPUs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, l2_normalized
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.kernels.triton.matmul import tl_precision
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_attention.TritonPass")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonPass:
    """The launch of a pass.

    Attributes:
      block_v: channels of values of a program, or of a step.
      num_warps: warps of a program.
      num_stages: stages of its pipelined loop.
    """

    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name, minimum, maximum in (("block_v", MIN_DOT, 256), ("num_warps", 1, 16)):
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not minimum <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from {minimum} to {maximum}, got {self}")
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self}")


def operand_dtype(dtype: DTypeLike) -> Any:
    """The dtype of operands of matmuls: float16 values are in TensorFloat-32, which has its digits and more range."""
    return jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32


def normalized(inputs: LinearAttentionInputs, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as the kernels read them, in their dtype."""
    if not inputs.qk_l2norm:
        return query, key
    wide = (l2_normalized(x.astype(jnp.float32), inputs.l2norm_eps) for x in (query, key))
    first, second = (x.astype(query.dtype) for x in wide)
    return first, second


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A call, by chunks.

    Attributes:
      gamma, inverse: see ``forward_kernels``; without elements where there is no decay, or no delta rule.
      transposed: whether states lie in memory as ``[V, K]``, and not as ``[K, V]``.
    """

    inputs: LinearAttentionInputs
    table: ChunkTable
    query: jax.Array
    key: jax.Array
    gamma: jax.Array
    inverse: jax.Array
    transposed: bool = False

    @property
    def rows(self) -> int:
        return self.inputs.batch * self.inputs.length

    @property
    def operand(self) -> Any:
        return operand_dtype(self.inputs.value.dtype)

    def constants(self, tile: TritonPass, block_k: int, *, states: bool = False, scale: bool = False) -> dict[str, Any]:
        """The constants of a pass; ``states`` and ``scale`` for the kernels that have them."""
        inputs = self.inputs
        found: dict[str, Any] = {
            "H": inputs.heads,
            "HV": inputs.value_heads,
            "K": inputs.key_dim,
            "V": inputs.value_dim,
            "BLOCK_K": block_k,
            "BLOCK_V": min(tile.block_v, power_of_two(inputs.value_dim, MIN_DOT)),
            "GATE": inputs.log_decay is not None,
            "PRECISION": tl_precision(),
        }
        if states:
            found |= {"DELTA": inputs.beta is not None}
        return found | ({"SCALE": float(inputs.scale)} if scale else {})

    def struct(self, dtype: DTypeLike, *shape: int, present: bool = True) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an output; without elements if it is not ``present``."""
        return jax.ShapeDtypeStruct(shape if present else (0,), dtype)

    def states(self, dtype: DTypeLike, *, present: bool = True) -> jax.ShapeDtypeStruct:
        inputs = self.inputs
        shape = self.table.num_chunks, inputs.value_heads, inputs.key_dim, inputs.value_dim
        return self.struct(dtype, *shape, present=present)

    @property
    def state_strides(self) -> tuple[int, int]:
        """Elements from a channel of the keys to the next in a state, and from one of the values."""
        return (1, self.inputs.key_dim) if self.transposed else (self.inputs.value_dim, 1)

    def pairs(self) -> jax.ShapeDtypeStruct:
        """A number for each pair of tokens of a chunk."""
        return self.struct(self.operand, self.table.num_chunks, self.inputs.value_heads, CHUNK, CHUNK)

    def blocks(self, constants: dict[str, Any]) -> int:
        """Blocks of V."""
        return -(-self.inputs.value_dim // constants["BLOCK_V"])


def absent(array: jax.Array | None) -> jax.Array:
    """The array, or a stand-in that no kernel reads."""
    return jnp.zeros((0,), jnp.float32) if array is None else array


def block_k(inputs: LinearAttentionInputs) -> int:
    """Channels of keys of a step."""
    widest = 64 if operand_dtype(inputs.value.dtype) == jnp.bfloat16 else 32
    return min(power_of_two(inputs.key_dim, MIN_DOT), widest)
