"""Checks and options of functions with the argument names of other libraries."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, TypedDict

import jax
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, has_arithmetic
from tilewright.kernels.op.public import Default, public_function
from tilewright.kernels.op.signatures import results
from tilewright.kernels.sequences import num_sequences, sequence_arrays, sequence_ids
from tilewright.ops.kernel.kernel import errors_naming_function
from tilewright.ops.utils.promotion import default_promotion

TOKENS = "batch length"
"""The leading dimensions of what a whole sequence gives."""


class SequenceOptions(TypedDict, total=False):
    """The sequences of a call, of which at most one description is given, and what runs it.

    Args:
      cum_seqlens: ``[sequences + 1]`` integers: where sequences begin and end in the one row of a packed call.
      segment_ids: ``[batch, length]`` integers: the state starts anew where the id changes; tokens of negative ids are
        padding.
      seq_lengths: ``[batch]`` integers: the tokens of each row; those behind them are padding.
      platform: as for ``linear_attention``.
      cfg: a config to use instead of the selected one.
    """

    cum_seqlens: ArrayLike | None
    segment_ids: ArrayLike | None
    seq_lengths: ArrayLike | None
    platform: PlatformOption
    cfg: Any


class DeltaOptions(SequenceOptions, total=False):
    """Options of delta rules, whose keys should have a norm of 1.

    Args:
      qk_l2norm: divide q and k by their norms along the last dimension, in float32.
      l2norm_eps: what is added to the sum of squares.
    """

    qk_l2norm: bool
    l2norm_eps: Annotated[float, Default(1e-6)]


class Dims:
    """The sizes of a call's dimensions by name, as its arrays give them one after another."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def array(self, name: str, value: object, dims: str) -> jax.Array:
        """Checks an argument: a floating-point array of these dimensions, some of which have their sizes already.

        Args:
          dims: names with spaces between them.
        """
        array = as_array(name, value)
        names, shape = dims.split(), tuple(array.shape)
        if not has_arithmetic(array.dtype):
            raise TypeError(f"{name} must be floating-point of 16 bits or more, got {name}.dtype={array.dtype}")
        if len(shape) != len(names) or any(self.sizes.get(each, n) != n for each, n in zip(names, shape, strict=True)):
            known = ", ".join(f"{each}={self.sizes[each]}" for each in names if each in self.sizes)
            said = f"[{', '.join(names)}]" + f" with {known}" * bool(known)
            raise ValueError(f"{name} must have the shape {said}, got {name}.shape={shape}")
        self.sizes.update(zip(names, shape, strict=True))
        return array

    def multiple(self, name: str, dim: str, other_name: str, other_dim: str) -> None:
        """Checks that a dimension of one argument is a multiple of another dimension of another."""
        size, divisor = self.sizes[dim], self.sizes[other_dim]
        if divisor == 0 or size % divisor:
            raise ValueError(
                f"{dim} of {name} must be a multiple of {other_dim} of {other_name}, got {size} and {divisor}"
            )

    @staticmethod
    def same_dtype(**arrays: jax.Array) -> None:
        """Checks that the operands of matmuls have one dtype."""
        if len({array.dtype for array in arrays.values()}) > 1:
            found = ", ".join(f"{name}.dtype={array.dtype}" for name, array in arrays.items())
            raise TypeError(f"{', '.join(arrays)} must have one dtype, got {found}")

    def rows(
        self, query: object, key: object, value: object, names: str = "q k v", tokens: str = TOKENS
    ) -> tuple[jax.Array, ...]:
        """Checks queries, keys and values, by default of whole sequences."""
        of_query, of_key, of_value = names.split()
        arrays = (
            self.array(of_query, query, f"{tokens} heads key_dim"),
            self.array(of_key, key, f"{tokens} heads key_dim"),
            self.array(of_value, value, f"{tokens} value_heads value_dim"),
        )
        self.multiple(of_value, "value_heads", of_query, "heads")
        self.same_dtype(**dict(zip(names.split(), arrays, strict=True)))
        return arrays

    def sequence_ids(self, options: SequenceOptions) -> jax.Array | None:
        """The sequence of each token, as ``sequences.sequence_ids`` says; and learns the number of sequences."""
        given = (options.get(name) for name in ("cum_seqlens", "segment_ids", "seq_lengths"))
        batch, length = self.sizes["batch"], self.sizes["length"]
        arrays = sequence_arrays(batch, length, *given)
        self.sizes["sequences"] = num_sequences(batch, arrays["cum_seqlens"])
        return sequence_ids(batch, length, **arrays)


def named_function[**P](function: Callable[Concatenate[Dims, P], Any]) -> Callable[P, Any]:
    """Makes a public function of one whose first argument are the dimensions, of which each call gets its own."""
    return _named(function, {"": jax.Array, "return_state": tuple[jax.Array, jax.Array]})


def named_step[**P](function: Callable[Concatenate[Dims, P], Any]) -> Callable[P, Any]:
    """Makes a public function likewise of a decoding step, which returns an output and a pool."""
    return _named(function, {"": tuple[jax.Array, jax.Array]})


def _named[**P](function: Callable[Concatenate[Dims, P], Any], returned: dict[str, Any]) -> Callable[P, Any]:
    @public_function(function)
    @results(returned)
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with errors_naming_function(function.__name__), default_promotion():
            return function(Dims(), *args, **kwargs)

    return call
