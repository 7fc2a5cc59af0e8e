"""The options of attention, of a whole call and of a device's part of one."""

from typing import Annotated, TypedDict

from jax.typing import ArrayLike

from tilewright.kernels.flash_attention.arguments import CausalAlignment
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.public import Default


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of ``flash_attention``, which documents them."""

    causal: bool
    causal_alignment: Annotated[CausalAlignment, Default("top_left")]
    sliding_window: int | tuple[int | None, int | None] | None
    softmax_scale: ArrayLike | None
    logits_soft_cap: float | None
    softmax_aux: ArrayLike | None
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    cum_seqlens_q: ArrayLike | None
    cum_seqlens_k: ArrayLike | None
    dropout_prob: Annotated[float, Default(0.0)]
    dropout_seed: ArrayLike | None
    return_lse: bool
    precision: PrecisionLike
    platform: PlatformOption
    cfg: object
