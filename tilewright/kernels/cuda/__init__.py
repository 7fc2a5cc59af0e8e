"""Makes kernels in CUDA C++ from a header and a table of variants; knows no op (see docs/cuda.md).

Not loaded by ``import tilewright``.
"""

from tilewright.kernels.cuda.build import (
    Event,
    Group,
    GroupDone,
    GroupFailed,
    GroupStarted,
    SharedObject,
    build,
    find,
    groups_of,
    locate,
)
from tilewright.kernels.cuda.cache import BuildCache
from tilewright.kernels.cuda.kernel import CudaKernel
from tilewright.kernels.cuda.requirements import (
    AnyOf,
    Compare,
    DeviceField,
    Fact,
    Field,
    MultipleOf,
    Predicate,
    Values,
    one_of,
)
from tilewright.kernels.cuda.sources import generate
from tilewright.kernels.cuda.table import Variant, VariantTable, instance
from tilewright.kernels.cuda.toolchain import CURAND, HeaderPackage, cutlass

__all__ = [
    "CURAND",
    "AnyOf",
    "BuildCache",
    "Compare",
    "CudaKernel",
    "DeviceField",
    "Event",
    "Fact",
    "Field",
    "Group",
    "GroupDone",
    "GroupFailed",
    "GroupStarted",
    "HeaderPackage",
    "MultipleOf",
    "Predicate",
    "SharedObject",
    "Values",
    "Variant",
    "VariantTable",
    "build",
    "cutlass",
    "find",
    "generate",
    "groups_of",
    "instance",
    "locate",
    "one_of",
]
