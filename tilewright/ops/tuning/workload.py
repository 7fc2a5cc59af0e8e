"""The runnable form of one invocation: its inputs, its stage under a given config, and the oracle's results."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tilewright.ops.config.chooser import ConfigChooser
from tilewright.ops.config.context import current_overrides
from tilewright.ops.kernel.arrays import Shaped, split
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.optional import gradient_form
from tilewright.ops.kernel.parts import Arguments, OraclePart
from tilewright.ops.lowering import ahead
from tilewright.ops.lowering.call import Call, Selector, code_of, known_results
from tilewright.ops.lowering.gradients import array_labels
from tilewright.ops.lowering.lowering import results_of
from tilewright.ops.lowering.stages import map_axes
from tilewright.ops.tuning.numerics import promoted, tree_violations
from tilewright.ops.types import MappedAxis
from tilewright.ops.utils.untraced import numerics_here

SEED = 20
# Number of different elements drawn for mapped axes; longer ones repeat them.
DISTINCT_ELEMENTS = 8
# The oracle runs twice only: autotuning its matmuls would take longer than running them untuned.
ORACLE_OPTIONS: dict[str, bool | int | str] = {"xla_gpu_autotune_level": 0}


class Workload:
    """One invocation made runnable.

    Args:
      inv: the invocation.
      chooser: provides the forward config if the invocation is a backward pass.
      inputs: prepared arguments of one call; sampled by default.
      verify: compute the oracle's results to check candidates against.

    Attributes:
      operands: the operands of every compiled candidate.
      checked: True if ``check`` compares with an oracle.
    """

    def __init__(
        self, inv: Invocation[Any, Any], chooser: ConfigChooser, inputs: Arguments | None = None, *, verify: bool = True
    ):
        self._inv = inv
        self._device = inv.target
        arrays, structure = self._sampled() if inputs is None else split(inputs)
        selector = Selector(chooser, None, current_overrides())
        self._call = Call(inv.kernel, selector, structure, (None,) * len(arrays))
        self._mesh = inv.kernel.measured_on(inv)
        self.operands: list[Any] = [self._placed(jnp.asarray(a)) for a in arrays]
        self._mapped = inv.mapped
        if inv.direction == "backward":
            self._add_cotangents(chooser)
        self.checked = verify and inv.kernel.reference is not None
        self._oracle_results: concurrent.futures.Future[tuple[float, list[_Answer]]] | None = None

    def start_oracle(self, device_access: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        """Runs the oracle in another thread, inside of ``device_access()``, while candidates are compiled."""
        if not self.checked or self._oracle_results is not None:
            return
        numerics = numerics_here()  # those of this thread; the other thread has its own

        def answer() -> tuple[float, list[_Answer]]:
            with numerics(), device_access():
                return self._oracle()

        pool = concurrent.futures.ThreadPoolExecutor(1, "tilewright-oracle")
        self._oracle_results = pool.submit(contextvars.copy_context().run, answer)
        pool.shutdown(wait=False)

    def wait_for_oracle(self) -> None:
        """Waits for the oracle's results, if there is an oracle.

        Raises:
          Whatever the oracle raised.
        """
        self.start_oracle()
        if self._oracle_results is not None:
            self._oracle_results.result()

    def compile(
        self, config: object, device_access: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> Callable[..., Any]:
        """Compiles the stage with a config, inside of ``device_access()``; lowering does not touch the device."""
        lowered = jax.jit(self._code(config)).lower(*self.operands)
        ahead.wait()  # otherwise XLA would compile the same kernels at the same time
        with device_access():
            return lowered.compile()

    def recheck(self, config: object) -> list[str]:
        """Checks the results of a config with poisoned output memory, which reveals elements that are not written."""
        code = self._code(config)
        shapes = jax.eval_shape(code, *self.operands)
        # The outputs are written into the donated arrays, which nothing else reads.
        poisoned = jax.jit(lambda poison, *operands: code(*operands), donate_argnums=0, keep_unused=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            # An array that is still being written might be copied instead of donated.
            poison = jax.block_until_ready([_poison(shape) for shape in shapes])
            return self.check(poisoned(poison, *self.operands))

    def check(self, results: Sequence[Any]) -> list[str]:
        """The differences of results from the oracle's that exceed the numerics policy."""
        self.wait_for_oracle()
        if self._oracle_results is None:
            return []
        factor, answers = self._oracle_results.result()
        found = [] if len(answers) == 1 and answers[0].part is None else _nan_counts(results)
        for each in answers:
            found += tree_violations(self._of_part(each.part, list(results)), each.ref, each.lowp, factor=factor)
        return found

    def _code(self, config: object) -> Callable[..., list[Any]]:
        """The stage with a config, lowered once also for the user's program; as the kernel wants it measured."""
        if self._inv.kernel.measured_with_gradients:
            code = with_gradients(self._call.function(config, self._mapped, self._device))
        else:
            code = self._stage(self._call, config, self._mapped)
        return self._on_mesh(code)

    def _placed(self, array: jax.Array) -> jax.Array:
        """The array on every device of the mesh on which the call is measured."""
        if self._mesh is None:
            return array
        placed: jax.Array = jax.device_put(array, jax.NamedSharding(self._mesh, PartitionSpec()))
        return placed

    def _on_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one of every device of the mesh, all with the same operands; the first one's results."""
        if self._mesh is None:
            return function
        whole = PartitionSpec()
        return jax.shard_map(function, mesh=self._mesh, in_specs=whole, out_specs=whole, check_vma=False)

    def _stage(self, call: Call, config: object, mapped: tuple[MappedAxis, ...]) -> Callable[..., list[Any]]:
        """A stage as a function that finds its code where it is traced, which may be inside ``shard_map``."""

        def code(*operands: jax.Array) -> list[Any]:
            avals = [jax.typeof(operand) for operand in operands]
            found: list[Any] = code_of(call, config, avals, mapped, self._device)(*operands)
            return found

        return code

    def _sampled(self) -> tuple[list[Any], Any]:
        """Random arguments; a leaf that is mapped has a few different draws, repeated, along its mapped axes."""
        inv, key = self._inv, jax.random.key(SEED)
        count = max(1, min(math.prod(axis.size for axis in inv.mapped), DISTINCT_ELEMENTS))
        keys = [key, *(jax.random.fold_in(key, i) for i in range(1, count))]
        draws, (structure, *_) = zip(*(split(inv.kernel.sample_inputs(inv, each)) for each in keys), strict=True)

        def stacked(leaf: int, array: Any) -> Any:
            sizes = [axis.size for axis in inv.mapped if axis.mapped[leaf]]
            if not sizes:
                return array
            elements = jnp.stack([draws[i % count][leaf] for i in range(math.prod(sizes))])
            return elements.reshape(*sizes, *array.shape)

        return [stacked(leaf, array) for leaf, array in enumerate(draws[0])], structure

    def _add_cotangents(self, chooser: ConfigChooser) -> None:
        """Runs the forward pass, draws cotangents, and turns the call into its backward stage."""
        inv = self._inv
        forward = chooser.lookup(forward_of(inv))
        stage, results = forward_stage(inv, self._call, self.operands, forward.config)
        code = self._stage(stage, forward.config, forward_of(inv).mapped)
        results = jax.tree.unflatten(jax.tree.structure(results), jax.jit(self._on_mesh(code))(*self.operands))
        out, residuals = results_and_residuals(inv, results)
        keys = iter(jax.random.split(jax.random.key(SEED + 1), 1 + len(jax.tree.leaves(out))))
        cotangents = jax.tree.map(lambda x: _cotangent(next(keys), x), out)
        self._num_cotangents = len(jax.tree.leaves(cotangents))
        self._call, self._mapped, rest = backward_stage(inv, self._call, self.operands, residuals, cotangents)
        self.operands += [self._placed(jnp.asarray(x)) for x in rest]

    def _oracle(self) -> tuple[float, list["_Answer"]]:
        """The policy's factor, and the reference's results for the whole call or for some parts of it."""
        kernel = self._inv.kernel
        parts = () if self._mapped else tuple(kernel.oracle_parts(self._inv))
        answers = [self._answer(part) for part in parts or (None,)]
        return kernel.tolerance_factor(self._inv), answers

    def _answer(self, part: OraclePart | None) -> "_Answer":
        """The reference's results in high precision and in the input dtype."""
        function = self._reference_gradients if self._inv.direction == "backward" else self._reference
        options = ORACLE_OPTIONS if self._device.kind == "gpu" else None
        mapped = map_axes(functools.partial(function, part), self._mapped)
        if self._inv.kernel.measured_with_gradients:
            mapped = with_gradients(mapped)
        run_reference = jax.jit(self._on_mesh(mapped), compiler_options=options)
        # Some devices round the operands of float32 matmuls by default; that is part of lowp's error, not of ref's.
        with jax.default_matmul_precision("highest"):
            ref = run_reference(*promoted(self.operands))
        return _Answer(part, ref, run_reference(*self.operands))

    def _reference(self, part: OraclePart | None, *arrays: jax.Array) -> list[Any]:
        return jax.tree.leaves(self._reference_tree(part, *arrays))

    def _reference_tree(self, part: OraclePart | None, *arrays: jax.Array) -> Any:
        args, kwargs = self._call.structure.join(arrays)
        if part is not None:
            args, kwargs = part.arguments(args, kwargs)
        reference = self._inv.kernel.reference
        assert reference is not None  # it is asked only if `checked`
        return reference(*args, **kwargs)

    def _reference_gradients(self, part: OraclePart | None, *operands: jax.Array) -> list[Any]:
        arrays, cotangents = operands[: self._call.num_arrays], operands[len(operands) - self._num_cotangents :]
        wanted = self._wanted_leaves

        def of_wanted(*values: jax.Array) -> list[Any]:
            complete = list(arrays)
            for i, value in zip(wanted, values, strict=True):
                complete[i] = value
            return [x for x in self._reference(part, *complete) if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pull = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        given = list(cotangents) if part is None else self._results_of_part(part, cotangents)
        # The gradients of a part have the arrays' full size and are zero outside of the part.
        gradients = pull([c.astype(x.dtype) for c, x in zip(given, out, strict=True)])
        return self._of_part(part, list(gradients))

    @property
    def _wanted_leaves(self) -> list[int]:
        return [i for i, flag in enumerate(self._call.wanted) if flag]

    def _of_part(self, part: OraclePart | None, results: list[Any]) -> list[Any]:
        """Selects from the stage's results those that a part determines."""
        if part is None:
            return results
        if self._inv.direction == "forward":
            return self._results_of_part(part, results)
        complete = list(self.operands[: self._call.num_arrays])
        for i, gradient in zip(self._wanted_leaves, results, strict=True):
            complete[i] = gradient
        args, kwargs = self._call.structure.join(complete)
        restricted, _ = split(part.arguments(args, kwargs))
        names = array_labels(self._inv.kernel, args, kwargs)
        return [restricted[i] for i in self._wanted_leaves if names[i] not in part.shared]

    def _results_of_part(self, part: OraclePart, results: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(part.results(jax.tree.unflatten(self._results_tree, results)))

    @functools.cached_property
    def _results_tree(self) -> Any:
        arrays = self.operands[: self._call.num_arrays]
        return jax.tree.structure(jax.eval_shape(functools.partial(self._reference_tree, None), *arrays))


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """The oracle's results for a part or for the whole call."""

    part: OraclePart | None
    ref: list[Any]
    lowp: list[Any]


def _nan_counts(results: Sequence[Any]) -> list[str]:
    """Reports NaNs, which outside of the checked parts nothing else would find."""
    return [
        f"[{i}]: {count} elements are not numbers"
        for i, array in enumerate(results)
        if jnp.issubdtype(array.dtype, jnp.inexact) and (count := int(jnp.isnan(array).sum()))
    ]


def with_gradients(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The results of a function and, for each floating-point operand, the gradient of their sum."""

    def both(*operands: jax.Array) -> list[Any]:
        floating = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floating(*values: jax.Array) -> list[Any]:
            complete = list(operands)
            for i, value in zip(floating, values, strict=True):
                complete[i] = value
            return function(*complete)

        results, pull = jax.vjp(of_floating, *(operands[i] for i in floating))
        return [*results, *pull([jnp.ones_like(x) for x in results])]

    return both


def forward_of(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The forward pass whose results a backward pass starts from."""
    count = len(split((inv.abstract_args, inv.abstract_kwargs))[0])
    mapped = tuple(dataclasses.replace(axis, mapped=axis.mapped[:count]) for axis in inv.mapped)
    return dataclasses.replace(inv, direction="forward", mapped=mapped)


def forward_stage(inv: Invocation[Any, Any], call: Call, operands: Sequence[Any], config: object) -> tuple[Call, Any]:
    """The stage of a call whose results its backward pass starts from, and these, abstract."""
    stage = dataclasses.replace(call, stage="forward" if gradient_form(inv.kernel) == "residuals" else "run")
    declared = inv.kernel.types_cfg(is_split=False)
    avals = [jax.typeof(operand) for operand in operands]
    known = results_of(
        stage.program(config if declared is None else declared, avals, forward_of(inv).mapped, inv.target)
    )
    return stage, stage.tree(known).unflatten([known.avals[i] for i in stage.picked(known)])


def results_and_residuals(inv: Invocation[Any, Any], results: Any) -> tuple[Any, Any]:
    """The outputs of a call and what its backward pass needs beside its arguments, from the results of the stage."""
    out, residuals = results if gradient_form(inv.kernel) == "residuals" else (results, ())
    return out, residuals


def backward_stage(
    inv: Invocation[Any, Any], call: Call, operands: Sequence[Any], residuals: Any, cotangents: Any
) -> tuple[Call, tuple[MappedAxis, ...], list[Any]]:
    """The backward stage of a call, its mapped axes, and its operands behind those of the call.

    Args:
      cotangents: those of the outputs, ``None`` for those that have none.
    """
    per_output = tuple(cotangents) if isinstance(cotangents, tuple | list) else (cotangents,)
    rest, extra = split((residuals, per_output))
    # All results of a mapped forward pass are mapped.
    mapped = tuple(
        dataclasses.replace(axis, mapped=axis.mapped[: len(operands)] + (True,) * len(rest)) for axis in inv.mapped
    )
    backward = dataclasses.replace(call, stage="backward", extra=extra)
    known = known_results(backward, [jax.typeof(x) for x in (*operands, *rest)], mapped, inv.target)
    given = known.tree.unflatten(known.avals)
    return dataclasses.replace(backward, wanted=tuple(g is not None for g in given)), mapped, list(rest)


def _poison(like: Shaped) -> jax.Array:
    """Values that no kernel returns, if the dtype has any."""
    if jnp.issubdtype(like.dtype, jnp.inexact):
        return jnp.full(like.shape, jnp.nan, like.dtype)
    if jnp.issubdtype(like.dtype, jnp.integer):
        return jnp.full(like.shape, jnp.iinfo(like.dtype).max, like.dtype)
    return jnp.zeros(like.shape, like.dtype)


def _cotangent(key: jax.Array, result: jax.Array) -> jax.Array | None:
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return None
    return jax.random.normal(key, result.shape, jnp.float32).astype(result.dtype)
