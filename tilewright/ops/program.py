"""Finds, tunes and explains every kernel call of a whole program, by the labels in its lowered text."""

import collections
import contextlib
import dataclasses
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from tilewright.ops.config.chooser import ConfigChooser
from tilewright.ops.config.context import check_budget, inspection_only
from tilewright.ops.config.memory import ConfigCache
from tilewright.ops.config.results import AutotuningResult
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.config.tuner import Tuner
from tilewright.ops.executor import Executor, default_executor
from tilewright.ops.explained import ExplainedCall, ProgramExplanation
from tilewright.ops.kernel.arrays import is_wrapper, unwrapped
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.splitting import AUTOMATIC
from tilewright.ops.lowering.labels import (
    find_labels_in_lowered,
    is_call_label,
    is_name_of,
    name_in,
    parse_label,
)
from tilewright.ops.lowering.occurrences import walk
from tilewright.ops.lowering.partitioned import Parts
from tilewright.ops.lowering.propagation import split_places
from tilewright.ops.tuning.confirming import check_confirmable, confirmed
from tilewright.ops.tuning.events import Event
from tilewright.ops.tuning.tuning import DEFAULT_CALL_S, Autotuner
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.target import active_target


def lower(fn: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> jax.stages.Lowered:
    """Lowers a call without tuning anything.

    Args:
      fn: see ``tune``.

    Raises:
      TypeError: ``fn`` is not a function, or it is lowered already and arguments were given.
    """
    if isinstance(fn, jax.stages.Compiled):
        raise TypeError("a compiled program no longer holds all labels of its calls; give the function, or its Lowered")
    lowered = _jax_lowered(fn)
    if lowered is not None:
        if args or kwargs:
            raise TypeError(f"{type(fn).__name__} is lowered already and takes no arguments, got {args=} and {kwargs=}")
        return lowered
    if not callable(fn):
        raise TypeError(f"{fn!r} of type {type(fn).__name__} is neither a function nor lowered")
    with inspection_only(), _mesh_of_target((args, kwargs)) as platforms:
        method = getattr(fn, "lower", None)  # a method of the results of jax.jit, nnx.jit and eqx.filter_jit
        if callable(method) and not (platforms and hasattr(fn, "trace")):
            lowered = _jax_lowered(method(*args, **kwargs))
        else:
            flat, operands = (fn, args) if callable(method) else _flat_call(fn, args, kwargs)
            traced = cast(Any, flat).trace(*operands, **(kwargs if callable(method) else {}))
            lowered = traced.lower(lowering_platforms=platforms)
    assert lowered is not None  # such a method returns nothing else
    return lowered


@contextlib.contextmanager
def _mesh_of_target(arguments: object) -> Iterator[tuple[str, ...] | None]:
    """Within `target_device`, enters the mesh of arguments with automatic axes; yields the platforms to lower for.

    JAX would take the platform from the mesh in force, but only from one with explicit axes.
    """
    target = active_target()
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    meshes = (each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding))
    mesh = next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.AbstractMesh) and mesh.axis_names), None)
    if target is None or mesh is None or not mesh._any_axis_auto:
        yield None
        return
    with jax.sharding.use_abstract_mesh(mesh):
        yield (target.known.platform,)


def _jax_lowered(lowered: object) -> jax.stages.Lowered | None:
    """The ``jax.stages.Lowered`` inside of what JAX, Flax or Equinox return for a lowered function; else ``None``."""
    found = getattr(lowered, "lowered", lowered)
    return found if isinstance(found, jax.stages.Lowered) else None


def _flat_call(
    fn: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Any, tuple[list[Any]]]:
    """A jitted function of the call's arrays and positional numbers, everything else bound; and its argument."""
    static = {name: value for name, value in kwargs.items() if isinstance(value, numbers.Number | str | np.generic)}
    rest = {name: value for name, value in kwargs.items() if name not in static}
    leaves, tree = jax.tree.flatten((args, rest))
    leaves = [unwrapped(leaf) for leaf in leaves]
    traced = [_is_traceable(leaf) for leaf in leaves]

    def flat(arrays: list[Any]) -> Any:
        given = iter(arrays)
        rebuilt = [next(given) if is_array else leaf for leaf, is_array in zip(leaves, traced, strict=True)]
        args, rest = jax.tree.unflatten(tree, rebuilt)
        results = jax.tree.leaves(fn(*args, **rest, **static))
        return [result for result in results if _is_traceable(result)]

    return jax.jit(flat), ([leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array],)


