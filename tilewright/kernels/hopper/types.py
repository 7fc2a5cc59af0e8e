"""Names for the types of what kernels handle; JAX exports none for references and views of them."""

from types import EllipsisType
from typing import Protocol

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

type Scalar = int | jax.Array
"""A number on the device, or one that is known while the kernel is traced."""

type Condition = bool | jax.Array
"""A condition on the device, or one that is known while the kernel is traced."""


type Part = Scalar | slice | pl.Slice | EllipsisType | None
"""What stands for one dimension where a reference is indexed."""

type Index = Part | tuple[Part, ...]
"""What stands between the brackets there."""


class Views(Protocol):
    """What ``ref.at`` is: indexed, it gives a view."""

    def __getitem__(self, index: Index, /) -> "Ref": ...


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

    def reshape(self, *shape: int | tuple[int, ...]) -> "Ref": ...

    def __getitem__(self, index: Index, /) -> jax.Array: ...

    def __setitem__(self, index: Index, value: ArrayLike, /) -> None: ...
