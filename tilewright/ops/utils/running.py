"""The call whose code is being traced, for the names of device kernels."""

import contextlib
import contextvars
import re
from collections.abc import Iterator

_CALL: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("tilewright_running", default=("", ""))
_NOT_IN_NAMES = re.compile(r"\W", re.ASCII)


@contextlib.contextmanager
def running(op: str, direction: str) -> Iterator[None]:
    """A context in which a call of an op is traced."""
    token = _CALL.set((_NOT_IN_NAMES.sub("_", op), direction))
    try:
        yield
    finally:
        _CALL.reset(token)


def device_kernel_name(role: str) -> str:
    """The name in a profile of a device kernel with a role in the call that is being traced."""
    op, direction = _CALL.get()
    roles = (word for word in role.split("_") if word != direction)
    return "_".join(word for word in ("tilewright", op, direction, *roles) if word)
