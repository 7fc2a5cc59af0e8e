"""`hostile` for a GPU: kernels in CUDA C++ that take the device away from the process that runs them."""

from pathlib import Path

import jax
import numpy as np

from tests.support.hostile import Hostile, Way
from tests.support.plain_variant import PlainVariant
from tilewright.kernels.cuda import CudaKernel, VariantTable
from tilewright.ops.utils.device import current_device

WAYS = ("right", "slow", "left out", "illegal", "hang")


VARIANTS = {
    way: PlainVariant(name=way.replace(" ", "_"), cpp_class=f"Twice<{number}>", sort_key=(number,))
    for number, way in enumerate(WAYS)
}
TABLE = VariantTable("hostile", Path(__file__).with_name("hostile.cuh"), ("size",), tuple(VARIANTS.values()))
KERNEL = CudaKernel(TABLE)


class HostileGpu(Hostile):
    """``2 * x`` on a GPU, in one of `WAYS`; two of the same kind are told apart by what follows a colon."""

    def run(self, x: jax.Array, *, cfg: Way) -> jax.Array:
        variant = VARIANTS[cfg.name.partition(":")[0]]
        outputs = [jax.ShapeDtypeStruct(x.shape, np.float32)]
        return KERNEL.call(variant, {"size": x.size}, current_device(), [x], outputs, {})[0]
