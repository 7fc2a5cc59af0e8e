"""Runs real computations while a program is being traced."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

import jax

_MEASURING = threading.Lock()
_IS_MEASURING: contextvars.ContextVar[bool] = contextvars.ContextVar("tilewright_measuring", default=False)


@contextlib.contextmanager
def measurement_lock() -> Iterator[None]:
    """Waits until no other thread measures, and makes others wait.

    The lock is re-entrant: a candidate may itself call a kernel that must be tuned first.
    """
    if _IS_MEASURING.get():
        yield
        return
    with _MEASURING:
        reset = _IS_MEASURING.set(True)
        try:
            yield
        finally:
            _IS_MEASURING.reset(reset)


@contextlib.contextmanager
def _numerics(x64: bool, precision: str | None, device: jax.Device | None) -> Iterator[None]:
    with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.default_device(device):
        yield


def numerics_here() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context manager that gives another thread the numerics and default device of this one."""
    config = jax.config
    settings = (config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_default_device)
    return lambda: _numerics(*settings)


def run_untraced[T](function: Callable[[threading.Event], T]) -> T:
    """Calls a function in a new thread, where no trace, mesh or mapped axis of the caller is in force.

    JAX keeps all of these per thread, so that nothing the function computes becomes part of the caller's program. The
    caller's precision, default device and context variables apply in the new thread too.

    Args:
      function: takes an event that is set when the caller is interrupted; it should then return soon.

    Raises:
      Whatever the function raised, and ``KeyboardInterrupt`` after it has returned if the caller was interrupted.
    """
    numerics = numerics_here()
    context = contextvars.copy_context()
    cancelled, done = threading.Event(), threading.Event()
    values: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with numerics():
                values.append(context.run(function, cancelled))
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="tilewright-tuning", daemon=True)
    thread.start()
    interrupted = False
    while not done.is_set():
        try:
            done.wait()  # not join: Python 3.12 takes a thread whose join was interrupted for finished
        except KeyboardInterrupt:
            if interrupted:
                raise  # a second interrupt ends the wait at once
            interrupted = True
            cancelled.set()
    if errors:
        raise errors[0]
    if interrupted:
        raise Interrupted(values[0])
    return values[0]


class Interrupted(KeyboardInterrupt):
    """The caller was interrupted; ``value`` is what the function still returned."""

    def __init__(self, value: object):
        super().__init__()
        self.value = value
