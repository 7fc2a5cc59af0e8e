"""Tuning a whole program: every kernel call that its lowered text names."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tilewright.ops.config.context import current_overrides, in_force
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.core.kernel import Invocation
from tilewright.ops.execution.results import AutotuningResult
from tilewright.ops.execution.tuning import Autotuner, Event, Tuner
from tilewright.ops.utils.labels import find_labels_in_lowered, is_call_label, parse_label


@contextlib.contextmanager
def _only_reading() -> Iterator[None]:
    """Nothing is tuned while the program is lowered, and the trace is not kept: a real call must see the winners."""
    with in_force(dataclasses.replace(current_overrides(), token=object())):
        yield


def find_invocations(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Invocation[Any, Any]]:
    """The kernel calls of a function, forward and backward, each once, read from its lowered program.

    Calls with an explicit config are left out: nothing else would ever be chosen for them.

    Args:
      fn: any function that ``jax.jit`` can trace, or a jitted one.
      *args, **kwargs: its arguments, or ``ShapeDtypeStruct`` in their place.
    """
    with _only_reading():
        # Only what jax.jit returned can be lowered as it is; anything else is traced as a whole.
        lowered = (fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)).lower(*args, **kwargs)
    said = [parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)]
    found = [each.invocation() for each in said if each.step != "explicit"]
    return list({inv.key: inv for inv in found}.values())


def tune(
    fn: Callable[..., Any],
    *args: Any,
    tuner: Tuner | None = None,
    budget_s: float | None = None,
    verify: bool = True,
    reuse: bool = True,
    on_event: Event | None = None,
    chooser: ConfigSelectorChain | None = None,
    **kwargs: Any,
) -> AutotuningResult:
    """Tunes every kernel call of a function, forward and backward, and stores the winners for later calls.

    The function is lowered, not run; each call is measured on sampled inputs. Calls that the persistent cache has
    complete measurements of are taken from there.

    Args:
      fn: any function that ``jax.jit`` can trace, or a jitted one.
      *args, **kwargs: its arguments, or ``ShapeDtypeStruct`` in their place.
      tuner: how to measure.
      budget_s: seconds for one call.
      verify: check candidates against the kernels' references.
      reuse: ``False`` measures again what is already known.
      on_event: is called with the events of the tuning.
      chooser: the chain to store the winners in; the default executor's by default.

    Raises:
      ExceptionGroup: every candidate of a call failed.
      KeyboardInterrupt: the caller was interrupted; what had been measured is kept.
    """
    invocations = find_invocations(fn, *args, **kwargs)
    autotuner = Autotuner(tuner, chooser=chooser, budget_s=budget_s, verify=verify, on_event=on_event)
    result = autotuner.tune(*invocations, reuse=reuse)
    if result.interrupted:
        raise KeyboardInterrupt
    return result
