"""Decays within a chunk: of a head and token, or of each channel of the key.

γ_i is the sum of the logarithms up to token i of a chunk, and every factor e^x has x ≤ 0 if decays are at most 1: it is
masked before the exponential. What a token's factors are computed from are its own decays and those before it.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.linear_attention.xla.triangular import merged

MIN_LOG_DECAY = -1e4
"""A decay by which nothing is left in any precision; less is taken for it, since −∞ has no differences."""

PAIRWISE = 8
"""Tokens of a block whose pairs have an exponential each, for decays of channels."""


class Sums(NamedTuple):
    """Sums of logarithms in two parts: of their integers, which are exact, and of the rest.

    A difference of two of them is then as precise as its size allows, however strong decays before were.
    """

    whole: jax.Array
    rest: jax.Array

    @classmethod
    def of(cls, log_decay: jax.Array, axis: int) -> "Sums":
        whole = lax.stop_gradient(jnp.round(log_decay))
        return cls(jnp.cumsum(whole, axis=axis), jnp.cumsum(log_decay - whole, axis=axis))

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Sums":
        return Sums(function(self.whole), function(self.rest))

    def minus(self, other: "Sums") -> jax.Array:
        return (self.whole - other.whole) + (self.rest - other.rest)

    def total(self) -> jax.Array:
        return self.whole + self.rest


@dataclasses.dataclass(frozen=True)
class Gate(abc.ABC):
    """The decays of all chunks.

    Attributes:
      sums: γ, ``[..., chunk]`` or ``[..., chunk, K]``.
      begun: ``[..., chunk]``: how many segments have begun in the chunk up to each token; None for one sequence.
    """

    sums: Sums
    begun: jax.Array | None
    precision: lax.Precision

    @classmethod
    def of(cls, log_decay: jax.Array, axis: int, begun: jax.Array | None, precision: lax.Precision) -> Self:
        log_decay = jnp.maximum(log_decay, MIN_LOG_DECAY)
        return cls(Sums.of(log_decay, axis), begun, precision)

    def matmul(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=self.precision)

    def mask(self, size: int, *, strict: bool) -> jax.Array:
        """``[..., chunk, chunk]``: True for the tokens that a token sees in its chunk."""
        found = jnp.tril(jnp.ones((size, size), bool), -1 if strict else 0)
        if self.begun is not None:
            found = found & (self.begun[..., :, None] == self.begun[..., None, :])
        return found

    @property
    def sees_state(self) -> jax.Array | None:
        """``[..., chunk]``: True for tokens that the state before the chunk reaches."""
        return None if self.begun is None else self.begun == 0

    @property
    def reaches_end(self) -> jax.Array | None:
        """``[..., chunk]``: True for tokens that the state behind the chunk has."""
        return None if self.begun is None else self.begun == self.begun[..., -1:]

    @abc.abstractmethod
    def scores(self, x: jax.Array, y: jax.Array, *, strict: bool = False, before: bool = False) -> jax.Array:
        """Σ_c x_ic y_jc e^(γ_ic − γ_jc) for j ≤ i, or j < i if ``strict``; with ``before``, γ_i is that of i − 1."""

    @abc.abstractmethod
    def read(self, x: jax.Array, states: jax.Array, *, before: bool = False) -> jax.Array:
        """(x e^γ) S for the states before the chunks."""

    @abc.abstractmethod
    def combined(self, weights: jax.Array, x: jax.Array, *, before: bool = False) -> jax.Array:
        """W (x e^γ) for weights ``[..., chunk, chunk]``: what multiplies the states before the chunks."""

    @abc.abstractmethod
    def written(self, y: jax.Array, values: jax.Array) -> jax.Array:
        """(y e^(γ_C − γ))ᵀ U, with γ_C that of the last token: what is added to the states behind the chunks."""

    @property
    @abc.abstractmethod
    def decay(self) -> jax.Array:
        """e^γ_C, as a factor of states."""


def _exp(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return jnp.exp(x if mask is None else jnp.where(mask, x, -jnp.inf))


class HeadGate(Gate):
    """A decay for each head and token: factors of results and of values, not of keys."""

    def _rows(self, before: bool) -> Sums:
        return self.sums.map(lambda x: _shifted(x, -1)) if before else self.sums

    def _start(self, before: bool) -> jax.Array:
        return _exp(self._rows(before).total(), self.sees_state)

    def scores(self, x: jax.Array, y: jax.Array, *, strict: bool = False, before: bool = False) -> jax.Array:
        rows, columns = self._rows(before).map(lambda x: x[..., :, None]), self.sums.map(lambda x: x[..., None, :])
        mask = self.mask(x.shape[-2], strict=strict)
        products = self.matmul(x, jnp.swapaxes(y, -1, -2))
        return jnp.where(mask, products, 0) * _exp(rows.minus(columns), mask)

    def read(self, x: jax.Array, states: jax.Array, *, before: bool = False) -> jax.Array:
        return self._start(before)[..., None] * self.matmul(x, states)

    def combined(self, weights: jax.Array, x: jax.Array, *, before: bool = False) -> jax.Array:
        return self.matmul(weights * self._start(before)[..., None, :], x)

    def written(self, y: jax.Array, values: jax.Array) -> jax.Array:
        end = self.sums.map(lambda x: x[..., -1:])
        factors = _exp(end.minus(self.sums), self.reaches_end)
        return self.matmul(jnp.swapaxes(y, -1, -2), factors[..., None] * values)

    @property
    def decay(self) -> jax.Array:
        return jnp.exp(self.sums.total()[..., -1, None, None])


class ChannelGate(Gate):
    """A decay for each channel of the key, by which queries and keys are multiplied."""

    def _rows(self, before: bool) -> Sums:
        return self.sums.map(lambda x: _shifted(x, -2)) if before else self.sums

    def _from_start(self, x: jax.Array, before: bool) -> jax.Array:
        mask = self.sees_state
        return x * _exp(self._rows(before).total(), None if mask is None else mask[..., None])

    def scores(self, x: jax.Array, y: jax.Array, *, strict: bool = False, before: bool = False) -> jax.Array:
        compute = functools.partial(_channel_scores, strict=strict, precision=self.precision)
        # Factors are computed again for the gradients: there are more of them than of all that is kept. Without the
        # optimization barriers of prevent_cse: on GPUs XLA writes the results of a fusion over an operand of which a
        # copy behind a barrier, in the same buffer, is another operand and still to be read.
        found = jax.checkpoint(compute, prevent_cse=False)(x, y, self._rows(before), self.sums)
        return jnp.where(self.mask(x.shape[-2], strict=strict), found, 0)

    def read(self, x: jax.Array, states: jax.Array, *, before: bool = False) -> jax.Array:
        return self.matmul(self._from_start(x, before), states)

    def combined(self, weights: jax.Array, x: jax.Array, *, before: bool = False) -> jax.Array:
        return self.matmul(weights, self._from_start(x, before))

    def written(self, y: jax.Array, values: jax.Array) -> jax.Array:
        end = self.sums.map(lambda x: x[..., -1:, :])
        mask = self.reaches_end
        factors = _exp(end.minus(self.sums), None if mask is None else mask[..., None])
        return self.matmul(jnp.swapaxes(y * factors, -1, -2), values)

    @property
    def decay(self) -> jax.Array:
        return jnp.exp(self.sums.total()[..., -1, :, None])


def _shifted(sums: jax.Array, axis: int) -> jax.Array:
    """The sums without each token's own: those of the token before, and 0 for the first."""
    size = sums.shape[axis]
    widths = [(0, 0)] * sums.ndim
    widths[axis] = (1, 0)
    return lax.slice_in_dim(jnp.pad(sums, widths), 0, size, axis=axis % sums.ndim)


