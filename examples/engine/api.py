"""OpenAI's completion format over HTTP, with streaming: ``/v1/completions``, ``/v1/models`` and ``/health``."""

import asyncio
import codecs
import contextlib
import dataclasses
import json
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.requests import EngineStopped, QueueFull, Request, RequestError, Sampling
from engine.thread import EngineThread

type Choice = dict[str, Any]
type Answer = AsyncGenerator[Choice]

MOST_CHOICES = 16
MOST_BYTES = 4 << 20
"""Of the body of a request."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decoder(self) -> Callable[[int, bool], str]:
        """A function of a token, and whether it is the last one, that returns the text that it completes."""
        ...


class Bytes:
    """Tokens that are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decoder(self) -> Callable[[int, bool], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token, last: decoder.decode(bytes([token]), last)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request's body, checked.

    Attributes:
      prompts: tokens of each.
      n: answers to each.
      logprobs: whether each token comes with its log-probability.
    """

    prompts: list[list[int]]
    n: int
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    logprobs: bool
    echo: bool


SERVED = {
    "prompt", "n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream", "stream_options",
    "logprobs", "echo",
}  # fmt: skip
IGNORED = {"model", "user"}
NEUTRAL: Mapping[str, Any] = {
    "suffix": None, "best_of": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0
}  # fmt: skip
"""Fields of the format that this server does not serve, with the value, beside null, that changes nothing."""


def number(body: Mapping[str, Any], name: str, default: Any, kind: type) -> Any:
    """A number of a body; a boolean is none.

    Raises:
      RequestError: it is something else.
    """
    found = body.get(name)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, (int, float) if kind is float else int):
        raise RequestError(f"{name} must be {'a number' if kind is float else 'an integer'}, got {found!r}")
    return kind(found)


def flag(body: Mapping[str, Any], name: str) -> bool:
    found = body.get(name)
    if found is not None and not isinstance(found, bool):
        raise RequestError(f"{name} must be true or false, got {found!r}")
    return bool(found)


def prompts_of(prompt: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of a text, of texts, of tokens, or of lists of tokens."""
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            return [tokenizer.encode(each) for each in prompt]
        nested = prompt if all(isinstance(each, list) for each in prompt) else [prompt]
        if all(type(token) is int for each in nested for token in each):
            return nested
    raise RequestError("prompt must be a string, a list of strings, a list of tokens, or a list of such lists")


def decoded(body: bytes) -> Any:
    """The JSON of a body. Raises RequestError if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise RequestError(f"the body is not JSON: {wrong}") from None


def completion(body: Any, tokenizer: Tokenizer) -> Completion:
    """Checks a body.

    Raises:
      RequestError: a field is wrong or not served.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if unknown := sorted(body.keys() - SERVED - IGNORED - NEUTRAL.keys()):
        raise RequestError(f"unknown fields: {', '.join(unknown)}")
    for name, neutral in NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            raise RequestError(f"{name} is not served")
    if "prompt" not in body:
        raise RequestError("prompt is missing")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(each, str) and each for each in stop):
        raise RequestError("stop must be a string or a list of strings, none of them empty")
    n = number(body, "n", 1, int)
    prompts = prompts_of(body["prompt"], tokenizer)
    if not 1 <= n * len(prompts) <= MOST_CHOICES:
        raise RequestError(f"n times the prompts must be from 1 to {MOST_CHOICES}, got {n} times {len(prompts)}")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object")
    logprobs = number(body, "logprobs", None, int)
    if logprobs not in (None, 0, 1):
        raise RequestError(f"logprobs may be 0 or 1, that of the token itself; got {logprobs}")
    sampling = Sampling(
        number(body, "temperature", 1.0, float), number(body, "top_k", 0, int), number(body, "top_p", 1.0, float),
        number(body, "min_p", 0.0, float), number(body, "seed", random.randrange(2**31), int),
    )  # fmt: skip
    return Completion(
        prompts, n, number(body, "max_tokens", 16, int), sampling, tuple(stop), stream=flag(body, "stream"),
        usage=flag(options, "include_usage"), logprobs=logprobs is not None, echo=flag(body, "echo"),
    )  # fmt: skip


