"""Maps a kernel over a batch or over devices, with one config selected for a single element."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tilewright.ops.config.chooser import ConfigChooser, Selection
from tilewright.ops.config.context import Overrides, current_overrides, synchronise
from tilewright.ops.executor import Executor, default_executor
from tilewright.ops.kernel.arrays import split
from tilewright.ops.kernel.kernel import Invocation, Kernel, check_kernel
from tilewright.ops.lowering.programs import Programs
from tilewright.ops.types import Out


class ElementChooser(ConfigChooser):
    """Chooses the config of one element of a mapped call and ignores the mapped axes around it."""

    def __init__(self, chooser: ConfigChooser):
        self._chooser = chooser

    def choose(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        return self._chooser.choose(_element(inv), cfg=cfg, overrides=overrides)

    def lookup(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        return self._chooser.lookup(_element(inv), cfg=cfg, overrides=overrides)

    @property
    def version(self) -> int:
        return self._chooser.version


def _element(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    return Invocation(inv.kernel, inv.args, inv.kwargs, inv.metadata, inv.direction, (), inv.device)


def _element_executor(kernel: Kernel[Any, Any], executor: Executor[Any, Any] | None) -> Executor[Any, Any]:
    check_kernel(kernel)
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(f"{executor=} must be an Executor or None")
    return Executor(ElementChooser((executor or default_executor()).chooser))


def vmap_with_config(
    kernel: Kernel[Any, Out],
    in_axes: int | Sequence[Any] | None = 0,
    out_axes: object = 0,
    *,
    executor: Executor[Any, Any] | None = None,
    cfg: object = None,
) -> Callable[..., Out]:
    """``jax.vmap`` of a kernel, run with the config that a single element would get.

    Args:
      in_axes: as for ``jax.vmap``, for the positional arguments; keyword arguments are not mapped.
      out_axes: as for ``jax.vmap``.
      executor: supplies the chooser; the default executor by default.
      cfg: an explicit config.
    """
    element = _element_executor(kernel, executor)

    def mapped(*args: object, **kwargs: object) -> Any:
        return jax.vmap(lambda *each: element(kernel, *each, cfg=cfg, **kwargs), in_axes, out_axes)(*args)

    return mapped


def pmap_with_config(
    kernel: Kernel[Any, Out],
    axis_name: str = "devices",
    *,
    executor: Executor[Any, Any] | None = None,
    cfg: object = None,
) -> Callable[..., Out]:
    """Runs a kernel on every local device, each on its slice of the leading axis, with one config for all devices.

    Positional arrays and results have a leading axis as long as the number of local devices. Everything else, keyword
    arrays included, is replicated.

    Args:
      axis_name: the mesh axis, for collectives inside the kernel.

    Raises:
      ValueError: the leading axis of an array has another size.
    """
    element = _element_executor(kernel, executor)

    programs = Programs()

    def mapped(*args: object, **kwargs: object) -> Any:
        sliced, arguments = split(args)
        shared, options = split(kwargs)
        devices = jax.local_devices()
        for array in sliced:
            if array.ndim == 0 or array.shape[0] != len(devices):
                raise ValueError(f"the leading axis of {array.shape=} must have the size of {len(devices)=}")

        def spread() -> Callable[..., Any]:
            def on_each(slices: list[Any], replicated: list[Any]) -> Any:
                element_args = arguments.join([array[0] for array in slices])
                out = element(kernel, *element_args, cfg=cfg, **options.join(replicated))
                return jax.tree.map(lambda x: x[None], out)

            mesh = jax.sharding.Mesh(np.array(devices), (axis_name,))
            specs = (PartitionSpec(axis_name), PartitionSpec())
            return jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)

        overrides = current_overrides()
        synchronise()
        program = programs.get((arguments, options, overrides), element.chooser, overrides, spread)
        return program.run(sliced, shared)

    return mapped
