"""Pallas kernels for TPUs on the CPU: JAX's TPU interpreter, with memory that starts as NaN, and races as errors."""

import contextlib
from collections.abc import Iterator
from typing import Literal
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax.experimental.pallas import tpu as pltpu

from tilewright.kernels.op.portfolio import Portfolio
from tilewright.ops.utils.target import traced_as

TPUS = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")


@contextlib.contextmanager
def interpret_tpu(
    name: str = "TPU v5e",
    *,
    detect_races: bool = False,
    dma: Literal["eager", "on_wait"] = "on_wait",
    seed: int | None = None,
) -> Iterator[None]:
    """Runs Pallas kernels for TPUs on the CPU, as on the named TPU.

    After a race the process is not to be trusted: a test that wants one runs in a process of its own.

    Args:
      detect_races: makes an access that no semaphore orders after another device's or DMA's one an error.
      dma: whether a copy happens when it starts, or when it is waited for: a kernel must be right with both.
      seed: the order of steps along parallel axes of the grid is drawn with it.
    """
    params = pltpu.InterpretParams(
        detect_races=detect_races, dma_execution_mode=dma, uninitialized_memory="nan", random_seed=seed
    )
    # The interpreter's callbacks are effects, which the declared results of a call do not have: a call is traced with
    # its kernel here.
    with (
        mock.patch.object(race_detection_state, "print", _raise, create=True),
        mock.patch.object(Portfolio, "types_cfg", return_value=None),
        traced_as(name),
        pltpu.force_tpu_interpret_mode(params),
    ):
        yield
        jax.effects_barrier()


def _raise(race: str) -> None:
    """Raises a race that jax 0.11 only prints; later ones raise it themselves."""
    raise RuntimeError(race)
