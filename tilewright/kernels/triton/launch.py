"""Launches of Triton kernels inside JAX programs.

The kernel goes to jaxlib's custom call, which jax-triton uses as well, as ``triton.compile`` returns it, and the next
process finds it in Triton's cache on disk. jax-triton itself is not used: it has no such cache, its last version before
0.4 passes every output in place to the kernel twice, and 0.4.1 does not lower under JAX 0.12.
"""

import contextlib
import contextvars
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from tilewright.errors import TargetDeviceError
from tilewright.kernels.in_place import apart
from tilewright.kernels.triton.compiler import CompiledKernel, compiled
from tilewright.kernels.triton.description import ALIGNMENT, JitKernel, Launch
from tilewright.kernels.triton.requirements import package_reasons
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.running import device_kernel_name
from tilewright.ops.utils.target import check_is_here

SCRATCH_ALIGNMENT = 128
"""Bytes by which the address of an array that XLA allocates is divisible."""


def launch(
    kernel: JitKernel,
    inputs: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: Sequence[int],
    constants: Mapping[str, Any],
    scalars: Mapping[str, int] = MappingProxyType({}),
    num_warps: int = 4,
    num_stages: int = 2,
    in_place: Mapping[int, int] = MappingProxyType({}),
) -> tuple[jax.Array, ...]:
    """Runs a ``@triton.jit`` kernel on ``inputs`` and returns arrays like ``outputs``.

    The kernel's parameters are, in order: a pointer for each input, the scalars, a pointer for each output, and the
    ``tl.constexpr`` parameters. Pointers are divisible by 16 bytes; every array is contiguous in row-major order.
    Elements that the kernel does not write are undefined. With an empty grid, or no element to write, nothing runs, and
    the outputs that are not in place are zeros.

    Differentiation and ``vmap`` are the caller's to define; either raises.

    Args:
      kernel: the ``@triton.jit`` function.
      inputs: arrays; an absent one needs a stand-in, such as ``jnp.zeros((0,), dtype)``.
      outputs: shape and dtype of each result.
      grid: programs along one to three axes.
      constants: values of the ``tl.constexpr`` parameters; the kernel is compiled for each set of them.
      scalars: integers by parameter; it is compiled once for all their values (except 1, which is a constant).
      num_warps: warps of a program.
      num_stages: stages of the pipelines that Triton makes of loops.
      in_place: input index by output index, for outputs that update an input's memory; these outputs come last. The
        kernel has no parameter for them: it reads and writes by the input's pointer. Donating the input saves a copy.

    Raises:
      TypeError, ValueError: the arguments are not what the kernel takes.
      RuntimeError: a program is lowered for another platform than CUDA, or for an unknown compute capability.
    """
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"a grid has one to three axes, got {grid=}")
    if sorted(in_place) != list(range(len(outputs) - len(in_place), len(outputs))):
        raise ValueError(f"outputs in place come last, got {len(outputs)} outputs and {dict(in_place)=}")
    x, y, z = (*(int(count) for count in grid), 1, 1)[:3]
    description = Launch(
        kernel,
        tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs),
        tuple(jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs),
        tuple(scalars.items()),
        tuple(constants.items()),
        (x, y, z),
        num_warps,
        num_stages,
        tuple(in_place[index] for index in sorted(in_place)),
    )
    record = _records.get()
    if record is not None:
        record.append(description)
    if 0 in description.grid or all(0 in output.shape for output in description.outputs):
        fresh = (jnp.zeros(output.shape, output.dtype) for output in description.fresh)
        return (*fresh, *(inputs[source] for source in description.in_place))
    run = _runner.get() or _on_gpu
    return tuple(run(description, tuple(jnp.asarray(array) for array in inputs)))


type Runner = Callable[[Launch, tuple[Any, ...]], Sequence[Any]]

_runner: contextvars.ContextVar[Runner | None] = contextvars.ContextVar("triton_runner", default=None)
_records: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar("triton_records", default=None)


@contextlib.contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Runs launches that are traced in the context by ``runner`` instead of a GPU."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collects the launches of programs that are traced in the context."""
    record: list[Launch] = []
    token = _records.set(record)
    try:
        yield record
    finally:
        _records.reset(token)


def _on_gpu(launch: Launch, inputs: tuple[Any, ...]) -> Sequence[Any]:
    name = device_kernel_name(launch.name)
    operands = apart(inputs) if launch.in_place else inputs
    results = _triton_p.bind(*operands, launch=launch, capability=current_device().capability, name=name)
    return apart(results) if launch.in_place else results


_TARGET = "triton_kernel_call_ffi"

