"""Continuous batching over a paged cache: requests join and leave a running batch, each at its own place in its text.

Every step is one program of fixed shapes: the next byte of each running request, or a chunk of its prompt, packed.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from byte_transformer import Attention, ModelConfig, Parameters, embed, features, logits

from tilewright.modules import ragged_page_attention

Cache = list[tuple[jax.Array, jax.Array]]
"""Pages of keys and of values of each layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the server has room for.

    Attributes:
      slots: requests that run at the same time.
      page_size: bytes of text in a page.
      num_pages: of each layer, for all requests.
      longest: bytes of prompt and answer of one request.
      chunk: bytes of a step in which a prompt is read; other steps have one for each slot.
    """

    slots: int = 8
    page_size: int = 16
    num_pages: int = 320
    longest: int = 1024
    chunk: int = 128

    def __post_init__(self) -> None:
        if self.chunk < self.slots:
            raise ValueError(f"a step must have a byte for each slot: {self.chunk=}, {self.slots=}")
        if self.num_pages < self.columns:
            raise ValueError(f"one request may need {self.columns} pages, there are {self.num_pages=}")

    @property
    def columns(self) -> int:
        return math.ceil(self.longest / self.page_size)


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and what was written after it.

    Attributes:
      cached: bytes of the text whose keys and values are in the cache.
    """

    name: int
    prompt: list[int]
    count: int
    answer: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def finished(self) -> bool:
        return len(self.answer) == self.count


class StepInputs(NamedTuple):
    """One step's packed bytes and the state of every slot; an empty slot has no bytes and the length 0."""

    tokens: Any
    earlier: Any
    positions: Any
    page_table: Any
    kv_lengths: Any
    cum_q_lens: Any


class StepInfo(NamedTuple):
    """What a step did."""

    prompt_bytes: int
    answer_bytes: int
    joined: list[Request]
    left: list[Request]


def empty_cache(model: ModelConfig, server: ServerConfig) -> Cache:
    shape = (server.num_pages, server.page_size, model.kv_heads, model.head_dim)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(model.layers)]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def step(parameters: Parameters, cache: Cache, inputs: StepInputs, *, model: ModelConfig) -> tuple[Cache, jax.Array]:
    """The cache with the step's bytes in it, and of every slot the likeliest byte after its last."""
    cache = list(cache)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out, keys, values = ragged_page_attention(
            query,
            *cache[layer],
            inputs.page_table,
            inputs.kv_lengths,
            inputs.cum_q_lens,
            new_key=key,
            new_value=value,
            sliding_window=model.sliding_window(layer),
        )
        cache[layer] = keys, values
        return out

    x = embed(parameters, inputs.tokens, list(inputs.earlier), model)
    x = features(parameters, x, inputs.positions, model, attend)
    last = x[jnp.maximum(inputs.cum_q_lens[1:] - 1, 0)]
    return cache, jnp.argmax(last @ parameters["embedding"].T, axis=-1)


