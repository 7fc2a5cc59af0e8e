"""The inputs and results of the functions that draw tokens."""

import functools
import math
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from tilewright.kernels.op.inputs import OpInputs, static

GROUP = 128
"""Tokens of a group: scores are relative to the largest logit of their group, whatever the tiles of a backend are.

So a draw depends on no tiling, and tokens are compared at the precision that float32 has near the best of them.
"""


class Draw(NamedTuple):
    """A drawn token of each row.

    Attributes:
      log_probs: ``None`` if the call does not return it.
    """

    tokens: Any
    log_probs: Any


class SampleInputs(OpInputs):
    """A call of ``sample`` after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      key: two words for each row.
      temperature: ``None`` for 1.
      top_k: from 1 on, or none of a limit; ``None`` for no limit in any row.
      top_p, min_p: ``None`` for no limit in any row.
    """

    logits: Float[Array, "*rows vocab"]
    key: UInt32[Array, "*rows 2"]
    temperature: Float32[Array, "*rows"] | None = None
    top_k: Int32[Array, "*rows"] | None = None
    top_p: Float32[Array, "*rows"] | None = None
    min_p: Float32[Array, "*rows"] | None = None
    return_log_probs: bool = static(default=False, role="call")

    @functools.cached_property
    def leading(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        return self.logits.shape[:-1]

    @functools.cached_property
    def rows(self) -> int:
        """Number of tokens to draw."""
        return math.prod(self.leading)

    @functools.cached_property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    @functools.cached_property
    def is_limited(self) -> bool:
        """True if some tokens may be ruled out."""
        return any(limit is not None for limit in (self.top_k, self.top_p, self.min_p))


class LinearSampleInputs(OpInputs):
    """A call of ``linear_sample`` after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      weight: ``[d, vocab]``, or ``[vocab, d]`` with ``vocab_first``.
      key: two words for each row.
      temperature: ``None`` for 1.
    """

    x: Float[Array, "*rows d"]
    weight: Float[Array, "_ _"]
    key: UInt32[Array, "*rows 2"]
    bias: Float[Array, " vocab"] | None = None
    temperature: Float32[Array, "*rows"] | None = None
    vocab_first: bool = static(default=False)
    logits_soft_cap: float | None = static(default=None)

    @functools.cached_property
    def leading(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        return self.x.shape[:-1]

    @functools.cached_property
    def rows(self) -> int:
        """Number of tokens to draw."""
        return math.prod(self.leading)

    @functools.cached_property
    def d(self) -> int:
        return self.x.shape[-1]

    @functools.cached_property
    def vocab(self) -> int:
        return self.weight.shape[0 if self.vocab_first else 1]


def draw_structs(leading: tuple[int, ...], return_log_probs: bool) -> Draw:
    """The results of every backend."""
    tokens, log_probs = (jax.ShapeDtypeStruct(leading, dtype) for dtype in ("int32", "float32"))
    return Draw(tokens, log_probs if return_log_probs else None)


def outputs_of(draw: Draw) -> Any:
    """The outputs of a function: the tokens, and their log-probabilities if the call returns them."""
    return draw.tokens if draw.log_probs is None else tuple(draw)
