"""Keys as versions before 0.2 wrote them: every option of a call, whether given or not, and absent arrays as null.

Caches and lock files of those versions are found by them. An op that came later has no entry.
"""

from types import MappingProxyType
from typing import Any

from tilewright.kernels.op.inputs import OpInputs

_PAGED = (
    "query key value page_table kv_lengths kv_starts cum_q_lens key_scale value_scale alibi_slopes softmax_aux new_key "
    "new_value",
    "softmax_scale left right logits_soft_cap q_length latent_dim kv_dtype leading return_lse writes platform",
)

_WRITTEN = MappingProxyType(
    {
        "flash_attention": (
            "query key value bias|position_bias mask softmax_aux",
            "dropout_seed softmax_scale logits_soft_cap dropout_prob precision return_lse unbatched platform",
        ),
        "rms_norm": ("x residual weight bias", "eps weight_offset platform"),
        "layer_norm": ("x residual weight bias", "eps platform"),
        "matmul": ("lhs rhs", "out_dtype transpose_lhs transpose_rhs precision platform"),
        "glu": ("lhs rhs up", "out_dtype activation platform"),
        "grouped_matmul": ("lhs rhs group_sizes", "out_dtype transpose_rhs precision platform"),
        "gated_grouped_matmul": ("lhs rhs up group_sizes", "out_dtype activation platform"),
        "linear_cross_entropy": (
            "x weight labels",
            "vocab_first label_smoothing z_loss logits_soft_cap reduction return_lse platform",
        ),
        "linear_kl_divergence": (
            "student_x student_weight teacher_x teacher_weight",
            "temperature vocab_first logits_soft_cap reduction platform",
        ),
        "update_pages": (
            "key_pages value_pages key_scale value_scale key value page_table kv_lengths cum_q_lens",
            "kv_dtype headless platform",
        ),
        "decode_attention": _PAGED,
        "page_attention": _PAGED,
        "ragged_decode_attention": _PAGED,
        "ragged_page_attention": _PAGED,
        "unified_attention": _PAGED,
        "chunked_prefill_paged_decode": _PAGED,
        "mla_decode": _PAGED,
    }
)
"""For each op the names of what stood in its keys by position, and of what stood there by name in every call."""

_LATER = frozenset({"kind"})
"""Fields of inputs that no key had."""


def former_description(op: str, inputs: OpInputs) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments in the former key of a call; ``None`` if there was none."""
    if op not in _WRITTEN:
        return None
    positional, named = ([name.split("|") for name in names.split()] for names in _WRITTEN[op])

    def value(names: list[str]) -> Any:
        return next((found for name in names if (found := getattr(inputs, name)) is not None), None)

    args = tuple(value(names) for names in positional)
    _, given = inputs.described
    known = {name for names in positional for name in names} | _LATER
    further = {name: found for name, found in given.items() if name not in known}
    return args, {names[0]: value(names) for names in named} | further
