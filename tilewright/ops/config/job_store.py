"""The key-value store of a job of several processes: that of JAX's coordination service, which process 0 runs."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the store has no public name


class StoreError(Exception):
    """The coordination service fails; the message is its own first line."""


def is_distributed() -> bool:
    """True if ``jax.distributed`` connects this process to others."""
    return distributed.global_state.client is not None and distributed.global_state.num_processes > 1


def service() -> object:
    """Identifies the service that this process is connected to."""
    return _client()


def _client() -> Any:
    return distributed.global_state.client


def _asked[**P, T](ask: Callable[P, T], expected: str, *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The result of a method of the client; ``None`` if it fails with the expected status.

    Raises:
      StoreError: the service fails otherwise.
    """
    try:
        return ask(*args, **kwargs)
    except jax.errors.JaxRuntimeError as error:
        if str(error).partition(":")[0] == expected:
            return None
        raise StoreError(str(error).partition("\n")[0]) from error


# Each of these raises a StoreError if the service fails, but for `remove`.


def put_first(name: str, text: str) -> str:
    """Stores a text unless the name has one already; returns the text that the name has then."""
    _asked(_client().key_value_set, "ALREADY_EXISTS", name, text)
    return get(name) or text


def put(name: str, text: str) -> None:
    """Stores a text in place of what the name had."""
    _asked(_client().key_value_set, "", name, text, allow_overwrite=True)


def get(name: str) -> str | None:
    """The text of a name now, or ``None``."""
    return _asked(_client().key_value_try_get, "NOT_FOUND", name)


def wait_for(name: str, seconds: float) -> str | None:
    """The text of a name as soon as it has one, or ``None`` after that time; not interruptible."""
    return _asked(_client().blocking_key_value_get, "DEADLINE_EXCEEDED", name, max(1, int(1e3 * seconds)))


def remove(name: str) -> None:
    """Removes a name; a service that fails is ignored."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_delete(name)
