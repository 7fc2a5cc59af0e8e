"""Configs of the layer of experts: those of its matmuls."""

import dataclasses
from typing import Any

from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/experts.ForwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsForwardParams:
    """Config of the forward pass.

    Attributes:
      gated: of ``gated_grouped_matmul`` in the same language, or of ``grouped_matmul`` if there are biases.
      down: of ``grouped_matmul``.
      gathers: whether the first matmul takes the tokens as they are, and loads the rows of experts from them; else
        these are copied before.
    """

    gated: Any
    down: Any
    gathers: bool = False


@stable_id("tilewright/experts.BackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsBackwardParams:
    """Config of the backward pass.

    Attributes:
      hidden: of the forward pass of ``grouped_matmul``, which computes the cotangents of the hidden rows.
      gated: of the backward pass of the gated matmul.
      down: of the backward pass of ``grouped_matmul``.
      gathers: whether the matmuls take the tokens and their cotangents as they are, and load the rows of experts from
        them; else these are copied before.
    """

    hidden: Any
    gated: Any
    down: Any
    gathers: bool = False
