"""Types of values and references in kernels; JAX exports none for references and their views."""

from types import EllipsisType
from typing import Protocol

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

type Scalar = int | jax.Array
"""A number on the device, or a static one."""

type Condition = bool | jax.Array
"""A condition on the device, or a static one."""


type Part = Scalar | slice | pl.Slice | EllipsisType | None
"""The index of one dimension of a reference."""

type Index = Part | tuple[Part, ...]
"""The index of a reference, between the brackets."""


class Views(Protocol):
    """The type of ``ref.at``: indexed, it gives a view."""

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
