"""The base class of the backends of the layer of experts: its matmuls, and the movement of rows between them."""

import abc
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from tilewright.kernels.experts.inputs import OPTIONS, ExpertsInputs, ExpertsResults
from tilewright.kernels.experts.params import ExpertsBackwardParams, ExpertsForwardParams
from tilewright.kernels.matmul.backend import MatmulBackend
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.gated_grouped_matmul import GatedGroupedMatmul
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul
from tilewright.kernels.numerics.activations import gated, kept_apart
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.routing import Routing, of_rows
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

type Params = ExpertsForwardParams | ExpertsBackwardParams

SUM_ROWS = 8
"""Rows of the product that sums over the rows of an expert, of which one or two are used: TMA needs columns of its left
operand by 16 bytes, which are 8 elements of 16 bits."""


class ExpertsBackend(Backend[ExpertsInputs, ExpertsResults, ExpertsForwardParams, ExpertsBackwardParams], abc.ABC):
    """A backend whose matmuls are those of the backends of its name, and which defines only what moves the rows.

    Attributes:
      gathers: whether these take rows by an index, ``MatmulInputs.row_index`` and ``cotangent_index``.
    """

    forward_params: ClassVar[type] = ExpertsForwardParams
    backward_params: ClassVar[type] = ExpertsBackwardParams
    serves: ClassVar[frozenset[str]] = OPTIONS
    gathers: ClassVar[bool] = False

    @functools.cached_property
    def gated(self) -> MatmulBackend[Any, Any]:
        return cast(MatmulBackend[Any, Any], GatedGroupedMatmul().backends.named(self.name))

    @functools.cached_property
    def grouped(self) -> MatmulBackend[Any, Any]:
        return cast(MatmulBackend[Any, Any], GroupedMatmul().backends.named(self.name))

    @abc.abstractmethod
    def movement(self, inputs: ExpertsInputs, device: Device) -> Movement:
        """The movement of rows of a call on a device."""

    def matmuls(
        self, inputs: ExpertsInputs, direction: Direction, gathers: bool = False
    ) -> dict[str, tuple[MatmulBackend[Any, Any], MatmulInputs, Direction]]:
        """The matmuls of a direction with their own directions, by the names of their configs.

        Args:
          gathers: of the params.
        """
        each = inputs.abstract_matmuls(gathers)
        if direction == "forward":
            gated = self.gated if inputs.is_fused else self.grouped
            return {"gated": (gated, each["gated"], "forward"), "down": (self.grouped, each["down"], "forward")}
        return {
            "hidden": (self.grouped, each["hidden"], "forward"),
            "gated": (self.gated, each["d_gated"], "backward"),
            "down": (self.grouped, each["d_down"], "backward"),
        }

    def reasons(self, inputs: ExpertsInputs, device: Device, direction: Direction) -> list[str]:
        found = [
            reason
            for backend, matmul, way in self.matmuls(inputs, direction).values()
            for reason in backend.not_supported_reasons(matmul, device, way)
        ]
        found += self.movement(inputs, device).reasons(inputs.tokens, inputs.k, device)
        return list(dict.fromkeys(found))

    def candidates(self, inputs: ExpertsInputs, device: Device, direction: Direction) -> Iterable[Params]:
        params = self.forward_params if direction == "forward" else self.backward_params
        # Best guesses of both ways first. Copies of rows are written once and read again by matmuls: on an H200, for
        # 24576 tokens of 1536 and 8 of 128 experts of 256, 0.18 of 1.15 ms forward and 0.36 of 2.18 ms backward.
        ways = (True, False) if self.gathers else (False,)
        listed = [
            [params(**each, gathers=gathers) for each in self._listed(inputs, device, direction, gathers)]
            for gathers in ways
        ]
        return [found for each in itertools.zip_longest(*listed) for found in each if found is not None]

    def _listed(
        self, inputs: ExpertsInputs, device: Device, direction: Direction, gathers: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Configs of the matmuls of a direction by name, best guess first."""
        listed = {
            name: list(backend.candidates(matmul, device, way))
            for name, (backend, matmul, way) in self.matmuls(inputs, direction, gathers).items()
        }
        for i in range(max(map(len, listed.values()))):
            yield {name: each[i % len(each)] for name, each in listed.items()}

    def _parts(
        self, inputs: ExpertsInputs, direction: Direction, params: Params
    ) -> Iterator[tuple[MatmulBackend[Any, Any], MatmulInputs, Direction, Any]]:
        for name, matmul in self.matmuls(inputs, direction, params.gathers).items():
            yield *matmul, getattr(params, name)

    def config_reasons(self, inputs: ExpertsInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        found = ["its matmuls take rows that were copied"] if params.gathers and not self.gathers else []
        for backend, matmul, way, own in self._parts(inputs, direction, params):
            wanted = backend.forward_params if way == "forward" else backend.backward_params
            if not isinstance(own, wanted):
                found.append(f"its config must be a {wanted.__name__}, got {own}")
            elif getattr(own, "recompute", None):
                found.append(f"it keeps both pre-activations, got {own}")
            else:
                found += backend.config_reasons(matmul, device, way, own)
        return found

    def footprints(
        self, inputs: ExpertsInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        parts = self._parts(inputs, direction, params)
        each = (backend.footprints(matmul, device, way, own) for backend, matmul, way, own in parts)
        return list(itertools.chain.from_iterable(each))

    def forward(self, inputs: ExpertsInputs, params: ExpertsForwardParams) -> ExpertsResults:
        shape, inputs = (*inputs.leading, inputs.d), inputs.flat
        if inputs.is_empty:
            return _empty_results(inputs, shape)
        movement = self.movement(inputs, current_device())
        routing = movement.route(inputs.experts, inputs.num_experts, inputs.capacity)
        routing = routing._replace(source=routing.source[: inputs.rows])
        if params.gathers:
            matmul = inputs.gated_matmul(inputs.x, routing.group_sizes, routing.source // inputs.k)
        else:
            matmul = inputs.gated_matmul(movement.gather(inputs.x, routing, fills=False), routing.group_sizes)
        hidden, gate, up = self._hidden(inputs, matmul, routing, params)
        rows = self.grouped.forward(inputs.down_matmul(hidden, routing.group_sizes), params.down).out
        out = movement.combine(
            rows, routing, inputs.weights, inputs.down_bias, inputs.experts, inputs.sum_dtype
        ).reshape(shape)
        return ExpertsResults(out, gate, up, routing) if inputs.keeps else ExpertsResults(out)

    def _hidden(
        self, inputs: ExpertsInputs, matmul: MatmulInputs, routing: Routing, params: ExpertsForwardParams
    ) -> tuple[Any, Any, Any]:
        """The hidden rows and both pre-activations, which may be ``None`` if they are not kept."""
        if inputs.is_fused:
            found = self.gated.forward(matmul, params.gated)
            return found.out, found.gate, found.up
        # Rows without a choice may take any expert's bias: nobody reads them.
        expert, wide, kept = of_rows(inputs.experts, routing.source, 0), inputs.accumulator, []
        for matrix, bias in ((inputs.gate, inputs.gate_bias), (inputs.up, inputs.up_bias)):
            product = self.grouped.forward(matmul.replace(rhs=matrix), params.gated).out
            if bias is not None:
                product = (product.astype(wide) + bias[expert].astype(wide)).astype(inputs.out_dtype)
            kept.append(product)
        gate, up = kept
        return gated(inputs.activation, gate.astype(wide), up.astype(wide)).astype(inputs.out_dtype), gate, up

    def backward(
        self, inputs: ExpertsInputs, results: ExpertsResults, cotangents: ExpertsResults, params: ExpertsBackwardParams
    ) -> dict[str, Any]:
        """All gradients that are used, from both pre-activations and the routing."""
        if inputs.is_empty:
            return {name: jnp.zeros(like.shape, like.dtype) for name, like in inputs.gradients.items()}
        gradients = _Gradients(self, inputs.flat, results, cotangents.out, params).by_name()
        return {name: gradients[name].reshape(like.shape).astype(like.dtype) for name, like in inputs.gradients.items()}


class _Gradients:
    """The backward pass of one call with one dimension of tokens."""

    def __init__(
        self, backend: ExpertsBackend, inputs: ExpertsInputs, results: ExpertsResults, d_out: jax.Array, params: Any
    ) -> None:
        self.backend, self.inputs, self.params = backend, inputs, params
        self.movement = backend.movement(inputs, current_device())
        self.gate, self.up, self.routing = results.gate, results.up, results.routing
        self.d_out = d_out.reshape(inputs.tokens, inputs.d).astype(inputs.out_dtype)
        self.tokens = self.routing.source // inputs.k if params.gathers else None

    def by_name(self) -> dict[str, jax.Array]:
        inputs, routing, movement = self.inputs, self.routing, self.movement
        sizes = routing.group_sizes
        d_rows = self._rows_of(self.d_out)
        matmul = inputs.hidden_gradient(d_rows, sizes, self.tokens)
        d_hidden = self.backend.grouped.forward(matmul, self.params.hidden).out
        by_row = of_rows(inputs.weights, routing.source, 0)
        d_gate, d_up, hidden, dots = movement.gate_gradients(
            inputs.activation, self.gate, self.up, d_hidden, by_row, routing.source
        )
        found = self._of_rows([d_gate, d_up])
        if inputs.wants("weights"):
            found["weights"] = self._of_weights(dots)
        if inputs.wants("down"):
            matmul = inputs.d_down_matmul(hidden, sizes, self.tokens)
            found["down"] = self.backend.grouped.gradients(matmul, [d_rows], self.params.down)["rhs"]
        for name, summed, weights, index in (
            ("gate_bias", d_gate, None, None),
            ("up_bias", d_up, None, None),
            ("down_bias", d_rows, by_row, self.tokens),
        ):
            if inputs.arrays[name] is not None and inputs.wants(name):
                found[name] = self._sums_by_expert(summed, weights, index)
        return found

    def _rows_of(self, x: jax.Array) -> jax.Array:
        """The rows of experts, or x itself where the matmuls take rows by the index of their tokens."""
        return x if self.params.gathers else self.movement.gather(x, self.routing, fills=False)

    def _of_rows(self, d_products: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The gradients of x and of both matrices of the gate, from those of the pre-activations."""
        inputs, names = self.inputs, {"x": "lhs", "gate": "rhs", "up": "up"}
        wanted = frozenset(names[name] for name in names if inputs.wants(name))
        if not wanted:
            return {}
        # Gathered again: without a barrier XLA takes the rows of the forward pass, and keeps them until here.
        x = kept_apart(inputs.x, self.d_out)
        matmul = inputs.d_gated_matmul(self._rows_of(x), self.routing.group_sizes, self.tokens).replace(wanted=wanted)
        of_matmul = self.backend.gated.gradients(matmul, d_products, self.params.gated)
        found = {name: of_matmul[own] for name, own in names.items() if own in of_matmul}
        if "x" in found:
            found["x"] = self.movement.combine(found["x"], self.routing, out_dtype=inputs.x.dtype)
        return found

    def _of_weights(self, dots: jax.Array) -> jax.Array:
        """The inner product of a token's cotangent with the result of each of its choices."""
        inputs, positions = self.inputs, self.routing.positions
        found = dots[jnp.maximum(positions, 0)]
        if inputs.down_bias is not None:
            wide = inputs.accumulator
            expert = jnp.clip(inputs.experts, 0, inputs.num_experts - 1)
            biases = (inputs.down_bias[expert[:, j]].astype(wide) for j in range(inputs.k))
            found += jnp.stack([(self.d_out.astype(wide) * each).sum(1) for each in biases], axis=1)
        return jnp.where(positions >= 0, found, 0)

    def _sums_by_expert(self, rows: jax.Array, weights: jax.Array | None, index: jax.Array | None) -> jax.Array:
        """Sums of rows over those of each expert, with weights: a matmul of few columns, in float32.

        Args:
          index: the token of each row, for tokens in place of rows.
        """
        inputs, dtype = self.inputs, rows.dtype
        if weights is None:
            columns = [jnp.ones(inputs.rows, dtype)]
        else:  # in two parts, for a weight is float32
            first = weights.astype(dtype)
            columns = [first, (weights - first.astype(weights.dtype)).astype(dtype)]
        left = jnp.stack(columns + [jnp.zeros(inputs.rows, dtype)] * (SUM_ROWS - len(columns)), axis=1)
        wide = jax.ShapeDtypeStruct((inputs.num_experts, SUM_ROWS, rows.shape[1]), dtype)
        matmul = MatmulInputs(
            left,
            wide,  # type: ignore[arg-type]
            out_dtype=inputs.out_dtype,
            group_sizes=self.routing.group_sizes,
            cotangent_index=index,
            wanted=frozenset({"rhs"}),
        )
        found = self.backend.grouped.gradients(matmul, [rows], self.params.down)["rhs"]
        return found[:, : len(columns)].astype(inputs.accumulator).sum(1)


def _empty_results(inputs: ExpertsInputs, shape: tuple[int, ...]) -> ExpertsResults:
    """The results of a call without rows, or with sums over nothing."""
    out, kept = jnp.zeros(shape, inputs.sum_dtype), jnp.zeros((inputs.rows, inputs.n), inputs.out_dtype)
    if not inputs.keeps:
        return ExpertsResults(out)
    none, positions = (jnp.full(shape, -1, jnp.int32) for shape in ((inputs.rows,), inputs.experts.shape))
    routing = Routing(none, positions, jnp.zeros(inputs.num_experts, jnp.int32))
    return ExpertsResults(out, kept, kept, routing)
