"""Keys by which other processes recognise a program, and JSON forms of its results."""

import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from tilewright.ops.config.persistent import REBUILD_ERRORS, rebuild_config
from tilewright.ops.kernel.arrays import first_sharding, is_symbolic, struct_of
from tilewright.ops.lowering.stages import RESHAPES, Program, Reshaping, Results, Stage
from tilewright.ops.lowering.surroundings import (
    NotDescribableError,
    described,
    is_dumping,
)
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.serialize import canonical_json, qualified_name, tagged, untagged
from tilewright.ops.utils.sources import packages_fingerprint

logger = logging.getLogger(__name__)

_SCHEMA = 1
_RESHAPES = {primitive.name: primitive for primitive in RESHAPES}
# Packages whose types are identified by the versions in the toolchain.
_KNOWN_PACKAGES = frozenset({"builtins", "jax", "jaxlib", "numpy", "ml_dtypes"})


def is_shared(program: Program) -> bool:
    """True if programs can share one lowering of it: without symbolic sizes and not sharded over a mesh."""
    sizes = (size for aval in program.avals for size in getattr(aval, "shape", ()))
    if is_symbolic(*sizes, *(axis.size for axis in program.mapped)) or is_dumping():
        return False
    return first_sharding(program.avals) is None


def is_kept_on_disk() -> bool:
    """False if the environment variable ``TILEWRIGHT_LOWERED`` is 0: then nothing is stored on disk."""
    return os.environ.get("TILEWRIGHT_LOWERED", "") != "0"


def describe(program: Program, settings: Hashable) -> dict[str, Any] | None:
    """Describes a program under some settings as JSON data; ``None`` if it must not be stored on disk."""
    stage = program.stage
    names = stage.kernel.lowering_packages(program.cfg.value)
    if not names or not is_kept_on_disk() or not is_shared(program):
        return None
    source = packages_fingerprint(frozenset(names))
    if not source:
        return None
    try:
        known_settings = described(settings)  # at first: those of an absent device have no such form
        return {
            "schema": _SCHEMA,
            "op": stage.kernel.name,
            "version": stage.kernel.version,
            "kernel": qualified_name(type(stage.kernel)),
            "stage": stage.name,
            **_arguments(stage, program.avals, {*names, *_KNOWN_PACKAGES}),
            "operands": _written_avals(program.avals),
            "wanted": list(stage.wanted),
            "mapped": [[axis.size, list(axis.mapped)] for axis in program.mapped],
            "cfg": tagged(program.cfg.value),
            "device": [program.device.kind, program.device.name, program.device.capability, program.device.cores],
            "settings": known_settings,
            "source": source,
            "toolchain": toolchain_fingerprint(),
        }
    except (TypeError, NotDescribableError) as error:
        logger.debug("%s is not kept on disk: %s", stage.kernel.name, error)
        return None


def _arguments(stage: Stage, avals: tuple[Any, ...], packages: set[str]) -> dict[str, Any]:
    """The structures of the operands, static values included.

    Raises:
      TypeError: a static value has no JSON form, or depends on code outside of the sources of those packages.
    """
    found: dict[str, type] = {}
    structs = [struct_of(aval) for aval in avals]
    count = stage.num_arrays
    structures = {"arguments": tagged(stage.structure.join(structs[:count]), found=found)}
    if stage.extra is not None:
        structures["extra"] = tagged(stage.extra.join(structs[count:]), found=found)
    text = canonical_json(structures)
    if '"$callable":' in text:
        raise TypeError("a function among the arguments is known by its name alone")
    # An array inside of a static value is described without its values, so the key would be incomplete.
    if text.count('"$array":') != len(avals):
        raise TypeError("an array stands in a static value")
    foreign = {name for name, kind in found.items() if kind.__module__.partition(".")[0] not in packages}
    if foreign:
        raise TypeError(f"the sources of {sorted(foreign)} are not among those of the kernel")
    return structures


def written(results: Results) -> dict[str, Any] | None:
    """Results as JSON data; ``None`` if they would not survive the round trip."""
    indices = list(range(len(results.avals)))
    try:
        about = {
            "avals": _written_avals(results.avals),
            "tree": tagged(results.tree.unflatten(indices)),
            "sources": [[index, _written_reshaping(reshaping)] for index, reshaping in results.sources],
            "has_kernels": results.has_kernels,
        }
    except (TypeError, NotDescribableError, *REBUILD_ERRORS) as error:
        logger.debug("results are not kept on disk: %s", error)
        return None
    return about if read(about) == results else None


def read(about: Mapping[str, Any]) -> Results | None:
    """Rebuilds the results that `written` described; ``None`` if that fails, for example without their classes."""
    try:
        avals = tuple(_read_aval(aval) for aval in about["avals"])
        leaves, tree = jax.tree.flatten(rebuild_config(about["tree"], None))
        if leaves != list(range(len(avals))):
            return None
        sources = tuple((index, _read_reshaping(reshaping)) for index, reshaping in about["sources"])
        return Results(avals, tree, frozenset(), sources, has_kernels=about["has_kernels"])
    except (KeyError, TypeError, *REBUILD_ERRORS) as error:
        logger.debug("results cannot be rebuilt: %s", error)
        return None


def _written_avals(avals: Sequence[Any]) -> Any:
    if not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        raise TypeError(f"{avals!r} are not all arrays")
    structs = [struct_of(aval) for aval in avals]
    varying = [sorted(aval.manual_axis_type.varying) for aval in avals]
    return tagged([{"struct": struct, "varying": axes} for struct, axes in zip(structs, varying, strict=True)])


def _read_aval(aval: Mapping[str, Any]) -> Any:
    struct, mesh = untagged(aval["struct"]), jax.sharding.get_abstract_mesh()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(struct.shape)))
    array = jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type, sharding=replicated)
    varying = frozenset(aval["varying"])
    return array.update(manual_axis_type=type(array.manual_axis_type)(varying=varying)) if varying else array


def _written_reshaping(reshaping: Reshaping | None) -> Any:
    return None if reshaping is None else [reshaping.primitive.name, tagged(reshaping.params)]


def _read_reshaping(data: Sequence[Any] | None) -> Reshaping | None:
    return None if data is None else Reshaping(_RESHAPES[data[0]], untagged(data[1]))
