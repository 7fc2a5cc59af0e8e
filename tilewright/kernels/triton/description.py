"""Description of a launch of a Triton kernel, complete before anything is compiled."""

import dataclasses
from typing import Any

import jax

ALIGNMENT = 16
"""Bytes by which the address of every array is divisible."""

MAX_PROGRAMS = (2**31 - 1, 65535, 65535)
"""Maximum size of a grid along each axis, by CUDA."""

type JitKernel = Any
"""A ``@triton.jit`` function, of a package that need not be installed."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch, except for the values in its arrays.

    Attributes:
      kernel: a ``@triton.jit`` function, whose parameters are pointers to the inputs, the scalars, pointers to the
        outputs that are not in place, and the constants.
      inputs, outputs: shapes and dtypes; the outputs in place come last.
      scalars: integers by parameter, in the parameters' order; the kernel is compiled for any value but 1.
      constants: values of the ``tl.constexpr`` parameters; the kernel is compiled for each set of them.
      grid: programs along three axes.
      in_place: for each output that is an input, updated, the input's index.
    """

    kernel: JitKernel
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    scalars: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    in_place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        name, given = self.name, dict(self.constants)
        parameters = [parameter.name for parameter in self.kernel.params if not parameter.is_constexpr]
        constants = {
            parameter.name: parameter.has_default for parameter in self.kernel.params if parameter.is_constexpr
        }
        if not given.keys() <= constants.keys() or not all(constants[each] for each in constants.keys() - given.keys()):
            raise TypeError(f"{name} takes the constants {sorted(constants)}, got {sorted(given)}")
        if len(parameters) != len(self.inputs) + len(self.scalars) + len(self.fresh):
            raise TypeError(
                f"{name} has the parameters {parameters}, got {len(self.inputs)} inputs, {len(self.scalars)} scalars "
                f"and {len(self.fresh)} outputs that are not in place"
            )
        first, scalars = len(self.inputs), [each for each, _ in self.scalars]
        if parameters[first : first + len(scalars)] != scalars:
            raise TypeError(f"after {first} inputs {name} takes {parameters[first:]}, got the {scalars=}")
        if not all(0 <= programs <= maximum for programs, maximum in zip(self.grid, MAX_PROGRAMS, strict=True)):
            raise ValueError(f"{name}: a grid has up to {MAX_PROGRAMS} programs, got {self.grid=}")
        for source, output in zip(self.in_place, self.outputs[len(self.fresh) :], strict=True):
            updated = self.inputs[source]
            if (updated.shape, updated.dtype) != (output.shape, output.dtype):
                raise ValueError(f"{name} updates input {source} in place, but it is {updated} and the output {output}")

    @property
    def name(self) -> str:
        """The name of the kernel's function."""
        return self.kernel.fn.__name__

    @property
    def fresh(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The outputs that are not in place."""
        return self.outputs[: len(self.outputs) - len(self.in_place)]
