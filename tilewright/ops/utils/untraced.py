"""Running real computations while a program is being traced."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

import jax

_TURN = threading.Lock()
_HAS_TURN: contextvars.ContextVar[bool] = contextvars.ContextVar("tilewright_measuring", default=False)


@contextlib.contextmanager
def measuring_alone() -> Iterator[None]:
    """Waits until no other thread measures, and makes others wait.

    A candidate may itself call a kernel that must be tuned first; that happens within the candidate's turn.
    """
    if _HAS_TURN.get():
        yield
        return
    with _TURN:
        reset = _HAS_TURN.set(True)
        try:
            yield
        finally:
            _HAS_TURN.reset(reset)


@contextlib.contextmanager
def _numerics(x64: bool, precision: str | None, device: jax.Device | None) -> Iterator[None]:
    with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.default_device(device):
        yield


def numerics_here() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager in which another thread has the numerics and the default device of this one."""
    config = jax.config
    settings = (config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_default_device)
    return lambda: _numerics(*settings)


def outside_traces[T](function: Callable[[threading.Event], T]) -> T:
    """Calls a function in a thread of its own, where no trace, mesh or mapped axis of the caller is in force.

    JAX keeps all of these per thread, so nothing that the function computes can become part of the caller's program.
    The caller's precision, default device and context variables hold there too.

    Args:
      function: takes an event that is set when the caller is interrupted; it should then soon return.

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
                raise  # the second one means now
            interrupted = True
            cancelled.set()
    if errors:
        raise errors[0]
    if interrupted:
        raise Interrupted(values[0])
    return values[0]


class Interrupted(KeyboardInterrupt):
    """The caller was interrupted; ``value`` is what the function returned in spite of it."""

    def __init__(self, value: object):
        super().__init__()
        self.value = value
