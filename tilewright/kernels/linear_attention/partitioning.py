"""Splits linear attention over the explicit axes of a mesh: by batch and by heads.

A state is passed from token to token, and every channel of a key meets every channel of a value: lengths and channels
stay whole. Arrays that are whole over a split axis are sliced to what a device needs, and their gradients are summed.
"""

from typing import Any

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.op.sharding import Partitioning, SplitDimensions

TOKENS = "bthx"
"""The dimensions of an array of tokens: batch, tokens, heads, and channels."""


def layouts_of(inputs: LinearAttentionInputs) -> dict[str, str]:
    """The dimensions of every array by letters: of sequences "n", others as for ``TOKENS``."""
    return dict.fromkeys(("query", "key", "value", "removal_read", "removal_write"), TOKENS) | {
        "log_decay": {"none": "", "head": "h", "token": "bth", "channel": TOKENS}[inputs.gate],
        "beta": "bth",
        "bonus": "hx",
        "initial_state": "bhxx" if inputs.cum_seqlens is None else "nhxx",
        "cum_seqlens": "n",
        "segment_ids": "bt",
        "seq_lengths": "b",
    }


def linear_attention_partitioning(inputs: LinearAttentionInputs) -> Partitioning | None:
    """The partitioning implied by the types of the arrays.

    Raises:
      ValueError: an array is split by something else, two are split in different ways, or key heads are shared by
        value heads of several devices.
    """
    layouts = layouts_of(inputs)
    split = SplitDimensions.of(inputs, layouts, {"b": "batch", "h": "heads"})
    if split is None:
        return None
    if inputs.heads % split.devices("h"):
        raise ValueError(
            f"value heads over {split.devices('h')} devices need key heads of their own, got {inputs.heads} of them; "
            "repeat query and key for more heads first (jax.numpy.repeat along axis 2)"
        )
    out: Any = None if inputs.only_maps else TOKENS
    state: Any = layouts["initial_state"] if inputs.return_state or inputs.only_maps else None
    return split.partitioning(inputs, LinearAttentionResults(out, state))
