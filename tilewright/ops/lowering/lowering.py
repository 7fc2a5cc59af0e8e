"""Lowers a kernel's program once per process and once per machine, whichever user programs contain it.

``run`` binds one equation for it. When the user's program is lowered, the kernel's MLIR module is taken from memory or
from disk, or made, and becomes a function of the user's module, which is called. A kernel that cannot be moved between
programs, for example because of callbacks, is lowered in place, as if there were no such equation.
"""

import dataclasses
import functools
import logging
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from tilewright.ops.lowering import ahead, custom_calls, mlir_modules
from tilewright.ops.lowering.lowered_files import LoweredFiles
from tilewright.ops.lowering.program_key import describe, is_shared, read, written
from tilewright.ops.lowering.stages import Program, Results, traced
from tilewright.ops.lowering.surroundings import (
    LoweringContext,
    NotDescribableError,
    lowering_context,
    trace_settings,
    without_label,
)
from tilewright.ops.utils.memory import LruCache

logger = logging.getLogger(__name__)

MEMORY_LIMIT = 128 << 20
"""Bytes of lowered kernels that a process keeps in memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A program as an MLIR module with a function ``main`` of its flat operands.

    Attributes:
      bytecode: ``None`` for a program that must be lowered in place.
    """

    bytecode: bytes | None


def _size(lowered: Lowered) -> int:
    return 1024 + len(lowered.bytecode or b"")


_RESULTS: LruCache[Results] = LruCache("tilewright results of kernels", 4096)
_LOWERED: LruCache[Lowered] = LruCache("tilewright's lowered kernels", MEMORY_LIMIT, _size)
_FILES = LoweredFiles()


@dataclasses.dataclass(frozen=True)
class KnownProgram:
    """A program under the settings in force when it was asked about, with what is known of it, asked once."""

    program: Program
    settings: Hashable = dataclasses.field(default_factory=trace_settings, repr=False)

    @functools.cached_property
    def description(self) -> dict[str, Any] | None:
        """The program as JSON data, by which it is known on disk; ``None`` if it must not be stored there."""
        return describe(self.program, self.settings)

    @functools.cached_property
    def trace(self) -> tuple[Any, Results]:
        """The program as a closed jaxpr, and the properties of its results."""
        return traced(self.program)

    @functools.cached_property
    def results(self) -> Results:
        """The results' abstract values, from memory, from disk, or else by tracing the program."""
        key = (self.program, self.settings)
        return _RESULTS.get(key) or _RESULTS.put(key, self._find_or_trace())

    def _find_or_trace(self) -> Results:
        description = self.description
        file = None if description is None else _FILES.get(description)
        found = None if file is None else read(file.about)
        if found is not None:
            return found
        results = self.trace[1]
        if description is not None and not _belongs_to_caller(results) and (about := written(results)) is not None:
            _FILES.put(description, about, b"")
        return results


def results_of(program: Program) -> Results:
    """The abstract values of a program's results."""
    return KnownProgram(program).results


def run(known: KnownProgram, *operands: jax.Array) -> list[Any]:
    """Runs a program on its operands; returns the flat results."""
    results: list[Any] = program_p.bind(*operands, known=known)
    return results


program_p = Primitive("tilewright_program")
program_p.multiple_results = True


def _abstract_eval(*_: jax.core.AbstractValue, known: KnownProgram) -> tuple[list[Any], set[Any]]:
    return list(known.results.avals), set(known.results.effects)


program_p.def_effectful_abstract_eval(_abstract_eval)


def _impl(*operands: jax.Array, known: KnownProgram) -> list[Any]:
    return jax.tree.leaves(known.program.function(*operands))


program_p.def_impl(_impl)


def _lowering_rule(ctx: mlir.LoweringRuleContext, *operands: mlir_modules.Value, known: KnownProgram) -> Any:
    program = known.program
    with without_label():
        context = lowering_context(ctx) if _can_be_shared(known, operands) else None
        if context is not None:
            key = (program, known.settings, context)
            lowered = _LOWERED.get(key) or _LOWERED.put(key, _find_or_lower(ctx, operands, known, context))
            if lowered.bytecode is not None:
                name = f"kernel.{program.stage.kernel.name}.{program.stage.name}"
                return mlir_modules.call(ctx, key, lowered.bytecode, operands, name)
        return mlir.lower_fun(jaxpr_as_fun(known.trace[0]))(ctx, *operands)


mlir.register_lowering(program_p, _lowering_rule)


def _can_be_shared(known: KnownProgram, operands: Sequence[object]) -> bool:
    """True if the program can be lowered independently of the program that calls it."""
    values = all(isinstance(operand, ir.Value) for operand in operands)
    return values and is_shared(known.program) and not _belongs_to_caller(known.results)


def _belongs_to_caller(results: Results) -> bool:
    """True if a program has effects, or depends on choices that the program calling it would make."""
    return bool(results.effects) or results.chooses


def _find_or_lower(
    ctx: mlir.LoweringRuleContext, operands: Sequence[mlir_modules.Value], known: KnownProgram, context: LoweringContext
) -> Lowered:
    """The lowered program from disk, or else lowered now and stored on disk."""
    disk_key = _described(known, context)
    if disk_key is not None and (found := _from_disk(ctx, operands, disk_key)) is not None:
        return found
    module = mlir_modules.lower(ctx, known.trace[0], operands)
    if module is None:
        return Lowered(None)
    bytecode = mlir_modules.bytecode_of(module)
    if disk_key is not None and custom_calls.can_be_kept(targets := mlir_modules.custom_calls(module)):
        # Another process may have been faster: if all use the same module, JAX's cache compiles one program for all.
        if _FILES.has(disk_key) and (found := _from_disk(ctx, operands, disk_key)) is not None:
            return found
        _FILES.put(disk_key, {"targets": targets}, bytecode)
    ahead.begin(ctx, module)
    return Lowered(bytecode)


def _described(known: KnownProgram, context: LoweringContext) -> dict[str, Any] | None:
    """The key of a lowered program on disk; ``None`` if it must not be stored there."""
    if known.description is None:
        return None
    try:
        return {**known.description, "platform": context.platform, "surroundings": context.described()}
    except NotDescribableError as error:
        logger.debug("%s is not kept on disk: %s", known.program.stage.kernel.name, error)
        return None


def _from_disk(
    ctx: mlir.LoweringRuleContext, operands: Sequence[mlir_modules.Value], disk_key: dict[str, Any]
) -> Lowered | None:
    """Loads the lowered program stored under a key, ready to be compiled."""
    file = _FILES.get(disk_key)
    if file is None:
        return None
    try:
        targets = file.about["targets"]
        if custom_calls.are_made_otherwise(targets):
            return None
        custom_calls.register(targets)
        module = mlir_modules.parsed(ctx, file.content)
        if not mlir_modules.takes(module, operands):
            raise ValueError("it is for other operands")
    except (KeyError, TypeError, ValueError, ImportError) as error:
        logger.warning("a lowered kernel on disk is not used: %s", error)
        return None
    ahead.begin(ctx, module)
    return Lowered(file.content)
