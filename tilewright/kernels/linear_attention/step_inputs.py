"""The inputs of a decoding step of linear attention, and the step token by token."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tilewright.kernels.linear_attention.inputs import GateKind, l2_normalized
from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.state_pools import exists, read_states, slots_to_write, write_states

MAX_TOKENS = 8
"""Tokens of one step: more of them are a prompt, which is read in chunks."""

type StateLayout = Literal["kv", "vk"]
"""The order of the last two dimensions of a pool: of keys and values."""

type Stepped = tuple[Any, Any]
"""The output of the tokens, and the pool with the new states."""


class StepInputs(OpInputs):
    """A step after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, or the last two exchanged with ``state_layout="vk"``.
      log_decay: ``[value_heads]``, ``[batch, tokens, value_heads]`` or ``[batch, tokens, value_heads, key_dim]``.
      removal_read: a of S + b (aᵀ S).
      removal_write: b of S + b (aᵀ S).
      has_tokens: False if the caller's arrays have no axis of tokens; here it has size 1.
    """

    query: Float[Array, "batch tokens heads key_dim"]
    key: Float[Array, "batch tokens heads key_dim"]
    value: Float[Array, "batch tokens value_heads value_dim"]
    state_pool: Float[Array, "slots value_heads _ _"]
    scale: float = static()
    log_decay: Float[Array, "..."] | None = None
    beta: Float[Array, "batch tokens value_heads"] | None = None
    removal_read: Float[Array, "batch tokens value_heads key_dim"] | None = None
    removal_write: Float[Array, "batch tokens value_heads key_dim"] | None = None
    bonus: Float[Array, "value_heads key_dim"] | None = None
    state_indices: Int32[Array, " batch"] | None = None
    write_indices: Int32[Array, " batch"] | None = None
    qk_l2norm: bool = static(default=False)
    l2norm_eps: float = static(default=1e-6)
    state_layout: StateLayout = static(default="kv")
    has_tokens: bool = static(default=False, role="call")

    @functools.cached_property
    def batch(self) -> int:
        return self.value.shape[0]

    @functools.cached_property
    def tokens(self) -> int:
        return self.value.shape[1]

    @functools.cached_property
    def heads(self) -> int:
        """Heads of queries and keys."""
        return self.key.shape[2]

    @functools.cached_property
    def value_heads(self) -> int:
        return self.value.shape[2]

    @functools.cached_property
    def groups(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.heads

    @functools.cached_property
    def key_dim(self) -> int:
        return self.key.shape[3]

    @functools.cached_property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @functools.cached_property
    def slots(self) -> int:
        return self.state_pool.shape[0]

    @functools.cached_property
    def gate(self) -> GateKind:
        kinds: dict[int, GateKind] = {1: "head", 3: "token", 4: "channel"}
        return "none" if self.log_decay is None else kinds[self.log_decay.ndim]

    @functools.cached_property
    def removal(self) -> tuple[jax.Array, jax.Array] | None:
        """The pair (a, b) of S + b (aᵀ S)."""
        read, write = self.removal_read, self.removal_write
        return None if read is None or write is None else (read, write)

    @functools.cached_property
    def compute_dtype(self) -> Any:
        """Float32, or float64 for a pool or values of it."""
        return jnp.promote_types(jnp.promote_types(self.value.dtype, self.state_pool.dtype), jnp.float32)

    def is_empty(self) -> bool:
        """True if there is nothing to compute, or no state."""
        return 0 in (*self.value.shape, *self.key.shape, *self.state_pool.shape)


def gates_of(inputs: StepInputs) -> dict[str, Any]:
    """All that the recurrence reads, in the dtype that it is computed in, with heads of queries and keys repeated.

    Query and key are ``[batch, tokens, value_heads, key_dim]``; ``decay`` is the factor and not its logarithm,
    ``[..., 1]`` or ``[..., key_dim]``; ``beta`` has a last axis of 1; ``removal`` is a pair. None stands for
    each that the call does not have.
    """
    dtype = inputs.compute_dtype
    arrays: dict[str, Any] = {
        name: None if x is None else x.astype(dtype)
        for name, x in inputs.arrays.items()
        if name not in ("state_pool", "state_indices", "write_indices")
    }
    for name in ("query", "key"):
        if inputs.qk_l2norm:
            arrays[name] = l2_normalized(arrays[name], inputs.l2norm_eps)
        arrays[name] = jnp.repeat(arrays[name], inputs.groups, axis=2)
    decay = arrays.pop("log_decay")
    if decay is not None:
        decay = jnp.exp(decay)
        decay = decay if decay.ndim == 4 else decay[..., None]
        decay = jnp.broadcast_to(decay, (inputs.batch, inputs.tokens, inputs.value_heads, decay.shape[-1]))
    beta = arrays.pop("beta")
    removal = None if inputs.removal is None else (arrays["removal_read"], arrays["removal_write"])
    return arrays | {"decay": decay, "beta": None if beta is None else beta[..., None], "removal": removal}


def in_pool(inputs: StepInputs, states: jax.Array) -> jax.Array:
    """States ``[..., key_dim, value_dim]`` in the layout of the pool, or back."""
    return jnp.swapaxes(states, -1, -2) if inputs.state_layout == "vk" else states


def read(inputs: StepInputs) -> jax.Array:
    """The states of the rows, ``[batch, value_heads, key_dim, value_dim]``."""
    return in_pool(inputs, read_states(inputs.state_pool, inputs.state_indices)).astype(inputs.compute_dtype)


def stepped(inputs: StepInputs, out: jax.Array, states: jax.Array) -> Stepped:
    """The results, from outputs and states of every row: without a slot to read there is no output and no write."""
    if inputs.state_indices is not None:
        out = jnp.where(exists(inputs.state_indices, inputs.slots)[:, None, None, None], out, 0)
    write = slots_to_write(inputs.state_indices, inputs.write_indices, inputs.slots)
    pool = write_states(inputs.state_pool, write, in_pool(inputs, states))
    return out.astype(inputs.value.dtype), pool


def step_reference(inputs: StepInputs) -> Stepped:
    """The recurrence, one token after the other."""
    if inputs.is_empty():
        return jnp.zeros(inputs.value.shape, inputs.value.dtype), inputs.state_pool
    given, state, outs = gates_of(inputs), read(inputs), []
    for t in range(inputs.tokens):
        query, key, value = (given[name][:, t] for name in ("query", "key", "value"))
        written = key[..., :, None] * value[..., None, :]
        if given["bonus"] is not None:
            seen = state + given["bonus"][..., None] * written
        removed = None if given["removal"] is None else _read(state, given["removal"][0][:, t])
        if given["decay"] is not None:
            state = given["decay"][:, t, :, :, None] * state
        if given["beta"] is not None:
            change = value - _read(state, key)
            written = key[..., :, None] * (given["beta"][:, t] * change)[..., None, :]
        if removed is not None:
            state = state + given["removal"][1][:, t, :, :, None] * removed[..., None, :]
        state = state + written
        outs.append(inputs.scale * _read(state if given["bonus"] is None else seen, query))
    return stepped(inputs, jnp.stack(outs, axis=1), state)


def _read(state: jax.Array, by: jax.Array) -> Any:
    return jnp.einsum("bhkv,bhk->bhv", state, by, precision="highest")