def _is_traceable(leaf: object) -> bool:
    """True if ``jax.jit`` accepts the leaf as an array."""
    return is_wrapper(leaf) or isinstance(
        leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | numbers.Number
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A call in a lowered program.

    Attributes:
      explicit: the config that the caller gave, if any.
      parts: the split over automatic mesh axes of the call that this one is a device's part of.
      times: the number of times that a run of the program runs it.
    """

    inv: Invocation[Any, Any]
    explicit: Any = None
    parts: Parts | None = None
    times: int = 1


def _found(fn: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[_Found]:
    """The calls of a program; of those that are split over automatic axes a device's parts in their place."""
    lowered = lower(fn, args, kwargs)
    labels = {text: parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)}
    places = split_places(lowered) if any(label.step == AUTOMATIC for label in labels.values()) else []
    times = _times(lowered)
    found = list[_Found]()
    for text, label in labels.items():
        if label.step == AUTOMATIC:
            of_call = [place for place in places if is_name_of(name_in(place.name), text)]
            found += [_Found(x.inv, x.cfg, place.parts, place.times) for place in of_call for x in place.calls]
        else:
            explicit = label.config if label.step == "explicit" else None
            runs = sum(count for name, count in times.items() if is_name_of(name, text))
            found.append(_Found(label.invocation(), explicit, times=runs or 1))
    return found


def _times(lowered: jax.stages.Lowered) -> collections.Counter[str]:
    """The number of times that a run of a program runs each call, by the call's name."""
    module: Any = lowered.compiler_ir("stablehlo")
    found: collections.Counter[str] = collections.Counter()
    for operation, times in walk(module):
        if operation.name == "func.call":
            found[name_in(operation.attributes["callee"].value)] += times
    return found


def find_invocations(fn: Callable[..., Any], *args: object, **kwargs: object) -> list[Invocation[Any, Any]]:
    """Returns the kernel calls of a function, forward and backward, each once, read from its lowered program.

    Calls with an explicit config are left out, since no other config would ever run.

    Args:
      fn: see ``tune``.
      *args, **kwargs: the function's arguments, or ``ShapeDtypeStruct`` in their place.
    """
    found = [each.inv for each in _found(fn, args, kwargs) if each.explicit is None]
    return list({inv.key: inv for inv in found}.values())


