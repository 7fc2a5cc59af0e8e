"""The split of a selective scan over explicit mesh axes: by rows of the batch and by channels."""

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.op.sharding import Partitioning, SplitDimensions
from tilewright.kernels.selective_scan.inputs import ScanResults, SelectiveScanInputs, SelectiveScanStepInputs

SCAN = {
    **dict.fromkeys(("u", "delta", "z"), "btc"),
    "A": "cx",
    **dict.fromkeys(("B", "C"), "btgx"),
    **dict.fromkeys(("D", "delta_bias"), "c"),
    "initial_state": "bcx",
    "cum_seqlens": "n",
    "segment_ids": "bt",
    "seq_lengths": "b",
}
"""The dimensions of arrays: batch, tokens, channels, groups of these, elements of a state, and sequences."""

STEP = {
    "state_pool": "scx",
    **dict.fromkeys(("u", "delta", "z"), "bc"),
    "A": "cx",
    **dict.fromkeys(("B", "C"), "bgx"),
    **dict.fromkeys(("D", "delta_bias"), "c"),
    **dict.fromkeys(("state_indices", "write_indices"), "b"),
}
"""The same of a step, with slots of a pool."""


def split_of(
    inputs: SelectiveScanInputs | SelectiveScanStepInputs, layouts: Mapping[str, str], allowed: Mapping[str, str]
) -> SplitDimensions | None:
    """The split of a call, whose groups are split as its channels are, if there are several."""
    if inputs.groups > 1:
        layouts = {name: letters.replace("g", "c") for name, letters in layouts.items()}
    split = SplitDimensions.of(inputs, layouts, allowed)
    if split is not None and inputs.groups > 1 and inputs.groups % split.devices("c"):
        raise ValueError(f"{inputs.groups} groups of B and C cannot be split over {split.devices('c')} devices")
    return split


def scan_partitioning(inputs: SelectiveScanInputs) -> Partitioning | None:
    """The split of a scan; of a packed row by channels."""
    layouts, allowed = SCAN, {"b": "rows of the batch", "c": "channels"}
    if inputs.cum_seqlens is not None:
        # The one row is no dimension that could be split, and the states are of sequences in it.
        layouts, allowed = SCAN | {"initial_state": "ncx"}, {"c": "channels"}
    split = split_of(inputs, layouts, allowed)
    if split is None:
        return None
    states: Any = layouts["initial_state"] if inputs.return_state else None
    chunk_states: Any = "btcx" if inputs.keeps else None
    out: Any = "btc"
    return split.partitioning(inputs, ScanResults(out, states, chunk_states))


def step_partitioning(inputs: SelectiveScanStepInputs) -> Partitioning | None:
    """The split of a step, by channels: any row may have any slot of the pool."""
    split = split_of(inputs, STEP, {"c": "channels"})
    return None if split is None else split.partitioning(inputs, ("bc", "scx"))
