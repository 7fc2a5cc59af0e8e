"""Static scheduling: the work items of the programs (CTAs) of a kernel and their order, planned before it runs.

An item is a row of tiles of one matrix of scores, that is of one batch element and one head; those of `Rounds` are any.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.pallas_types import Ref, Scalar

type ItemLists[Items] = tuple[Items | None, Items]
"""`program_lists`; or None and the item of each program, if it has one."""

type WarpgroupRole = Callable[[Scalar, Scalar, Scalar], Scalar]
"""``first = role(item_index, item, first)``: the work of a warpgroup in an item.

``item_index`` counts the items of the program; step 0 of an item is step ``first`` of the rings, and that of the next
item is returned.
"""

ITEM_OVERHEAD = 1.5
"""Cost of a work item besides its steps, in steps: its first QKᵀ, which overlaps with nothing, and its output."""


STEPS_OF_RESIDENT_KEYS = 16
"""Steps with the same keys from which these stay in the rings although those of the next head do not fit beside them.

The change from one head to the next then shows the latency of most of its loads. 66 × 14 heads of 256 queries and keys
of head_dim 72, which are 4 steps, took 87 µs in this way and 78 with all keys loaded twice; 32 × 12 heads of 512 and
head_dim 64, which are 16, took 69 and 71.
"""

MANY_WAVES = 8
"""Items of a program from which it does not matter that the last ones leave programs without work."""


WAVES = 4
"""Waves of programs whose items differ in length.

With one wave the cluster that has the longest item has as many others as all: sums over 128 groups of Zipf's sizes took
343 µs, in four waves 281, and those over equal groups 236 and 239 (docs/notes/hopper_matmul.md).
"""


class Rounds(NamedTuple):
    """The items of a program: each of a wave takes one in every round.

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


