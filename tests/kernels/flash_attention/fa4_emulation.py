"""FlashAttention-4's kernels as ``jax.numpy`` computes them, and the bridge that launches them.

Each takes what its class takes, checks what the class asserts, and leaves NaN in whatever the class does not write.
"""

import abc
import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.fa4.architecture import Kernels

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


def attend(
    own: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, scale: float,
    lengths: tuple[Any, Any], window: tuple[Any, Any],
) -> None:  # fmt: skip
    """The forward pass, by float32 logits and probabilities that are rounded for the second product."""
    q, k, v = query.value, key.value, value.value
    assert q.dtype == k.dtype == v.dtype
    dims = q.shape[3], v.shape[3], q.shape[2] // k.shape[2]
    assert dims == (own.head_dim, own.head_dim_v, own.qhead_per_kvhead)
    assert own.head_dim % 8 == own.head_dim_v % 8 == 0
    visible = seen(q.shape[1], k.shape[1], own, window, *lengths)
    k, v = (jnp.repeat(x, own.qhead_per_kvhead, 2) for x in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, **F32) * scale
    if own.score_mod is not None:
        logits = own.score_mod * jnp.tanh(logits / own.score_mod)
    masked = jnp.where(visible, logits, -jnp.inf)
    # A row that sees nothing is as the kernel left it.
    greatest = jnp.max(masked, -1, keepdims=True)
    weights = jnp.exp(masked - greatest)
    total = weights.sum(-1)
    result = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(q.dtype), v, **F32)
    out.value = (result / total.transpose(0, 2, 1)[..., None]).astype(q.dtype)
    lse.value = greatest[..., 0] + jnp.log(total)


@dataclasses.dataclass(kw_only=True)
class Arguments:
    """Those that all classes have."""

    head_dim: int
    head_dim_v: int
    qhead_per_kvhead: int
    is_causal: bool
    is_local: bool

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v


@dataclasses.dataclass(kw_only=True)
class Forward(Arguments, abc.ABC):
    pack_gqa: bool
    score_mod: Any

    def __call__(
        self, query: Any, key: Any, value: Any, out: Any, lse: Any, scale: float, *,
        mSeqUsedQ: Any, mSeqUsedK: Any, window_size_left: Any, window_size_right: Any, stream: Any,
    ) -> None:  # fmt: skip
        window = (window_size_left, window_size_right)
        self.check(query.value, mSeqUsedQ, window)
        attend(self, query, key, value, out, lse, scale, (mSeqUsedQ, mSeqUsedK), window)

    @abc.abstractmethod
    def check(self, query: Any, q_lengths: Any, window: tuple[Any, Any]) -> None:
        """Asserts what the class asserts of a call."""


@dataclasses.dataclass(kw_only=True)
class ForwardSm90(Forward):
    dtype: Any
    tile_m: int
    tile_n: int
    num_stages: int
    intra_wg_overlap: bool
    mma_pv_is_rs: bool

    def check(self, query: Any, q_lengths: Any, window: tuple[Any, Any]) -> None:
        assert query.dtype == self.dtype


@dataclasses.dataclass(kw_only=True)
class ForwardSm100(Forward):
    m_block_size: int
    n_block_size: int
    q_stage: int
    is_static_persistent: bool
    is_varlen_q: bool
    use_2cta_instrs: bool
    use_s_ping_pong: bool

    def check(self, query: Any, q_lengths: Any, window: tuple[Any, Any]) -> None:
        dims = self.dims
        assert dims in ((192, 128), (256, 256)) or dims[0] == dims[1] <= 128, dims
        assert self.m_block_size == self.n_block_size == 128
        assert self.q_stage in (1, 2)
        assert 2 * self.n_block_size + self.q_stage * self.head_dim_v <= 512  # columns of the tensor memory
        assert self.is_varlen_q == (q_lengths is not None)
        rows = query.shape[1] * (self.qhead_per_kvhead if self.pack_gqa else 1)
        one_tile, banded = rows <= self.q_stage * 128, self.is_causal or self.is_local
        if self.use_2cta_instrs:
            assert not self.is_varlen_q
            assert dims == (256, 256) or (not banded and self.head_dim in (128, 192) and self.head_dim_v == 128)
            assert not self.pack_gqa or 128 % self.qhead_per_kvhead == 0
            assert not one_tile
        if self.is_static_persistent:
            assert (not banded and not self.is_varlen_q) or (one_tile and not (self.use_2cta_instrs and banded))
        if self.use_s_ping_pong:
            assert self.q_stage == 1
            assert dims[0] == dims[1] in (64, 128, 256)
            assert self.score_mod is None


@dataclasses.dataclass(kw_only=True)
class ForwardSm120(Forward):
    dtype: Any
    tile_m: int
    tile_n: int
    num_stages: int
    num_threads: int

    def check(self, query: Any, q_lengths: Any, window: tuple[Any, Any]) -> None:
        assert query.dtype == self.dtype
        # As FlashAttentionForwardSm120.can_implement, with the 99 KB of a block.
        assert (self.num_threads, self.tile_n % 16, self.tile_m * 2 % self.num_threads) == (128, 0, 0)
        tiles = self.tile_m * self.head_dim + self.num_stages * self.tile_n * (self.head_dim + self.head_dim_v)
        assert 2 * tiles <= 99 << 10
        assert all(x is None or isinstance(x, np.int32) for x in window)


