"""The items of programs (CTAs, or clusters) that go through them in rounds, known without a table of all items."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper.types import Scalar

WAVES = 4
"""Waves of programs whose items differ in length.

With one wave the cluster that has the longest item has as many others as all: sums over 128 groups of Zipf's sizes took
343 µs, in four waves 281, and those over equal groups 236 and 239 (docs/notes/hopper_matmul.md).
"""


class Rounds(NamedTuple):
    """Which items a program has: each of a wave takes one in every round.

    Attributes:
      programs: of a wave, as many as run at a time.
      most: rounds of a wave; None if there is one for all items.
    """

    programs: int
    most: int | None = None

    @classmethod
    def in_waves(cls, items: int, programs: int) -> "Rounds":
        """Rounds of items that differ in length: a wave's programs begin one by one, as those before them end."""
        programs = min(programs, items)
        rounds = -(-items // programs)
        return cls(programs, -(-rounds // WAVES) if rounds >= 2 * WAVES else None)

    def grid(self, items: int) -> int:
        """The number of programs of all waves."""
        return self.programs * (1 if self.most is None else -(-items // (self.programs * self.most)))

    def of(self, program: Scalar, items: Scalar) -> tuple[Scalar, Scalar]:
        """A program's first item, behind which its others are ``programs`` apart, and how many it has."""
        # Neighbouring programs work on neighbouring items at a time, and share operands in the L2 cache.
        first, stride = jnp.asarray(program, jnp.int32), jnp.int32(self.programs)
        if self.most is not None:
            first = lax.div(first, stride) * (self.most * self.programs) + lax.rem(first, stride)
        count = lax.div(items - first + stride - 1, stride)
        return first, count if self.most is None else jnp.clip(count, 0, self.most)
