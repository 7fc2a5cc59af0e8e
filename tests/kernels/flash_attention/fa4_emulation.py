"""FlashAttention-4's kernels for Hopper as ``jax.numpy`` computes them, and the bridge that launches them.

Each takes what its class takes, checks what the class asserts, and leaves NaN in whatever the class does not write.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.fa4 import cute

F32 = {"preferred_element_type": jnp.float32}


@dataclasses.dataclass
class Buffer:
    """What a kernel reads or writes."""

    value: Any


def call(
    launch: Callable[..., None],
    *,
    output_shape_dtype: tuple[Any, ...],
    input_output_aliases: Mapping[int, int],
    compile_key: Any,
) -> Callable[..., tuple[Any, ...]]:
    """As ``cutlass.jax.cutlass_call``: what is aliased is an input alone for the kernel."""
    hash(compile_key)

    def run(*operands: Any) -> tuple[Any, ...]:
        inputs = [None if x is None else Buffer(x) for x in operands]
        outputs = [Buffer(jnp.full(x.shape, jnp.nan, x.dtype)) for x in output_shape_dtype]
        for i, n in input_output_aliases.items():
            assert (operands[i].shape, operands[i].dtype) == (outputs[n].value.shape, outputs[n].value.dtype)
        aliased = set(input_output_aliases.values())
        launch(None, *inputs, *(x for n, x in enumerate(outputs) if n not in aliased))
        for i, n in input_output_aliases.items():
            outputs[n] = inputs[i]
        for made, wanted in zip(outputs, output_shape_dtype, strict=True):
            assert (made.value.shape, made.value.dtype) == (wanted.shape, wanted.dtype)
        return tuple(x.value for x in outputs)

    return run


def seen(q_length: int, kv_length: int, own: Any, window: tuple[Any, Any], q_lengths: Any, kv_lengths: Any) -> Any:
    """``[batch|1, 1, q_length, kv_length]``: bands are counted from the ends of the lengths."""
    queries = jnp.full((1,), q_length) if q_lengths is None else q_lengths.value
    keys = jnp.full((1,), kv_length) if kv_lengths is None else kv_lengths.value
    rows, columns = jnp.arange(q_length)[:, None], jnp.arange(kv_length)[None, :]
    place = columns - rows - (keys - queries)[:, None, None, None]
    left, right = (None, 0) if own.is_causal else window
    assert own.is_local == (window != (None, None))
    assert not (own.is_causal and own.is_local)
    visible = (rows < queries[:, None, None, None]) & (columns < keys[:, None, None, None])
    if left is not None:
        visible &= place >= -left
    if right is not None:
        visible &= place <= right
    return visible


@dataclasses.dataclass
class Forward:
    dtype: Any
    head_dim: int
    head_dim_v: int
    qhead_per_kvhead: int
    is_causal: bool
    is_local: bool
    pack_gqa: bool
    tile_m: int
    tile_n: int
    num_stages: int
    intra_wg_overlap: bool
    mma_pv_is_rs: bool
    score_mod: Any

    def __call__(
        self, query: Any, key: Any, value: Any, out: Any, lse: Any, scale: float, *,
        mSeqUsedQ: Any, mSeqUsedK: Any, window_size_left: Any, window_size_right: Any, stream: Any,
    ) -> None:  # fmt: skip
        q, k, v = query.value, key.value, value.value
        assert q.dtype == k.dtype == v.dtype == self.dtype
        assert (q.shape[3], v.shape[3], q.shape[2] // k.shape[2]) == (
            self.head_dim,
            self.head_dim_v,
            self.qhead_per_kvhead,
        )
        assert self.head_dim % 8 == self.head_dim_v % 8 == 0
        window = window_size_left, window_size_right
        visible = seen(q.shape[1], k.shape[1], self, window, mSeqUsedQ, mSeqUsedK)
        k, v = (jnp.repeat(x, self.qhead_per_kvhead, 2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, **F32) * scale
        if self.score_mod is not None:
            logits = self.score_mod * jnp.tanh(logits / self.score_mod)
        masked = jnp.where(visible, logits, -jnp.inf)
        # A row that sees nothing is as the kernel left it.
        greatest = jnp.max(masked, -1, keepdims=True)
        weights = jnp.exp(masked - greatest)
        total = weights.sum(-1)
        result = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(self.dtype), v, **F32)
        out.value = (result / total.transpose(0, 2, 1)[..., None]).astype(self.dtype)
        lse.value = greatest[..., 0] + jnp.log(total)


@dataclasses.dataclass
class Preprocess:
    dtype: Any
    head_dim: int
    head_dim_v: int
    tile_m: int
    hdim_multiple_of: int

    def __call__(
        self, out: Any, d_out: Any, delta: Any, lse: Any, exponent: Any, d_query: Any, cu_seqlens: None,
        q_lengths: Any, d_lse: Any, row_max: None, scale_p: None, scale: float, *, stream: Any,
    ) -> None:  # fmt: skip
        assert cu_seqlens is row_max is scale_p is None
        assert self.head_dim % self.hdim_multiple_of == self.head_dim_v % self.hdim_multiple_of == 0
        assert self.tile_m * self.head_dim // 4 % 256 == 0
        length = out.value.shape[1]
        inside = (jnp.arange(length) < (length if q_lengths is None else q_lengths.value[:, None]))[..., None, :]
        sums = jnp.sum(out.value.astype(jnp.float32) * d_out.value.astype(jnp.float32), -1).transpose(0, 2, 1)
        sums = sums if d_lse is None else sums - d_lse.value
        rest = delta.value.shape[2] - length
        assert 0 <= rest < self.tile_m
        delta.value = jnp.pad(jnp.where(inside, sums, 0.0), [(0, 0), (0, 0), (0, rest)])
        log2 = jnp.where(jnp.isneginf(lse.value), 0.0, lse.value * np.log2(np.e))
        log2 = jnp.where(inside, log2, jnp.inf)
        exponent.value = jnp.pad(log2, [(0, 0), (0, 0), (0, rest)], constant_values=jnp.inf)
        d_query.value = jnp.zeros_like(d_query.value)


@dataclasses.dataclass
class Backward:
    dtype: Any
    head_dim: int
    head_dim_v: int
    qhead_per_kvhead: int
    is_causal: bool
    is_local: bool
    tile_m: int
    tile_n: int
    Q_stage: int
    dO_stage: int
    PdS_stage: int
    SdP_swapAB: bool
    dKV_swapAB: bool
    dQ_swapAB: bool
    AtomLayoutMSdP: int
    AtomLayoutNdKV: int
    AtomLayoutMdQ: int
    num_threads: int
    score_mod: Any
    score_mod_bwd: Any
    dQ_single_wg: bool

    def __call__(
        self, query: Any, key: Any, value: Any, d_out: Any, exponent: Any, delta: Any, d_query: Any, d_key: Any,
        d_value: Any, scale: float, *, mSeqUsedQ: Any, mSeqUsedK: Any, window_size_left: Any, window_size_right: Any,
        stream: Any,
    ) -> None:  # fmt: skip
        q, k, v, d_o = query.value, key.value, value.value, d_out.value
        groups, length = self.qhead_per_kvhead, q.shape[1]
        assert groups == 1 or (self.head_dim == self.head_dim_v and self.num_threads == 384)
        assert (
            exponent.value.shape
            == delta.value.shape
            == (*q.shape[:1], q.shape[2], -(-length // self.tile_m) * self.tile_m)
        )
        window = window_size_left, window_size_right
        visible = seen(length, k.shape[1], self, window, mSeqUsedQ, mSeqUsedK)
        wide_k, wide_v = (jnp.repeat(x, groups, 2) for x in (k, v))
        logits, slope = jnp.einsum("bqhd,bkhd->bhqk", q, wide_k, **F32) * scale, 1.0
        if self.score_mod is not None:
            assert self.score_mod == self.score_mod_bwd
            logits = self.score_mod * jnp.tanh(logits / self.score_mod)
            slope = 1.0 - (logits / self.score_mod) ** 2
        scores = jnp.where(visible, logits * np.log2(np.e), -jnp.inf)
        weights = jnp.exp2(scores - exponent.value[..., :length, None])
        products = jnp.einsum("bqhd,bkhd->bhqk", d_o, wide_v, **F32)
        d_logits = (weights * (products - delta.value[..., :length, None]) * slope).astype(self.dtype)
        d_q = jnp.einsum("bhqk,bkhd->bhqd", d_logits, wide_k, **F32)
        d_k = jnp.einsum("bhqk,bqhd->bkhd", d_logits, q, **F32)
        d_v = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(self.dtype), d_o, **F32)
        d_query.value = d_query.value + in_tiles(d_q, self.tile_m)
        d_k, d_v = (x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (d_k, d_v))
        if groups > 1:
            sums = (in_tiles(x.transpose(0, 2, 1, 3), self.tile_n) for x in (d_k, d_v))
            d_key.value, d_value.value = (old.value + x for old, x in zip((d_key, d_value), sums, strict=True))
            return
        keys = k.shape[1] if mSeqUsedK is None else mSeqUsedK.value[:, None]
        inside = (jnp.arange(k.shape[1]) < keys)[..., None, None]
        d_key.value, d_value.value = (jnp.where(inside, x, jnp.nan).astype(self.dtype) for x in (d_k * scale, d_v))


def in_tiles(sums: Any, tile: int) -> Any:
    """``[batch, heads, rows * dim]`` of whole tiles; only the kernels know the order in one."""
    padded = jnp.pad(sums, [(0, 0), (0, 0), (0, -sums.shape[2] % tile), (0, 0)])
    return padded.reshape(*padded.shape[:2], -1)


@dataclasses.dataclass
class Postprocess:
    dtype: Any
    head_dim: int
    arch: int
    tile_m: int
    num_threads: int
    atoms: int
    swap: bool
    hdim_multiple_of: int

    def __call__(
        self, sums: Any, gradient: Any, scale: float, cu_seqlens: None, lengths: Any, sinks: None, *, stream: Any
    ) -> None:
        assert cu_seqlens is sinks is None
        assert (self.arch, self.head_dim % self.hdim_multiple_of) == (90, 0)
        batch, length, heads, dim = gradient.value.shape
        assert dim == self.head_dim
        rows = sums.value.reshape(batch, heads, -1, dim)
        assert rows.shape[2] == -(-length // self.tile_m) * self.tile_m
        result = (rows[:, :, :length] * scale).transpose(0, 2, 1, 3)
        inside = jnp.arange(length) < (length if lengths is None else lengths.value[:, None])
        gradient.value = jnp.where(inside[..., None, None], result, jnp.nan).astype(self.dtype)


KERNELS = cute._Kernels(
    {"forward": Forward, "preprocess": Preprocess, "backward": Backward, "postprocess": Postprocess},
    types.SimpleNamespace(create_softcap_scoremod=float, create_softcap_scoremod_bwd=float),
    {np.dtype(np.float16): np.dtype(np.float16), np.dtype(jnp.bfloat16): np.dtype(jnp.bfloat16)},
    float,
    call,
    ("4.0", "0.5", "4.8"),
)
