"""The serving engine: answers are those of the model without a cache, whatever joins, leaves, waits or looks ahead."""

import dataclasses
from typing import Any

import byte_transformer as bt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_demo
from engine.engine import Engine
from engine.models import ByteModel, Llama
from engine.pages import PagePool, page_keys
from engine.programs import EngineConfig
from engine.requests import QueueFull, Request, RequestError, Sampling
from generate import dense_answer
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_transformer import MODEL

CONFIG = EngineConfig(slots=3, page_size=4, num_pages=36, longest=40, chunk=16, max_waiting=20, proposals=2)
SMALL = dataclasses.replace(CONFIG, num_pages=13)
"""Pages for one long request and little more."""
MODEL_OF_BYTES = ByteModel(MODEL)


def drawn_parameters(seed: int) -> Any:
    drawn = bt.initial_parameters(MODEL, jax.random.key(seed))
    # As they are drawn the next byte is nearly always the last one: all depends on the cache with larger weights.
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, drawn)


@pytest.fixture(scope="module")
def parameters() -> Any:
    return drawn_parameters(0)


def requests(seed: int = 0, count: int = 7, **options: Any) -> list[Request]:
    draw = np.random.default_rng(seed)
    sizes = [(int(draw.integers(1, 28)), int(draw.integers(1, 12))) for _ in range(count)]
    return [Request(draw.integers(0, 256, n).tolist(), m, **options) for n, m in sizes]


def sampled(count: int = 5) -> list[Request]:
    every = [Sampling(1.0, 20, 0.9, seed=5), Sampling(0.7, seed=6), Sampling(1.3, min_p=0.1, seed=2**31 - 1)]
    found = requests(count=count)
    for i, request in enumerate(found):
        request.sampling = every[i % 3]
    return found


def dense(parameters: Any, request: Request) -> list[int]:
    attention = train_demo.tilewright_attention
    return dense_answer(parameters, request.prompt, request.max_tokens, MODEL, attention, CONFIG.longest)


def check_pages(engine: Engine) -> None:
    """Every page is free, idle, or read by as many requests as hold it."""
    held = np.zeros(engine.config.num_pages, int)
    for running in engine.running:
        assert len(set(running.pages)) == len(running.pages)
        np.add.at(held, running.pages, 1)
    assert engine.pool.used == np.count_nonzero(held)
    assert engine.pool.available == engine.config.num_pages - np.count_nonzero(held)


def test_answers_are_those_without_a_cache(parameters: Any):
    engine, submitted = Engine(MODEL_OF_BYTES, parameters, CONFIG), requests()
    for request in submitted:
        engine.submit(request)
    seen, most = [], 0
    while (info := engine.advance()) is not None:
        seen.append(info)
        most = max(most, len(engine.running))
        check_pages(engine)
    assert most == 3
    # Some join while others run, and answers are written in the very steps in which prompts are read.
    assert any(info.joined for info in seen[1:])
    assert any(info.prompt_tokens and info.answer_tokens for info in seen)
    assert sum(info.answer_tokens for info in seen) == sum(request.max_tokens for request in submitted)
    assert engine.pool.used == 0
    assert all(request.finish_reason == "length" for request in submitted)
    different = set()
    for request in submitted:
        assert request.answer == dense(parameters, request)
        different |= set(request.answer)
    assert len(different) > 5


def test_requests_that_must_go_back_have_the_same_answers(parameters: Any):
    engine, submitted = Engine(MODEL_OF_BYTES, parameters, SMALL), requests()
    for request in submitted:
        engine.submit(request)
    joined = 0
    while (info := engine.advance()) is not None:
        joined += len(info.joined)
        check_pages(engine)
    assert joined > len(submitted)
    assert engine.pool.used == 0
    for request in submitted:
        assert request.answer == dense(parameters, request)


def test_what_is_drawn_depends_on_the_request_alone(parameters: Any):
    together, apart = sampled(), sampled()
    engine = Engine(MODEL_OF_BYTES, parameters, CONFIG)
    engine.run(together)
    for request in reversed(apart):
        engine.run([request])
    for a, b in zip(together, apart, strict=True):
        assert a.answer == b.answer
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
    again = sampled(1)
    again[0].sampling = dataclasses.replace(again[0].sampling, seed=7)
    engine.run(again)
    assert again[0].answer != together[0].answer


