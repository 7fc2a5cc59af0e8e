"""Config of the gated linear unit in XLA."""

import dataclasses

from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.XlaGluBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaGluBackwardParams:
    """Config of the backward pass.

    Attributes:
      recompute: compute the pre-activations again; under ``jax.jit`` those of the forward pass are then not kept.
    """

    recompute: bool = False

    def __post_init__(self) -> None:
        if type(self.recompute) is not bool:
            raise TypeError(f"XlaGluBackwardParams needs a bool, got {self.recompute=}")
