"""Times a whole program with and without the tuned configs: a kernel that wins by itself can lose beside others."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.config.context import overlay_cache
from tilewright.ops.config.memory import ConfigCache
from tilewright.ops.config.results import Confirmation
from tilewright.ops.kernel.candidates import Timing

logger = logging.getLogger(__name__)

ROUNDS = 5
"""Samples of the program for each set of configs."""


def check_confirmable(fn: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raises unless a function can be run with its arguments.

    Raises:
      ValueError: the function is lowered already, or there are shapes in place of arrays.
    """
    if not callable(fn) or isinstance(fn, jax.stages.Lowered):
        raise ValueError(f"confirm=True runs the program: it takes a function with its arguments, got {fn!r}")
    shape = next((leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.ShapeDtypeStruct)), None)
    if shape is not None:
        raise ValueError(f"confirm=True runs the program: it needs arrays, got {shape}")


def confirmed(
    fn: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    tuned: ConfigCache,
    untuned: ConfigCache,
) -> Confirmation:
    """Times a jitted program with two sets of configs, alternating, on copies of its arguments."""
    caches = (tuned, untuned)
    samples: tuple[list[float], list[float]] = ([], [])
    for number in range(1 + ROUNDS):
        for index in (0, 1) if number % 2 else (1, 0):
            with overlay_cache(caches[index]):
                sample = _sample_ms(fn, args, kwargs)
            if number:  # the first call compiles
                samples[index].append(sample)
    found = Confirmation(*(Timing(tuple(each)) for each in samples))
    logger.log(logging.WARNING if found.is_slower else logging.INFO, "%s", found)
    return found


def _sample_ms(fn: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> float:
    """Milliseconds of one call; it gets copies, since the program may donate or update its arguments."""
    given = jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, (args, kwargs))
    copies, keywords = jax.block_until_ready(given)
    start = time.perf_counter()
    results = fn(*copies, **keywords)
    # Wait for arguments that the program updates, such as Flax modules; donated arrays are deleted.
    leaves = [leaf for leaf in jax.tree.leaves((copies, keywords)) if isinstance(leaf, jax.Array)]
    jax.block_until_ready((results, [leaf for leaf in leaves if not leaf.is_deleted()]))
    return (time.perf_counter() - start) * 1e3
