"""Log-probabilities of labels: each token's cross-entropy without options of a loss, negated."""

from typing import Any

import jax
from jax.typing import ArrayLike

from tilewright.kernels.linear_cross_entropy.op import linear_cross_entropy
from tilewright.kernels.op.arguments import PlatformOption


def linear_log_probs(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    vocab_first: bool = False,
    logits_soft_cap: float | None = None,
    ignore_index: int = -100,
    axis_name: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    platform: PlatformOption = None,
    cfg: object = None,
) -> Any:
    """``log_softmax(x · weight + bias)`` at the labels, without the logits in memory: for policy gradients and DPO.

    A call of ``linear_cross_entropy``, whose configs and tables it shares.

    Args:
      x, weight, labels, bias, vocab_first, logits_soft_cap, axis_name, platform, cfg: as ``linear_cross_entropy``.
      ignore_index: the label of tokens whose result is 0.
      return_lse: also return ``log Σ exp(logits)``.

    Returns:
      ``[...]`` in float32 (float64 for float64); or (log-probabilities, lse).
    """
    found = linear_cross_entropy(
        x, weight, labels, bias=bias, vocab_first=vocab_first, logits_soft_cap=logits_soft_cap,
        ignore_index=ignore_index, axis_name=axis_name, return_lse=return_lse, reduction="none", platform=platform,
        cfg=cfg,
    )  # fmt: skip
    return (-found[0], found[1]) if return_lse else jax.tree.map(lambda x: -x, found)
