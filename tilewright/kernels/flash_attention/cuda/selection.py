"""Selects the variant of the CUDA C++ kernels for a call."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda.kernel import CudaKernel
from tilewright.kernels.cuda.table import Variant
from tilewright.kernels.flash_attention.cuda import ampere_variants, cutlass_variants, hopper_variants
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.operands import (
    needs_exact_matmuls,
)
from tilewright.ops.types import Device, Direction

TABLES = {
    "forward": (
        hopper_variants.WIDE_FORWARD,
        ampere_variants.FORWARD,
        cutlass_variants.FORWARD,
    ),
    "backward": (ampere_variants.BACKWARD, cutlass_variants.BACKWARD),
}
"""The tables of each direction, in the order in which they are tried."""

DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(jnp.bfloat16): "bf16"}

VECTOR_BYTES = 16
"""Head dims are padded to a multiple of this many bytes if no variant supports them unpadded."""


@functools.cache
def kernels(direction: Direction) -> tuple[CudaKernel, ...]:
    """The kernels of a direction, in the order in which they are tried."""
    return tuple(CudaKernel(table) for table in TABLES[direction])


def problem_fields(inputs: AttentionInputs, deterministic: bool) -> dict[str, int]:
    """Describes a call by the tables' fields."""
    parts = MaskParts.of(inputs.mask)
    return {
        "batch": inputs.batch,
        "q_length": inputs.q_length,
        "kv_length": inputs.kv_length,
        "heads": inputs.heads,
        "kv_heads": inputs.kv_heads,
        "head_dim": inputs.head_dim,
        "value_dim": inputs.value_dim,
        "dtype": cutlass_variants.DTYPES.index(DTYPES[inputs.dtype]),
        "bias": int(inputs.bias is not None),
        "rows": int(parts.has_rows),
        "mask": int(parts.matrix is not None),
        "soft_cap": int(inputs.logits_soft_cap is not None),
        "sinks": int(inputs.sinks > 0),
        "dropout": int(inputs.dropout),
        "lowest": parts.band.lowest,
        "highest": parts.band.highest,
        "deterministic": int(deterministic),
        "exact": int(needs_exact_matmuls(inputs)),
    }


def padded_fields(fields: Mapping[str, int], itemsize: int) -> Iterator[dict[str, int]]:
    """Yields the problem unchanged, and with padded head dims if that differs."""
    # Unpadded first: padding copies the arrays.
    yield dict(fields)
    vector = VECTOR_BYTES // itemsize
    padded = {name: -(-fields[name] // vector) * vector for name in ("head_dim", "value_dim")}
    if any(padded[name] != fields[name] for name in padded):
        yield {**fields, **padded}


def each_variant(
    direction: Direction, fields: Mapping[str, int], itemsize: int, name: str | None = None
) -> Iterator[tuple[CudaKernel, Variant, dict[str, int]]]:
    """Every variant, or the named one, with every form of the inputs, in the order in which they are tried."""
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
    """Selects the variant for a call; compiles it if it is not built.

    Args:
      name: selects the variant of this name.

    Raises:
      UnsupportedError: no variant can serve the call; the message has the reasons.
      BuildError: the compiler failed.
    """
    reasons: dict[str, list[str]] = {}
    if name is None:
        for each in padded_fields(fields, itemsize):
            for kernel in kernels(direction):
                found, variant_reasons = kernel.select(each, device)
                if found is not None:
                    return Selected(kernel, found, each)
                reasons |= variant_reasons
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
    """Drops variants that only compute more than another: keeps a table's two smallest head dims and needed features.

    Args:
      fitting: names of tables and their variants that can serve a call, best first.
    """
    found: list[Any] = []
    dims: dict[str, set[int]] = {}
    lean: set[Any] = set()
    for table, variant in fitting:
        known = dims.setdefault(table, set())
        max_dim = variant.head_dim if hasattr(variant, "head_dim") else variant.max_dim
        # Kernels compute their maximum head dim in full: from the third one on they only compute more.
        if max_dim not in known and len(known) == 2:
            continue
        known.add(max_dim)
        disabled = {
            name: value for name, value in (("features", ""), ("apply_dropout", False)) if hasattr(variant, name)
        }
        if disabled:
            without = dataclasses.replace(variant, **disabled)
            # The same variant with fewer features, which suffice for the call, was listed before.
            if without in lean:
                continue
            lean.add(without)
        found.append(variant)
    return found


def queries_per_block(variant: Variant) -> int | None:
    """The number of one head's queries in a block of a forward variant; ``None`` for a backward variant."""
    match variant:
        case cutlass_variants.ForwardVariant():
            return variant.block_q
        case ampere_variants.AmpereForwardVariant():
            return variant.tile.queries
        case hopper_variants.HopperWideForwardVariant():
            return hopper_variants.WIDE_TILE_Q
    return None