class Server:
    """Runs requests to their end: ``submit`` them, then call ``advance`` until it returns None."""

    def __init__(self, parameters: Parameters, model: ModelConfig, server: ServerConfig) -> None:
        self.parameters, self.model, self.config = parameters, model, server
        self.cache = empty_cache(model, server)
        self.free = list(range(server.num_pages))[::-1]
        self.slots: list[Request | None] = [None] * server.slots
        self.waiting: collections.deque[Request] = collections.deque()

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            total = len(request.prompt) + request.count
            if not request.prompt or request.count < 1 or total > self.config.longest:
                raise ValueError(
                    f"a request needs a prompt and an answer, of at most {self.config.longest} bytes, got "
                    f"{len(request.prompt)=}, {request.count=}"
                )
            self.waiting.append(request)

    @property
    def running(self) -> list[Request]:
        return [request for request in self.slots if request is not None]

    def advance(self) -> StepInfo | None:
        """One step of all running requests; None when there are none left."""
        joined = self._join()
        if not self.running:
            return None
        counts = self._counts()
        self.cache, best = step(self.parameters, self.cache, self._inputs(counts), model=self.model)
        left, answered, chosen = [], 0, np.asarray(best)
        for slot, (request, count) in enumerate(zip(self.slots, counts, strict=True)):
            if request is None:
                continue
            request.cached += count
            if request.cached == len(request.text):
                request.answer.append(int(chosen[slot]))
                answered += 1
            if request.finished:
                self.free += request.pages
                request.pages, self.slots[slot] = [], None
                left.append(request)
        return StepInfo(sum(counts) - answered, answered, joined, left)

    def _join(self) -> list[Request]:
        """Fills empty slots, as long as there are pages for the whole of the next request."""
        joined = []
        for slot, there in enumerate(self.slots):
            if there is None and self.waiting:
                request = self.waiting[0]
                needed = math.ceil((len(request.prompt) + request.count) / self.config.page_size)
                if needed > len(self.free):
                    break
                self.waiting.popleft()
                request.pages = [self.free.pop() for _ in range(needed)]
                self.slots[slot] = request
                joined.append(request)
        return joined

    def _counts(self) -> list[int]:
        """Bytes of each slot in the next step: one at least, and of prompts as many as fit beside the others."""
        rest = [0 if request is None else len(request.text) - request.cached for request in self.slots]
        counts = [min(n, 1) for n in rest]
        if max(rest) > 1:
            room = self.config.chunk - sum(counts)
            for slot, n in enumerate(rest):
                more = min(max(n - 1, 0), room)
                counts[slot] += more
                room -= more
        return counts

    def _inputs(self, counts: list[int]) -> StepInputs:
        size = self.config.slots if max(counts) <= 1 else self.config.chunk
        orders = self.model.longest_ngram - 1
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        earlier = np.zeros((orders, size), np.int32)
        table = np.full((self.config.slots, self.config.columns), -1, np.int32)
        lengths, at = np.zeros(self.config.slots, np.int32), 0
        for slot, (request, count) in enumerate(zip(self.slots, counts, strict=True)):
            if request is None:
                continue
            text = np.asarray(request.text, np.int32)
            first, last = request.cached, request.cached + count
            tokens[at : at + count], positions[at : at + count] = text[first:last], np.arange(first, last)
            for back in range(1, orders + 1):
                earlier[back - 1, at : at + count] = np.pad(text, (back, 0))[first:last]
            table[slot, : len(request.pages)] = request.pages
            lengths[slot] = last
            at += count
        cum = np.append(0, np.cumsum(counts)).astype(np.int32)
        return StepInputs(tokens, earlier, positions, table, lengths, cum)


@functools.partial(jax.jit, static_argnames=("count", "model", "attention"))
def _dense_answer(
    parameters: Parameters, text: jax.Array, length: jax.Array, *, count: int, model: ModelConfig, attention: Attention
) -> jax.Array:
    def write(index: Any, text: jax.Array) -> jax.Array:
        found = logits(parameters, text[None], model, attention)[0, length + index - 1]
        return text.at[length + index].set(jnp.argmax(found).astype(text.dtype))

    return jax.lax.fori_loop(0, count, write, text)


def dense_answer(
    parameters: Parameters, prompt: list[int], count: int, model: ModelConfig, attention: Attention, size: int
) -> list[int]:
    """The likeliest byte after byte by the model as it is trained: the whole text anew for each, without a cache.

    Args:
      size: bytes to which the text is padded, so that one program serves several.
    """
    text = jnp.asarray(np.pad(np.asarray(prompt, np.int32), (0, size - len(prompt))))
    length = jnp.asarray(len(prompt), jnp.int32)
    filled = _dense_answer(parameters, text, length, count=count, model=model, attention=attention)
    return np.asarray(filled)[len(prompt) : len(prompt) + count].tolist()
