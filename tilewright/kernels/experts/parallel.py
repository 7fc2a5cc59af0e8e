"""The layer of experts over several devices, each of which has some of the experts and some of the tokens."""

import dataclasses
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.experts.inputs import BIASES, TOKENS, ParallelInputs
from tilewright.kernels.experts.layer import MOE_MLP, ExpertActivation, ExpertBiases
from tilewright.kernels.experts.reference import experts_reference
from tilewright.kernels.op.arguments import PlatformOption, as_array
from tilewright.kernels.op.distributed import TracedOp
from tilewright.kernels.op.sharding import (
    AxisName,
    axis_names,
    axis_of,
    devices_along,
    explicit_mesh,
    over_explicit_axes,
    typed_axes,
)
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

type ExpertStrategy = Literal["auto", "all_gather"]

_PLANS = "tilewright.kernels.experts.plans"


@stable_id("tilewright/experts.ExpertParallelMlp")
class ExpertParallelMlp(TracedOp[ParallelInputs, Any]):
    """The layer of experts over a mesh axis; see ``moe_mlp`` for the arguments."""

    kernel = MOE_MLP

    def __init__(self) -> None:
        super().__init__("expert_parallel_mlp", version="1", backends=[f"{_PLANS}:AllGatherExperts"])

    def prepare(
        self,
        x: ArrayLike,
        weights: ArrayLike,
        experts: ArrayLike,
        gate: ArrayLike,
        up: ArrayLike,
        down: ArrayLike,
        *,
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
        capacity: int | None = None,
        axis_name: AxisName | None = None,
        strategy: ExpertStrategy = "auto",
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> ParallelInputs:
        """Checks a call inside ``shard_map``."""
        part = MOE_MLP.prepare(
            x, weights, experts, gate, up, down,
            activation=activation, biases=biases, capacity=capacity, platform=platform,
        )  # fmt: skip
        if axis_name is None:
            raise ValueError("expert parallelism needs axis_name, a mesh axis of the surrounding jax.shard_map")
        inputs = ParallelInputs(
            **{field.name: getattr(part, field.name) for field in dataclasses.fields(part)},
            devices=devices_along(axis_name, "tokens and experts"),
            strategy=strategy,
            axis=axis_of(axis_name),
        )
        self.check_strategy(inputs, current_device())
        return inputs

    def results(self, inputs: ParallelInputs) -> Any:
        """The result of this device's tokens."""
        return jax.ShapeDtypeStruct((*inputs.leading, inputs.d), inputs.out_dtype)

    def reference(self, inputs: ParallelInputs) -> jax.Array:
        """The oracle inside ``shard_map``: that of one device, for all tokens and with all experts."""

        def whole(array: Any) -> Any:
            return None if array is None else lax.all_gather(array, inputs.axis, tiled=True)

        flat = inputs.flat
        out = experts_reference(flat.replace(**{name: whole(array) for name, array in flat.arrays.items()}))
        own = lax.dynamic_slice_in_dim(out, lax.axis_index(inputs.axis) * inputs.tokens, inputs.tokens)
        return own.reshape(*inputs.leading, inputs.d)

    def sampled(self, inputs: ParallelInputs, key: jax.Array) -> ParallelInputs:
        """As for one device, with the experts of all."""
        found = MOE_MLP.sampled(inputs, key)
        number = inputs.num_experts * inputs.devices
        ids = jax.random.randint(key, inputs.experts.shape, 0, number, jnp.int32)
        return cast(ParallelInputs, found.replace(experts=ids))


EXPERT_PARALLEL_MLP = ExpertParallelMlp()


def on_explicit_axes(arguments: dict[str, Any], options: dict[str, Any]) -> jax.Array | None:
    """The layer whose experts are split by the types of the matrices; ``None`` if they are not.

    Tokens are split over the axes of the experts beside their own, and then their results are put back.

    Raises:
      ValueError: experts are split in two ways.
    """
    gate = arguments["gate"]
    if not isinstance(gate, jax.Array) or gate.ndim != 3 or (axes := typed_axes(gate)[0]) is None:
        return None
    mesh = explicit_mesh(gate)
    assert mesh is not None
    names = axis_names(axes)
    arrays = {name: as_array(name, value) for name, value in arguments.items()}
    biases = options.pop("biases", None) or (None,) * 3
    arrays |= {key: as_array(key, bias) for key, bias in zip(BIASES, biases, strict=True) if bias is not None}
    first = axis_names(typed_axes(arrays["x"])[0])
    others = [name for name in first if name not in names]
    if options.get("capacity") is not None and others:
        raise ValueError(
            f"with capacity tokens must be whole but for the axes of the experts, and are split over {others}"
        )
    split = (*first, *(name for name in names if name not in first))
    # Other axes than those of the tokens and of the experts have whole arrays: n may not be split here.
    specs = {name: PartitionSpec(split if name in TOKENS else axes) for name in arrays}

    def on_device(parts: dict[str, Any]) -> Any:
        own = tuple(parts.pop(key, None) for key in BIASES)
        return EXPERT_PARALLEL_MLP(**parts, biases=own, axis_name=axes, **options)

    out = over_explicit_axes(on_device, mesh, arrays, specs, PartitionSpec(split))
    return jax.reshard(out, jax.typeof(arrays["x"]).sharding)
