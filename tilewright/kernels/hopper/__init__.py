"""The way of keys and values from device memory to the matrix instructions, one abstraction for all kernels."""

from tilewright.kernels.hopper.kv_spec import KVBufferConfig, KVTileSpec, Role, over_budget
from tilewright.kernels.hopper.ring import Ring, RingPlan
from tilewright.kernels.hopper.ring_protocol import ProtocolError

__all__ = ["KVBufferConfig", "KVTileSpec", "ProtocolError", "Ring", "RingPlan", "Role", "over_budget"]
