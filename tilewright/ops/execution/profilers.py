"""Which profilers of a process may be used, and by whom else they are.

Mosaic GPU's profiler up to JAX 0.11 subscribes to CUPTI as if nobody else did. Where XLA's profiler was ever at work
in the process, CUPTI counts records that were dropped meanwhile; Mosaic's callback throws for them, across CUPTI's C
frames, and that ends the process (``callback_complete`` in ``jaxlib/mosaic/gpu/mosaic_gpu_ext.cc``). Of XLA's sessions
nothing is left that could be asked: they are started in Python (``jax.profiler.trace``), by TensorBoard
(``jax.profiler.start_server``) and by libraries. So that profiler is only used in processes in which nobody but us
profiles: those that tuning starts for its candidates.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import profiler as jax_profiler

_state: Any = jax_profiler._profile_state  # of the trace that ``jax.profiler.start_trace`` takes
_alone = threading.Event()
_traced = threading.Event()


def nobody_else_profiles() -> None:
    """Says that this process is one of ours, in which no user takes traces."""
    _alone.set()


def why_not_cupti() -> str:
    """Why CUPTI must not be used here: it might end the process; empty if it may."""
    if shares_cupti():
        return ""
    if not _alone.is_set():
        return (
            "this jaxlib's profiler of kernels ends a process in which XLA's was ever used, and that leaves no sign; "
            "Tuner(isolation='process') has a process of its own for it"
        )
    if _traced.is_set():
        return (
            "XLA's profiler was used in this process, after which CUPTI drops records; this jaxlib's profiler of "
            "kernels ends the process for it"
        )
    return ""


def shares_cupti() -> bool:
    """Whether Mosaic GPU's profiler is a subscriber to CUPTI of its own, which XLA's does not disturb."""
    try:
        from jax._src.lib import mosaic_gpu  # without a public name
    except ImportError:  # without CUDA's plugin there is none
        return False
    available = getattr(mosaic_gpu._mosaic_gpu_ext, "_cupti_v2_available", None)
    return available is not None and bool(available())


def running_session() -> str:
    """Who uses XLA's profiler now, of which there is one a process; empty if nobody does."""
    fields = vars(_state)
    if fields.get("session", fields.get("profile_session")) is not None:  # the first since JAX 0.12
        return "a trace is being taken in this process (jax.profiler)"
    if jax.profiler.TraceAnnotation.is_enabled():  # of sessions that were not started by jax.profiler's functions
        return "XLA's profiler is at work in this process (jax.profiler.start_server, or a library that profiles)"
    return ""


@contextlib.contextmanager
def trace_into(folder: str, options: jax.profiler.ProfileOptions) -> Iterator[None]:
    """Takes a trace.

    Raises:
      RuntimeError: another is being taken.
    """
    _traced.set()
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except RuntimeError:
            # A session from elsewhere was running. JAX would go on believing that ours is, and refuse every later one.
            with _state.lock:
                _state.reset()
            raise
