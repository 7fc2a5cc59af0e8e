"""Reports invalid data of serving calls if ``TILEWRIGHT_DEBUG=1``."""

import functools
import logging
from typing import Any

import jax
import numpy as np

from tilewright.kernels.op.contents import MAX_LOCATIONS, fault, is_debugging, listed
from tilewright.kernels.paged_attention.inputs import ELSEWHERE

logger = logging.getLogger("tilewright.serving")


def report(
    op: str,
    page_table: Any,
    kv_lengths: Any,
    cum_q_lens: Any,
    *,
    num_pages: int,
    page_size: int,
    tokens: int,
    q_length: int | None,
    writes: bool,
    by_place: bool = True,
) -> None:
    """Logs an ERROR, when a call runs, for data that the call clamps, masks or drops.

    Only if ``TILEWRIGHT_DEBUG`` is 1, and then the tables are copied to the host.
    """
    arrays = {"page_table": page_table, "kv_lengths": kv_lengths, "cum_q_lens": cum_q_lens}
    given = {name: array for name, array in arrays.items() if array is not None}
    if not is_debugging() or any(isinstance(array, jax.ShapeDtypeStruct) for array in given.values()):
        return

    def look(**values: Any) -> None:
        numbers = {name: np.asarray(value) for name, value in values.items()}
        found = faults(
            **numbers, num_pages=num_pages, page_size=page_size, tokens=tokens, q_length=q_length, writes=writes,
            by_place=by_place,
        )  # fmt: skip
        for each in found:
            logger.error("%s: %s", op, each)

    jax.debug.callback(functools.partial(look), **given)


def faults(
    *,
    kv_lengths: np.ndarray,
    num_pages: int,
    page_size: int,
    tokens: int,
    q_length: int | None,
    writes: bool,
    by_place: bool = True,
    page_table: np.ndarray | None = None,
    cum_q_lens: np.ndarray | None = None,
) -> list[str]:
    """The faults in the data of a call, one sentence for each kind; ``by_place``: masks depend on a query's place."""
    columns = 1 if page_table is None else page_table.shape[1]
    capacity = columns * page_size
    found = [
        fault("kv_lengths", kv_lengths, kv_lengths < 0, "is negative and counts as 0"),
        fault("kv_lengths", kv_lengths, kv_lengths > capacity, f"is beyond the {capacity} tokens there is room for"),
    ]
    # Clamped as the call does it, so that one mistake is not reported as several.
    lengths = np.clip(kv_lengths.astype(np.int64), 0, capacity)
    counts = np.full(lengths.shape, q_length or 1)
    if cum_q_lens is not None:
        cum = cum_q_lens.astype(np.int64)
        counts = np.diff(np.clip(np.maximum.accumulate(cum), 0, tokens))
        found.append(fault("cum_q_lens", cum, np.append(False, np.diff(cum) < 0), "is less than the boundary before"))
        found.append(fault("cum_q_lens", cum, (cum < 0) | (cum > tokens), f"is not within the {tokens} tokens"))
    if (cum_q_lens is not None and by_place) or writes:
        found.append(fault("kv_lengths", kv_lengths, lengths < counts, "is less than the sequence's new tokens"))
    if page_table is not None:
        used = np.arange(columns) * page_size < lengths[:, None]
        absent = used & ((page_table < 0) | (page_table >= num_pages)) & (page_table != ELSEWHERE)
        found.append(fault("page_table", page_table, absent, f"is none of the {num_pages} pages"))
        if writes:
            found.append(_written_twice(page_table, lengths, counts, num_pages, page_size))
    return [each for each in found if each]


def _written_twice(
    page_table: np.ndarray, lengths: np.ndarray, counts: np.ndarray, num_pages: int, page_size: int
) -> str:
    writer_of: dict[tuple[int, int], int] = {}
    twice: list[str] = []
    for sequence, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for position in range(max(length - count, 0), length):
            row = int(page_table[sequence, position // page_size]), position % page_size
            if not 0 <= row[0] < num_pages:
                continue
            if row in writer_of:
                twice.append(f"row {row[1]} of page {row[0]} by the sequences {writer_of[row]} and {sequence}")
            writer_of[row] = sequence
    return f"written twice: {listed(twice[:MAX_LOCATIONS], len(twice))}" if twice else ""
