"""The process that makes builds beside a tuning: an order on its standard input, a line for each change on its output.

Nobody may be listening any more: it goes on until all is made, and the next tuning finds it.
"""

import concurrent.futures
import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator

from tilewright.errors import BuildError
from tilewright.ops.kernel.builds import Build, Cancelled
from tilewright.ops.tuning.builds.background import Order

# Of what a compiler said, the end is evidence enough.
LAST_WORDS = 2000
_saying = threading.Lock()


def main() -> None:
    order: Order = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(OSError):
        os.nice(19)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with concurrent.futures.ThreadPoolExecutor(order.jobs) as pool:
        made = [pool.submit(_make, i, each, order.timeout_s, stopped) for i, each in enumerate(order.builds)]
        while not all(each.done() for each in made):  # a wait for ever would keep the signal's handler from running
            concurrent.futures.wait(made, timeout=0.2)


def _make(index: int, pickled: bytes, timeout_s: float, stopped: threading.Event) -> None:
    _say(index, None)
    began = time.monotonic()
    try:
        build: Build = pickle.loads(pickled)
        with _cancelled_after(timeout_s, stopped) as cancelled:
            build.make(cancelled)
        why = ""
    except Cancelled:
        why = "it was ended" if stopped.is_set() else f"it did not end within {timeout_s:g} s"
    except BuildError as error:
        why = f"{error}"[-LAST_WORDS:]
    except Exception as error:  # a module that cannot be imported here, a disk that is full: the others go on
        why = f"{type(error).__name__}: {error}"[-LAST_WORDS:]
    _say(index, why, round(time.monotonic() - began, 1))


@contextlib.contextmanager
def _cancelled_after(seconds: float, stopped: threading.Event) -> Iterator[threading.Event]:
    """An event that is set after some seconds, or when all shall stop."""
    cancelled, over = threading.Event(), threading.Event()

    def watch() -> None:
        until = time.monotonic() + seconds
        while not over.wait(0.1):
            if stopped.is_set() or time.monotonic() > until:
                cancelled.set()
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield cancelled
    finally:
        over.set()
        watching.join()


def _say(index: int, why: str | None, seconds: float = 0.0) -> None:
    """Tells who started this process that a build was begun, failed, or is made."""
    with _saying:
        try:
            print(json.dumps({"index": index, "why": why, "seconds": seconds}), flush=True)
        except OSError:  # nobody listens any more
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


if __name__ == "__main__":
    main()
