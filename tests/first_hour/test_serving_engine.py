"""A serving engine written for JAX's ragged paged attention on TPUs, with ours in its place: the same tokens.

The engine knows nothing of Tilewright: a function with JAX's signature is all that it is given.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from tilewright.integrations.jax_serving import ragged_paged_attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 31, 32, 4, 2, 8, 2
PAGES, PAGE_SIZE, MAX_SEQS, PAGES_PER_SEQ, MAX_TOKENS = 12, 4, 3, 6, 8

type Attention = Callable[..., Any]


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    combined = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return {
        "embedding": 6 * draw(VOCABULARY, WIDTH),
        "position": 6 * draw(PAGES_PER_SEQ * PAGE_SIZE, WIDTH),
        "qkv": draw(LAYERS, WIDTH, combined),
        "out": draw(LAYERS, HEADS * HEAD_DIM, WIDTH),
        "head": draw(WIDTH, VOCABULARY),
    }


@dataclasses.dataclass
class Request:
    prompt: list[int]
    count: int
    answer: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer


def forward(params: Any, caches: list[Any], batch: dict[str, Any], *, attention: Attention) -> tuple[list[Any], Any]:
    """The caches with the step's tokens in them, and of each sequence the likeliest next token."""
    x = params["embedding"][batch["tokens"]] + params["position"][batch["positions"]]
    caches = list(caches)
    for layer in range(LAYERS):
        qkv = (x @ params["qkv"][layer]).reshape(MAX_TOKENS, -1, HEAD_DIM)
        q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
        combined = jnp.stack([k, v], axis=2).reshape(MAX_TOKENS, 2 * KV_HEADS, HEAD_DIM)
        caches[layer] = caches[layer].at[batch["pages"], batch["rows"]].set(combined, mode="drop")
        metadata = (batch[name] for name in ("kv_lens", "page_indices", "cu_q_lens", "num_seqs"))
        out = attention(q, caches[layer], *metadata, sm_scale=HEAD_DIM**-0.5)
        x = x + out.reshape(MAX_TOKENS, -1) @ params["out"][layer]
    last = jnp.clip(batch["cu_q_lens"][1:] - 1, 0, MAX_TOKENS - 1)
    return caches, jnp.argmax(x[last] @ params["head"], axis=-1)


class Engine:
    """Continuous batching: prompts are read in chunks beside sequences that are decoded, and pages given on demand."""

    def __init__(self, step: Callable[..., Any]):
        self.step, self.params = step, parameters()
        self.caches = [jnp.zeros((PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM)) for _ in range(LAYERS)]
        self.free = list(range(PAGES))

    def run(self, waiting: list[Request]) -> None:
        running: list[Request] = []
        waiting = list(waiting)
        while running or waiting:
            while waiting and len(running) < MAX_SEQS:
                running.append(waiting.pop(0))
            room, counts = MAX_TOKENS - len(running), []
            for request in running:
                more = min(len(request.text) - request.cached - 1, room)
                counts.append(1 + more)
                room -= more
            self.caches, tokens = self.step(self.params, self.caches, self._batch(running, counts))
            for request, count, token in zip(running, counts, np.asarray(tokens), strict=False):
                request.cached += count
                if request.cached == len(request.text):
                    request.answer.append(int(token))
                if len(request.answer) == request.count:
                    self.free += request.pages
            running = [request for request in running if len(request.answer) < request.count]

    def _batch(self, running: list[Request], counts: list[int]) -> dict[str, Any]:
        """Arrays of fixed shapes; entries after the running sequences keep what was there."""
        rng = np.random.default_rng(sum(counts))
        batch = {
            "tokens": np.zeros(MAX_TOKENS, np.int32),
            "positions": np.zeros(MAX_TOKENS, np.int32),
            "pages": np.full(MAX_TOKENS, PAGES, np.int32),
            "rows": np.zeros(MAX_TOKENS, np.int32),
            "kv_lens": rng.integers(-9, 99, MAX_SEQS, np.int32),
            "page_indices": rng.integers(0, PAGES, (MAX_SEQS, PAGES_PER_SEQ), np.int32),
            "cu_q_lens": rng.integers(-9, 99, MAX_SEQS + 1, np.int32),
            "num_seqs": np.array([len(running)], np.int32),
        }
        at = batch["cu_q_lens"][0] = 0
        for row, (request, count) in enumerate(zip(running, counts, strict=True)):
            length = request.cached + count
            while len(request.pages) * PAGE_SIZE < length:
                request.pages.append(self.free.pop())
            positions = np.arange(request.cached, length)
            batch["tokens"][at : at + count] = request.text[request.cached : length]
            batch["positions"][at : at + count] = positions
            batch["pages"][at : at + count] = np.asarray(request.pages)[positions // PAGE_SIZE]
            batch["rows"][at : at + count] = positions % PAGE_SIZE
            batch["kv_lens"][row] = length
            batch["page_indices"][row, : len(request.pages)] = request.pages
            at += count
            batch["cu_q_lens"][row + 1] = at
        return batch


def requests() -> list[Request]:
    rng = np.random.default_rng(1)
    sizes = ((5, 4), (11, 2), (1, 5), (9, 3))
    return [Request(rng.integers(0, VOCABULARY, prompt).tolist(), count) for prompt, count in sizes]


def by_jax(q: jax.Array, *others: Any, **options: Any) -> jax.Array:
    """JAX's reference, which leaves out the rows behind the last sequence's."""
    out = ref_ragged_paged_attention(q, *others, **options)
    return jnp.zeros_like(q).at[: out.shape[0]].set(out)


def answers(step: Callable[..., Any]) -> list[list[int]]:
    made = requests()
    Engine(step).run(made)
    return [request.answer for request in made]


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 3}, {"sliding_window": 5, "soft_cap": 0.5}],
    ids=str,
)
def test_the_engine_writes_the_same_tokens(options: dict[str, Any]):
    traces = []

    # One program with the writes in it, and with donated pages.
    @functools.partial(jax.jit, donate_argnums=1)
    def program(params: Any, caches: Any, batch: Any) -> Any:
        traces.append(batch["tokens"].shape)
        return forward(params, caches, batch, attention=functools.partial(ragged_paged_attention, **options))

    def step(params: Any, caches: Any, batch: Any) -> Any:
        result = program(params, caches, batch)
        assert all(cache.is_deleted() for cache in caches)
        return result

    got = answers(step)
    want = answers(functools.partial(forward, attention=functools.partial(by_jax, **options)))
    assert got == want
    assert [len(answer) for answer in got] == [4, 2, 5, 3]
    assert len({tuple(answer) for answer in got}) == 4, "the model must look at its cache"
    assert len(traces) == 1, "sequences grow, join and leave without another program"
