"""The XLA backends of all matmuls, for every device."""

import abc
from collections.abc import Iterable
from typing import Any, ClassVar

from tilewright.kernels.matmul.backend import MatmulBackend, Products
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.xla.params import (
    XlaBlockParams,
    XlaGatedBackwardParams,
    XlaGluBackwardParams,
    candidate_rows,
)
from tilewright.kernels.matmul.xla.products import DenseProducts, GroupedProducts
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

type Params = FwdParams | BwdParams | XlaGluBackwardParams | XlaBlockParams | XlaGatedBackwardParams


class _XlaBackend(MatmulBackend[Any, Any], abc.ABC):
    """Serves every call, a grouped one in loops over blocks of rows of one group each; ops differ in their params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "up", "activation", "group_sizes", "group_offset", "lhs_scale", "rhs_scale", "transpose_lhs",
            "transpose_rhs", "precision",
        }
    )  # fmt: skip

    def reasons(self, inputs: MatmulInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: MatmulInputs, device: Device, direction: Direction) -> Iterable[Params]:
        # Recomputing is never faster: it is for callers who want the memory.
        kind = self.forward_params if direction == "forward" else self.backward_params
        if inputs.group_sizes is None:
            return [kind()]
        return [kind(rows) for rows in candidate_rows(inputs.rows, inputs.groups, device)]

    def products(self, inputs: MatmulInputs, params: Any) -> Products:
        return DenseProducts(inputs) if inputs.group_sizes is None else GroupedProducts(inputs, params.block_rows)

    def recomputed_by(self, params: Any) -> Any:
        return params if params.recompute else None


class XlaMatmul(_XlaBackend):
    """Serves ``matmul``, which has no params."""


class XlaGlu(_XlaBackend):
    """Serves ``glu``."""

    backward_params: ClassVar[type] = XlaGluBackwardParams


class XlaGroupedMatmul(_XlaBackend):
    """Serves ``grouped_matmul``."""

    forward_params: ClassVar[type] = XlaBlockParams
    backward_params: ClassVar[type] = XlaBlockParams


class XlaGatedGroupedMatmul(_XlaBackend):
    """Serves ``gated_grouped_matmul``."""

    forward_params: ClassVar[type] = XlaBlockParams
    backward_params: ClassVar[type] = XlaGatedBackwardParams
