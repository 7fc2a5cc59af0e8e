"""Detects which profilers a process may use, given its other users.

Mosaic GPU's profiler up to JAX 0.11 subscribes to CUPTI as if it were the only user. After XLA's profiler was used in
the process, CUPTI counts records that were dropped meanwhile; Mosaic's callback throws for them, across CUPTI's C
frames, which ends the process (``callback_complete`` in ``jaxlib/mosaic/gpu/mosaic_gpu_ext.cc``). A session that is
over leaves no state to query. So that profiler is used only if there was no session: every entry from JAX into XLA's
profiler is watched since before JAX had any device, and none was used. Only sessions that other libraries start by
themselves and that end before the first check are missed.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import jax
from jax._src import profiler as jax_profiler
from jax._src import xla_bridge

_TOOLS = (3, 4)
"""Tool ids of `sys.monitoring` without a reserved purpose."""

_state: Any = jax_profiler._profile_state  # the state of the trace that ``jax.profiler.start_trace`` takes
_watched = threading.Event()
_traced = threading.Event()


def _entry_points() -> list[CodeType]:
    """The functions by which a program enters XLA's profiler: its own traces, a server's, and PGLE's."""
    functions: list[Any] = [
        jax_profiler.start_trace,
        jax_profiler.start_server,
        jax_profiler.PGLEProfiler.__init__,
    ]
    session = vars(jax_profiler).get("ProfileSession")  # since JAX 0.12
    return [function.__code__ for function in functions] + ([] if session is None else [session.start.__code__])


def _watch() -> None:
    """Records from now on when one of them is called; before JAX has a device, that is from the beginning."""
    tool = next((each for each in _TOOLS if sys.monitoring.get_tool(each) is None), None)
    if tool is None or xla_bridge.backends_are_initialized():
        return
    sys.monitoring.use_tool_id(tool, "tilewright")
    started = sys.monitoring.events.PY_START
    sys.monitoring.register_callback(tool, started, lambda *_: _traced.set())
    for code in _entry_points():
        sys.monitoring.set_local_events(tool, code, started)
    _watched.set()


def reason_against_cupti() -> str:
    """The reason why CUPTI must not be used here, since it might end the process; empty if it may."""
    if shares_cupti():
        return ""
    if _traced.is_set():
        return (
            "XLA's profiler was used in this process, after which CUPTI drops records; this jaxlib's profiler of "
            "kernels ends the process for it; Tuner(isolation='process') has one of its own"
        )
    if not _watched.is_set():
        return (
            "this jaxlib's profiler of kernels ends a process in which XLA's was ever used, and tilewright was imported"
            " too late to know: import it before JAX computes, or tune with Tuner(isolation='process')"
        )
    return running_session()


def shares_cupti() -> bool:
    """True if Mosaic GPU's profiler is a CUPTI subscriber of its own, which XLA's profiler does not disturb."""
    try:
        from jax._src.lib import mosaic_gpu  # without a public name
    except ImportError:  # without CUDA's plugin there is none
        return False
    available = getattr(mosaic_gpu._mosaic_gpu_ext, "_cupti_v2_available", None)
    return available is not None and bool(available())


def running_session() -> str:
    """The current user of XLA's profiler (one at a time in a process); empty if there is none."""
    fields = vars(_state)
    if fields.get("session", fields.get("profile_session")) is not None:  # the first since JAX 0.12
        return "a trace is being taken in this process (jax.profiler)"
    if jax.profiler.TraceAnnotation.is_enabled():  # for sessions not started by jax.profiler's functions
        _traced.set()
        return "XLA's profiler is at work in this process (jax.profiler.start_server, or a library that profiles)"
    return ""


@contextlib.contextmanager
def trace_into(folder: str, options: jax.profiler.ProfileOptions) -> Iterator[None]:
    """Takes a trace.

    Raises:
      RuntimeError: another trace is being taken.
    """
    _traced.set()
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except RuntimeError:
            # A foreign session was running. JAX would consider ours still active, and refuse every later one.
            with _state.lock:
                _state.reset()
            raise


_watch()