@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_changes_steps_and_no_token(parameters: Any, seed: int):
    """The model as its own draft is always right; one of other weights hardly ever."""
    want, found = [*requests(), *sampled()], [*requests(), *sampled()]
    plain = Engine(MODEL_OF_BYTES, parameters, CONFIG)
    plain.run(want)
    engine = Engine(MODEL_OF_BYTES, parameters, CONFIG, (MODEL_OF_BYTES, drawn_parameters(seed)))
    for request in found:
        engine.submit(request)
    tokens = slots = 0
    while (info := engine.advance()) is not None:
        if not info.prompt_tokens:
            tokens += info.answer_tokens
            slots += len(engine.running) + len(info.left)
    assert tokens / slots > 2 if seed == 0 else tokens / slots < 1.3
    assert engine.pool.used == 0
    for a, b in zip(want, found, strict=True):
        assert b.answer == a.answer
        assert b.finish_reason == "length"
        np.testing.assert_allclose(b.log_probs, a.log_probs, atol=1e-4)


def test_a_beginning_that_was_read_before_is_not_read_again(parameters: Any):
    prompt = np.random.default_rng(3).integers(0, 256, 26).tolist()
    engine = Engine(MODEL_OF_BYTES, parameters, CONFIG)
    first, same, longer, other = (Request(text, 6) for text in (prompt, prompt, [*prompt[:17], 1, 2], [*prompt[1:], 0]))
    engine.run([first])
    engine.run([same, longer, other])
    # Pages of 4: whole ones, and never the last token, whose row gives the next one.
    assert [each.reused for each in (first, same, longer, other)] == [0, 24, 16, 0]
    for request in (first, same, longer, other):
        assert request.answer == dense(parameters, request)
    follow_up = Request([*first.text, 9], 4)
    engine.run([follow_up])
    assert follow_up.reused == 28
    assert follow_up.answer == dense(parameters, follow_up)


def test_a_stop_token_ends_an_answer(parameters: Any):
    request = max(requests(), key=lambda request: request.max_tokens)
    want = dense(parameters, request)
    engine = Engine(MODEL_OF_BYTES, parameters, CONFIG)
    request.stop_tokens = frozenset({want[3]})
    engine.run([request])
    assert request.answer == want[: want.index(want[3]) + 1]
    assert request.finish_reason == "stop"
    assert engine.pool.used == 0


@pytest.mark.parametrize("after", range(5))
def test_a_request_can_be_cancelled_at_any_time(parameters: Any, after: int):
    engine, submitted, told = Engine(MODEL_OF_BYTES, parameters, CONFIG), requests(count=5), []
    for request in submitted:
        engine.submit(request)
    for _ in range(after):
        engine.advance()
    victims = [submitted[1], submitted[4]]
    for request in victims:
        request.listener = lambda each: told.append((each, each.finish_reason))
        engine.cancel(request)
        engine.cancel(request)
    check_pages(engine)
    late = requests(seed=1, count=2)
    engine.run(late)
    assert engine.pool.used == 0
    assert told == [(request, "cancelled") for request in victims if request.finish_reason == "cancelled"]
    for request in (*submitted, *late):
        want = dense(parameters, request)
        assert request.answer == (want[: len(request.answer)] if request in victims else want)


