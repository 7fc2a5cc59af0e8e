"""The Triton backend of the router, on NVIDIA GPUs: the k best of each token by rounds in registers, without a sort."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.router.inputs import EPSILON, RouterInputs
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

LIMITS: Mapping[str, int] = MappingProxyType({"experts": 1024, "k": 32, "tokens": 1 << 30})
"""Largest sizes: all experts of a token are in registers, a round for each of k is run, and rows have 32 bits."""

KEPT = {"forward": 32, "backward": 16}
"""Elements of a tile that a thread may hold; more would spill."""


@stable_id("tilewright/router.TritonRouterParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonRouterParams:
    """Config of either kernel.

    Attributes:
      rows: tokens of a program.
      num_warps: warps of a program.
    """

    rows: int
    num_warps: int = 1

    def __post_init__(self) -> None:
        for name, maximum in (("rows", 256), ("num_warps", 16)):
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not 1 <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from 1 to {maximum}, got {self}")


class TritonRouter(Backend[RouterInputs, tuple[Any, Any], TritonRouterParams, TritonRouterParams]):
    """Serves float32, bfloat16 and float16 with up to 1024 experts and k up to 32; repeats bit for bit."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonRouterParams
    backward_params: ClassVar[type] = TritonRouterParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "scoring", "normalize", "num_groups", "top_groups", "scale"})

    def reasons(self, inputs: RouterInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        if inputs.logits.dtype.name not in ("float32", "bfloat16", "float16"):
            reasons.append(f"logits must be float32, bfloat16 or float16, not {inputs.logits.dtype}")
        sizes = {"experts": inputs.logits.shape[-1], "k": inputs.k, "tokens": inputs.tokens}
        for name, maximum in LIMITS.items():
            if sizes[name] > maximum:
                reasons.append(f"{name}={sizes[name]} must be at most {maximum}")
        return reasons

    def candidates(self, inputs: RouterInputs, device: Device, direction: Direction) -> Iterable[TritonRouterParams]:
        width = _width(inputs, direction)
        rows = max(32 * KEPT[direction] // width, 1)
        # Four programs for each SM, as far as there are tokens.
        while rows > 1 and inputs.tokens < 4 * max(device.cores, 1) * rows:
            rows //= 2
        # A token in one warp, if it fits: reductions between warps wait for each other.
        best = TritonRouterParams(min(rows, 256), max(width // (32 * KEPT[direction]), 1))
        others = [TritonRouterParams(1 << rows, 1 << warps) for rows in range(7) for warps in range(3)]
        fitting = [each for each in others if 2 <= _kept(inputs, direction, each) <= KEPT[direction]]
        return list(dict.fromkeys([best, *fitting]))

    def config_reasons(
        self, inputs: RouterInputs, device: Device, direction: Direction, params: TritonRouterParams
    ) -> list[str]:
        kept = _kept(inputs, direction, params)
        if kept <= KEPT[direction]:
            return []
        return [f"{kept} elements of each thread do not fit into registers; at most {KEPT[direction]} do"]

    def forward(self, inputs: RouterInputs, params: TritonRouterParams) -> tuple[Any, Any]:
        bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)[None]
        call = functools.partial(_forward, inputs=inputs.structs, params=params)
        results = over_batch(call, [_as_batch(inputs, inputs.logits)], bias)
        leading = inputs.logits.shape[:-1]
        weights, experts = (each.reshape(*leading, inputs.k) for each in results)
        return weights, experts

    def backward(
        self, inputs: RouterInputs, results: Any, cotangents: Any, params: TritonRouterParams
    ) -> dict[str, jax.Array]:
        call = functools.partial(_backward, inputs=inputs.structs, params=params)
        arrays = (inputs.logits, results, cotangents[0])
        (gradient,) = over_batch(call, [_as_batch(inputs, x) for x in arrays], None)
        return {"logits": gradient.reshape(inputs.logits.shape)}


def _as_batch(inputs: RouterInputs, x: jax.Array) -> jax.Array:
    """``[1, tokens, ...]``."""
    return x.reshape(1, inputs.tokens, x.shape[-1])


def _groups(inputs: RouterInputs) -> int:
    """The groups that the choice looks at: one if all of them may be chosen from."""
    return inputs.num_groups if inputs.is_limited else 1


def _width(inputs: RouterInputs, direction: Direction) -> int:
    """Elements of a row of a tile."""
    experts, groups = inputs.logits.shape[-1], _groups(inputs) if direction == "forward" else 1
    return power_of_two(groups) * power_of_two(experts // groups)


def _kept(inputs: RouterInputs, direction: Direction, params: TritonRouterParams) -> int:
    """Elements of a tile that a thread holds."""
    return -(-params.rows * _width(inputs, direction) // (32 * params.num_warps))


def _constants(inputs: RouterInputs, params: TritonRouterParams) -> dict[str, Any]:
    return {
        "k": inputs.k,
        "block_rows": params.rows,
        "scoring": inputs.scoring,
        "normalize": inputs.normalize,
        "scale": float(inputs.scale),
        "epsilon": EPSILON,
    }


def _forward(mapped: Any, bias: jax.Array | None, inputs: RouterInputs, params: TritonRouterParams) -> Any:
    """``(weights, experts)``, both ``[batch, tokens, k]``."""
    from tilewright.kernels.router.triton import kernels

    (logits,) = mapped
    batch, tokens, experts = logits.shape
    groups, shape = _groups(inputs), (batch, tokens, inputs.k)
    return launch(
        kernels.forward,
        [logits, jnp.zeros((0,), jnp.float32) if bias is None else bias],
        [jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)],
        grid=[-(-batch * tokens // params.rows)],
        scalars={"rows": batch * tokens, "batch_rows": tokens},
        constants=_constants(inputs, params)
        | {
            "size": experts // groups,
            "groups": groups,
            "top_groups": inputs.top_groups,
            "block_size": power_of_two(experts // groups),
            "block_groups": power_of_two(groups),
            "block_k": power_of_two(inputs.k),
            "has_bias": bias is not None,
            "bias_stride": experts if bias is not None and bias.shape[0] > 1 else 0,
        },
        num_warps=params.num_warps,
        num_stages=1,
    )


def _backward(mapped: Any, _: None, inputs: RouterInputs, params: TritonRouterParams) -> Any:
    """The gradient of the logits, ``[batch, tokens, experts]``."""
    from tilewright.kernels.router.triton import kernels

    logits, chosen, d_weights = mapped
    batch, tokens, experts = logits.shape
    return launch(
        kernels.backward,
        [logits, chosen, d_weights],
        [jax.ShapeDtypeStruct(logits.shape, logits.dtype)],
        grid=[-(-batch * tokens // params.rows)],
        scalars={"rows": batch * tokens},
        constants=_constants(inputs, params) | {"count": experts, "block_columns": power_of_two(experts)},
        num_warps=params.num_warps,
        num_stages=1,
    )
