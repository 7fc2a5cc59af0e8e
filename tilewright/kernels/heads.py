"""The sizes by which every attention op describes its query and key, whatever their leading dimensions are."""

import functools

import numpy as np
from jaxtyping import Array, Float, Num

from tilewright.kernels.op.inputs import OpInputs


class HeadInputs(OpInputs):
    """A call of attention, whose query and key end with heads and their elements."""

    query: Float[Array, "*rows heads head_dim"]
    key: Num[Array, "*rows kv_heads head_dim"]

    @functools.cached_property
    def heads(self) -> int:
        return self.query.shape[-2]

    @functools.cached_property
    def head_dim(self) -> int:
        return self.query.shape[-1]

    @functools.cached_property
    def kv_heads(self) -> int:
        return self.key.shape[-2]

    @functools.cached_property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The dtype of the query and of the output."""
        return np.dtype(self.query.dtype)
