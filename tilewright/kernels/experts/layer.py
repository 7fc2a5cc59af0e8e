"""The layer of experts on one device: its argument list and its checks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.experts.cases import CASES, ExpertsCase, drawn_experts
from tilewright.kernels.experts.inputs import ExpertsInputs, ExpertsResults
from tilewright.kernels.experts.partitioning import experts_partitioning
from tilewright.kernels.experts.reference import experts_reference
from tilewright.kernels.numerics.activations import SWIGLU_OAI, Activation, activation_name
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op.arguments import (
    PlatformOption,
    apply,
    as_array,
    has_arithmetic,
    integer,
    integer_array,
)
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.permutation.routing import declared
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import Product
from tilewright.ops.utils.stable_ids import stable_id

type ExpertActivation = Activation | Literal["swiglu_oai"]
"""An activation of a gated unit, or the clamped gate of gpt-oss."""

type ExpertBiases = Sequence[ArrayLike | None]
"""The biases of gate, up and down, or None for one."""

_MATMULS = 3


@stable_id("tilewright/experts.MoeMlp")
class MoeMlp(PortfolioKernel[ExpertsInputs, ExpertsResults]):
    """The layer of a mixture of experts; see ``moe_mlp`` for the arguments."""

    cases: ClassVar[OpCases[ExpertsCase]] = CASES
    run_is_forward: ClassVar[bool] = False  # it keeps no pre-activations

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.experts.hopper:HopperExperts",
            "tilewright.kernels.experts.triton:TritonExperts",
            "tilewright.kernels.experts.xla:XlaExperts",
        )
        super().__init__("moe_mlp", version="1", backends=backends)

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
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> ExpertsInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        floats = {"x": x, "weights": weights, "gate": gate, "up": up, "down": down}
        arrays = {name: _floating(name, value) for name, value in floats.items()}
        _check_tokens(arrays["x"], arrays["weights"])
        ids = integer_array("experts", experts, arrays["weights"].shape, unbatched=False)
        _check_matrices(arrays["x"], arrays["gate"], arrays["up"], arrays["down"])
        number, _, n = arrays["gate"].shape
        shapes = {"gate_bias": (number, n), "up_bias": (number, n), "down_bias": (number, arrays["x"].shape[-1])}
        given = _biases(biases, shapes)
        operands = {name: each for name, each in (arrays | given).items() if name != "weights" and each is not None}
        dtype = result_dtype(None, *(each.dtype for each in operands.values()))
        return ExpertsInputs(
            arrays["x"],
            _in(jnp.promote_types(dtype, jnp.float32), arrays["weights"]),
            ids,
            arrays["gate"],
            arrays["up"],
            arrays["down"],
            out_dtype=dtype.name,
            **given,  # type: ignore[arg-type]
            activation=activation_name(activation, SWIGLU_OAI),
            capacity=None if capacity is None else _positive("capacity", capacity),
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: ExpertsInputs) -> Any:
        out = jax.ShapeDtypeStruct((*inputs.leading, inputs.d), inputs.sum_dtype)
        if not inputs.keeps:
            return ExpertsResults(out)
        kept = jax.ShapeDtypeStruct((inputs.rows, inputs.n), inputs.out_dtype)
        return ExpertsResults(out, kept, kept, declared(inputs.rows, inputs.tokens, inputs.k, inputs.num_experts))

    def outputs(self, inputs: ExpertsInputs, results: ExpertsResults) -> jax.Array:
        return results.out

    def run(self, inputs: ExpertsInputs, *, cfg: Choice) -> Any:
        """The result, without pre-activations in memory where the backend can do without."""
        return super().run(inputs.replace(keeps=False), cfg=cfg)

    def residuals(self, results: ExpertsResults) -> Any:
        """Both pre-activations and the routing."""
        return results._replace(out=None)

    def cotangents(self, inputs: ExpertsInputs, residuals: Any, cotangents: tuple[Any, ...]) -> Any:
        """Only those of the result."""
        return ExpertsResults(cotangents[0])

    def reference(self, inputs: ExpertsInputs) -> jax.Array:
        """The oracle: every expert for every token, in float32 or float64."""
        return experts_reference(inputs)

    def product(self, inputs: ExpertsInputs) -> Product:
        """Rows times a matrix, as a model without this op has them."""
        matrix = jax.ShapeDtypeStruct(inputs.gate.shape[1:], inputs.gate.dtype)
        contracting = ((len(inputs.x.shape) - 1,), (0,))
        return Product(struct_like(inputs.x), matrix, contracting, sources=(("x",), ("gate", "up", "down")))

    def partitioning(self, inputs: ExpertsInputs) -> Partitioning | None:
        """Splits by tokens and by n, as in the types of the operands."""
        return experts_partitioning(inputs)

    def sampled(self, inputs: ExpertsInputs, key: jax.Array) -> ExpertsInputs:
        """Normal arrays, and experts as a router chooses them: some are chosen more often."""
        random = generator_of(key)
        shares = random.standard_normal(inputs.num_experts)
        experts = drawn_experts(random, inputs.tokens, inputs.k, shares).reshape(inputs.experts.shape)
        return super().sampled(inputs, key).replace(experts=jnp.asarray(experts))

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of all rows, twice as many backward, and bytes of every operand and result once."""
        inputs = self.inputs_of(inv)
        flops = 2.0 * _MATMULS * inputs.rows * inputs.d * inputs.n
        operands, out = array_bytes(inputs), array_bytes(self.output_shapes(inv))
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        kept = 2 * inputs.rows * inputs.n * jnp.dtype(inputs.out_dtype).itemsize
        return Cost(2 * flops, float(2 * operands + out + kept))