def decode_tile_index(item: Scalar, row_tiles: int, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch element, head and row of tiles of a work item, ``(batch · heads + head) · row_tiles + row tile``."""
    matrix, row_tile = lax.div(item, jnp.int32(row_tiles)), lax.rem(item, jnp.int32(row_tiles))
    return lax.div(matrix, jnp.int32(heads)), lax.rem(matrix, jnp.int32(heads)), row_tile


def group_sizes(matrices: int, matrices_at_once: int) -> list[int]:
    """Sizes of the groups in which matrices are scheduled, as even as can be.

    A small last group has too few rows of tiles to fill the device: with 3 + 3 + 3 + 3 + 3 + 1 heads of 16384 causal
    queries, 132 SMs are 4 % idle, with six even groups 0.3 %, with equal ones 0.1 %.
    """
    # As few groups as the cache allows, or up to twice as many where that makes them equal.
    fewest = -(-matrices // matrices_at_once)
    groups = next((count for count in range(fewest, 2 * fewest) if matrices % count == 0), fewest)
    ends = [matrices * group // groups for group in range(groups + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def program_order(row_steps: np.ndarray, matrices: int, matrices_at_once: int) -> np.ndarray:
    """Work items in the order in which they start, ``[matrices · row_tiles]``: matrix · row_tiles + row tile.

    Matrices (a head of a batch element) are taken in groups whose keys and values fit the L2 cache together; in a group
    the longest rows of tiles start first, so that short ones even out the end.
    """
    tiles = len(row_steps)
    longest_first = np.argsort(-row_steps, kind="stable")
    # In a group a row of tiles is started for all matrices before the next row.
    items, start = [], 0
    for size in group_sizes(matrices, matrices_at_once):
        group = np.arange(start, start + size)
        items.append((group[None, :] * tiles + longest_first[:, None]).reshape(-1))
        start += size
    return np.concatenate(items).astype(np.int32)


def program_lists(order: np.ndarray, row_steps: np.ndarray, programs: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of persistent programs: ``(starts, items)``; program p has ``items[starts[p] : starts[p + 1]]``.

    Each item of ``order`` goes to the program that is done first with those it has: the assignment of a dynamic
    scheduler if every step took the same time.
    """
    owners, _ = _owners(order, row_steps, programs)
    starts = np.searchsorted(np.sort(owners), np.arange(programs + 1))
    # Stable: each program keeps the order in which its items start.
    return starts.astype(np.int32), order[np.argsort(owners, kind="stable")]


def _owners(order: np.ndarray, row_steps: np.ndarray, programs: int) -> tuple[np.ndarray, float]:
    """The program of each item of ``order`` by `program_lists`, and the time, in steps, until all are done."""
    costs = (row_steps + ITEM_OVERHEAD)[order % len(row_steps)]
    # A heap of the programs by the time at which they are done.
    busy = [(0.0, program) for program in range(programs)]
    owners = np.empty(len(order), np.int64)
    for index, cost in enumerate(costs.tolist()):
        until, program = busy[0]
        heapq.heapreplace(busy, (until + cost, program))
        owners[index] = program
    return owners, max(until for until, _ in busy)


def fewest_at_once(row_steps: np.ndarray, matrices: int, cached: int, group: int, programs: int) -> int:
    """Matrices at once for `program_order`: the fewest that keep all programs busy.

    The rows of tiles of a matrix then start at about the same time, so that its columns, which all of them read, come
    from memory once and from the L2 cache after that. A group of matrices has one row of tiles for each program at
    least. More are taken, twice as many each time, where rows differ in steps and fewer would leave programs idle at
    the end.

    Args:
      cached: matrices whose columns fit the cache together: never more than these.
      group: matrices that have the same columns, and stay together.
    """
    # In this order 256 queries and keys took 92 µs instead of 107 at head_dim 128, and 117 instead of 133 at 160. At 72
    # it was slower, 85 instead of 79, as neighbours read the sectors that their rows share at the same time
    # (docs/notes/hopper_attention.md).
    at_once = -(-programs // (len(row_steps) * group)) * group
    if at_once >= cached or np.ptp(row_steps) == 0:
        return min(at_once, cached)

    def time(at_once: int) -> float:
        return _owners(program_order(row_steps, matrices, at_once), row_steps, programs)[1]

    # As many as the cache holds leave the fewest CTAs idle: no smaller number may end later than that.
    longest = time(cached)
    while at_once < cached and time(at_once) > longest:
        at_once *= 2
    return min(at_once, cached)


def even_lists(items: int, programs: int) -> tuple[np.ndarray, np.ndarray]:
    """``program_lists`` of items that take the same time, in their own order: neighbours mostly share a program."""
    starts = np.arange(programs + 1) * items // programs
    return starts.astype(np.int32), np.arange(items, dtype=np.int32)


def makespan(row_costs: np.ndarray, matrices: int, programs: int) -> float:
    """Time until all programs are done with the items of so many matrices, if the longest start first.

    Args:
      row_costs: of each row of tiles of a matrix.
    """
    total = float(row_costs.sum()) * matrices
    items = len(row_costs) * matrices
    if items > MANY_WAVES * programs:  # the end is a small part
        return total / programs
    busy = [0.0] * programs
    for cost in np.sort(np.tile(row_costs, matrices))[::-1].tolist():
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)


def item_by_arithmetic(
    row_steps: np.ndarray, matrices: int, matrices_at_once: int
) -> Callable[[Scalar], jax.Array] | None:
    """``program_order`` as a function of the position in it: the item of a program that has one, without a table.

    None where no arithmetic gives it: it takes groups of one size, and rows whose steps only grow or only shrink.
    """
    sizes, tiles = group_sizes(matrices, matrices_at_once), len(row_steps)
    longest_first = np.argsort(-row_steps, kind="stable")
    ascending = np.array_equal(longest_first, np.arange(tiles))
    if len(set(sizes)) > 1 or not (ascending or np.array_equal(longest_first[::-1], np.arange(tiles))):
        return None

    def item(position: Scalar) -> jax.Array:
        # In the order of `program_order`: by group, in it by row of tiles, then by matrix.
        size = jnp.int32(sizes[0])
        group = lax.div(position, size * tiles)
        row, matrix = lax.div(position - group * (size * tiles), size), lax.rem(position, size)
        return (group * size + matrix) * tiles + (row if ascending else tiles - 1 - row)

    return item


def over_items(lists: ItemLists[Ref], one: WarpgroupRole) -> Scalar:
    """Calls ``first = one(item_index, item, first)`` for the items of this program; returns the last ``first``."""
    starts_ref, items_ref = lists
    program = lax.axis_index("program")
    if starts_ref is None:  # no loop, whose carry would take registers
        return one(0, items_ref[program], 0)
    start, end = starts_ref[program], starts_ref[program + 1]

    def one_item(item_index: Scalar, state: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        first, item = state
        # This reads one entry behind the last: `operands_of` appends it.
        following = items_ref[item_index + 1]  # loaded one item ahead, so that its latency is hidden
        return one(item_index - start, item, first), following

    steps, _ = lax.fori_loop(start, end, one_item, (jnp.int32(0), items_ref[start]))
    return steps


def run_warpgroup(
    lists: ItemLists[Ref],
    role: WarpgroupRole,
    registers: int,
    action: Literal["increase", "decrease"],
    finish: Callable[[Scalar], None] = lambda steps: None,
) -> None:
    """Runs a warpgroup's role in every item of this program, and waits until TMA has read what it stores.

    Args:
      finish: called at the end, with the steps of all items.
    """
    plgpu.set_max_registers(registers, action=action)
    steps = over_items(lists, role)
    # A role that stores nothing has no copies to wait for: this returns at once.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    finish(steps)


def operands_of(lists: ItemLists[np.ndarray]) -> ItemLists[jax.Array]:
    """``lists`` as arrays for ``over_items``, which of `program_lists` reads one item behind the last."""
    starts, items = lists
    return (None, jnp.asarray(items)) if starts is None else (jnp.asarray(starts), jnp.asarray(np.append(items, 0)))


def programs_of(lists: ItemLists[np.ndarray]) -> int:
    """The number of programs."""
    starts, items = lists
    return len(items) if starts is None else len(starts) - 1