def test_what_can_never_be_served_is_refused(parameters: Any):
    engine = Engine(MODEL_OF_BYTES, parameters, CONFIG)
    for prompt, count, message in (
        ([1] * 30, 11, "max_tokens=11 are more than the 40 tokens"),
        ([], 3, "empty"),
        ([1], 0, "at least 1, got 0"),
        ([1, 256], 3, "vocabulary of 256"),
        ([-1], 3, "vocabulary"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(Request(prompt, count))
    for options in (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 101},
        {"top_k": 2**31},
        {"top_p": 0},
        {"top_k": -1},
        {"seed": 2**31},
    ):
        with pytest.raises(RequestError, match=next(iter(options))):
            Sampling(**options)
    for _ in range(CONFIG.max_waiting + CONFIG.slots):
        engine.submit(Request([1], 1))
    with pytest.raises(QueueFull, match="23 requests wait"):
        engine.submit(Request([1], 1))
    assert engine.pool.used == 0
    for wrong, message in (
        ({"num_pages": 3}, "num_pages=3"), ({"chunk": 3}, "chunk=3"), ({"slots": 0}, "slots must be at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **wrong)
    with pytest.raises(ValueError, match="vocabulary of 256, got 97"):
        Engine(MODEL_OF_BYTES, parameters, CONFIG, (LLAMA, None))


LLAMA = Llama(2, 32, 4, 2, 8, 64, 97, dtype=jnp.float32)


def llama_logits(parameters: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits after a text, in float64 without a cache."""

    def norm(x: Any, scale: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
    n, d = len(tokens), LLAMA.head_dim
    angles = np.arange(n)[:, None] * 500000.0 ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x: Any) -> Any:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["embedding"][tokens]
    for i in range(LLAMA.layers):
        layer = w["layers"][i] if isinstance(w["layers"], list) else {k: x[i] for k, x in w["layers"].items()}
        rows = (norm(x, layer["attention_norm"]) @ layer["qkv"]).reshape(n, -1, d)
        q, k, v = turned(rows[:, :4]), turned(rows[:, 4:6]), rows[:, 6:]
        k, v = (np.repeat(each, 2, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + out @ layer["o"]
        y = norm(x, layer["mlp_norm"])
        gate = y @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
    return norm(x, w["norm"])[-1] @ w["head"]


@pytest.mark.parametrize("scanned", [True, False])
def test_a_llama(scanned: bool):
    model = dataclasses.replace(LLAMA, scanned=scanned)
    parameters = model.parameters(jax.random.key(0))
    found = [Request(list(range(20)), 9), Request([3, 4, 5], 9)]
    Engine(model, parameters, CONFIG).run(found)
    for request in found:
        for i, (token, log_prob) in enumerate(zip(request.answer, request.log_probs, strict=True)):
            logits = llama_logits(parameters, request.prompt + request.answer[:i])
            assert token == logits.argmax()
            want = logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert log_prob == pytest.approx(want, abs=1e-4)


def test_keys_of_pages_tell_all_text_before():
    a, b = list(range(12)), [9, *range(1, 12)]
    keys = [list(page_keys(text, 4)) for text in (a, b, a[:11], a[4:])]
    assert [len(each) for each in keys] == [3, 3, 2, 2]
    assert keys[2] == keys[0][:2]
    assert len({*keys[0], *keys[1], *keys[3]}) == 8


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)), max_size=60))
def test_pages_are_never_lost_nor_given_twice(calls: list[tuple[int, int, int]]):
    """Texts of a few tokens, which share beginnings: pages that are shared hold the text that is asked for."""
    pool, readers, holds = PagePool(7, 2), list[tuple[list[int], list[int]]](), dict[int, list[int]]()
    for action, which, count in calls:
        if action < 2:
            text = [which % 2, which % 3, *range(2 * count)][: 2 * count + 1]
            pages = pool.share(text)
            assert all(holds[page] == text[: 2 * i + 2] for i, page in enumerate(pages))
            needed = count - len(pages)
            if needed > pool.available:
                with pytest.raises(MemoryError, match="asked for"):
                    pool.take(needed)
                pool.release(pages)
                continue
            fresh = pool.take(needed)
            held = {page for own, _ in readers for page in own}
            assert not held & set(fresh)
            for i, page in enumerate(fresh, len(pages)):
                holds[page] = text[: 2 * i + 2]
            pages += fresh
            if action == 1:
                for page, key in zip(pages, page_keys(text, 2), strict=False):
                    pool.publish(page, key)
            readers.append((pages, text))
        elif readers:
            pages, _ = readers.pop(which % len(readers))
            pool.release(pages)
        held = {page for own, _ in readers for page in own}
        assert pool.used == len(held)
        assert pool.available == 7 - len(held)
    for pages, _ in readers:
        pool.release(pages)
    assert len(set(pool.take(7))) == 7
    with pytest.raises(ValueError, match="no reader"):
        PagePool(1, 1).release([0])
