"""Linear attention: its argument list, its checks and its public function."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.linear_attention.cases import CASES, LinearAttentionCase, segments
from tilewright.kernels.linear_attention.distributed import attention_on_explicit_axes
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults, with_identity
from tilewright.kernels.linear_attention.partitioning import linear_attention_partitioning
from tilewright.kernels.linear_attention.reference import linear_attention_reference
from tilewright.kernels.op.arguments import (
    PlatformOption,
    apply,
    as_array,
    flag,
    has_arithmetic,
    number,
    to_32_bit,
)
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.contents import Check
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.op.signatures import results
from tilewright.kernels.sequences import num_sequences, sequence_arrays, sequence_contents
from tilewright.kernels.split_sequences import splits_tokens
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.types import Direction
from tilewright.ops.utils.stable_ids import stable_id

_CHUNK = 64
"""The chunk of which FLOPs are counted."""


@stable_id("tilewright/linear_attention.LinearAttention")
class LinearAttention(PortfolioKernel[LinearAttentionInputs, LinearAttentionResults]):
    """Linear attention; see ``linear_attention`` for the arguments."""

    cases: ClassVar[OpCases[LinearAttentionCase]] = CASES
    contents: ClassVar[Mapping[str, Check]] = sequence_contents("query")

    def __init__(self) -> None:
        backends = [
            "tilewright.kernels.linear_attention.hopper.backend:HopperLinearAttention",
            "tilewright.kernels.linear_attention.triton.backend:TritonLinearAttention",
            "tilewright.kernels.linear_attention.xla.backend:XlaLinearAttention",
        ]
        super().__init__("linear_attention", version="1", backends=backends)

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *,
        log_decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        removal: tuple[ArrayLike, ArrayLike] | None = None,
        bonus: ArrayLike | None = None,
        scale: float | None = None,
        qk_l2norm: bool = False,
        l2norm_eps: float = LinearAttentionInputs.l2norm_eps,
        initial_state: ArrayLike | None = None,
        return_state: bool = False,
        cum_seqlens: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        seq_lengths: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> LinearAttentionInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        query, key, value = (as_array(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
        _check_shapes(query, key, value)
        (batch, length, _, key_dim), (value_heads, value_dim) = query.shape, value.shape[2:]
        per_token = (batch, length, value_heads)
        if sum(each is not None for each in (beta, removal, bonus)) > 1:
            raise ValueError("beta, removal and bonus are different updates of the state: a call has one of them")
        if removal is not None and (not isinstance(removal, tuple | list) or len(removal) != 2):
            raise ValueError(f"removal must be a pair of arrays (a, b), got {type(removal).__name__}")
        read, write = (None, None) if removal is None else removal
        sequences: dict[str, Any] = dict(sequence_arrays(batch, length, cum_seqlens, segment_ids, seq_lengths))
        return_state = flag("return_state", return_state)
        if segment_ids is not None and (return_state or initial_state is not None):
            raise ValueError(
                "with segment_ids no row has one state; describe sequences by cum_seqlens, or leave out initial_state "
                "and return_state"
            )
        state_shape = (num_sequences(batch, sequences["cum_seqlens"]), value_heads, key_dim, value_dim)
        gates = ((value_heads,), per_token, (*per_token, key_dim))
        eps = number("l2norm_eps", l2norm_eps)
        if eps < 0:
            raise ValueError(f"l2norm_eps must not be negative, got {eps}")
        return LinearAttentionInputs(
            query,
            key,
            value,
            max(key_dim, 1) ** -0.5 if scale is None else number("scale", scale),
            _floating("log_decay", log_decay, value.dtype, *gates),
            _floating("beta", beta, value.dtype, per_token),
            _floating("removal[0]", read, value.dtype, (*per_token, key_dim)),
            _floating("removal[1]", write, value.dtype, (*per_token, key_dim)),
            _floating("bonus", bonus, value.dtype, (value_heads, key_dim)),
            _state(initial_state, value.dtype, state_shape),
            **sequences,
            qk_l2norm=flag("qk_l2norm", qk_l2norm),
            l2norm_eps=eps,
            return_state=return_state,
            platform=self.backends.allowed(platform),
        )

    def distributed(self, cfg: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """`context_parallel_linear_attention` where types split the length of query, key or value."""
        if not splits_tokens(*args[:3], *(kwargs.get(name) for name in ("query", "key", "value"))):
            return None
        return functools.partial(attention_on_explicit_axes, self, self.prepare(*args, **kwargs), cfg)

    def results(self, inputs: LinearAttentionInputs) -> Any:
        state: Any = jax.ShapeDtypeStruct(inputs.state_shape, inputs.state_dtype) if inputs.return_state else None
        if inputs.only_maps:
            maps: Any = jax.ShapeDtypeStruct(inputs.map_shape, inputs.state_dtype)
            return LinearAttentionResults(None, maps)
        out: Any = struct_like(inputs.value)
        return LinearAttentionResults(out, state)

    def outputs(self, inputs: LinearAttentionInputs, results: LinearAttentionResults) -> Any:
        if inputs.only_maps:
            return results.state
        return tuple(results) if inputs.return_state else results.out

    def residuals(self, results: LinearAttentionResults) -> LinearAttentionResults:
        """No array: states are computed anew, which is a small part of the backward pass."""
        return LinearAttentionResults(None, None)

    def cotangents(
        self, inputs: LinearAttentionInputs, residuals: LinearAttentionResults, cotangents: tuple[Any, ...]
    ) -> LinearAttentionResults:
        if inputs.only_maps:
            return LinearAttentionResults(None, *cotangents)
        return LinearAttentionResults(*cotangents, *[None] * (2 - len(cotangents)))

    def reference(self, inputs: LinearAttentionInputs) -> Any:
        if inputs.only_maps:
            return linear_attention_reference(with_identity(inputs))[1]
        out, state = linear_attention_reference(inputs)
        return self.outputs(inputs, LinearAttentionResults(cast(Any, out).astype(inputs.value.dtype), state))

    def partitioning(self, inputs: LinearAttentionInputs) -> Partitioning | None:
        """Splits by batch and by heads, as in the types of the arrays; ``distributed`` has the length."""
        return linear_attention_partitioning(inputs)

    def sampled(self, inputs: LinearAttentionInputs, key: jax.Array) -> LinearAttentionInputs:
        """Normal arrays; decays, strengths and keys for which states stay finite; sequences of about equal lengths."""
        found, random = super().sampled(inputs, key), generator_of(key)
        batch, length, key_dim = inputs.batch, inputs.length, max(inputs.key_dim, 1)
        changes: dict[str, Any] = {"key": found.key / key_dim**0.5}
        if found.log_decay is not None:
            changes["log_decay"] = -0.1 * jnp.square(found.log_decay)
        if found.beta is not None:
            changes["beta"] = jax.nn.sigmoid(found.beta)
        if found.removal is not None:
            read, write = found.removal
            changes |= {"removal_read": -read / key_dim**0.5, "removal_write": 0.5 * write / key_dim**0.5}
        if found.cum_seqlens is not None:
            changes["cum_seqlens"] = jnp.linspace(0, length, found.cum_seqlens.shape[0]).astype(jnp.int32)
        if found.segment_ids is not None:
            changes["segment_ids"] = jnp.asarray(segments(random, batch, length))
        if found.seq_lengths is not None:
            changes["seq_lengths"] = jnp.asarray(random.integers(length // 2, length + 1, batch), jnp.int32)
        return found.replace(**{name: x.astype(getattr(found, name).dtype) for name, x in changes.items()})

    def flops(self, inputs: LinearAttentionInputs, direction: Direction) -> float:
        """FLOPs of the matmuls of the chunk form with 64 tokens in a chunk; 2.8 times as many backward."""
        key_dim, value_dim = inputs.key_dim, inputs.value_dim
        with_state, in_chunk = 2, key_dim + value_dim  # Q S and Kᵀ U; Q Kᵀ and P U
        if inputs.beta is not None:
            with_state, in_chunk = 3, 2 * (key_dim + value_dim)
        if inputs.removal is not None:
            with_state, in_chunk = 4, 4 * key_dim + 4 * value_dim
        tokens = inputs.batch * inputs.length * inputs.value_heads
        forward = 2.0 * tokens * (with_state * key_dim * value_dim + _CHUNK * in_chunk)
        return forward if direction == "forward" else 2.8 * forward


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query.shape={tuple(query.shape)}, key.shape={tuple(key.shape)}, value.shape={tuple(value.shape)}"
    if len(query.shape) != 4 or len(value.shape) != 4 or key.shape != query.shape:
        raise ValueError(
            f"query and key must be [batch, length, heads, key_dim] and value [batch, length, value_heads, value_dim], "
            f"got {shapes}"
        )
    if value.shape[:2] != query.shape[:2]:
        raise ValueError(f"query, key and value must have the same batch and length, got {shapes}")
    if not has_arithmetic(query.dtype) or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must have one floating-point dtype of 16 bits or more, got "
            f"{query.dtype=}, {key.dtype=}, {value.dtype=}"
        )
    sizes = *query.shape[2:], *value.shape[2:]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"numbers of heads and of channels must be known, got {shapes}")
    heads, value_heads = query.shape[2], value.shape[2]
    if heads < 1 or value_heads % heads:
        raise ValueError(f"value_heads must be a multiple of heads, of which there is one at least, got {shapes}")


def _floating(name: str, value: object, dtype: DTypeLike, *shapes: tuple[int, ...]) -> Any:
    """A floating-point array of one of some shapes, not rounded to the dtype of the values; or None."""
    if value is None:
        return None
    array = as_array(name, value)
    if not has_arithmetic(array.dtype):
        raise TypeError(f"{name} must be floating-point of 16 bits or more, got {array.dtype}")
    if array.shape not in shapes:
        expected = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(array.shape)}")
    return to_32_bit(array, dtype)


def _state(value: object, dtype: DTypeLike, shape: tuple[int, ...]) -> Any:
    """The initial states in the dtype of states; a narrower one would round them between two calls."""
    array = _floating("initial_state", value, dtype, shape)
    if array is None:
        return None
    wide = jnp.promote_types(dtype, jnp.float32)
    if array.dtype.itemsize < 4:
        raise TypeError(f"initial_state must be {wide}, got {array.dtype}")
    return array if array.dtype == wide else apply(lambda x: x.astype(wide), array)


LINEAR_ATTENTION = LinearAttention()


@public_function(LinearAttention.prepare)
@results({"": jax.Array, "return_state": tuple[jax.Array, jax.Array]})
def linear_attention(*args: Any, **kwargs: Any) -> Any:
    """Linear attention with a state that decays and is corrected: the recurrences of linear models, as one function.

    Each value head has a state S ``[key_dim, value_dim]``, to which a token does, in this order: decay, update, read.

    | arguments | a token makes of S | models |
    | --- | --- | --- |
    | none | S + k vᵀ | linear attention |
    | ``log_decay`` g | e^g S + k vᵀ | RetNet, lightning attention, Mamba-2, GLA, HGRN-2 |
    | ``beta`` β | (I − β k kᵀ) e^g S + β k vᵀ | DeltaNet, gated delta rule, Kimi delta attention |
    | ``removal`` (a, b) | e^g S + b (aᵀ S) + k vᵀ | DPLR, RWKV-7 |
    | ``bonus`` u | e^g S + k vᵀ, after the result scale · (S + Diag(u) k vᵀ)ᵀ q is read | RWKV-6 |

    Results are scale · Sᵀ q, and nothing of the past is dropped. Gates, states and sums are float32, or float64 for
    float64 values. Results of a token do not depend on later ones, to the bit for one config, as long as those are
    finite. Gradients reach all floating-point arguments, from the returned states, too. They are the same bit for bit
    in every run.

    Args:
      query, key: ``[batch, length, heads, key_dim]``, floating-point.
      value: ``[batch, length, value_heads, value_dim]`` in the dtype of the query. ``value_heads`` is a multiple of
        ``heads``; value head i has key head ``i // (value_heads // heads)``.
      log_decay: natural logarithms of decays, at most 0: ``[value_heads]``, ``[batch, length, value_heads]``, or
        ``[batch, length, value_heads, key_dim]`` for a decay of each channel of the key. −1000 forgets all.
      beta: ``[batch, length, value_heads]``, the strength of a delta rule, from 0 to 2 for keys of norm 1.
      removal: ``(a, b)``, each ``[batch, length, value_heads, key_dim]``. a reads the state before its decay.
      bonus: ``[value_heads, key_dim]``.
      scale: multiplies the query, ``key_dim ** -0.5`` by default.
      qk_l2norm: divide each query and each key by √(its sum of squares + ``l2norm_eps``) first.
      l2norm_eps: see ``qk_l2norm``.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]``, float32: the states before the first tokens; 0
        by default. There is one for each row, or for each sequence of ``cum_seqlens``.
      return_state: return the states behind the last tokens as well; that of a sequence without tokens is its first.
      cum_seqlens: ``[sequences + 1]`` integers, not decreasing: where sequences begin and end in one row (batch 1).
        The first may be more than 0 and the last less than the length. The results of a sequence depend neither on
        its neighbours nor on its place.
      segment_ids: ``[batch, length]`` integers: the state begins anew where the id changes. Results depend on the
        places of segments and on their neighbours by their rounding, and neighbours must be finite.
      seq_lengths: ``[batch]`` integers: the tokens of each row.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The results ``[batch, length, value_heads, value_dim]`` in the dtype of the value; with ``return_state`` a pair of
      these and the states, float32. Tokens of no sequence (outside of ``cum_seqlens`` or ``seq_lengths``, or of
      negative ``segment_ids``) may hold anything; their results and gradients are zeros.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return LINEAR_ATTENTION(*args, **kwargs)
