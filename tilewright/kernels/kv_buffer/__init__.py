"""The way of keys and values from device memory to the matrix instructions, one abstraction for all kernels."""

from tilewright.kernels.kv_buffer.protocol import ProtocolError
from tilewright.kernels.kv_buffer.ring import Ring, RingPlan
from tilewright.kernels.kv_buffer.spec import KVBufferConfig, KVTileSpec, Role, over_budget

__all__ = ["KVBufferConfig", "KVTileSpec", "ProtocolError", "Ring", "RingPlan", "Role", "over_budget"]
