"""A decoding step of linear attention: the argument list, its checks and the public function."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from tilewright.kernels.linear_attention.step_cases import CASES, StepCase
from tilewright.kernels.linear_attention.step_inputs import MAX_TOKENS, StateLayout, StepInputs, Stepped, step_reference
from tilewright.kernels.op.arguments import (
    PlatformOption,
    as_array,
    flag,
    has_arithmetic,
    number,
    reshape,
    to_32_bit,
)
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.contents import Check, Finder, Given, fault, shape_of
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning, explicit_mesh, typed_axes
from tilewright.kernels.state_pools import slot_arrays
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id

POOL_DTYPES = ("bfloat16", "float32", "float64")


def _distinct(given: Given) -> Finder | None:
    """The finder of slots that two rows would write to."""
    pool = shape_of(given, "state_pool")
    if pool is None or not pool:
        return None

    def repeated(name: str, numbers: np.ndarray) -> Iterator[str]:
        if numbers.ndim == 1 and (name == "write_indices" or given.get("write_indices") is None):
            exists = (numbers >= 0) & (numbers < pool[0])
            first = np.unique(numbers, return_index=True)[1]
            again = exists & ~np.isin(np.arange(numbers.size), first)
            yield fault(name, numbers, again, "is the slot of an earlier row, too, and each row needs one to write to")

    return repeated


@stable_id("tilewright/linear_attention.LinearAttentionStep")
class LinearAttentionStep(InferenceKernel[StepInputs, Stepped]):
    """A few tokens of many sequences, whose states are in a pool; see ``linear_attention_step`` for the arguments."""

    cases: ClassVar[OpCases[StepCase]] = CASES
    contents: ClassVar[Mapping[str, Check]] = MappingProxyType({"write_indices": _distinct, "state_indices": _distinct})

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.linear_attention.triton.step:TritonLinearAttentionStep",
            "tilewright.kernels.linear_attention.xla.step:XlaLinearAttentionStep",
        )
        super().__init__("linear_attention_step", version="1", backends=backends)

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        state_pool: ArrayLike,
        *,
        log_decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        removal: tuple[ArrayLike, ArrayLike] | None = None,
        bonus: ArrayLike | None = None,
        scale: float | None = None,
        qk_l2norm: bool = False,
        l2norm_eps: float = StepInputs.l2norm_eps,
        state_indices: ArrayLike | None = None,
        write_indices: ArrayLike | None = None,
        state_layout: StateLayout = "kv",
        platform: PlatformOption = None,
        cfg: Any = None,
    ) -> StepInputs:
        """Checks a call, and adds the axis of tokens where there is none; reads only types, shapes and dtypes."""
        arrays = {"query": as_array("query", query), "key": as_array("key", key), "value": as_array("value", value)}
        has_tokens = _check_rows(arrays)
        found, new, values = (x if has_tokens else reshape(x, (x.shape[0], 1, *x.shape[1:])) for x in arrays.values())
        batch, tokens, value_heads, value_dim = values.shape
        key_dim = new.shape[3]
        if isinstance(tokens, int) and tokens > MAX_TOKENS:
            raise ValueError(f"a step has up to {MAX_TOKENS} tokens, got {tokens}; linear_attention reads a prompt")
        if state_layout not in get_args(StateLayout.__value__):
            raise ValueError(f"state_layout must be one of {get_args(StateLayout.__value__)}, got {state_layout!r}")
        pool = as_array("state_pool", state_pool)
        state = (key_dim, value_dim) if state_layout == "kv" else (value_dim, key_dim)
        if len(pool.shape) != 4 or pool.shape[1:] != (value_heads, *state):
            named = ", ".join(("key_dim", "value_dim") if state_layout == "kv" else ("value_dim", "key_dim"))
            raise ValueError(
                f"state_pool must be [slots, value_heads, {named}] with {state_layout=}, here [slots, {value_heads}, "
                f"{state[0]}, {state[1]}], got state_pool.shape={pool.shape}"
            )
        if pool.dtype.name not in POOL_DTYPES:
            raise TypeError(f"state_pool must have one of the dtypes {POOL_DTYPES}, got {pool.dtype}")
        if sum(each is not None for each in (beta, removal, bonus)) > 1:
            raise ValueError("beta, removal and bonus are different updates of the state: a call has one of them")
        by_head, by_channel = (batch, tokens, value_heads), (batch, tokens, value_heads, key_dim)
        if removal is not None and not (isinstance(removal, tuple | list) and len(removal) == 2):
            raise ValueError(f"removal must be a pair of arrays (a, b), got {type(removal).__name__}")
        a, b = (None, None) if removal is None else removal

        def gate(name: str, array: object, *shapes: tuple[int, ...], has_rows: bool = True) -> Any:
            return _gate(name, array, shapes, pool.dtype, 1 if has_rows and not has_tokens else None)

        read, write = slot_arrays(batch, pool.shape[0], state_indices, write_indices)
        return StepInputs(
            found,
            new,
            values,
            pool,
            max(key_dim, 1) ** -0.5 if scale is None else number("scale", scale),
            log_decay=gate("log_decay", log_decay, (value_heads,), by_head, by_channel),
            beta=gate("beta", beta, by_head),
            removal_read=gate("removal[0]", a, by_channel),
            removal_write=gate("removal[1]", b, by_channel),
            bonus=gate("bonus", bonus, (value_heads, key_dim), has_rows=False),
            state_indices=read,
            write_indices=write,
            qk_l2norm=flag("qk_l2norm", qk_l2norm),
            l2norm_eps=_eps(l2norm_eps),
            state_layout=state_layout,
            has_tokens=has_tokens,
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: StepInputs) -> Any:
        return struct_like(inputs.value), struct_like(inputs.state_pool)

    def outputs(self, inputs: StepInputs, results: Stepped) -> Any:
        out, pool = results
        return out if inputs.has_tokens else out.reshape(out.shape[0], *out.shape[2:]), pool

    def reference(self, inputs: StepInputs) -> Any:
        return self.outputs(inputs, step_reference(inputs))

    def no_gradient(self) -> str:
        return f"{self.name} is for inference and has no gradient; linear_attention has one"

    def sampled(self, inputs: StepInputs, key: jax.Array) -> StepInputs:
        """Normal arrays, decays below 1, ``beta`` from 0 to 1, small removals, and a slot for each row."""
        found = super().sampled(inputs, key)
        random = generator_of(key)

        def slots(array: jax.Array | None) -> Any:
            if array is None:
                return None
            chosen = random.permutation(max(inputs.slots, array.shape[0]))[: array.shape[0]]
            return jnp.asarray(np.where(chosen < inputs.slots, chosen, -1), jnp.int32)

        indices = slots(inputs.state_indices)
        # The slots that were read: what a row writes no other may read.
        write = indices if indices is not None else jnp.arange(inputs.batch, dtype=jnp.int32)
        return found.replace(
            log_decay=None if found.log_decay is None else -jnp.abs(found.log_decay),
            beta=None if found.beta is None else jax.nn.sigmoid(found.beta),
            removal_read=None if found.removal_read is None else 0.1 * found.removal_read,
            removal_write=None if found.removal_write is None else 0.1 * found.removal_write,
            state_indices=indices,
            write_indices=None if inputs.write_indices is None else write,
        )

    def partitioning(self, inputs: StepInputs) -> Partitioning | None:
        """Splits by heads, and by rows with their slots if row i has slot i, as in the types of the arrays.

        Raises:
          ValueError: something else is split, or they are split differently.
        """
        arrays = {name: inputs.arrays[name] for name in ("query", "key", "value", "state_pool")}
        mesh = explicit_mesh(*arrays.values())
        if mesh is None:
            return None
        specs = {name: typed_axes(array) for name, array in arrays.items()}
        has_slots = inputs.state_indices is not None or inputs.write_indices is not None
        rows, heads = specs["value"][0], specs["value"][2]
        shared = None if inputs.heads == 1 else heads
        wanted = {
            "query": (rows, None, shared, None),
            "key": (rows, None, shared, None),
            "value": (rows, None, heads, None),
            "state_pool": (rows, heads, None, None),
        }
        if any(specs[name] != spec for name, spec in wanted.items()) or (has_slots and rows is not None):
            text = ", ".join(f"{name}: {P(*spec)}" for name, spec in specs.items())
            raise ValueError(
                "query, key, value and state_pool can be split by heads alone, and alike, and without state_indices "
                f"and write_indices by rows and slots ({text}); reshard them first, or give each device its own rows "
                "and slots by jax.shard_map"
            )
        by_row = P(rows, None, heads)
        gates = {
            "log_decay": P(heads) if inputs.gate == "head" else by_row,
            "beta": by_row, "removal_read": by_row, "removal_write": by_row, "bonus": P(heads), "state_indices": P(),
            "write_indices": P(),
        }  # fmt: skip
        parts = {name: P(*spec) for name, spec in wanted.items()}
        parts |= {name: spec for name, spec in gates.items() if inputs.arrays[name] is not None}
        results = (parts["value"], parts["state_pool"])
        return Partitioning(mesh=mesh, inputs=inputs.replace(**parts), results=results, gradients={})

    def split_alike(self, inputs: StepInputs) -> Sequence[Mapping[str, int]]:
        """All heads; and all rows with their slots, if no row has another slot."""
        heads = {"value": 2, "state_pool": 1}
        groups = [heads if inputs.heads == 1 else heads | {"query": 2, "key": 2}]
        if inputs.state_indices is None and inputs.write_indices is None:
            groups.append(dict.fromkeys(("query", "key", "value", "state_pool"), 0))
        return groups

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Bytes of the rows' states, read once and written once, and of every other array."""
        inputs = self.inputs_of(inv)
        state = array_bytes(inputs.state_pool) // max(inputs.slots, 1)
        # Of the size of value is the output.
        moved = 2 * inputs.batch * state + array_bytes(inputs.replace(state_pool=inputs.value))
        return Cost(0.0, float(moved))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if no row has a state, and the pool is donated: the output is written."""
        return Cost(0.0, float(array_bytes(self.inputs_of(inv).value)))


def _check_rows(arrays: Mapping[str, Any]) -> bool:
    """Checks queries, keys and values; returns if they have an axis of tokens."""
    given = ", ".join(f"{name}={array.dtype}{list(array.shape)}" for name, array in arrays.items())
    query, key, value = arrays.values()
    rank = len(query.shape)
    if rank not in (3, 4) or len(value.shape) != rank or key.shape != query.shape:
        raise ValueError(
            "query and key must be [batch, heads, key_dim] and value [batch, value_heads, value_dim], or all with "
            f"tokens behind batch, got {given}"
        )
    if value.shape[:-2] != query.shape[:-2]:
        raise ValueError(f"query, key and value must have the same batch and tokens, got {given}")
    if not has_arithmetic(query.dtype) or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must have one floating-point dtype of 16 bits or more, got {given}")
    if not all(isinstance(size, int) for size in (*query.shape[-2:], *value.shape[-2:])):
        raise ValueError(f"numbers of heads and of channels must be known, got {given}")
    if query.shape[-2] < 1 or value.shape[-2] % query.shape[-2]:
        raise ValueError(f"value_heads must be a multiple of heads, of which there is one at least, got {given}")
    return rank == 4


def _gate(name: str, array: object, shapes: Sequence[tuple[int, ...]], dtype: np.dtype, squeezed: int | None) -> Any:
    """A floating-point array of one of these shapes, which a caller may give without their axis ``squeezed``."""
    if array is None:
        return None
    array = as_array(name, array)
    given = {
        shape if squeezed is None or len(shape) < 3 else (*shape[:squeezed], *shape[squeezed + 1 :]): shape
        for shape in shapes
    }
    if tuple(array.shape) not in given:
        expected = " or ".join(str(list(shape)) for shape in given)
        raise ValueError(f"{name} must have the shape {expected}, got {list(array.shape)}")
    if not has_arithmetic(array.dtype):
        raise TypeError(f"{name} must be floating-point, got {array.dtype}")
    return to_32_bit(reshape(array, given[tuple(array.shape)]), dtype)


def _eps(value: object) -> float:
    found = number("l2norm_eps", value)
    if found < 0.0:
        raise ValueError(f"l2norm_eps must not be negative, got {value}")
    return found


_LINEAR_ATTENTION_STEP = LinearAttentionStep()


@public_function(LinearAttentionStep.prepare)
def linear_attention_step(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """A step of decoding: a few tokens of each of many sequences, whose states are in a pool.

    In each token, with k, v, q of the head and S its state, [key_dim, value_dim], in this order::

        S = exp(log_decay) S                   if there is log_decay
        S = S - beta k (kᵀ S) + beta k vᵀ      with beta; else S = S + k vᵀ
        S = S + b (aᵀ S')                      with removal, S' before the decay
        out = scale Sᵀ q

    With ``bonus`` u the output is ``scale (S' + diag(u) k vᵀ)ᵀ q`` of the state before the token. It is computed in
    float32, or in float64 if an array has that, and rounded once: the output, and the state after the last token.

    Args:
      query: ``[batch, heads, key_dim]``, or ``[batch, tokens, heads, key_dim]`` of up to 8 tokens; floating-point of 16
        bits or more.
      key: likewise.
      value: ``[batch, (tokens,) value_heads, value_dim]``; its heads are a multiple of those of the keys, and head i
        has key head ``i // (value_heads // heads)``.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, float32 or bfloat16, or float64. Donate it to the
        ``jit`` around, or it is copied.
      log_decay: ``[value_heads]``, ``[batch, (tokens,) value_heads]``, or with a factor for each element of the key
        ``[batch, (tokens,) value_heads, key_dim]``: natural logarithms, not above 0.
      beta: ``[batch, (tokens,) value_heads]``: how much of what the key finds is replaced by the value.
      removal: (a, b), each ``[batch, (tokens,) value_heads, key_dim]``; not beside ``beta``.
      bonus: ``[value_heads, key_dim]``; not beside ``beta`` or ``removal``.
      scale: a number, by default ``key_dim ** -0.5``.
      qk_l2norm: divide queries and keys by their length, ``sqrt(sum(x²) + l2norm_eps)``.
      l2norm_eps: see there.
      state_indices: ``[batch]`` integers, the slot of each row's state. A row whose slot does not exist, such as -1,
        is padding: its output is 0, and nothing is written. By default row i has slot i.
      write_indices: ``[batch]`` integers: where the new states are written, by default the slots that were read. Where
        a slot does not exist nothing is written.
      state_layout: "vk" for a pool ``[slots, value_heads, value_dim, key_dim]``.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      The output in the shape and dtype of value, and the pool with new states. All slots that no row writes are the
      same, bit for bit. A slot that one row writes must not be read or written by another: what is found there, and
      what that row computes, is undefined.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _LINEAR_ATTENTION_STEP(*args, **kwargs)
