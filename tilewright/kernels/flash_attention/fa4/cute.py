"""Launches FlashAttention-4's kernels from JAX, through the CuTe DSL; the only module that loads the packages.

The packages are ``flash-attn-4``, which imports PyTorch, and ``nvidia-cutlass-dsl`` with its ``cutlass.jax``. They are
looked for only when a call could run on such a GPU, and any of them may be missing.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.fa4.architecture import (
    Accumulator,
    Architecture,
    Kernels,
    Scores,
    Settings,
    dtype_of,
)
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams
from tilewright.kernels.in_place import apart
from tilewright.ops.utils.target import check_is_here, is_assumed

MIN_VERSIONS = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}
"""Minimum versions, the first that were tested: the kernels' arguments change from one beta to the next."""

INSTALL = "pip install 'tilewright[fa4]'"

SHARED_CLASSES = {
    "preprocess": ("flash_bwd_preprocess", "FlashAttentionBackwardPreprocess"),
    "postprocess": ("flash_bwd_postprocess", "FlashAttentionBackwardPostprocess"),
}
"""Module of ``flash_attn.cute``, and class, of the kernels that all architectures share."""

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

    Every call on such a GPU needs these reasons, and loading takes a quarter of a minute, since it imports PyTorch.
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


def kernels(architecture: Architecture) -> Kernels:
    """Loads the kernels of an architecture.

    Raises:
      ImportError: the packages cannot be imported or have changed; recorded as a reason from then on.
      TargetDeviceError: they are missing here, and the target in force is said to have them.
    """
    check_is_here("fa4", missing_packages())
    try:
        return _loaded(architecture)
    except Exception as error:  # importing these packages runs their code, which may fail in any way
        message = f"{type(error).__name__}: {error}"
        if message not in _LOAD_ERRORS:
            _LOAD_ERRORS.append(message)
        raise ImportError(f"FlashAttention-4 cannot be loaded: {message}") from error