_triton_p = Primitive("tilewright_triton")
_triton_p.multiple_results = True
_triton_p.def_impl(lambda *inputs, **params: jax.jit(lambda *inputs: _triton_p.bind(*inputs, **params))(*inputs))


@_triton_p.def_abstract_eval
def _(*_: object, launch: Launch, capability: tuple[int, int] | None, name: str) -> list[Any]:
    # Typed like arrays of the current mesh, as JAX types the results of its own operations: an update of one of those
    # can be a result, and the results of a kernel are found on disk whichever of both they are.
    mesh = jax.sharding.get_abstract_mesh()

    def typed(output: jax.ShapeDtypeStruct) -> Any:
        whole = PartitionSpec(*(None,) * len(output.shape))
        return jax.core.ShapedArray(output.shape, output.dtype, sharding=jax.sharding.NamedSharding(mesh, whole))

    return [typed(output) for output in launch.outputs]


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: object, launch: Launch, capability: tuple[int, int] | None, name: str
) -> Any:
    if capability is None:
        raise RuntimeError(f"{launch.name} is compiled for a compute capability, and that of the device is unknown")
    check_is_here("triton", package_reasons())
    kernel = compiled(launch, capability)
    scratch = _scratch(launch, kernel)
    call = _call_of(launch, kernel, capability, len(scratch), name)
    # Results of the custom call: fresh outputs, scratch, outputs in place. Aliases count the scratch, callers do not
    # get it.
    fresh, first = ctx.avals_out[: len(launch.fresh)], len(launch.fresh) + len(scratch)
    lower = jax.ffi.ffi_lowering(
        _TARGET,
        operand_output_aliases={source: first + i for i, source in enumerate(launch.in_place)},
    )
    ctx = ctx.replace(avals_out=[*fresh, *scratch, *ctx.avals_out[len(fresh) :]])
    results = list(lower(ctx, *operands, opaque=zlib.compress(call.to_proto(name, b""))))
    return [*results[: len(fresh)], *results[first:]]


def _scratch(launch: Launch, kernel: CompiledKernel) -> list[jax.core.ShapedArray]:
    """Scratch memory in which a kernel builds its TMA descriptors: an additional result that is never read, or none.

    The custom call could allocate it, but only while it runs, and CUDA graphs cannot capture that.
    """
    metadata = kernel.metadata
    if not metadata.global_scratch_size:
        return []
    assert metadata.global_scratch_align <= SCRATCH_ALIGNMENT, metadata.global_scratch_align
    return [jax.core.ShapedArray((math.prod(launch.grid) * metadata.global_scratch_size,), jnp.uint8)]


def _call_of(launch: Launch, kernel: CompiledKernel, capability: tuple[int, int], scratch: int, name: str) -> Any:
    from jax._src.lib import gpu_triton  # has no public name; the import registers the custom call

    # Without the CUDA plugin the module has no such class.
    if not callable(getattr(gpu_triton, "TritonKernelCall", None)):
        raise TargetDeviceError(
            f"{name} is a Triton kernel, which JAX lowers only where its CUDA plugin is installed "
            "(pip install 'jax[cuda13]'; it needs no GPU); tilewright.explain needs none"
        )
    metadata = kernel.metadata
    # Triton compiles a function once for all calls that it is a part of.
    ptx = re.sub(rf"\b{re.escape(metadata.name)}\b", name, kernel.asm["ptx"])
    number = 10 * capability[0] + capability[1]
    clusters = 1
    program = gpu_triton.TritonKernel(name, launch.num_warps, clusters, metadata.shared, ptx, "", number)
    array = gpu_triton.create_array_parameter(0, ALIGNMENT)
    scalars = [gpu_triton.create_scalar_parameter(value, "i32") for _, value in launch.scalars if value != 1]
    # The custom call takes pointers from the operands, then from the results; those of outputs in place come last, and
    # are left over. Every compiled kernel takes a pointer to scratch memory after its own parameters.
    parameters = [*[array] * len(launch.inputs), *scalars, *[array] * (len(launch.fresh) + scratch)]
    return gpu_triton.TritonKernelCall(program, *launch.grid, parameters)


def _lower_elsewhere(
    ctx: mlir.LoweringRuleContext, *_: object, launch: Launch, capability: tuple[int, int] | None, name: str
) -> Any:
    raise RuntimeError(f"{launch.name} is a Triton kernel: it runs on CUDA GPUs, not on {ctx.module_context.platforms}")


def _batch(*_: object, launch: Launch, **__: Any) -> Any:
    raise NotImplementedError(f"{launch.name} has no rule for vmap: define one by jax.custom_batching.custom_vmap")


mlir.register_lowering(_triton_p, _lower, platform="cuda")
mlir.register_lowering(_triton_p, _lower_elsewhere)
batching.primitive_batchers[_triton_p] = _batch
