"""The plans of attention over a split sequence, as backends."""

import abc
from typing import ClassVar

import jax

from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.distributed.model import best_strategy, ulysses_reason
from tilewright.kernels.flash_attention.distributed.ring import ring_attention
from tilewright.kernels.flash_attention.distributed.whole import gathered_attention, ulysses_attention
from tilewright.kernels.op.distributed import PlanParams, TracedPlan
from tilewright.ops.types import Device, Direction

type Results = tuple[jax.Array, jax.Array]

_SERVED = frozenset(
    {
        "softmax_aux", "q_ids", "kv_ids", "q_lengths", "kv_lengths", "q_bounds", "kv_bounds", "lowest", "highest",
        "moving_ends", "bottom_right", "longest", "logits_soft_cap", "precision",
    }
)  # fmt: skip


class ContextPlan(TracedPlan[ContextInputs, Results], abc.ABC):
    """A plan whose time the model of ``model.py`` predicts."""

    serves: ClassVar[frozenset[str]] = _SERVED

    def is_best(self, inputs: ContextInputs, device: Device, direction: Direction) -> bool:
        return best_strategy(inputs) == self.name


class RingAttention(ContextPlan):
    """Keys and values go around, behind the computation."""

    name: ClassVar[str] = "ring"

    def plan_reasons(self, inputs: ContextInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def forward(self, inputs: ContextInputs, params: PlanParams) -> Results:
        return ring_attention(inputs, params.parts)


class GatheredAttention(ContextPlan):
    """Keys and values are gathered before one call."""

    name: ClassVar[str] = "all_gather"

    def plan_reasons(self, inputs: ContextInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def forward(self, inputs: ContextInputs, params: PlanParams) -> Results:
        return gathered_attention(inputs, params.parts)


class UlyssesAttention(ContextPlan):
    """Rows are exchanged for heads around one call."""

    name: ClassVar[str] = "ulysses"

    def plan_reasons(self, inputs: ContextInputs, device: Device, direction: Direction) -> list[str]:
        why = ulysses_reason(inputs)
        return [f"it splits the heads: {why}"] if why else []

    def forward(self, inputs: ContextInputs, params: PlanParams) -> Results:
        return ulysses_attention(inputs, params.parts)
