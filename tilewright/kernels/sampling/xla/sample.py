"""Tokens from logits in plain XLA, without a sort: the backend for every device."""

from collections.abc import Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.sampling.draws import best_group, best_of_groups, relative, slopes, without_nan
from tilewright.kernels.sampling.inputs import Draw, SampleInputs
from tilewright.kernels.sampling.ordered import largest, mass, ordered
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaSample(InferenceBackend[SampleInputs, Draw, FwdParams]):
    """Serves every call; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"temperature", "top_k", "top_p", "min_p"})

    def forward_reasons(self, inputs: SampleInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: SampleInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: SampleInputs, params: FwdParams) -> Draw:
        slope, greedy = slopes(inputs.temperature, inputs.leading)
        x = without_nan(inputs.logits)
        if inputs.is_limited:
            x = jnp.where(_kept(inputs, x, slope), x, -jnp.inf)
        groups = best_of_groups(x, 0, inputs.key, slope, greedy)
        return best_group(groups, slope, greedy, log_probs=inputs.return_log_probs)


def _kept(inputs: SampleInputs, x: jax.Array, slope: jax.Array) -> jax.Array:
    """Marks the tokens that the limits keep: a pass over the row for each bit of a threshold."""
    order = ordered(x)
    top = order.max(-1)
    weights = jnp.exp(relative(x, order, top, slope))
    threshold = jnp.zeros_like(top)
    if inputs.top_k is not None:
        k = jnp.where(inputs.top_k < 1, inputs.vocab, jnp.minimum(inputs.top_k, inputs.vocab))
        threshold = largest(lambda at: (order >= at[..., None]).sum(-1, dtype=jnp.int32) >= k, top)
    if inputs.top_p is not None:
        goal = inputs.top_p * mass(weights, order >= threshold[..., None])
        # The largest logit is kept whatever the goal is.
        found = jnp.minimum(largest(lambda at: mass(weights, order >= at[..., None]) >= goal, top), top)
        threshold = jnp.where(inputs.top_p < 1.0, found, threshold)
    kept = order >= threshold[..., None]
    return kept if inputs.min_p is None else kept & ~(weights < jnp.minimum(inputs.min_p, 1.0)[..., None])