@dataclasses.dataclass
class Preprocess:
    dtype: Any
    head_dim: int
    head_dim_v: int
    tile_m: int
    hdim_multiple_of: int

    def __call__(
        self, out: Any, d_out: Any, delta: Any, lse: Any, exponent: Any, d_query: Any | None, cu_seqlens: None,
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
        if d_query is not None:
            d_query.value = jnp.zeros_like(d_query.value)


def differentiate(
    own: Any, operands: tuple[Any, ...], gradients: tuple[Any, ...], scale: float,
    lengths: tuple[Any, Any], window: tuple[Any, Any], tiles: tuple[int, int] | None,
) -> None:  # fmt: skip
    """The backward pass: into accumulators, in tiles of so many queries and keys, or into the gradients themselves."""
    q, k, v, d_o, exponent, delta = (x.value for x in operands)
    d_query, d_key, d_value = gradients
    groups, length, score_mod = own.qhead_per_kvhead, q.shape[1], getattr(own, "score_mod", None)
    assert (q.shape[3], v.shape[3], q.shape[2] // k.shape[2]) == (own.head_dim, own.head_dim_v, groups)
    block_q = 128 if tiles is None else tiles[0]
    assert exponent.shape == delta.shape == (*q.shape[:1], q.shape[2], -(-length // block_q) * block_q)
    visible = seen(length, k.shape[1], own, window, *lengths)
    wide_k, wide_v = (jnp.repeat(x, groups, 2) for x in (k, v))
    logits, slope = jnp.einsum("bqhd,bkhd->bhqk", q, wide_k, **F32) * scale, 1.0
    if score_mod is not None:
        assert score_mod == own.score_mod_bwd
        logits = score_mod * jnp.tanh(logits / score_mod)
        slope = 1.0 - (logits / score_mod) ** 2
    scores = jnp.where(visible, logits * np.log2(np.e), -jnp.inf)
    weights = jnp.exp2(scores - exponent[..., :length, None])
    products = jnp.einsum("bqhd,bkhd->bhqk", d_o, wide_v, **F32)
    d_logits = (weights * (products - delta[..., :length, None]) * slope).astype(q.dtype)
    d_q = jnp.einsum("bhqk,bkhd->bhqd", d_logits, wide_k, **F32)
    d_k = jnp.einsum("bhqk,bqhd->bkhd", d_logits, q, **F32)
    d_v = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(q.dtype), d_o, **F32)
    d_k, d_v = (x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (d_k, d_v))

    def inside(x: Any, lengths: Any, scale: float) -> Any:
        """Rows beyond the lengths are not written."""
        used = x.shape[1] if lengths is None else lengths.value[:, None]
        return jnp.where((jnp.arange(x.shape[1]) < used)[..., None, None], x * scale, jnp.nan).astype(q.dtype)

    if tiles is None:
        d_query.value = inside(d_q.transpose(0, 2, 1, 3), lengths[0], scale)
    else:
        d_query.value = d_query.value + in_tiles(d_q, tiles[0])
    if groups > 1 and tiles is not None:
        sums = (in_tiles(x.transpose(0, 2, 1, 3), tiles[1]) for x in (d_k, d_v))
        d_key.value, d_value.value = (old.value + x for old, x in zip((d_key, d_value), sums, strict=True))
        return
    d_key.value, d_value.value = inside(d_k, lengths[1], scale), inside(d_v, lengths[1], 1.0)


@dataclasses.dataclass(kw_only=True)
class Backward(Arguments, abc.ABC):
    def __call__(
        self, query: Any, key: Any, value: Any, d_out: Any, exponent: Any, delta: Any, d_query: Any, d_key: Any,
        d_value: Any, scale: float, *, mSeqUsedQ: Any, mSeqUsedK: Any, window_size_left: Any, window_size_right: Any,
        stream: Any,
    ) -> None:  # fmt: skip
        lengths, window = (mSeqUsedQ, mSeqUsedK), (window_size_left, window_size_right)
        tiles = self.checked_tiles(query.value, window)
        operands, gradients = (query, key, value, d_out, exponent, delta), (d_query, d_key, d_value)
        differentiate(self, operands, gradients, scale, lengths, window, tiles)

    @abc.abstractmethod
    def checked_tiles(self, query: Any, window: tuple[Any, Any]) -> tuple[int, int]:
        """Queries and keys of a tile of the accumulators; asserts what the class asserts of a call."""


@dataclasses.dataclass(kw_only=True)
class BackwardSm90(Backward):
    dtype: Any
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

    def checked_tiles(self, query: Any, window: tuple[Any, Any]) -> tuple[int, int]:
        assert query.dtype == self.dtype
        assert self.qhead_per_kvhead == 1 or (self.head_dim == self.head_dim_v and self.num_threads == 384)
        return self.tile_m, self.tile_n


@dataclasses.dataclass(kw_only=True)
class BackwardSm100(Backward):
    tile_m: int
    tile_n: int
    score_mod: Any
    score_mod_bwd: Any
    cluster_size: int
    use_2cta_instrs: bool

    @staticmethod
    def accum_tile_orders(use_2cta_instrs: bool, tile_n: int) -> tuple[str, str]:
        return ("of a pair" if use_2cta_instrs else "of a CTA"), "of a CTA"

    def checked_tiles(self, query: Any, window: tuple[Any, Any]) -> tuple[int, int]:
        dims = self.dims
        assert dims == (192, 128) or dims[0] == dims[1] <= 128, dims
        assert self.head_dim % 32 == 0
        assert self.tile_m == self.tile_n == 128
        assert self.use_2cta_instrs == (self.cluster_size == 2)
        assert self.use_2cta_instrs or self.head_dim <= 128
        return self.tile_m, self.tile_n * self.cluster_size


@dataclasses.dataclass(kw_only=True)
class BackwardOf256(Arguments):
    cluster_size: int
    use_2cta_instrs: bool

    def __call__(
        self, query: Any, key: Any, value: Any, d_out: Any, exponent: Any, delta: Any, d_query: Any, d_key: Any,
        d_value: Any, scale: float, cu_seqlens_q: None, cu_seqlens_k: None, *, seqused_q: Any, seqused_k: Any,
        window_size_left: None, window_size_right: None, stream: Any,
    ) -> None:  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k is window_size_left is window_size_right is None
        assert (*self.dims, self.is_local) == (256, 256, False)
        assert (self.cluster_size, self.use_2cta_instrs) == (2, True)
        operands, gradients = (query, key, value, d_out, exponent, delta), (d_query, d_key, d_value)
        differentiate(self, operands, gradients, scale, (seqused_q, seqused_k), (None, None), None)


@dataclasses.dataclass(kw_only=True)
class BackwardSm120(Backward):
    dtype: Any
    m_block_size: int
    n_block_size: int
    num_stages_Q: int
    num_stages_dO: int
    num_threads: int
    AtomLayoutMSdP: int
    AtomLayoutNdKV: int
    AtomLayoutMdQ: int

    def checked_tiles(self, query: Any, window: tuple[Any, Any]) -> tuple[int, int]:
        assert query.dtype == self.dtype
        tile_q, tile_k = self.m_block_size, self.n_block_size
        assert (self.num_threads, self.AtomLayoutMSdP, self.AtomLayoutNdKV, self.AtomLayoutMdQ) == (128, 4, 4, 4)
        # As FlashAttentionBackwardSm120.can_implement, with the 99 KB of a block, and P and dS.
        of_queries = tile_q * (self.num_stages_Q * self.head_dim + self.num_stages_dO * self.head_dim_v)
        assert 2 * (of_queries + tile_k * (self.head_dim + self.head_dim_v) + 2 * tile_q * tile_k) <= 99 << 10
        assert all(x is None or isinstance(x, np.int32) for x in window)
        return tile_q, tile_k


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
    AtomLayoutMdQ: int
    dQ_swapAB: bool
    hdim_multiple_of: int
    use_2cta_instrs: bool = False
    cluster_size: int = 1
    accum_order: str | None = None

    def __call__(
        self, sums: Any, gradient: Any, scale: float, cu_seqlens: None, lengths: Any, sinks: None, *, stream: Any
    ) -> None:
        assert cu_seqlens is sinks is None
        assert self.head_dim % self.hdim_multiple_of == 0
        if self.arch == 100:
            assert (self.accum_order == "of a pair") == self.use_2cta_instrs
            assert self.num_threads == 128
        else:
            assert self.arch in (90, 120)
            assert (self.accum_order, self.use_2cta_instrs, self.cluster_size) == (None, False, 1)
        batch, length, heads, dim = gradient.value.shape
        assert dim == self.head_dim
        rows = sums.value.reshape(batch, heads, -1, dim)
        tile = self.tile_m * self.cluster_size
        assert rows.shape[2] == -(-length // tile) * tile
        result = (rows[:, :, :length] * scale).transpose(0, 2, 1, 3)
        inside = jnp.arange(length) < (length if lengths is None else lengths.value[:, None])
        gradient.value = jnp.where(inside[..., None, None], result, jnp.nan).astype(self.dtype)


def _kernels(**classes: Any) -> Kernels:
    return Kernels(
        {"preprocess": Preprocess, "postprocess": Postprocess, **classes},
        types.SimpleNamespace(create_softcap_scoremod=float, create_softcap_scoremod_bwd=float),
        {np.dtype(np.float16): np.dtype(np.float16), np.dtype(jnp.bfloat16): np.dtype(jnp.bfloat16)},
        float,
        np.int32,
        call,
        ("4.0", "0.5", "4.8"),
    )


KERNELS = {
    "sm90": _kernels(forward=ForwardSm90, backward=BackwardSm90),
    "sm100": _kernels(forward=ForwardSm100, backward=BackwardSm100, **{"backward of 256": BackwardOf256}),
    "sm120": _kernels(forward=ForwardSm120, backward=BackwardSm120),
}
"""By the names of the architectures."""
