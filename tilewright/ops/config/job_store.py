"""The key-value store of a job of several processes: that of JAX's coordination service, which process 0 runs."""

import contextlib
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


def _status(error: Exception) -> str:
    return str(error).partition(":")[0]


def _failure(error: Exception) -> StoreError:
    return StoreError(str(error).partition("\n")[0])


def put_first(name: str, text: str) -> str:
    """Stores a text unless the name has one already; returns the text that the name has then.

    Raises:
      StoreError: the service fails.
    """
    try:
        _client().key_value_set(name, text)
    except jax.errors.JaxRuntimeError as error:
        if _status(error) != "ALREADY_EXISTS":
            raise _failure(error) from error
        return get(name) or text
    return text


def put(name: str, text: str) -> None:
    """Stores a text in place of what the name had.

    Raises:
      StoreError: the service fails.
    """
    try:
        _client().key_value_set(name, text, allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise _failure(error) from error


def get(name: str) -> str | None:
    """The text of a name now, or ``None``.

    Raises:
      StoreError: the service fails.
    """
    try:
        text: str = _client().key_value_try_get(name)
    except jax.errors.JaxRuntimeError as error:
        if _status(error) != "NOT_FOUND":
            raise _failure(error) from error
        return None
    return text


def wait_for(name: str, seconds: float) -> str | None:
    """The text of a name as soon as it has one, or ``None`` after that time; not interruptible.

    Raises:
      StoreError: the service fails.
    """
    try:
        text: str = _client().blocking_key_value_get(name, max(1, int(1e3 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if _status(error) != "DEADLINE_EXCEEDED":
            raise _failure(error) from error
        return None
    return text


def remove(name: str) -> None:
    """Removes a name; a service that fails is ignored."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_delete(name)
