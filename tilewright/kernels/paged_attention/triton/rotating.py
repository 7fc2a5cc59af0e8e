"""Rotates queries and keys and writes into pages in Triton, on NVIDIA GPUs: every element is read and written once."""

import itertools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.rotating import Rotated, RotateInputs, rotate_and_write
from tilewright.kernels.paged_attention.writing import given_scales, max_finite, page_rows, scaled_by_token
from tilewright.kernels.rope.inputs import RopeInputs
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams

MAX_TILE = 1 << 14
"""Elements of all key heads of a token, which one program has in registers: their scale may be one for all."""

BLOCK_H = 8
"""Query heads of a program."""


class TritonRopeUpdatePages(InferenceBackend[RotateInputs, Rotated, FwdParams]):
    """Serves float16, bfloat16 and float32, with any cache. Its params are ``blocksize_heads`` and ``num_warps``."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = FwdParams
    serves: ClassVar[frozenset[str]] = frozenset(
        {"key_scale", "value_scale", "base", "scaling", "interleaved", "rotary_dim"}
    )

    def forward_reasons(self, inputs: RotateInputs, device: Device) -> list[str]:
        why = unavailable(device)
        for name in ("query", "key", "value"):
            dtype = inputs.arrays[name].dtype
            if dtype.name not in ("float16", "bfloat16", "float32"):
                why.append(f"{name} must be float16, bfloat16 or float32, not {dtype}")
        if inputs.key_pages.dtype == jnp.float64:
            why.append("pages must not be float64")
        if inputs.kv_dtype == "float8_e4m3fn" and device.capability is not None and device.capability < (8, 9):
            why.append(f"float8_e4m3fn needs compute capability 8.9, this device has {device.capability}")
        heads = inputs.key_pages.shape[2]
        widest = max(inputs.key.shape[2], inputs.value.shape[2])
        if power_of_two(heads) * power_of_two(widest) > MAX_TILE:
            why.append(f"{heads} key heads of {widest} elements exceed a tile of {MAX_TILE}")
        return why

    def candidates(self, inputs: RotateInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        most = power_of_two(inputs.query.shape[1])
        sizes = dict.fromkeys(min(block, most) for block in (BLOCK_H, 4, 16))
        return [FwdParams(blocksize_heads=block, num_warps=warps) for block, warps in itertools.product(sizes, (4, 2))]

    def config_reasons(
        self, inputs: RotateInputs, device: Device, direction: Direction, params: FwdParams
    ) -> list[str]:
        block = params.blocksize_heads or BLOCK_H
        return [] if block == power_of_two(block) else [f"blocksize_heads={block} must be a power of two"]

    def forward(self, inputs: RotateInputs, params: FwdParams) -> Rotated:
        """The rotated query, the pages with the new tokens, and their scales."""
        arrays = (inputs.query, inputs.key_pages, inputs.value_pages, inputs.page_table)
        if any(0 in array.shape for array in arrays):
            return rotate_and_write(inputs)
        leaves, tree = jax.tree.flatten(inputs)

        @jax.custom_batching.sequential_vmap
        def each(*leaves: jax.Array) -> Rotated:
            return _run(jax.tree.unflatten(tree, leaves), params)

        return each(*leaves)


def _run(inputs: RotateInputs, params: FwdParams) -> Rotated:
    from tilewright.kernels.paged_attention.triton import rotating_kernels

    tokens, heads, head_dim = inputs.query.shape
    num_pages, page_size, kv_heads, value_dim = inputs.value_pages.shape
    rotation = inputs.rotation(inputs.query, inputs.all_positions())
    cos, sin = _tables(rotation)
    page, row = page_rows(inputs.write(inputs.key))
    block_h = params.blocksize_heads or BLOCK_H
    query_parts = -(-heads // block_h)
    narrow = jnp.dtype(inputs.kv_dtype).itemsize == 1
    absent = jnp.zeros((0,), jnp.float32)
    operands = [inputs.query, inputs.key, inputs.value, cos, sin, page, row]
    results = [jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype)]
    cache = {"key": inputs.key_scale, "value": inputs.value_scale}
    computed = {
        name: scaled_by_token(scale, pages)
        for (name, scale), pages in zip(cache.items(), (inputs.key_pages, inputs.value_pages), strict=True)
    }
    scale_constants: dict[str, Any] = {}
    for name, scale in cache.items():
        divisor = None if scale is None or computed[name] else given_scales(scale, page, row)
        operands.append(absent if divisor is None else divisor)
        scale_constants |= {
            f"computes_{name}_scale": computed[name],
            f"has_{name}_factor": divisor is not None,
            f"{name}_scale_heads": 1 if scale is None else scale.shape[2],
        }
    updated = [inputs.key_pages, inputs.value_pages, *(absent if scale is None else scale for scale in cache.values())]
    written = [True, True, *computed.values()]
    in_place: dict[int, int] = {}
    for index, (array, is_written) in enumerate(zip(updated, written, strict=True), len(operands)):
        if is_written:
            in_place[len(results)] = index
            results.append(jax.ShapeDtypeStruct(array.shape, array.dtype))
    out, *found = launch(
        rotating_kernels.rotate_and_write,
        [*operands, *updated],
        results,
        grid=[tokens, query_parts + 2],
        scalars={"num_pages": num_pages},
        constants={
            "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, "page_size": page_size,
            "rotated": rotation.rotated, "interleaved": inputs.interleaved, "query_parts": query_parts,
            "block_h": block_h, "block_kv": power_of_two(kv_heads), "block_p": power_of_two(rotation.rotated // 2),
            "block_r": power_of_two(head_dim - rotation.rotated), "block_v": power_of_two(value_dim),
            "limit": max_finite(inputs.kv_dtype) if narrow else 0.0, "greatest": max_finite(inputs.kv_dtype),
            **scale_constants,
        },
        in_place=in_place,
        num_warps=params.num_warps or 4,
    )  # fmt: skip
    key_pages, value_pages, *new_scales = found
    key_scale, value_scale = (new_scales.pop(0) if computed[name] else scale for name, scale in cache.items())
    return out, key_pages, value_pages, key_scale, value_scale


def _tables(rotation: RopeInputs) -> tuple[Any, Any]:
    """Cosines and sines, ``[tokens, pairs]`` with the factor of the rotation.

    A program that calls several layers computes them once, since XLA finds that they are the same.
    """
    rates, magnitude = rotation.rotation
    angles = rotation.positions.astype(jnp.float32) * rates.astype("float32")
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)
