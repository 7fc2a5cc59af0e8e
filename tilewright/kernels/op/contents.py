"""Checks of what integer arrays hold: an error where it is known, otherwise logged if ``TILEWRIGHT_DEBUG=1``."""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.arguments import on_host
from tilewright.ops.kernel.arrays import unwrapped

type Given = Mapping[str, Any]
"""The arguments of a call by name; of arrays only shape and dtype may be read."""
type Finder = Callable[[str, np.ndarray], Iterable[str]]
"""Finds the faults of an argument, from its name and its numbers; empty strings are none."""
type Check = Callable[[Given], Finder | None]
"""Makes the finder of a call; ``None`` for arguments that do not fit together, of which ``prepare`` says more."""

MAX_LOCATIONS = 3
"""Maximum locations listed for each kind of fault."""

logger = logging.getLogger("tilewright.debug")


def is_debugging() -> bool:
    """True if the arrays of calls shall be looked at when they run, which is part of a program when it is traced."""
    return os.environ.get("TILEWRIGHT_DEBUG", "") == "1"


def known_faults(checks: Mapping[str, Check], given: Given, *, is_traced: bool) -> list[str]:
    """The faults of the first argument that no call can mean, of those whose numbers are known without waiting.

    These are NumPy arrays, lists and numbers, and unless the call is traced arrays that a CPU has computed.
    """
    for name, check in checks.items():
        value: Any = given.get(name)
        if value is None:
            continue
        if isinstance(value, jax.Array):
            is_number = isinstance(value.dtype, np.dtype)  # others are the types of random keys
            if is_traced or not (is_number and _is_on_cpus(value.sharding) and cast(Any, value).is_ready()):
                continue
        elif not isinstance(value, int | np.integer) and not on_host(value):
            continue
        numbers = np.asarray(value)
        finder = check(given) if numbers.dtype.kind in "iu" else None
        if finder is not None and (found := [each for each in finder(name, numbers) if each]):
            return found
    return []


@functools.lru_cache(maxsize=128)
def _is_on_cpus(sharding: jax.sharding.Sharding) -> bool:
    """True for CPUs of this process: reading an array of a GPU or TPU would wait for it."""
    devices: Iterable[Any] = sharding.device_set
    return sharding.is_fully_addressable and all(device.platform == "cpu" for device in devices)


def report_on_device(op: str, checks: Mapping[str, Check], given: Given) -> None:
    """Logs an ERROR, when a call runs, for what would be an error if the numbers were known.

    Only if ``TILEWRIGHT_DEBUG`` is 1, and then the arrays are copied to the host.
    """
    if not checks or not is_debugging():
        return
    arrays = {name: value for name in checks if isinstance(value := given.get(name), jax.Array)}
    arrays = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.integer)}
    finders = {name: finder for name in arrays if (finder := checks[name](given)) is not None}
    if not finders:
        return

    def look(**values: Any) -> None:
        for name, value in values.items():
            for found in finders[name](name, np.asarray(value)):
                if found:
                    logger.error("%s: %s", op, found)

    watched: Any = {name: arrays[name] for name in finders}
    jax.debug.callback(look, **watched)


def shape_of(given: Given, name: str) -> tuple[int, ...] | None:
    """The shape of an argument; ``None`` if it is no array, or has symbolic dimensions."""
    shape = getattr(unwrapped(given.get(name)), "shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape):
        return None
    return tuple(shape)


def parts(given: Given) -> int | None:
    """The number of devices over which ``axis_name`` splits a call, 1 without; ``None`` where there is no such axis."""
    axis = given.get("axis_name")
    if axis is None:
        return 1
    try:
        return int(jax.lax.axis_size(axis))
    except (NameError, TypeError, ValueError):
        return None


def lengths(name: str, numbers: np.ndarray, total: int) -> Iterator[str]:
    """The faults of lengths that are from 0 to ``total``."""
    if not numbers.size or (numbers.min() >= 0 and numbers.max() <= total):
        return
    yield fault(name, numbers, numbers < 0, "is negative")
    yield fault(name, numbers, numbers > total, f"is more than the length {total}")


def boundaries(name: str, numbers: np.ndarray, total: int) -> Iterator[str]:
    """The faults of boundaries of sequences that are laid end to end and fill a length."""
    if numbers.ndim != 1 or numbers.size < 2:
        return
    if numbers[0] == 0 and numbers[-1] == total and (numbers[1:] >= numbers[:-1]).all():
        return
    wide = numbers.astype(np.int64) if numbers.dtype != np.uint64 else numbers.astype(np.float64)
    at, end = np.arange(wide.size), wide.size - 1
    wrong = [
        fault(name, numbers, (at == 0) & (wide != 0), "is not 0"),
        fault(name, numbers, np.append(False, np.diff(wide) < 0), "is less than the boundary before"),
        fault(name, numbers, (at == end) & (wide != total), f"is not the length {total}"),
    ]
    if any(wrong):
        yield (
            f"{', and '.join(filter(None, wrong))}: {name} says where sequences begin and end, from 0 to the length, "
            "and not how long they are; what pads the last one is a sequence of its own"
        )


def fault(name: str, numbers: np.ndarray, wrong: np.ndarray, what: str) -> str:
    """A sentence that names the first places that are wrong; empty if there is none."""
    locations = np.argwhere(wrong)
    if not len(locations):
        return ""
    shown = locations[:MAX_LOCATIONS].tolist()
    named = [
        f"{name}[{', '.join(map(str, place))}] = {numbers[tuple(place)]}" if place else f"{name} = {numbers}"
        for place in shown
    ]
    return f"{listed(named, len(locations))} {what}"


def listed(named: Iterable[str], count: int) -> str:
    """Some places, and how many more there are."""
    shown = ", ".join(named)
    return shown + (f" and {count - MAX_LOCATIONS} more, each" if count > MAX_LOCATIONS else "")
