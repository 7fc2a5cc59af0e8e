"""The problem of an attention call, for selection: shapes, dtypes, options, and the mask without its values."""

import dataclasses

import jax
import numpy as np

from tilewright.kernels.flash_attention.inputs import AttentionInputs, AttentionOptions
from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.masks import Mask


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """Sizes of one call; ``bias`` and the leaves of ``mask`` and ``position_bias`` are ``jax.ShapeDtypeStruct``.

    ``sinks`` is the number of extra logits per head; ``lse_wanted`` is True if the caller reads (and may differentiate)
    the log-sum-exp.
    """

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    bias: jax.ShapeDtypeStruct | None
    mask: Mask | None
    sinks: int
    lse_wanted: bool
    options: AttentionOptions
    position_bias: PositionBias | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs, lse_wanted: bool = False) -> "AttentionProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        batch, q_length, heads, head_dim = inputs.query.shape
        _, kv_length, kv_heads, value_dim = inputs.value.shape

        def abstract(leaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        return cls(
            batch=batch,
            q_length=q_length,
            kv_length=kv_length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=np.dtype(inputs.query.dtype),
            bias=None if inputs.bias is None else abstract(inputs.bias),
            mask=jax.tree.map(abstract, inputs.mask),
            sinks=0 if inputs.softmax_aux is None else inputs.softmax_aux.shape[1],
            lse_wanted=lse_wanted,
            options=inputs.options,
            position_bias=jax.tree.map(abstract, inputs.position_bias),
        )

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        return self.batch, self.heads, self.q_length, self.kv_length

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def position_bias_reasons(self) -> list[str]:
        """The reason why a backend that adds arrays alone cannot serve the call; empty without such a bias."""
        return [] if self.position_bias is None else ["adds a bias that is an array alone, got one of positions"]

    @property
    def dropout(self) -> bool:
        """True if probabilities are dropped."""
        return self.options.dropout_prob > 0.0
