"""The process that makes builds for a tuning: reads an order from standard input, prints a line for each change.

The reader may be gone: the process continues until all builds are made, and the next tuning finds them.
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

# Characters kept from the end of a compiler's output.
MAX_OUTPUT_CHARS = 2000
_stdout_lock = threading.Lock()


def main() -> None:
    order: Order = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(OSError):
        os.nice(19)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with concurrent.futures.ThreadPoolExecutor(order.jobs) as pool:
        futures = [pool.submit(_make, i, each, order.timeout_s, stopped) for i, each in enumerate(order.builds)]
        while not all(each.done() for each in futures):  # an unlimited wait would keep the signal handler from running
            concurrent.futures.wait(futures, timeout=0.2)


def _make(index: int, pickled: bytes, timeout_s: float, stopped: threading.Event) -> None:
    _report(index, None)
    began = time.monotonic()
    try:
        build: Build = pickle.loads(pickled)
        with _cancelled_after(timeout_s, stopped) as cancelled:
            build.make(cancelled)
        why = ""
    except Cancelled:
        why = "it was ended" if stopped.is_set() else f"it did not end within {timeout_s:g} s"
    except BuildError as error:
        why = f"{error}"[-MAX_OUTPUT_CHARS:]
    except Exception as error:  # for example an import error or a full disk: the other builds continue
        why = f"{type(error).__name__}: {error}"[-MAX_OUTPUT_CHARS:]
    _report(index, why, round(time.monotonic() - began, 1))


@contextlib.contextmanager
def _cancelled_after(seconds: float, stopped: threading.Event) -> Iterator[threading.Event]:
    """An event that is set after some seconds, or when the process is told to stop."""
    cancelled, over = threading.Event(), threading.Event()

    def watch() -> None:
        until = time.monotonic() + seconds
        while not over.wait(0.1):
            if stopped.is_set() or time.monotonic() > until:
                cancelled.set()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield cancelled
    finally:
        over.set()
        watcher.join()


def _report(index: int, why: str | None, seconds: float = 0.0) -> None:
    """Reports to the parent that a build was started, failed, or is made."""
    with _stdout_lock:
        try:
            print(json.dumps({"index": index, "why": why, "seconds": seconds}), flush=True)
        except OSError:  # the reader is gone
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


if __name__ == "__main__":
    main()
