"""Work of several threads at once."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


def together[T, R](work: Callable[[T], R], arguments: Iterable[T]) -> list[R]:
    """What ``work`` returns for each argument, in threads that begin at once; raises what the first of them raised."""
    given = list(arguments)
    start = threading.Barrier(len(given))

    def begin(argument: T) -> R:
        start.wait()
        return work(argument)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(begin, given))
