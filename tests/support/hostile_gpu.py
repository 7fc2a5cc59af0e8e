"""`hostile` for a GPU: kernels in CUDA C++ that take the device away from the process that runs them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.support.hostile import Hostile, Way
from tilewright.kernels.cuda import CudaKernel, Predicate, Variant, VariantTable
from tilewright.ops.utils.device import current_device

WAYS = ("right", "slow", "left out", "illegal", "hang")


@dataclasses.dataclass(frozen=True)
class Twice(Variant):
    way: str

    @property
    def name(self) -> str:
        return self.way.replace(" ", "_")

    @property
    def group(self) -> str:
        return "all"

    @property
    def cpp_class(self) -> str:
        return f"Twice<{WAYS.index(self.way)}>"

    @property
    def sort_key(self) -> tuple[Any, ...]:
        return (WAYS.index(self.way),)

    @property
    def arch_range(self) -> tuple[int, int]:
        return (75, 130)

    @property
    def requirements(self) -> tuple[Predicate, ...]:
        return ()


TABLE = VariantTable("hostile", Path(__file__).with_name("hostile.cuh"), ("size",), tuple(map(Twice, WAYS)))
KERNEL = CudaKernel(TABLE)


class HostileGpu(Hostile):
    """``2 * x`` on a GPU, in one of `WAYS`; two of the same kind are told apart by what follows a colon."""

    def run(self, x: jax.Array, *, cfg: Way) -> jax.Array:
        variant = next(v for v in TABLE.variants if v.way == cfg.name.partition(":")[0])
        outputs = [jax.ShapeDtypeStruct(x.shape, np.float32)]
        return KERNEL.call(variant, {"size": x.size}, current_device(), [x], outputs, {})[0]
