"""The engine in a thread of its own, which the server's coroutines ask for answers."""

import asyncio
import collections
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable

from engine.engine import Engine
from engine.requests import EngineStopped, FinishReason, QueueFull, Request, RequestError


class EngineThread:
    """Runs an engine while there is something to do, and sleeps otherwise.

    Attributes:
      failure: what ended the engine, if something did; requests raise it from then on.
      open: requests that the engine has.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._stops = False
        self.open: set[Request] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all requests and the thread."""
        with self._changed:
            self._stops = True
            self._changed.notify()
        self._thread.join()

    async def answer(self, request: Request) -> AsyncGenerator[tuple[int, FinishReason | None]]:
        """How many tokens of the answer are there, and why it ended if it did: 0 once the engine has the request.

        A generator that is closed before the end cancels the request.

        Raises:
          RequestError, QueueFull: the engine refuses it.
          EngineStopped: the engine ended before.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, FinishReason | None] | Exception]()

        def tell(event: tuple[int, FinishReason | None] | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                self.engine.submit(request)
            except (RequestError, QueueFull) as error:
                tell(error)
            else:
                self.open.add(request)
                tell((0, None))

        def listen(each: Request) -> None:
            if each.finish_reason is not None:
                self.open.discard(each)
            tell((len(each.answer), each.finish_reason))

        request.listener = listen
        self._call(submit)
        reason = None
        try:
            while reason is None:
                event = await events.get()
                if isinstance(event, Exception):
                    reason = "error"
                    raise event
                count, reason = event
                if reason == "error":
                    raise self._stopped()
                yield count, reason
        finally:
            if reason is None:
                with contextlib.suppress(EngineStopped):
                    self._call(lambda: self.engine.cancel(request))

    def _stopped(self) -> EngineStopped:
        return EngineStopped(f"the engine stopped: {self.failure or 'the server ends'}")

    def _call(self, call: Callable[[], None]) -> None:
        """Lets the engine's thread do something."""
        with self._changed:
            if self._stops:
                raise self._stopped()
            self._calls.append(call)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._next():
                self.engine.advance()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            with self._changed:
                self._stops = True
                calls, self._calls = list(self._calls), collections.deque()
            for call in calls:
                call()
            for request in list(self.open):
                self.engine.cancel(request, "error")

    def _next(self) -> bool:
        """Does what was asked for; waits if there is nothing else; returns whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._stops or self.engine.waiting or self.engine.running)
            calls, self._calls = list(self._calls), collections.deque()
            stops = self._stops
        for call in calls:
            call()
        return not stops
