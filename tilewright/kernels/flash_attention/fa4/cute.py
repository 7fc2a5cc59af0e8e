"""Launches FlashAttention-4's kernels for Hopper from JAX, through the CuTe DSL; the only module that knows both.

The packages are ``flash-attn-4``, which imports PyTorch, and ``nvidia-cutlass-dsl`` with its ``cutlass.jax``. They are
looked for only when a call could run on such a GPU, and any of them may be missing.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams
from tilewright.kernels.in_place import apart
from tilewright.ops.utils.target import check_is_here, is_assumed

MIN_VERSIONS = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}
"""Minimum versions, the first that were tested: the kernels' arguments change from one beta to the next."""

INSTALL = "pip install 'tilewright[fa4]'"

KERNELS = {
    "forward": ("flash_fwd_sm90", "FlashAttentionForwardSm90"),
    "preprocess": ("flash_bwd_preprocess", "FlashAttentionBackwardPreprocess"),
    "backward": ("flash_bwd_sm90", "FlashAttentionBackwardSm90"),
    "postprocess": ("flash_bwd_postprocess", "FlashAttentionBackwardPostprocess"),
}
"""Module of ``flash_attn.cute``, and class."""

type Lengths = tuple[jax.Array | None, jax.Array | None]


@functools.cache
def missing_packages() -> tuple[str, ...]:
    """Reasons why the packages cannot be used, by their versions."""
    reasons, absent = [], []
    for name, min_version in MIN_VERSIONS.items():
        version = _installed_version(name)
        if version is None:
            absent.append(name)
        elif _version_key(version) < _version_key(min_version):
            reasons.append(f"needs {name} {min_version} or later, got {version}: {INSTALL}")
    if _installed_version("torch") is None:  # flash-attn-4 imports it, of any version
        absent.append("torch")
    if absent:
        reasons.append(f"needs {', '.join(absent)}: {INSTALL}")
    return tuple(reasons)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_key(version: str) -> tuple[int, ...]:
    """A sort key of versions: pre-releases ``aN``, ``bN`` and ``rcN`` come before their release."""
    key: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = len(part) - len(part.lstrip("0123456789"))
        number, rest = part[:digits], part[digits:]
        if number:
            key.append(int(number))
        for rank, name in enumerate(("dev", "a", "b", "rc")):
            if rest.startswith(name):
                # Release numbers are filled up to four, so that the rank of a pre-release, negative, is compared with
                # the 0 of a release.
                return (*key, *[0] * (4 - len(key)), rank - 4, int("0" + "".join(filter(str.isdigit, rest))))
    return (*key, *[0] * (4 - len(key)), 0, 0)


def package_reasons() -> list[str]:
    """Reasons why the packages cannot be used, as far as they are known without loading them.

    Every call on a Hopper GPU needs these reasons, and loading takes a quarter of a minute, since it imports PyTorch.
    """
    if is_assumed("fa4"):
        return []
    return [*missing_packages()] or [f"FlashAttention-4 cannot be loaded: {error}" for error in _LOAD_ERRORS]


_LOAD_ERRORS: list[str] = []
"""Errors that occurred when the packages were loaded for a call."""


type CuteTensor = Any
"""A tensor of the CuTe DSL, whose package may not be installed; None for an absent one."""