def _channel_scores(
    x: jax.Array, y: jax.Array, rows: Sums, columns: Sums, *, strict: bool, precision: lax.Precision
) -> jax.Array:
    """The scores of ``ChannelGate`` for decays that may be of any strength.

    e^(γ_i − γ_j) of a pair is no product of factors that are finite for each token. But of two neighbouring blocks it
    is e^(γ_i − a) e^(a − γ_j) with a the sum up to the end of the first block: no exponent is positive, and none
    depends on what comes after i. Blocks are merged up to the whole chunk; pairs in the smallest have exponentials of
    their own.
    """
    *leading, count, channels = x.shape

    def blocks(a: jax.Array, size: int) -> jax.Array:
        return a.reshape(*leading, count // size, size, channels)

    base = functools.partial(blocks, size=PAIRWISE)
    exponents = (
        rows.map(base).map(lambda a: a[..., :, None, :]).minus(columns.map(base).map(lambda a: a[..., None, :, :]))
    )
    mask = jnp.tril(jnp.ones((PAIRWISE, PAIRWISE), bool), -1 if strict else 0)[..., None]
    found = jnp.sum(base(x)[..., :, None, :] * base(y)[..., None, :, :] * _exp(exponents, mask), axis=-1)
    size = PAIRWISE
    while size < count:

        def half(a: jax.Array, index: int, size: int = size) -> jax.Array:
            return a.reshape(*leading, count // (2 * size), 2, size, channels)[..., index, :, :]

        late, early = rows.map(lambda a: half(a, 1)), columns.map(lambda a: half(a, 0))
        anchor = early.map(lambda a: a[..., -1:, :])
        left = half(x, 1) * jnp.exp(late.minus(anchor))
        right = half(y, 0) * jnp.exp(anchor.minus(early))
        found = merged(found, jnp.matmul(left, jnp.swapaxes(right, -1, -2), precision=precision))
        size *= 2
    return found.reshape(*leading, count, count)