def _floating(name: str, value: object) -> jax.Array:
    array = as_array(name, value)
    if not has_arithmetic(array.dtype):
        raise TypeError(f"{name} must be a floating-point array of 16 bits or more, got {array.dtype=}")
    return array


def _positive(name: str, value: object) -> int:
    found = integer(name, value)
    if found < 1:
        raise ValueError(f"{name} must be at least 1, got {found}")
    return found


def _in(dtype: Any, array: jax.Array) -> jax.Array:
    found: jax.Array = array if array.dtype == dtype else apply(lambda x: x.astype(dtype), array)
    return found


def _check_tokens(x: jax.Array, weights: jax.Array) -> None:
    if len(x.shape) < 2 or len(weights.shape) != len(x.shape) or weights.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"x must be [..., d] and weights [..., k] of the same tokens, got {x.shape=}, {weights.shape=}"
        )
    if weights.shape[-1] == 0:
        raise ValueError(f"k must be at least 1, got {weights.shape=}")


def _check_matrices(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> None:
    d = x.shape[-1]
    if len(gate.shape) != 3 or gate.shape[1] != d or up.shape != gate.shape:
        raise ValueError(f"gate and up must be [experts, d, n] with {d=}, got {gate.shape=}, {up.shape=}")
    if down.shape != (gate.shape[0], gate.shape[2], d):
        raise ValueError(f"down must be [experts, n, d], {(gate.shape[0], gate.shape[2], d)}, got {down.shape=}")


def _biases(biases: object, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array | None]:
    """The biases by field."""
    if biases is None:
        return dict.fromkeys(shapes)
    if not isinstance(biases, Sequence) or len(biases) != len(shapes):
        raise ValueError(f"biases must be (gate, up, down), arrays or None each, got {biases!r}")
    found: dict[str, jax.Array | None] = {}
    for (name, shape), value in zip(shapes.items(), biases, strict=True):
        found[name] = None if value is None else _floating(name, value)
        array = found[name]
        if array is not None and array.shape != shape:
            raise ValueError(f"the bias of {name.removesuffix('_bias')} must be {shape}, got {array.shape=}")
    return found


MOE_MLP = MoeMlp()
"""The one kernel behind the public function and behind the parts of expert parallelism."""
