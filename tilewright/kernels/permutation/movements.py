"""The movements of rows by the platforms that they run on, for every op that has such rows."""

from types import MappingProxyType

from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.triton.movement import TritonMovement
from tilewright.kernels.permutation.xla import XlaMovement

MOVEMENTS: MappingProxyType[Platform, Movement] = MappingProxyType(
    {Platform.TRITON: TritonMovement(), Platform.XLA: XlaMovement()}
)
"""They are stateless; no module of another op imports one by its backend's module."""
