"""A kernel in CUDA C++: selects the variant for a problem, builds it when first needed, and calls it."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.errors import BuildError
from tilewright.kernels.cuda import library, toolchain
from tilewright.kernels.cuda.build import Group, build
from tilewright.kernels.cuda.cache import BuildCache
from tilewright.kernels.cuda.devices import capability_of, device_values
from tilewright.kernels.cuda.library import Library
from tilewright.kernels.cuda.requirements import Predicate, Values, without_smaller_bounds
from tilewright.kernels.cuda.table import Variant, VariantTable
from tilewright.ops.types import Device
from tilewright.ops.utils.memory import clear_all
from tilewright.ops.utils.target import check_is_here, is_assumed

logger = logging.getLogger(__name__)

type Problem = Mapping[str, int]

_NEEDED_GROUPS: ContextVar[dict[Group, None] | None] = ContextVar("noted groups", default=None)


@contextlib.contextmanager
def recording_groups() -> Iterator[dict[Group, None]]:
    """Records the groups that calls in this context need, and compiles none of them.

    Programs lowered in this context are for inspection and must not run: a group that is not built is assumed to serve
    everything not known otherwise, and its results are zeros.
    """
    noted: dict[Group, None] = {}
    clear_all()  # an earlier trace would be reused, and record nothing
    token = _NEEDED_GROUPS.set(noted)
    try:
        yield noted
    finally:
        _NEEDED_GROUPS.reset(token)
        clear_all()  # traces made here must not run


class CudaKernel:
    """The kernel of one table.

    A problem is a mapping from the table's fields to integers.

    Args:
      cache: a build cache other than the user's.
    """

    def __init__(self, table: VariantTable, cache: BuildCache | None = None) -> None:
        self.table = table
        self._cache = cache

    @property
    def cache(self) -> BuildCache:
        """The build cache; the user's is determined at each use, since the environment may change."""
        return self._cache or BuildCache()

    def reasons(self, problem: Problem, device: Device) -> list[str]:
        """Reasons why no variant can serve a problem on a device, as far as they are known without compiling.

        The reasons are those of the variants with the fewest unmet requirements. An empty list does not promise
        support: requirements on a compiled kernel's facts are checked by `select`.
        """
        return self.closest(problem, device)[1]

    def closest(self, problem: Problem, device: Device) -> tuple[int, list[str]]:
        """The fewest unmet requirements of any variant, without those on facts, and the `reasons`.

        With several tables for one op, the reasons of the table with the fewest are those that matter to the caller.
        """
        values = self._values(problem, device)
        if values is None:
            return 0, [_no_capability(device)]
        capability = values.device["capability"]
        variants = self.table.for_capability(capability)
        if not variants:
            return 0, [f"no variant of {self.table.name} is for compute capability {capability / 10}"]
        by_num_unmet: dict[int, list[Predicate]] = {}  # unmet requirements of variants with that many
        not_compiled: list[str] = []
        for variant in variants:
            unmet = _unmet_requirements(variant, values)
            if not unmet:
                variant_reasons = self._reasons_without_compiling(variant, values)
                if not variant_reasons:
                    return 0, []
                not_compiled += variant_reasons
            # With 0 unmet, a fact of the compiled kernel is against the variant, or nothing can be compiled here.
            by_num_unmet.setdefault(len(unmet), []).extend(unmet)
        fewest = min(by_num_unmet)
        reasons = not_compiled or [each.reason(values) for each in without_smaller_bounds(by_num_unmet[fewest])]
        return fewest, list(dict.fromkeys(reasons))

    def select(self, problem: Problem, device: Device) -> tuple[Variant | None, dict[str, list[str]]]:
        """The first variant that can serve a problem, and for every one before it the reasons why it cannot.

        Builds the groups of variants whose requirements on problem and device are met, until one variant is accepted.

        Raises:
          BuildError: a group failed to compile.
        """
        values = self._values(problem, device)
        if values is None:
            return None, {variant.name: [_no_capability(device)] for variant in self.table.variants}
        reasons: dict[str, list[str]] = {}
        for variant in self.table.variants:
            # Ask the second only if the first has no reason: it may compile the variant's group.
            unmet = _unmet_without_facts(variant, values) or self._reasons_compiled(variant, values)
            if not unmet:
                return variant, reasons
            reasons[variant.name] = unmet
        return None, reasons

    def needed(self, problem: Problem, device: Device, variants: Sequence[Variant] | None = None) -> Group | None:
        """The group of the first variant that can serve a problem, built or not; ``None`` if no variant can.

        A variant whose facts are unknown, because it is not compiled, is assumed to meet its requirements on facts.

        Args:
          variants: the variants to consider, in order; by default all of the table.
        """
        values = self._values(problem, device)
        if values is None:
            return None
        for variant in self.table.variants if variants is None else variants:
            if not _unmet_without_facts(variant, values) and not self._reasons_without_compiling(variant, values):
                return self._group(variant, values)
        return None

    def variant_reasons(
        self, variant: Variant, problem: Problem, device: Device, *, compiled: bool = False
    ) -> list[str]:
        """Every reason why one variant cannot serve a problem.

        Args:
          compiled: compile the variant if that is needed to decide.

        Raises:
          BuildError: its group failed to compile.
        """
        values = self._values(problem, device)
        if values is None:
            return [_no_capability(device)]
        further = self._reasons_compiled if compiled else self._reasons_without_compiling
        return _unmet_without_facts(variant, values) or further(variant, values)

    def facts(self, variant: Variant, device: Device) -> Mapping[str, int]:
        """Shared memory, threads and alignment of a variant that was selected for a device."""
        return self._library(variant, device).facts[variant.name]

    def workspace(self, variant: Variant, problem: Problem, device: Device) -> int:
        """Bytes of scratch memory that a variant needs for a problem."""
        return self._library(variant, device).workspace(variant.name, self._field_values(problem))

    def call(
        self,
        variant: Variant,
        problem: Problem,
        device: Device,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        attributes: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a variant on ``inputs``; returns arrays like ``outputs``.

        Args:
          variant: the one that `select` returned for the same problem and device.
          inputs: arrays in row-major layout.
          outputs: ``jax.ShapeDtypeStruct`` of each result.
          attributes: strings, and numpy scalars and arrays of the dtypes that the kernel expects.
        """
        values = self._field_values(problem)
        noted = _NEEDED_GROUPS.get()
        if noted is not None:
            group = self._group_on(variant, device)
            noted[group] = None
            # The program is only read, so zeros of the right shapes suffice.
            if library.loaded(group, self.cache) is None:
                return [jnp.zeros(each.shape, each.dtype) for each in outputs]
        compiled = self._library(variant, device)
        workspace = jax.ShapeDtypeStruct((compiled.workspace(variant.name, values),), np.uint8)
        # Scratch memory is a result that is never read: allocated by XLA, it may be captured in a CUDA graph.
        call = jax.ffi.ffi_call(compiled.registered, [*outputs, workspace], vmap_method="sequential")
        call_attributes = dict(attributes or {}) | {"variant": variant.name, "problem": np.array(values, np.int64)}
        *results, _ = call(*inputs, **call_attributes)
        return results

    def _values(self, problem: Problem, device: Device) -> Values | None:
        """The values that predicates read; ``None`` for a device without a compute capability."""
        fields = dict(zip(self.table.fields, self._field_values(problem), strict=True))
        known = device_values(device)
        return None if known is None else Values(fields, known)

    def _field_values(self, problem: Problem) -> list[int]:
        if problem.keys() != set(self.table.fields):
            raise ValueError(
                f"a problem of {self.table.name} has the fields {self.table.fields}, got {sorted(problem)}"
            )
        return [int(problem[name]) for name in self.table.fields]

    def _reasons_without_compiling(self, variant: Variant, values: Values) -> list[str]:
        """Known reasons against a variant that meets all requirements not on facts; compiles nothing."""
        try:
            compiled = library.loaded(self._group(variant, values), self.cache)
        except BuildError as error:
            return [str(error)]
        return self._missing(values) if compiled is None else _unmet(variant, values, compiled)

    def _reasons_compiled(self, variant: Variant, values: Values) -> list[str]:
        """Reasons against a variant that meets all requirements not on facts; compiles it if necessary."""
        group = self._group(variant, values)
        compiled = library.loaded(group, self.cache)
        if compiled is None:
            missing = self._missing(values)
            if missing:
                return missing
            if _NEEDED_GROUPS.get() is not None:
                return []
            check_is_here("nvcc", self._missing_here(values))
            logger.warning("building %s into %s, once; this may take some minutes", group, self.cache.path)
            compiled = library.load(group, self.cache, build([group], cache=self.cache)[group])
        return _unmet(variant, values, compiled)

    def _group(self, variant: Variant, values: Values) -> Group:
        return Group(self.table, variant.group, values.device["capability"])

    def _missing(self, values: Values) -> list[str]:
        return [] if is_assumed("nvcc") else self._missing_here(values)

    def _missing_here(self, values: Values) -> list[str]:
        return toolchain.missing(values.device["capability"], self.table.packages)

    def _group_on(self, variant: Variant, device: Device) -> Group:
        capability = capability_of(device)
        if capability is None:
            raise ValueError(f"{variant.name} cannot run on {device.name}, which has no CUDA compute capability")
        return Group(self.table, variant.group, capability)

    def _library(self, variant: Variant, device: Device) -> Library:
        group = self._group_on(variant, device)
        compiled = library.loaded(group, self.cache)
        if compiled is None:
            compiled = library.load(group, self.cache, build([group], cache=self.cache)[group])
        if variant.name not in compiled.facts:
            raise ValueError(
                f"{variant.name} is for the architectures {variant.arch_range}, not for {group.capability}"
            )
        return compiled


def _no_capability(device: Device) -> str:
    return f"{device.name} has no CUDA compute capability that is known here"


def _unmet_without_facts(variant: Variant, values: Values) -> list[str]:
    """Reasons against a variant by its requirements that are not on facts."""
    reasons = []
    if not variant.runs_on(values.device["capability"]):
        low, high = variant.arch_range
        reasons.append(f"capability must be in [{low}, {high}), got capability={values.device['capability']}")
    return reasons + [requirement.reason(values) for requirement in _unmet_requirements(variant, values)]


def _unmet_requirements(variant: Variant, values: Values) -> list[Predicate]:
    requirements = [requirement for requirement in variant.requirements if not requirement.needs_facts]
    return [requirement for requirement in requirements if not requirement.holds(values)]


def _unmet(variant: Variant, values: Values, compiled: Library) -> list[str]:
    known = Values(values.problem, values.device, compiled.facts[variant.name])
    requirements = [requirement for requirement in variant.requirements if requirement.needs_facts]
    return [requirement.reason(known) for requirement in requirements if not requirement.holds(known)]