class Text:
    """The text of an answer as tokens come, which ends before the first of some strings."""

    def __init__(self, decode: Callable[[int, bool], str], stop: Sequence[str]) -> None:
        self.decode, self.stop = decode, stop
        self.held = ""
        self.stopped = False

    def add(self, token: int, last: bool) -> str:
        """The text that is certain by now: what may be the beginning of a stop string is held back."""
        self.held += self.decode(token, last)
        found = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self.held[: min(found)]
        keep = 0 if last else max((self._overlap(stop) for stop in self.stop), default=0)
        certain, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return certain

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that begins the string."""
        return next((n for n in range(min(len(stop) - 1, len(self.held)), 0, -1) if self.held.endswith(stop[:n])), 0)


@dataclasses.dataclass
class Piece:
    """A piece of an answer: its text, tokens and their log-probabilities, and why it ends if it does."""

    text: str
    tokens: list[int]
    log_probs: list[float]
    finish_reason: str | None


async def pieces(engine: EngineThread, request: Request, text: Text) -> AsyncGenerator[Piece]:
    """The pieces of an answer; the first one is empty, and comes once the engine has the request."""
    seen = 0
    async with contextlib.aclosing(engine.answer(request)) as events:
        async for count, reason in events:
            written = ""
            for i in range(seen, count):
                written += text.add(request.answer[i], reason is not None and i == count - 1)
                if text.stopped:
                    yield Piece(written, request.answer[seen : i + 1], request.log_probs[seen : i + 1], "stop")
                    return
            yield Piece(written, request.answer[seen:count], request.log_probs[seen:count], reason)
            seen = count


class Api:
    """The server's routes over an engine."""

    def __init__(self, engine: EngineThread, tokenizer: Tokenizer, name: str, end: Sequence[int] = ()) -> None:
        self.engine, self.tokenizer, self.name, self.end = engine, tokenizer, name, frozenset(end)
        self.created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application; it starts and stops the engine's thread."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            yield
            await asyncio.to_thread(self.engine.stop)

        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def models(self, _: HttpRequest) -> Response:
        data = {"id": self.name, "object": "model", "created": self.created, "owned_by": "tilewright"}
        return JSONResponse({"object": "list", "data": [data]})

    async def health(self, _: HttpRequest) -> Response:
        failure, engine = self.engine.failure, self.engine.engine
        counts = {"running": len(engine.running), "waiting": len(engine.waiting)}
        pages = {"pages_used": engine.pool.used, "pages": engine.pool.num_pages}
        status = "ok" if failure is None else f"the engine stopped: {failure}"
        return JSONResponse({"status": status, **counts, **pages}, 200 if failure is None else 503)

    async def completions(self, http: HttpRequest) -> Response:
        try:
            body = bytearray()
            async for part in http.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return error(413, f"the body is longer than {MOST_BYTES} bytes")
            wanted = completion(decoded(bytes(body)), self.tokenizer)
            requests = list(self._requests(wanted))
            answers = [self._answer(i, request, wanted) for i, request in enumerate(requests)]
            if wanted.stream:
                return await self._streamed(answers, requests, wanted.usage)
            return await self._whole(http, answers, requests)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except RequestError as wrong:
            return error(400, str(wrong))
        except QueueFull as full:
            return error(503, str(full), {"Retry-After": "1"})
        except EngineStopped as stopped:
            return error(503, str(stopped))

    def _requests(self, wanted: Completion) -> Iterator[Request]:
        for prompt in wanted.prompts:
            for i in range(wanted.n):
                sampling = dataclasses.replace(wanted.sampling, seed=(wanted.sampling.seed + i) % 2**31)
                yield Request(prompt, wanted.max_tokens, sampling, self.end)

    async def _answer(self, index: int, request: Request, wanted: Completion) -> Answer:
        """Choices of OpenAI's format: an empty one, or the prompt, once the engine has the request; then pieces."""
        text = Text(self.tokenizer.decoder(), wanted.stop)
        echo = self._decoded(request.prompt) if wanted.echo else ""
        async with contextlib.aclosing(pieces(self.engine, request, text)) as found:
            async for piece in found:
                choice = {"index": index, "text": echo + piece.text, "finish_reason": piece.finish_reason}
                echo = ""
                ids = [f"token_id:{token}" for token in piece.tokens]
                logprobs = {"tokens": ids, "token_logprobs": piece.log_probs}
                yield choice | {"logprobs": logprobs if wanted.logprobs else None}

    def _decoded(self, tokens: Sequence[int]) -> str:
        decode = self.tokenizer.decoder()
        return "".join(decode(token, i == len(tokens) - 1) for i, token in enumerate(tokens))

    def _body(self, choices: Sequence[Choice], name: str) -> dict[str, Any]:
        body = {"id": name, "object": "text_completion", "created": int(time.time()), "model": self.name}
        return body | {"choices": list(choices)}

    async def _whole(self, http: HttpRequest, answers: Sequence[Answer], requests: Sequence[Request]) -> Response:
        """All answers in one body. A client that goes away ends them."""
        tasks = [asyncio.ensure_future(_collected(answer)) for answer in answers]
        every: asyncio.Future[Any] = asyncio.gather(*tasks)
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait([every, gone], return_when=asyncio.FIRST_COMPLETED)
            if not every.done():
                return Response(status_code=499)  # nobody reads it
            body = self._body(await every, f"cmpl-{uuid.uuid4().hex}")
            return JSONResponse(body | {"usage": usage(requests)})
        finally:
            await _ended([*tasks, gone, every])

    async def _streamed(self, answers: Sequence[Answer], requests: Sequence[Request], usage_wanted: bool) -> Response:
        """Pieces as server-sent events. If the engine refuses one of the answers the whole is an error."""
        try:
            first = [await anext(answer) for answer in answers]
        except BaseException:
            for answer in answers:
                await answer.aclose()
            raise
        return EventStream(self._events(first, answers, requests, usage_wanted))

    async def _events(
        self, first: list[Choice], answers: Sequence[Answer], requests: Sequence[Request], usage_wanted: bool
    ) -> AsyncGenerator[str]:
        name, queue = f"cmpl-{uuid.uuid4().hex}", asyncio.Queue[Choice | EngineStopped | None]()

        async def forward(answer: Answer) -> None:
            async with contextlib.aclosing(answer):
                try:
                    async for choice in answer:
                        queue.put_nowait(choice)
                except EngineStopped as stopped:
                    queue.put_nowait(stopped)
                queue.put_nowait(None)

        tasks = [asyncio.ensure_future(forward(answer)) for answer in answers]
        try:
            for choice in first:
                yield event(self._body([choice], name))
            left = len(tasks)
            while left:
                found = await queue.get()
                if isinstance(found, EngineStopped):
                    yield event(error_body(503, str(found)))
                    return
                if found is None:
                    left -= 1
                elif found["text"] or found["finish_reason"] or found["logprobs"]:
                    yield event(self._body([found], name))
            if usage_wanted:
                yield event(self._body([], name) | {"usage": usage(requests)})
            yield "data: [DONE]\n\n"
        finally:
            await _ended(tasks)


class EventStream(StreamingResponse):
    """Server-sent events, whose generator is closed when the client goes away."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.events = events

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            await self.events.aclose()


async def _collected(answer: Answer) -> Choice:
    """The pieces of an answer as one."""
    async with contextlib.aclosing(answer):
        parts = [choice async for choice in answer]
    joined = parts[-1] | {"text": "".join(part["text"] for part in parts)}
    if joined["logprobs"] is not None:
        names = joined["logprobs"]
        joined["logprobs"] = {name: [each for part in parts for each in part["logprobs"][name]] for name in names}
    return joined


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits for their ends; what they raise was told before, or nobody asks any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def usage(requests: Sequence[Request]) -> dict[str, Any]:
    """Counts of tokens; of the prompts' those whose pages were found in the cache."""
    prompt = sum(len(request.prompt) for request in requests)
    answer = sum(len(request.answer) for request in requests)
    cached = sum(request.reused for request in requests)
    found = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return found | {"prompt_tokens_details": {"cached_tokens": cached}}


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_body(status, message), status, headers)