@functools.cache
def _loaded(architecture: Architecture) -> Kernels:
    cutlass = importlib.import_module("cutlass")
    bridge = importlib.import_module("cutlass.jax")

    def found(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"flash_attn.cute.{module}"), name)

    return Kernels(
        {name: found(*where) for name, where in {**SHARED_CLASSES, **architecture.classes}.items()},
        importlib.import_module("flash_attn.cute.utils"),
        {np.dtype(np.float16): cutlass.Float16, np.dtype(jnp.bfloat16): cutlass.BFloat16},
        cutlass.Float32,
        cutlass.Int32,
        bridge.cutlass_call,
        tuple(importlib.metadata.version(name) for name in MIN_VERSIONS),
    )


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: Lengths,
    scores: Scores,
    params: Fa4ForwardParams,
    architecture: Architecture,
) -> tuple[Any, ...]:
    """``(out, lse)``: ``[batch, length, heads, value_dim]``, and the natural log-sum-exp ``[batch, heads, length]``.

    Args:
      lengths: of queries and of keys, int32 ``[batch]`` each, or None; results beyond them are unspecified.
      params: complete.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    groups = heads // kv_heads
    rows = q_length * (groups if params.pack_groups else 1)
    call = _Call(
        architecture,
        Settings(
            query.dtype.name,
            head_dim,
            value_dim,
            groups,
            scores,
            params,
            q_lengths=lengths[0] is not None,
            one_tile=rows <= (params.block_q or 0),
        ),
    )
    shapes = [
        jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
    ]
    return tuple(call.run("forward", (query, key, value, *lengths), shapes))


def backward(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, lse: jax.Array,
    d_out: jax.Array, d_lse: jax.Array | None = None,
    *, lengths: Lengths, scores: Scores, params: Fa4BackwardParams, architecture: Architecture,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of query, key and value; with grouped heads on Hopper, value must have key's head dim."""
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    dtype, groups = query.dtype, heads // kv_heads
    assert params.block_q is not None
    assert params.block_k is not None
    q_rows = -(-q_length // params.block_q) * params.block_q
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    settings = Settings(dtype.name, head_dim, value_dim, groups, scores, params, q_lengths=lengths[0] is not None)
    call = _Call(architecture, settings)
    row_shapes = [float32((batch, heads, q_rows))] * 2
    gradient_shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (query, key, value)]
    rows = (out, d_out, lse, lengths[0], d_lse)
    if not architecture.accumulates(settings):
        delta, exponent = call.run("preprocess", rows, row_shapes)
        return tuple(call.run("backward", (query, key, value, d_out, exponent, delta, *lengths), gradient_shapes))
    # The kernel also clears the accumulator of dQ, to which the next one adds.
    delta, exponent, d_query = call.run("preprocess", rows, [*row_shapes, float32((batch, heads, q_rows * head_dim))])
    operands = (query, key, value, d_out, exponent, delta, *lengths)
    # A CTA has all queries of its keys, and stores dK and dV itself. With shared key heads several CTAs add to them.
    if groups == 1:
        d_query, d_key, d_value = call.run("backward", (*operands, d_query), gradient_shapes[1:], in_place=1)
    else:
        kv_rows = architecture.key_tiles(kv_length, params) * params.block_k
        zeros = [jnp.zeros((batch, kv_heads, kv_rows * dim), np.float32) for dim in (head_dim, value_dim)]
        d_query, d_key, d_value = call.run("backward", (*operands, d_query, *zeros), [], in_place=3)
        d_key = call.converted(d_key, key, lengths[1], "key")
        d_value = call.converted(d_value, value, lengths[1], "value")
    return call.converted(d_query, query, lengths[0], "query"), d_key, d_value


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A call's kernels on the architecture that runs it."""

    architecture: Architecture
    settings: Settings

    def run(
        self,
        name: str,
        operands: tuple[Any, ...],
        shapes: list[Any],
        in_place: int = 0,
        of: Accumulator | None = None,
    ) -> list[Any]:
        """Runs one kernel; returns the last ``in_place`` operands, which it updates, then results like ``shapes``."""
        updated = range(len(operands) - in_place, len(operands))
        results = [*(jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in updated), *shapes]
        loaded = kernels(self.architecture)
        call = loaded.call(
            self._launch(loaded, name, of),
            output_shape_dtype=tuple(results),
            input_output_aliases={i: n for n, i in enumerate(updated)},
            # The launch is another closure in each call: without a key the bridge would generate its IR to find the
            # kernel.
            compile_key=("tilewright fa4", self.architecture.name, name, of, self.settings, loaded.versions),
        )
        return apart(list(call(*apart(operands)))) if in_place else list(call(*operands))

    def converted(self, accumulator: jax.Array, like: jax.Array, lengths: jax.Array | None, of: Accumulator) -> Any:
        """Converts a gradient's accumulator, laid out by tiles, to the gradient."""
        shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
        return self.run("postprocess", (accumulator, lengths), [shape], of=of)[0]

    def _launch(self, kernels: Kernels, name: str, of: Accumulator | None) -> Callable[..., None]:
        if name == "forward":
            return self._forward_launch(kernels)
        if name == "preprocess":
            return self._preprocess_launch(kernels)
        if name == "backward":
            return self._backward_launch(kernels)
        assert of is not None
        return self._postprocess_launch(kernels, of)

    def _forward_launch(self, kernels: Kernels) -> Callable[..., None]:
        scores = self.settings.scores

        def launch(
            stream: Stream,
            query: CuteTensor,
            key: CuteTensor,
            value: CuteTensor,
            q_lengths: CuteTensor,
            kv_lengths: CuteTensor,
            out: CuteTensor,
            lse: CuteTensor,
        ) -> None:
            kernel = self.architecture.forward_kernel(kernels, self.settings)
            left, right = scores.window
            kernel(
                query, key, value, out, lse, kernels.float32(scores.scale), mSeqUsedQ=q_lengths,
                mSeqUsedK=kv_lengths, window_size_left=left, window_size_right=right, stream=stream,
            )  # fmt: skip

        return launch

    def _preprocess_launch(self, kernels: Kernels) -> Callable[..., None]:
        settings = self.settings

        def launch(
            stream: Stream, out: CuteTensor, d_out: CuteTensor, lse: CuteTensor, q_lengths: CuteTensor,
            d_lse: CuteTensor, delta: CuteTensor, exponent: CuteTensor, d_query: CuteTensor = None,
        ) -> None:  # fmt: skip
            multiple = self.architecture.dim_multiple(settings.params)
            kernel = kernels.classes["preprocess"](
                dtype_of(kernels, settings), settings.head_dim, settings.value_dim, settings.params.block_q,
                hdim_multiple_of=multiple,
            )  # fmt: skip
            scale = kernels.float32(settings.scores.scale)
            kernel(out, d_out, delta, lse, exponent, d_query, None, q_lengths, d_lse, None, None, scale, stream=stream)

        return launch

    def _backward_launch(self, kernels: Kernels) -> Callable[..., None]:
        scores = self.settings.scores

        def launch(
            stream: Stream, query: CuteTensor, key: CuteTensor, value: CuteTensor,
            d_out: CuteTensor, exponent: CuteTensor, delta: CuteTensor,
            q_lengths: CuteTensor, kv_lengths: CuteTensor,
            d_query: CuteTensor, d_key: CuteTensor, d_value: CuteTensor,
        ) -> None:  # fmt: skip
            kernel = self.architecture.backward_kernel(kernels, self.settings)
            left, right = scores.window
            kernel(
                query, key, value, d_out, exponent, delta, d_query, d_key, d_value, kernels.float32(scores.scale),
                mSeqUsedQ=q_lengths, mSeqUsedK=kv_lengths, window_size_left=left, window_size_right=right,
                stream=stream,
            )  # fmt: skip

        return launch

    def _postprocess_launch(self, kernels: Kernels, of: Accumulator) -> Callable[..., None]:
        def launch(stream: Stream, sums: CuteTensor, lengths: CuteTensor, gradient: CuteTensor) -> None:
            kernel = self.architecture.postprocess_kernel(kernels, self.settings, of)
            # dQ and dK are sums of dS times unscaled keys and queries; dV has no scale.
            scale = kernels.float32(1.0 if of == "value" else self.settings.scores.scale)
            kernel(sums, gradient, scale, None, lengths, None, stream=stream)

        return launch
