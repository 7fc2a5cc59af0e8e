"""Names for the types of what kernels handle; JAX exports none for references and views of them."""

from typing import Any, Protocol

import jax
import numpy as np

type Scalar = int | jax.Array
"""A number on the device, or one that is known while the kernel is traced."""

type Condition = bool | jax.Array
"""A condition on the device, or one that is known while the kernel is traced."""


class Views(Protocol):
    """What ``ref.at`` is: indexed, it gives a view."""

    def __getitem__(self, index: Any, /) -> "Ref": ...


class Ref(Protocol):
    """A Pallas reference to memory or to the accumulator of wgmma, or a view of one; an array of barriers, too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def at(self) -> Views: ...

    @property
    def T(self) -> "Ref": ...

    def reshape(self, *shape: Any) -> "Ref": ...

    def __getitem__(self, index: Any, /) -> jax.Array: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...
