"""For tests whose programs are compiled once and run once: XLA compiles them in half the time, unoptimised."""

import contextlib
from collections.abc import Iterator

import jax

_OPTION = "jax_disable_most_optimizations"


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    before = jax.config.read(_OPTION)
    jax.config.update(_OPTION, True)
    try:
        yield
    finally:
        jax.config.update(_OPTION, before)
