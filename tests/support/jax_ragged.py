"""JAX's own ragged paged attention for TPUs, on the CPU: its kernel by Pallas's TPU interpreter."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel


@contextlib.contextmanager
def interpret_ragged_kernel() -> Iterator[None]:
    """Runs JAX's kernel by the interpreter, in programs that are traced in the context.

    Up to JAX 0.12 the interpreter cannot read a reshaped or bitcast reference, or store with a mask into a part of one.
    Here a copied block is read whole and then reshaped, and masked elements are read and written back.
    """
    with (
        mock.patch.object(kernel, "MultiPageAsyncCopyDescriptor", _WholeBlocks),
        mock.patch.object(kernel, "pltpu", _UnmaskedStores()),
        pltpu.force_tpu_interpret_mode(),
    ):
        yield


class _Block:
    """A value with as much of a reference's interface as the kernel uses."""

    def __init__(self, value: Any):
        self.value, self.dtype = value, value.dtype

    def reshape(self, *shape: int) -> "_Block":
        return _Block(self.value.reshape(shape))

    def bitcast(self, dtype: Any) -> "_Block":
        """Rows of narrow elements side by side in wider ones, the first in the lowest bits."""
        packed = jnp.dtype(dtype).itemsize // self.dtype.itemsize
        together = self.value.reshape(-1, packed, self.value.shape[1]).swapaxes(1, 2)
        return _Block(lax.bitcast_convert_type(together, dtype))

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]


class _WholeBlocks(kernel.MultiPageAsyncCopyDescriptor):
    def wait(self) -> _Block:
        return _Block(super().wait()[...])


class _UnmaskedStores:
    def __getattr__(self, name: str) -> Any:
        return getattr(pltpu, name)

    def store(self, ref: Any, value: Any, *, mask: Any) -> None:
        ref[...] = jnp.where(mask, value, ref[...])