def tune(
    fn: Callable[..., Any],
    *args: object,
    tuner: Tuner | None = None,
    budget_s: float | None = None,
    call_budget_s: float | None = None,
    verify: bool = True,
    reuse: bool = True,
    confirm: bool = False,
    on_event: Event | None = None,
    chooser: ConfigSelectorChain | None = None,
    **kwargs: object,
) -> AutotuningResult:
    """Tunes every kernel call of a function, forward and backward, and stores the winners for later calls.

    The function is lowered, not run; each call is measured on sampled inputs. Calls whose complete measurements are in
    the persistent cache are not measured again. In a terminal or a notebook the progress is shown.

    Kernels that nvcc must compile are built in the background, on spare cores, while others are measured. Those that
    are not built in time are left out and named in the result; their builds continue, and the next tuning measures
    them.

    Args:
      fn: any function that ``jax.jit`` can trace; what ``jax.jit``, ``nnx.jit`` or ``eqx.filter_jit`` returned, with
        its own static arguments; or what their ``lower`` returned, without arguments.
      *args, **kwargs: the function's arguments, or ``ShapeDtypeStruct`` in their place. For a plain function, keywords
        that are Python or NumPy numbers, bools or strings are static, and so is every leaf that is not an array or a
        number.
      tuner: settings of the measurements.
      budget_s: seconds for the whole tuning, lowering and builds included; by default 120 for each kernel call,
        ``math.inf`` for no limit.
      call_budget_s: seconds for each call, within the total.
      verify: check candidates against the kernels' references.
      reuse: ``False`` measures again what the cache already holds.
      confirm: run the function with the tuned configs and with those that would run untuned, alternating, and report
        the faster in the result's ``confirmation``: a kernel that wins by itself can lose beside others at the power
        limit. It runs on copies of the arguments, a dozen times, after the tuning and in addition to its budget.
      on_event: called with the events of the tuning, instead of showing the progress.
      chooser: the chain to store the winners in; the default executor's by default.

    Raises:
      ExceptionGroup: every candidate of a call failed.
      ValueError: ``confirm`` was asked for without concrete arrays to run on.
      KeyboardInterrupt: the caller was interrupted; the measurements made so far are kept.
    """
    began = time.monotonic()
    if confirm:
        check_confirmable(fn, args, kwargs)
    options: dict[str, Any] = {
        "tuner": tuner, "call_budget_s": call_budget_s, "verify": verify, "chooser": chooser, "on_event": on_event,
    }  # fmt: skip
    check_budget(budget_s)
    autotuner = Autotuner(**options)  # Wrong options raise here, before the function is lowered.
    invocations = find_invocations(fn, *args, **kwargs)
    untuned = ConfigCache()
    for inv in invocations if confirm else ():
        untuned.put(inv.key, autotuner.chooser.lookup(inv).config)
    with contextlib.ExitStack() as stack:
        if on_event is None:
            from tilewright.ops.tuning.progress import progress_for  # reads the terminal: not before it is needed

            options["on_event"] = stack.enter_context(progress_for())
        result = tune_invocations(invocations, began=began, budget_s=budget_s, reuse=reuse, **options)
    if result.interrupted:
        raise KeyboardInterrupt
    if confirm and result.entries:
        if callable(getattr(fn, "lower", None)):
            result.confirmation = confirmed(fn, args, kwargs, tuned=result.cache(), untuned=untuned)
        else:
            flat, arrays = _flat_call(fn, args, kwargs)
            result.confirmation = confirmed(flat, arrays, {}, tuned=result.cache(), untuned=untuned)
    return result


def tune_invocations(
    invocations: Sequence[Invocation[Any, Any]],
    *,
    began: float,
    budget_s: float | None,
    reuse: bool,
    **options: Any,
) -> AutotuningResult:
    """Tunes calls that were found in programs, and returns a result even after an interrupt.

    Args:
      began: ``time.monotonic()`` at the start of the budget: finding the calls already used some of it.
      budget_s: seconds for all calls, as in ``tune``.
      **options: passed on to the ``Autotuner``.

    Raises:
      ExceptionGroup: every candidate of a call failed.
    """
    total = DEFAULT_CALL_S * max(1, len(invocations)) if budget_s is None else budget_s
    # A budget must be positive: if finding the calls has used it up, every call is left out and reported so.
    left = max(total - (time.monotonic() - began), 1e-9)
    return Autotuner(budget_s=left, **options).tune(*invocations, reuse=reuse)


def _split(parts: Parts | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if parts is None else (parts.split, parts.gathered)


def explain(
    fn: Callable[..., Any], *args: object, chooser: ConfigChooser | None = None, **kwargs: object
) -> ProgramExplanation:
    """Explains which backend and config every kernel call of a function would use, and why not the others.

    The function is lowered, not run, and nothing is measured.

    Args:
      fn: see ``tune``.
      *args, **kwargs: the function's arguments, or ``ShapeDtypeStruct`` in their place.
      chooser: the source of configs; the default executor's chooser by default.

    Returns:
      One entry for each call and direction, in the order of the program; ``print`` it, or show it in a notebook.
    """
    executor: Executor[Any, Any] = default_executor() if chooser is None else Executor(chooser)
    found: dict[Any, ExplainedCall] = {}
    device, target = current_device(), active_target()
    for each in _found(fn, args, kwargs):
        inv, choice = each.inv, executor.explain_choice(each.inv, each.explicit)
        device = inv.target  # of a program that is lowered already the device that it is for
        call = ExplainedCall(inv.kernel.name, describe_key(inv.key), choice, *_split(each.parts))
        key = (inv.key, describe_config(each.explicit), call.split, call.gathered)
        known = found.get(key)
        found[key] = dataclasses.replace(call, times=each.times + (known.times if known else 0))
    return ProgramExplanation(tuple(found.values()), device, frozenset() if target is None else target.packages)
