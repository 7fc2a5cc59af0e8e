"""Flash attention in CUDA C++: what it serves, which of its variants a call gets, and the way to their launch."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda.build import groups_of
from tilewright.kernels.cuda.devices import capability_of
from tilewright.kernels.cuda.kernel import CudaKernel
from tilewright.kernels.cuda.table import Variant
from tilewright.kernels.dropout import keep_threshold
from tilewright.kernels.flash_attention.cuda import ampere_variants, cutlass_variants, hopper_variants
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts, score_arrays
from tilewright.kernels.flash_attention.operands import (
    INT32_LIMIT,
    backward_arrays,
    bias_gradient,
    into_batch,
    wants_exact_products,
    widened,
    with_positive_scale,
)
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward, row_terms, sinks_gradient
from tilewright.kernels.footprint import Footprint
from tilewright.kernels.registry import Implementation, Platform
from tilewright.kernels.softmax import sinks_lse
from tilewright.ops.kernel.builds import Build
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

TABLES = {
    "forward": (
        hopper_variants.FORWARD,
        hopper_variants.WIDE_FORWARD,
        ampere_variants.FORWARD,
        cutlass_variants.FORWARD,
    ),
    "backward": (hopper_variants.BACKWARD, ampere_variants.BACKWARD, cutlass_variants.BACKWARD),
}
"""Of each direction, in the order in which they are asked for a variant."""

DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(jnp.bfloat16): "bf16"}

VECTOR_BYTES = 16
"""Head dims are padded to a whole number of these, where no variant takes them as they are."""


@stable_id(
    "tilewright/flash_attention.CudaForwardParams",
    formerly=("tilewright.kernels.flash_attention.cuda:CudaForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudaForwardParams:
    """How the forward pass runs: a variant by name, or the first that fits."""

    variant: str | None = None


@stable_id(
    "tilewright/flash_attention.CudaBackwardParams",
    formerly=("tilewright.kernels.flash_attention.cuda:CudaBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudaBackwardParams:
    """How the backward pass runs: a variant by name, or the first that fits; and whether it repeats bit for bit."""

    variant: str | None = None
    deterministic: bool = False


@functools.cache
def kernels(direction: Direction) -> tuple[CudaKernel, ...]:
    """The kernels of a direction, in the order in which they are asked."""
    return tuple(CudaKernel(table) for table in TABLES[direction])


def problem_fields(problem: AttentionProblem, deterministic: bool) -> dict[str, int]:
    """A call as the tables' fields."""
    parts = MaskParts.of(problem.mask)
    return {
        "batch": problem.batch,
        "q_length": problem.q_length,
        "kv_length": problem.kv_length,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "dtype": cutlass_variants.DTYPES.index(DTYPES[problem.dtype]),
        "bias": int(problem.bias is not None),
        "rows": int(parts.has_rows),
        "mask": int(parts.matrix is not None),
        "soft_cap": int(problem.options.logits_soft_cap is not None),
        "sinks": int(problem.sinks > 0),
        "dropout": int(problem.dropout),
        "lowest": parts.band.lowest,
        "highest": parts.band.highest,
        "deterministic": int(deterministic),
        "exact": int(wants_exact_products(problem.options, problem.dtype)),
    }


