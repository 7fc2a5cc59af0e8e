"""The launches that draws from logits and from hidden states share: from the best tokens of groups to those of rows."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.sampling.inputs import GROUP
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import power_of_two

DTYPES = ("float16", "bfloat16", "float32")

MAX_VOCAB = 1 << 20
"""Tokens of a row: all its groups are in the registers of one program, and counts of tokens have 21 bits."""

type Maybe = jax.Array | None
"""An operand, if the call has it."""


def groups_of(vocab: int) -> int:
    """Groups of a row; the last one may reach beyond the vocabulary."""
    return -(-vocab // GROUP)


def struct(dtype: DTypeLike, *shape: int, is_used: bool = True) -> jax.ShapeDtypeStruct:
    """An array of a launch, without elements if the kernel does not use it."""
    return jax.ShapeDtypeStruct(shape if is_used else (0,), dtype)


def group_structs(rows: int, groups: int, *, draws: bool, mass: bool) -> list[jax.ShapeDtypeStruct]:
    """Results by group: the order of the largest logit; score, token and logit of the best one; the mass."""
    return [
        struct(jnp.uint32, rows, groups),
        struct(jnp.float32, rows, groups, is_used=draws),
        struct(jnp.int32, rows, groups, is_used=draws),
        struct(jnp.float32, rows, groups, is_used=draws),
        struct(jnp.int32, rows, groups, is_used=mass),
    ]


def as_batch(x: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    """``[1, rows, ...]``, of an array that begins with these dimensions."""
    return jnp.reshape(x, (1, math.prod(leading), *x.shape[len(leading) :]))


def row_warps(groups: int) -> int:
    """Warps of a program that has all groups of a row in registers."""
    return min(max(power_of_two(groups) // 256, 1), 8)


def or_absent(x: Maybe) -> jax.Array:
    """An operand that a kernel does not read, if the call has none."""
    return jnp.zeros((0,), jnp.float32) if x is None else x


def best_of_rows(found: tuple[jax.Array, ...], temperature: Maybe, *, log_probs: bool) -> tuple[jax.Array, ...]:
    """The best token of each row from those of its groups, and with ``log_probs`` its log-probability."""
    from tilewright.kernels.sampling.triton import kernels

    rows, groups = found[0].shape
    drawn = launch(
        kernels.best_of_rows,
        [*found, or_absent(temperature)],
        [struct(jnp.int32, rows), struct(jnp.float32, rows, is_used=log_probs)],
        grid=[rows],
        constants={
            "GROUPS": groups,
            "HAS_TEMPERATURE": temperature is not None,
            "LOG_PROBS": log_probs,
            "BLOCK": power_of_two(groups),
        },
        num_warps=row_warps(groups),
        num_stages=1,
    )
    return drawn[: 1 + log_probs]