type Stream = Any
"""A CUDA stream of the same package."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernels:
    """The objects used from the packages: kernel classes, score modifiers, dtypes, and the bridge to JAX."""

    classes: Mapping[str, Callable[..., Any]]
    utils: Any
    dtypes: Mapping[np.dtype, Any]
    float32: Callable[[float], Any]
    call: Callable[..., Any]
    versions: tuple[str, ...]


def kernels() -> _Kernels:
    """Loads the kernels.

    Raises:
      ImportError: the packages cannot be imported or have changed; recorded as a reason from then on.
      TargetDeviceError: they are missing here, and the target in force is said to have them.
    """
    check_is_here("fa4", missing_packages())
    try:
        return _loaded()
    except Exception as error:  # importing these packages runs their code, which may fail in any way
        message = f"{type(error).__name__}: {error}"
        if message not in _LOAD_ERRORS:
            _LOAD_ERRORS.append(message)
        raise ImportError(f"FlashAttention-4 cannot be loaded: {message}") from error


@functools.cache
def _loaded() -> _Kernels:
    cutlass = importlib.import_module("cutlass")
    bridge = importlib.import_module("cutlass.jax")
    found = {name: importlib.import_module(f"flash_attn.cute.{module}") for name, (module, _) in KERNELS.items()}
    utils = importlib.import_module("flash_attn.cute.utils")
    return _Kernels(
        {name: getattr(found[name], kind) for name, (_, kind) in KERNELS.items()},
        utils,
        {np.dtype(np.float16): cutlass.Float16, np.dtype(jnp.bfloat16): cutlass.BFloat16},
        cutlass.Float32,
        bridge.cutlass_call,
        tuple(importlib.metadata.version(name) for name in MIN_VERSIONS),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Modifications of scores, compiled into the kernels.

    Attributes:
      left: number of visible keys before the query's own, with both sequences aligned at their ends; None for all.
      right: number of visible keys after it; negative if the last one is before it.
    """

    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0

    @property
    def local(self) -> bool:
        return not self.causal and (self.left is not None or self.right is not None)

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The window in the form that the kernels take beside ``local``."""
        return (self.left, self.right) if self.local else (None, None)


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: Lengths,
    scores: Scores,
    params: Fa4ForwardParams,
) -> tuple[Any, ...]:
    """``(out, lse)``: ``[batch, length, heads, value_dim]``, and the natural log-sum-exp ``[batch, heads, length]``.

    Args:
      lengths: of queries and of keys, int32 ``[batch]`` each, or None; results beyond them are unspecified.
      params: without None.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    settings = (query.dtype.name, head_dim, value_dim, heads // kv_heads, scores, params)
    shapes = [
        jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
    ]
    return tuple(_call("forward", settings, (query, key, value, *lengths), shapes))


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, lse: jax.Array,
    d_out: jax.Array, d_lse: jax.Array | None = None,
    *, lengths: Lengths, scores: Scores, params: Fa4BackwardParams,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of query, key and value; with grouped heads, value must have key's head dim."""
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    dtype, groups = query.dtype, heads // kv_heads
    assert params.block_q is not None
    assert params.block_k is not None
    q_rows, kv_rows = (-(-n // block) * block for n, block in ((q_length, params.block_q), (kv_length, params.block_k)))
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    settings = (dtype.name, head_dim, value_dim, groups, scores, params)
    per_row = float32((batch, heads, q_rows))
    row_shapes = [per_row, per_row, float32((batch, heads, q_rows * head_dim))]
    # The kernel also clears the accumulator of dQ, to which the next one adds.
    delta, exponent, d_query = _call("preprocess", settings, (out, d_out, lse, lengths[0], d_lse), row_shapes)
    operands = (query, key, value, d_out, exponent, delta, *lengths)
    # A CTA has all queries of its keys, and stores dK and dV itself. With shared key heads several CTAs add to them.
    if groups == 1:
        shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (key, value)]
        d_query, d_key, d_value = _call("backward", settings, (*operands, d_query), shapes, in_place=1)
    else:
        zeros = [jnp.zeros((batch, kv_heads, kv_rows * dim), np.float32) for dim in (head_dim, value_dim)]
        d_query, d_key, d_value = _call("backward", settings, (*operands, d_query, *zeros), [], in_place=3)
        d_key = _converted(d_key, key, lengths[1], "key", settings)
        d_value = _converted(d_value, value, lengths[1], "value", settings)
    return _converted(d_query, query, lengths[0], "query", settings), d_key, d_value


def _converted(
    accumulator: jax.Array, like: jax.Array, lengths: jax.Array | None, name: str, settings: tuple[Any, ...]
) -> Any:
    """Converts a gradient's accumulator, laid out by tiles, to the gradient."""
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _call("postprocess", (*settings, name), (accumulator, lengths), [shape])[0]


def _call(
    name: str, settings: tuple[Any, ...], operands: tuple[Any, ...], shapes: list[Any], in_place: int = 0
) -> list[Any]:
    """Runs one kernel; returns the last ``in_place`` operands, which it updates, then results like ``shapes``."""
    updated = range(len(operands) - in_place, len(operands))
    results = [*(jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in updated), *shapes]
    loaded = kernels()
    launch = _LAUNCHES[name](loaded, *settings)
    call = loaded.call(
        launch,
        output_shape_dtype=tuple(results),
        input_output_aliases={i: n for n, i in enumerate(updated)},
        # ``launch`` is another closure in each call: without a key the bridge would generate its IR to find the kernel.
        compile_key=("tilewright fa4", name, settings, loaded.versions),
    )
    return apart(list(call(*apart(operands)))) if in_place else list(call(*operands))


def _forward_launch(
    kernels: _Kernels, dtype: str, head_dim: int, value_dim: int, groups: int, scores: Scores, params: Fa4ForwardParams
) -> Callable[..., None]:
    def launch(
        stream: Stream,
        query: CuteTensor,
        key: CuteTensor,
        value: CuteTensor,
        q_lengths: CuteTensor,
        kv_lengths: CuteTensor,
        out: CuteTensor,
        lse: CuteTensor,
    ):
        kernel = kernels.classes["forward"](
            kernels.dtypes[jnp.dtype(dtype)],
            head_dim,
            value_dim,
            groups,
            is_causal=scores.causal,
            is_local=scores.local,
            pack_gqa=params.pack_groups and groups > 1,
            tile_m=params.block_q,
            tile_n=params.block_k,
            num_stages=params.num_stages,
            intra_wg_overlap=params.overlap,
            mma_pv_is_rs=params.weights_in_registers,
            score_mod=_score_mod(kernels, scores),
        )
        left, right = scores.window
        kernel(
            query, key, value, out, lse, kernels.float32(scores.scale),
            mSeqUsedQ=q_lengths, mSeqUsedK=kv_lengths, window_size_left=left, window_size_right=right, stream=stream,
        )  # fmt: skip

    return launch


def _score_mod(kernels: _Kernels, scores: Scores) -> Any:
    return None if scores.soft_cap is None else kernels.utils.create_softcap_scoremod(scores.soft_cap)


def _preprocess_launch(
    kernels: _Kernels, dtype: str, head_dim: int, value_dim: int, groups: int, scores: Scores, params: Fa4BackwardParams
) -> Callable[..., None]:
    def launch(
        stream: Stream, out: CuteTensor, d_out: CuteTensor, lse: CuteTensor, q_lengths: CuteTensor, d_lse: CuteTensor,
        delta: CuteTensor, exponent: CuteTensor, d_query: CuteTensor,
    ) -> None:  # fmt: skip
        kernel = kernels.classes["preprocess"](
            kernels.dtypes[jnp.dtype(dtype)], head_dim, value_dim, params.block_q, hdim_multiple_of=_multiple(params)
        )
        scale = kernels.float32(scores.scale)
        kernel(out, d_out, delta, lse, exponent, d_query, None, q_lengths, d_lse, None, None, scale, stream=stream)

    return launch


def _backward_launch(
    kernels: _Kernels, dtype: str, head_dim: int, value_dim: int, groups: int, scores: Scores, params: Fa4BackwardParams
) -> Callable[..., None]:
    def launch(
        stream: Stream, query: CuteTensor, key: CuteTensor, value: CuteTensor,
        d_out: CuteTensor, exponent: CuteTensor, delta: CuteTensor,
        q_lengths: CuteTensor, kv_lengths: CuteTensor, d_query: CuteTensor, d_key: CuteTensor, d_value: CuteTensor,
    ) -> None:  # fmt: skip
        assert params.groups is not None
        capped = scores.soft_cap is not None
        kernel = kernels.classes["backward"](
            kernels.dtypes[jnp.dtype(dtype)],
            head_dim,
            value_dim,
            groups,
            is_causal=scores.causal,
            is_local=scores.local,
            tile_m=params.block_q,
            tile_n=params.block_k,
            Q_stage=params.query_stages,
            dO_stage=params.d_out_stages,
            PdS_stage=params.score_stages,
            SdP_swapAB=params.swap_scores,
            dKV_swapAB=params.swap_d_key,
            dQ_swapAB=params.swap_d_query,
            AtomLayoutMSdP=params.score_groups_q,
            AtomLayoutNdKV=params.d_key_groups_k,
            AtomLayoutMdQ=params.d_query_groups_q,
            num_threads=128 * (params.groups + 1),
            score_mod=_score_mod(kernels, scores),
            score_mod_bwd=kernels.utils.create_softcap_scoremod_bwd(scores.soft_cap) if capped else None,
            dQ_single_wg=params.one_d_query_group,
        )
        left, right = scores.window
        kernel(
            query, key, value, d_out, exponent, delta, d_query, d_key, d_value, kernels.float32(scores.scale),
            mSeqUsedQ=q_lengths, mSeqUsedK=kv_lengths, window_size_left=left, window_size_right=right, stream=stream,
        )  # fmt: skip

    return launch


def _postprocess_launch(
    kernels: _Kernels,
    dtype: str,
    head_dim: int,
    value_dim: int,
    groups: int,
    scores: Scores,
    params: Fa4BackwardParams,
    name: str,
) -> Callable[..., None]:
    def launch(stream: Stream, sums: CuteTensor, lengths: CuteTensor, gradient: CuteTensor) -> None:
        assert params.groups is not None
        of_query = name == "query"
        kernel = kernels.classes["postprocess"](
            kernels.dtypes[jnp.dtype(dtype)],
            value_dim if name == "value" else head_dim,
            90,
            params.block_q if of_query else params.block_k,
            128 * (1 if of_query and params.one_d_query_group else params.groups),
            params.d_query_groups_q if of_query else params.d_key_groups_k,
            params.swap_d_query if of_query else params.swap_d_key,
            hdim_multiple_of=_multiple(params),
        )
        # dQ and dK are sums of dS times unscaled keys and queries; dV has no scale.
        scale = kernels.float32(1.0 if name == "value" else scores.scale)
        kernel(sums, gradient, scale, None, lengths, None, stream=stream)

    return launch


def _multiple(params: Fa4BackwardParams) -> int:
    """The head dim of accumulators is a multiple of this."""
    return 64 if params.swap_d_key else 32


_LAUNCHES: dict[str, Callable[..., Callable[..., None]]] = {
    "forward": _forward_launch,
    "preprocess": _preprocess_launch,
    "backward": _backward_launch,
    "postprocess": _postprocess_launch,
}