def padded_fields(fields: Mapping[str, int], itemsize: int) -> Iterator[dict[str, int]]:
    """The problem as it is, and with padded head dims if that is another one."""
    yield dict(fields)
    vector = VECTOR_BYTES // itemsize
    padded = {name: -(-fields[name] // vector) * vector for name in ("head_dim", "value_dim")}
    if any(padded[name] != fields[name] for name in padded):
        yield {**fields, **padded}


def each_variant(
    direction: Direction, fields: Mapping[str, int], itemsize: int, name: str | None = None
) -> Iterator[tuple[CudaKernel, Variant, dict[str, int]]]:
    """Every variant, or the one of a name, with every form of the problem, in the order in which they are tried."""
    for each in padded_fields(fields, itemsize):
        for kernel in kernels(direction):
            for variant in kernel.table.variants:
                if name is None or variant.name == name:
                    yield kernel, variant, each


@dataclasses.dataclass(frozen=True, slots=True)
class Selected:
    """A variant, its kernel, and the problem that it was selected for, whose head dims may be padded."""

    kernel: CudaKernel
    variant: Variant
    fields: Mapping[str, int]


def select(
    direction: Direction, fields: Mapping[str, int], itemsize: int, device: Device, name: str | None = None
) -> Selected:
    """The variant that a call gets; compiled first, if it never was.

    Args:
      name: of the one variant that is wanted.

    Raises:
      UnsupportedError: none can serve the call; it says why.
      BuildError: the compiler failed.
    """
    reasons: dict[str, list[str]] = {}
    if name is None:
        for each in padded_fields(fields, itemsize):
            for kernel in kernels(direction):
                found, against = kernel.select(each, device)
                if found is not None:
                    return Selected(kernel, found, each)
                reasons |= against
    else:
        named = list(each_variant(direction, fields, itemsize, name))
        if not named:
            raise ValueError(f"flash attention has no CUDA variant {name!r} ({direction})")
        for kernel, variant, each in named:
            reasons[name] = kernel.variant_reasons(variant, each, device, compiled=True)
            if not reasons[name]:
                return Selected(kernel, variant, each)
    raise UnsupportedError(f"flash_attention ({direction}) in CUDA C++", {n: why for n, why in reasons.items() if why})


def worth_measuring(fitting: Iterable[tuple[str, Any]]) -> list[Any]:
    """Without those that only compute more than another: of a table the two least head dims, and no needless feature.

    Args:
      fitting: names of tables and their variants that can serve a call, best first.
    """
    found: list[Any] = []
    dims: dict[str, set[int]] = {}
    lean: set[Any] = set()
    for table, variant in fitting:
        known = dims.setdefault(table, set())
        greatest = variant.head_dim if hasattr(variant, "head_dim") else variant.max_dim
        if greatest not in known and len(known) == 2:
            continue
        known.add(greatest)
        needless = {
            name: value for name, value in (("features", ""), ("apply_dropout", False)) if hasattr(variant, name)
        }
        if needless:
            without = dataclasses.replace(variant, **needless)
            if without in lean:
                continue
            lean.add(without)
        found.append(variant)
    return found


def queries_of_a_block(variant: Variant) -> int | None:
    """How many of one head's queries a block of a forward variant has; ``None`` for a backward variant."""
    match variant:
        case cutlass_variants.ForwardVariant():
            return variant.block_q
        case ampere_variants.AmpereForwardVariant():
            return variant.tile.queries
        case hopper_variants.HopperForwardVariant():
            return variant.tile_q
        case hopper_variants.HopperWideForwardVariant():
            return hopper_variants.WIDE_TILE_Q
    return None


class CudaFlashAttention(Implementation):
    """Serves float32, float16 and bfloat16 of any head dim, and every option, on compute capability 5.0 and up."""

    platform: ClassVar[Platform] = Platform.CUDA
    algorithm: ClassVar[str | None] = None
    forward_params: ClassVar[type] = CudaForwardParams
    backward_params: ClassVar[type] = CudaBackwardParams

    def not_supported_reasons(self, problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
        if device.kind != "gpu" or device.capability is None:
            return [f"needs a CUDA GPU whose compute capability is known, got {device.name} ({device.capability=})"]
        reasons = []
        if problem.dtype not in DTYPES:
            reasons.append(f"computes in float32, float16 or bfloat16, got {problem.dtype=}")
        if problem.bias is not None and problem.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        widest = max(problem.head_dim, problem.value_dim) + VECTOR_BYTES
        if problem.heads * widest >= INT32_LIMIT or max(problem.q_length, problem.kv_length) >= 1 << 29:
            reasons.append(f"rows and lengths must be counted by 32 bits, got {problem.score_shape=}, {widest=}")
        if reasons or 0 in (*problem.score_shape, problem.head_dim, problem.value_dim):
            return reasons
        fields = problem_fields(problem, False)
        capability = capability_of(device) or 0
        able = [kernel for kernel in kernels(direction) if kernel.table.for_capability(capability)]
        if not able:
            return [f"no variant is for compute capability {capability / 10}"]
        against: list[str] = []
        for each in padded_fields(fields, problem.dtype.itemsize):
            for kernel in able:
                said = kernel.reasons(each, device)
                if not said:
                    return []
                against += said
        return list(dict.fromkeys(against))

    def heuristic(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> CudaForwardParams | CudaBackwardParams:
        return CudaForwardParams() if direction == "forward" else CudaBackwardParams()

    def candidates(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> list[CudaForwardParams | CudaBackwardParams]:
        """What is worth it of all variants that may fit, and of the backward pass both forms."""
        fields = problem_fields(problem, False)
        fitting = [
            (kernel.table.name, variant)
            for kernel, variant, each in each_variant(direction, fields, problem.dtype.itemsize)
            if not kernel.variant_reasons(variant, each, device)
        ]
        names = dict.fromkeys(variant.name for variant in worth_measuring(fitting))
        if direction == "forward":
            return [CudaForwardParams(name) for name in names]
        return [CudaBackwardParams(), CudaBackwardParams(None, True), *(CudaBackwardParams(name) for name in names)]

    def config_reasons(self, problem: AttentionProblem, device: Device, direction: Direction, params: Any) -> list[str]:
        if params.variant is None:
            return []
        fields = problem_fields(problem, getattr(params, "deterministic", False))
        said = [
            kernel.variant_reasons(variant, each, device)
            for kernel, variant, each in each_variant(direction, fields, problem.dtype.itemsize, params.variant)
        ]
        if not said:
            return [f"there is no variant {params.variant!r}"]
        return min(said, key=len)

    def footprints(
        self, problem: AttentionProblem, device: Device, direction: Direction, params: Any
    ) -> list[Footprint]:
        """The grid of a forward variant; shared memory is among its requirements, the rest in compiled libraries."""
        if direction == "backward" or params.variant is None:
            return []
        fields = problem_fields(problem, False)
        variants = (each for _, each, _ in each_variant(direction, fields, problem.dtype.itemsize, params.variant))
        rows = [queries_of_a_block(variant) for variant in variants]
        if not rows or rows[0] is None:
            return []
        return [Footprint(-(-problem.q_length // rows[0]) * problem.batch * problem.heads)]

    def builds(self, problem: AttentionProblem, device: Device, direction: Direction, params: Any) -> list[Build]:
        if 0 in (*problem.score_shape, problem.head_dim, problem.value_dim):
            return []
        fields = problem_fields(problem, getattr(params, "deterministic", False))
        for each in padded_fields(fields, problem.dtype.itemsize):
            for kernel in kernels(direction):
                asked = [v for v in kernel.table.variants if params.variant in (None, v.name)]
                if (group := kernel.needed(each, device, asked)) is not None:
                    return [group]
        return []

    def all_builds(self, device: Device) -> list[Build]:
        capability = capability_of(device) or 0
        return [group for tables in TABLES.values() for table in tables for group in groups_of(table, capability)]

    def forward(self, inputs: AttentionInputs, params: CudaForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        inputs = with_positive_scale(inputs)
        call = _Call.of(inputs, "forward", params.variant, False)
        arrays = {
            "query": inputs.query, "key": inputs.key, "value": inputs.value, "sinks": sinks_lse(inputs.softmax_aux),
        }  # fmt: skip
        out, lse = call.run(arrays | score_arrays(inputs, backward=False))
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: CudaBackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        out, lse = results
        d_out, d_lse = cotangents
        turned, inputs = inputs.options.softmax_scale < 0, with_positive_scale(inputs)
        call = _Call.of(inputs, "backward", params.variant, params.deterministic)
        arrays = backward_arrays(inputs, results, cotangents) | score_arrays(inputs, backward=True)
        d_query, d_key, d_value, d_bias = call.run(arrays)
        sinks = None
        if inputs.softmax_aux is not None:
            sinks = sinks_gradient(inputs, *row_terms(inputs, out, lse, d_out, d_lse))
        # The deterministic form stores what several logits share apart from each other.
        bias = None if inputs.bias is None else bias_gradient(d_bias, inputs.bias)
        return {
            "query": -d_query if turned else d_query,
            "key": d_key,
            "value": d_value,
            "bias": bias,
            "softmax_aux": sinks,
        }


_FORWARD_INPUTS = (
    "query", "key", "value", "bias", "q_rows", "kv_rows", "mask", "key_ranges", "sinks", "dropout_keys",
)  # fmt: skip
_BACKWARD_INPUTS = (
    "query", "key", "value", "out", "lse", "d_out", "d_lse", "bias", "q_rows", "kv_rows", "mask",
    "query_ranges", "dropout_keys", "key_ranges",
)  # fmt: skip
_ABSENT = {
    "d_lse": np.float32, "bias": np.float32, "mask": np.uint8, "sinks": np.float32, "dropout_keys": np.uint32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """What a launch takes besides its arrays."""

    direction: Direction
    problem: AttentionProblem
    variant: str | None
    deterministic: bool
    device: Device

    @classmethod
    def of(cls, inputs: AttentionInputs, direction: Direction, variant: str | None, deterministic: bool) -> "_Call":
        return cls(direction, AttentionProblem.of(inputs), variant, deterministic, current_device())

    def run(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """The results for named arrays, all of whose first dimensions are the batch, or 1; ``sinks`` has none."""
        names = [name for name, array in arrays.items() if array is not None]

        @custom_vmap
        def launch(*operands: Any) -> tuple[Any, ...]:
            return self.launch(dict(zip(names, operands, strict=True)))

        @launch.def_vmap
        def _(size: int, mapped: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
            results = self._run_mapped(size, dict(zip(names, zip(operands, mapped, strict=True), strict=True)))
            return results, (True,) * len(results)

        return launch(*(arrays[name] for name in names))

    def _run_mapped(self, size: int, arrays: Mapping[str, tuple[Any, bool]]) -> tuple[Any, ...]:
        """With a mapped axis as a part of the batch."""
        if "sinks" in arrays and arrays["sinks"][1]:  # which have no batch that could take it
            mapped = {name: array for name, (array, is_mapped) in arrays.items() if is_mapped}
            fixed = {name: array for name, (array, is_mapped) in arrays.items() if not is_mapped}
            return jax.lax.map(lambda part: self.run({**fixed, **part}), mapped)
        batch = self.problem.batch
        folded = {}
        for name, (array, is_mapped) in arrays.items():
            if name == "sinks":
                folded[name] = array
                continue
            own = array.shape[1:] if is_mapped else array.shape
            # The gradient of a bias is summed over whatever shares it, which elements of a mapped axis do not.
            apart = name == "bias" and self.direction == "backward"
            if not is_mapped and own[0] == 1 and not apart:
                folded[name] = array
                continue
            folded[name] = into_batch(array, is_mapped, size, batch)
        bias = folded.get("bias")
        problem = dataclasses.replace(
            self.problem,
            batch=size * batch,
            bias=None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype),
        )
        results = dataclasses.replace(self, problem=problem).run(folded)
        return tuple(x.reshape(size, batch, *x.shape[1:]) if x.size else jnp.zeros((size, 0), x.dtype) for x in results)

    def launch(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """One call of the kernel."""
        problem, options = self.problem, self.problem.options
        fields = problem_fields(problem, self.deterministic)
        chosen = select(self.direction, fields, problem.dtype.itemsize, self.device, self.variant)
        head_dim, value_dim = chosen.fields["head_dim"], chosen.fields["value_dim"]
        names = _FORWARD_INPUTS if self.direction == "forward" else _BACKWARD_INPUTS
        widths = {"query": head_dim, "key": head_dim, "value": value_dim, "out": value_dim, "d_out": value_dim}
        operands = [_widened(arrays.get(name), widths.get(name), _ABSENT.get(name, np.int32)) for name in names]
        attributes = {
            "scale": np.float32(options.softmax_scale),
            "soft_cap": np.float32(options.logits_soft_cap or 0.0),
            "keep_threshold": np.int64(keep_threshold(options.dropout_prob)),
            "keep_scale": np.float32(1.0 / (1.0 - options.dropout_prob)),
        }
        results = chosen.kernel.call(
            chosen.variant, chosen.fields, self.device, operands, self._outputs(head_dim, value_dim), attributes
        )
        if self.direction == "forward":
            return results[0][..., : problem.value_dim], results[1]
        return (
            results[0][..., : problem.head_dim],
            results[1][..., : problem.head_dim],
            results[2][..., : problem.value_dim],
            results[3],
        )

    def _outputs(self, head_dim: int, value_dim: int) -> list[jax.ShapeDtypeStruct]:
        problem = self.problem
        batch, heads, q_length, kv_length = problem.score_shape
        if self.direction == "forward":
            return [
                jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), problem.dtype),
                jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
            ]
        bias: tuple[int, ...] = (0,)
        if problem.bias is not None:
            bias = problem.score_shape if self.deterministic else problem.bias.shape
        return [
            jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), problem.dtype),
            jax.ShapeDtypeStruct((batch, kv_length, problem.kv_heads, head_dim), problem.dtype),
            jax.ShapeDtypeStruct((batch, kv_length, problem.kv_heads, value_dim), problem.dtype),
            jax.ShapeDtypeStruct(bias, np.float32),
        ]


def _widened(array: Any, dim: int | None, absent: Any) -> Any:
    """With zeros up to ``dim`` at the end of the last axis; without elements where there is no array."""
    if array is None:
        return jnp.zeros((0,), absent)
    return array if dim is None else widened(array, dim)
