"""Continuous batching: requests join and leave a running batch, each at its own place in its text.

Every step is one program of fixed shapes. Without a draft the next step is on its way to the device before the tokens
of the last one are read, so that the device does not wait for Python.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from engine.models import Model
from engine.pages import PagePool, next_key, page_keys
from engine.programs import Drawn, EngineConfig, Slots, empty_state, place, speculate, step
from engine.requests import GREEDY, FinishReason, QueueFull, Request, RequestError


@dataclasses.dataclass(eq=False)
class Running:
    """A request in a slot.

    Attributes:
      order: how many joined before.
      cached: tokens in the cache once all steps are done that were started.
      pending: tokens that are drawn by steps which were started, and were not read yet.
      published: pages that are known to others, and the key of the last one.
    """

    request: Request
    order: int
    pages: list[int]
    cached: int
    published: tuple[int, bytes]
    pending: int = 0

    @property
    def rest(self) -> int:
        """Tokens of the text that are not in the cache, those that were not read yet included; 0 if no more follow."""
        request = self.request
        known = len(request.prompt) + len(request.answer) + self.pending
        return 0 if len(request.answer) + self.pending >= request.max_tokens else known - self.cached


class Started(NamedTuple):
    """A step that was given to the device: who has part in it, and what it draws."""

    running: list[Running | None]
    drawn: Drawn


class StepInfo(NamedTuple):
    """What a call of ``advance`` did.

    Attributes:
      prompt_tokens: tokens of the step that it started, less those after which one is drawn.
      answer_tokens: tokens that it read.
    """

    prompt_tokens: int
    answer_tokens: int
    joined: list[Request]
    left: list[Request]


class Engine:
    """Runs requests to their end: ``submit`` them, then call ``advance`` until it returns None; all in one thread.

    Args:
      draft: a smaller model with the same vocabulary, and its parameters.
    """

    def __init__(
        self, model: Model, parameters: Any, config: EngineConfig, draft: tuple[Model, Any] | None = None
    ) -> None:
        if draft is not None and draft[0].vocabulary != model.vocabulary:
            raise ValueError(
                f"the draft must have the model's vocabulary of {model.vocabulary}, got {draft[0].vocabulary}"
            )
        self.config = config
        self.models = (model,) if draft is None else (model, draft[0])
        self.parameters = (parameters,) if draft is None else (parameters, draft[1])
        self.state = empty_state(self.models, config)
        self.pool = PagePool(config.num_pages, config.page_size)
        self.slots: list[Running | None] = [None] * config.slots
        self.waiting: collections.deque[Request] = collections.deque()
        self._started: collections.deque[Started] = collections.deque()
        self._order = itertools.count()
        self._joined: list[Request] = []
        self._left: list[Request] = []

    @property
    def running(self) -> list[Running]:
        return [each for each in self.slots if each is not None]

    def submit(self, request: Request) -> None:
        """Lets a request wait for a slot.

        Raises:
          RequestError: it can never be served.
          QueueFull: too many wait.
        """
        prompt, total = request.prompt, len(request.prompt) + request.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if total > self.config.longest:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} are more than the "
                f"{self.config.longest} tokens that a request may have"
            )
        vocabulary = self.models[0].vocabulary
        if not all(0 <= token < vocabulary for token in prompt):
            raise RequestError(f"the prompt has a token outside of the vocabulary of {vocabulary}")
        if len(self.waiting) >= self.config.max_waiting + self.slots.count(None):
            raise QueueFull(f"{len(self.waiting)} requests wait already, try again later")
        self.waiting.append(request)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """Ends a request, if it has not ended; its pages are free at once."""
        for slot, each in enumerate(self.slots):
            if each is not None and each.request is request:
                self._leave(slot, reason)
                return
        if request in self.waiting:
            self.waiting.remove(request)
            self._end(request, reason)

    def advance(self) -> StepInfo | None:
        """Starts a step of all running requests and reads the one before; None when nothing is left to do."""
        self._joined, self._left = [], []
        self._join()
        counts = self._counts()
        prompt = self._start(counts) if any(counts) else 0
        # With a draft the length of a text is known only when its step was read.
        keep = 1 if any(counts) and len(self.models) == 1 else 0
        idle = not self._started and not self._left
        answers = sum([self._read() for _ in range(len(self._started) - keep)])
        return None if idle else StepInfo(prompt, answers, self._joined, self._left)

    def run(self, requests: Iterable[Request]) -> None:
        """Serves requests to their end, beside those that run already."""
        for request in requests:
            self.submit(request)
        while self.advance() is not None:
            pass

    def _join(self) -> None:
        """Fills empty slots, as long as there are pages for the text of the next request and one more token."""
        for slot, there in enumerate(self.slots):
            if there is not None or not self.waiting:
                continue
            request = self.waiting[0]
            text = request.text
            shared = self.pool.share(text)
            if self._pages_for(len(text) + 1) - len(shared) > self.pool.available:
                self.pool.release(shared)
                return
            self.waiting.popleft()
            size = self.config.page_size
            cached = len(shared) * size
            if not request.answer:
                request.reused = cached
            *_, key = (b"", *page_keys(text[:cached], size))
            self.slots[slot] = Running(request, next(self._order), shared, cached, (len(shared), key))
            row = np.zeros(self.config.places, np.int32)
            row[: len(text)] = text
            self.state = place(self.state, slot, row)
            self._joined.append(request)

    def _pages_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.config.page_size)

    def _counts(self) -> list[int]:
        """Tokens of each slot in the next step: one at least, and of prompts as many as fit beside the others.

        Slots get the pages that they need; if there are too few, requests that joined last go back and wait.
        """
        rest = [0 if each is None else each.rest for each in self.slots]
        room = self.config.chunk - sum(n > 0 for n in rest)
        counts = [0] * len(rest)
        for slot, n in enumerate(rest):
            counts[slot] = min(n, 1 + room)
            room -= max(counts[slot] - 1, 0)
        ahead = self.config.proposals if len(self.models) == 2 and max(rest) <= 1 else 0
        for each in sorted(self.running, key=lambda each: each.order):
            if each not in self.slots or not (count := counts[slot := self.slots.index(each)]):
                continue
            needed = self._pages_for(each.cached + count + ahead) - len(each.pages)
            while needed > self.pool.available and self.slots[slot] is each:
                self._make_room()
            if self.slots[slot] is each and needed > 0:
                each.pages += self.pool.take(needed)
        return [0 if each is None else n for each, n in zip(self.slots, counts, strict=True)]

    def _make_room(self) -> None:
        """Reads what was started, which may end requests; if it ends none, the one that joined last goes back."""
        left = len(self._left)
        while self._started:
            self._read()
        if len(self._left) == left:
            last = max(self.running, key=lambda each: each.order)
            self.slots[self.slots.index(last)] = None
            self.pool.release(last.pages)
            self.waiting.appendleft(last.request)

    def _start(self, counts: list[int]) -> int:
        """Gives a step to the device; returns the tokens of prompts in it."""
        running = [each if n else None for each, n in zip(self.slots, counts, strict=True)]
        rest = [0 if each is None else each.rest for each in running]
        draws = [n > 0 and n == count for n, count in zip(rest, counts, strict=True)]
        slots = self._slots(running, counts, draws)
        limited = any(each.request.sampling.limited for each in running if each is not None)
        options: dict[str, Any] = {"models": self.models, "config": self.config, "limited": limited}
        looks_ahead = len(self.models) == 2 and max(rest) <= 1
        if looks_ahead:
            options["tokens"] = self.config.slots * (self.config.proposals + 1)
            self.state, drawn = speculate(self.parameters, self.state, slots, **options)
        else:
            options["tokens"] = self.config.slots if max(counts) <= 1 else self.config.chunk
            self.state, drawn = step(self.parameters, self.state, slots, **options)
        for each, count, draw in zip(running, counts, draws, strict=True):
            if each is not None:
                each.cached += count
                each.pending += draw
        self._started.append(
            Started([each if draw else None for each, draw in zip(running, draws, strict=True)], drawn)
        )
        return sum(counts) - sum(draws)

    def _slots(self, running: list[Running | None], counts: list[int], draws: list[bool]) -> Slots:
        tables = np.full((self.config.slots, self.config.columns), -1, np.int32)
        cached = np.zeros(self.config.slots, np.int32)
        for slot, each in enumerate(running):
            if each is not None:
                tables[slot, : len(each.pages)] = each.pages
                cached[slot] = each.cached
        sampling = [GREEDY if each is None else each.request.sampling for each in running]

        def options(name: str, dtype: Any) -> np.ndarray[Any, Any]:
            return np.asarray([getattr(each, name) for each in sampling], dtype)

        return Slots(
            cached, np.asarray(counts, np.int32), np.asarray(draws), tables,
            options("temperature", np.float32), options("top_k", np.int32), options("top_p", np.float32),
            options("min_p", np.float32), options("seed", np.int32),
        )  # fmt: skip

    def _read(self) -> int:
        """Waits for the oldest step that was started, and takes its tokens; returns how many."""
        running, drawn = self._started.popleft()
        tokens, log_probs, counts = jax.device_get(drawn)
        taken = 0
        for slot, each in enumerate(running):
            if each is None or self.slots[slot] is not each:
                continue  # it had ended before
            each.pending -= 1
            each.cached += int(counts[slot]) - 1
            for token, log_prob in zip(tokens[slot, : counts[slot]].tolist(), log_probs[slot].tolist(), strict=False):
                taken += 1
                if self._take(slot, each.request, token, log_prob):
                    break
            else:
                self._publish(each)
        return taken

    def _take(self, slot: int, request: Request, token: int, log_prob: float) -> bool:
        """Adds a token to an answer; returns whether that ends it."""
        request.answer.append(token)
        request.log_probs.append(log_prob)
        ends: FinishReason | None = None
        if token in request.stop_tokens:
            ends = "stop"
        elif len(request.answer) == request.max_tokens:
            ends = "length"
        if ends is None and request.listener is not None:
            request.listener(request)
        if ends is not None:
            self._leave(slot, ends)
        return ends is not None

    def _publish(self, each: Running) -> None:
        """Lets others share the pages that are full of tokens which are known."""
        count, key = each.published
        size, text = self.config.page_size, each.request.text
        while (count + 1) * size <= min(each.cached, len(text)):
            key = next_key(key, text[count * size : (count + 1) * size])
            self.pool.publish(each.pages[count], key)
            count += 1
        each.published = count, key

    def _leave(self, slot: int, reason: FinishReason) -> None:
        each = self.slots[slot]
        assert each is not None
        # A step that was started may still write behind the last token that is known; that is no full page of others.
        self._publish(each)
        self.slots[slot] = None
        self.pool.release(each.pages)
        self._end(each.request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._left.append(request)
        if request.listener is not None:
            request.listener(request)
