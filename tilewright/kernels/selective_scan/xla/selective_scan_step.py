"""One token of each sequence through a selective scan in plain XLA, in place if the pool is donated."""

from collections.abc import Iterable
from typing import ClassVar

import jax

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.selective_scan.inputs import SelectiveScanStepInputs
from tilewright.kernels.selective_scan.reference import step_reference
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaSelectiveScanStep(InferenceBackend[SelectiveScanStepInputs, tuple[jax.Array, jax.Array], FwdParams]):
    """Serves every call; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"D", "z", "delta_bias", "delta_softplus", "state_indices", "write_indices"}
    )

    def forward_reasons(self, inputs: SelectiveScanStepInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: SelectiveScanStepInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: SelectiveScanStepInputs, params: FwdParams) -> tuple[jax.Array, jax.Array]:
        out, pool = step_reference(inputs)
        return out.astype(inputs.u.dtype), pool
