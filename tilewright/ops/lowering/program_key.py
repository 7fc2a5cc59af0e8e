"""A program as another process would recognise it, and what is known of its results as it is written down."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tilewright.ops.config.persistent import REBUILD_ERRORS, rebuild_config
from tilewright.ops.kernel.arrays import explicit_sharding, is_symbolic, struct_of
from tilewright.ops.lowering.stages import RESHAPES, Program, Reshaping, Results, Stage
from tilewright.ops.lowering.surroundings import (
    NotDescribableError,
    described,
    is_dumping,
    sources_fingerprint,
    trace_settings,
)
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.serialize import canonical_json, qualified_name, tagged, untagged

logger = logging.getLogger(__name__)

_SCHEMA = 1
_RESHAPES = {primitive.name: primitive for primitive in RESHAPES}
# Types that come with what the toolchain's versions say.
_KNOWN_PACKAGES = frozenset({"builtins", "jax", "jaxlib", "numpy", "ml_dtypes"})


def is_shared(program: Program) -> bool:
    """Tells if programs may share one lowering of it: not with symbolic sizes, nor where it is split over a mesh."""
    sizes = (size for aval in program.avals for size in getattr(aval, "shape", ()))
    if is_symbolic(*sizes, *(axis.size for axis in program.mapped)) or is_dumping():
        return False
    return all(explicit_sharding(aval) is None for aval in program.avals)


def is_kept_on_disk() -> bool:
    """Tells if anything is to be kept: the environment variable ``TILEWRIGHT_LOWERED`` is not 0."""
    return os.environ.get("TILEWRIGHT_LOWERED", "") != "0"


def describe(program: Program) -> dict[str, Any] | None:
    """A program under the settings in force as JSON data; ``None`` if it is not one to be kept on disk."""
    stage = program.stage
    if not is_kept_on_disk() or not is_shared(program):
        return None
    names = stage.kernel.lowering_packages(program.cfg.value)
    source = sources_fingerprint(names) if names else ""
    if not source:
        return None
    try:
        return {
            "schema": _SCHEMA,
            "op": stage.kernel.name,
            "version": stage.kernel.version,
            "kernel": qualified_name(type(stage.kernel)),
            "stage": stage.name,
            **_arguments(stage, program.avals, {*names, *_KNOWN_PACKAGES}),
            "operands": [_written_aval(aval) for aval in program.avals],
            "wanted": list(stage.wanted),
            "mapped": [[axis.size, list(axis.mapped)] for axis in program.mapped],
            "cfg": tagged(program.cfg.value),
            "device": [program.device.kind, program.device.name, program.device.capability, program.device.cores],
            "settings": described(trace_settings()),
            "source": source,
            "toolchain": toolchain_fingerprint(),
        }
    except (TypeError, NotDescribableError) as error:
        logger.debug("%s is not kept on disk: %s", stage.kernel.name, error)
        return None


def _arguments(stage: Stage, avals: tuple[Any, ...], packages: set[str]) -> dict[str, Any]:
    """The structures of the operands, static values included.

    Raises:
      TypeError: a static value has no JSON form, or more code than the sources of those packages decides what it does.
    """
    found: dict[str, type] = {}
    structs = [struct_of(aval) for aval in avals]
    count = stage.num_arrays
    told = {"arguments": tagged(stage.structure.join(structs[:count]), found=found)}
    if stage.extra is not None:
        told["extra"] = tagged(stage.extra.join(structs[count:]), found=found)
    text = canonical_json(told)
    if '"$callable":' in text:
        raise TypeError("a function among the arguments is known by its name alone")
    # Of an array that is part of a static value, the values would not be told.
    if text.count('"$array":') != len(avals):
        raise TypeError("an array stands in a static value")
    foreign = {name for name, kind in found.items() if kind.__module__.partition(".")[0] not in packages}
    if foreign:
        raise TypeError(f"the sources of {sorted(foreign)} are not among those of the kernel")
    return told


def written(results: Results) -> dict[str, Any] | None:
    """Results as JSON data; ``None`` if they would not come back as they are."""
    indices = list(range(len(results.avals)))
    try:
        about = {
            "avals": [_written_aval(aval) for aval in results.avals],
            "tree": tagged(results.tree.unflatten(indices)),
            "sources": [[index, _written_reshaping(reshaping)] for index, reshaping in results.sources],
        }
    except (TypeError, NotDescribableError, *REBUILD_ERRORS) as error:
        logger.debug("results are not kept on disk: %s", error)
        return None
    return about if read(about) == results else None


def read(about: Mapping[str, Any]) -> Results | None:
    """Results from what `written` returned; ``None`` if they cannot be rebuilt, as without their classes."""
    try:
        avals = tuple(_read_aval(aval) for aval in about["avals"])
        leaves, tree = jax.tree.flatten(rebuild_config(about["tree"], None))
        if leaves != list(range(len(avals))):
            return None
        sources = tuple((index, _read_reshaping(reshaping)) for index, reshaping in about["sources"])
        return Results(avals, tree, frozenset(), sources)
    except (KeyError, TypeError, *REBUILD_ERRORS) as error:
        logger.debug("results cannot be rebuilt: %s", error)
        return None


def _written_aval(aval: object) -> dict[str, Any]:
    if not isinstance(aval, jax.core.ShapedArray):
        raise TypeError(f"{aval!r} is no array")
    return {"struct": tagged(struct_of(aval)), "varying": tagged(sorted(aval.manual_axis_type.varying))}


def _read_aval(aval: Mapping[str, Any]) -> Any:
    struct, mesh = untagged(aval["struct"]), jax.sharding.get_abstract_mesh()
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(struct.shape)))
    made = jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=struct.weak_type, sharding=whole)
    varying = frozenset(aval["varying"])
    return made.update(manual_axis_type=type(made.manual_axis_type)(varying=varying)) if varying else made


def _written_reshaping(reshaping: Reshaping | None) -> Any:
    return None if reshaping is None else [reshaping.primitive.name, tagged(reshaping.params)]


def _read_reshaping(told: Sequence[Any] | None) -> Reshaping | None:
    return None if told is None else Reshaping(_RESHAPES[told[0]], untagged(told[1]))
