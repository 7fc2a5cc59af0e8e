"""The server over real connections: OpenAI's format, streams, bad requests, clients that leave, engines that fail."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import byte_transformer as bt
import jax
import numpy as np
import pytest
import serve
import train_demo
import uvicorn
from engine.api import Api, Bytes, Text
from engine.engine import Engine
from engine.models import ByteModel
from engine.programs import EngineConfig
from engine.requests import Request
from engine.thread import EngineThread

from tests.support.tiny_transformer import MODEL

CONFIG = EngineConfig(slots=2, page_size=4, num_pages=64, longest=120, chunk=16, max_waiting=3)


class Served:
    """A server on a port of its own, in a thread."""

    def __init__(self, engine: Engine, name: str = "bytes") -> None:
        self.engine = engine
        self.open = (thread := EngineThread(engine)).open
        api = Api(thread, Bytes(), name)
        self.server = uvicorn.Server(uvicorn.Config(api.app(), port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body if isinstance(body, str | bytes) else json.dumps(body))
            found = connection.getresponse()
            return found.status, json.loads(found.read())

    def complete(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", body)

    def events(self, **body: Any) -> list[Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({"stream": True, **body}))
            found = connection.getresponse()
            assert found.status == 200
            assert found.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in found.read().decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def leaving(self, body: Any) -> socket.socket:
        """A connection with a request that nobody has answered yet."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall((head + text).encode())
        return connection

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def new_engine(config: EngineConfig = CONFIG) -> Engine:
    drawn = bt.initial_parameters(MODEL, jax.random.key(0))
    parameters = jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, drawn)
    return Engine(ByteModel(MODEL), parameters, config)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = new_engine()
    serve.warm_up(engine)
    served = Served(engine)
    yield served
    served.stop()


def decoded(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def test_answers_are_the_engines(served: Served):
    want = Request(list(b"def main("), 20)
    new_engine().run([want])
    status, body = served.complete(prompt="def main(", max_tokens=20, temperature=0, model="bytes", logprobs=1)
    assert status == 200
    (choice,) = body["choices"]
    assert choice["text"] == decoded(want.answer)
    assert choice["finish_reason"] == "length"
    assert choice["index"] == 0
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], want.log_probs, atol=1e-4)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in want.answer]
    assert body["object"] == "text_completion"
    assert body["model"] == "bytes"
    assert body["usage"] == {
        "prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    _, again = served.complete(prompt=list(b"def main("), max_tokens=20, temperature=0, echo=True)
    assert again["choices"][0]["text"] == "def main(" + decoded(want.answer)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


def test_streams_say_the_same_piece_by_piece(served: Served):
    body = {"prompt": ["import ", "class "], "n": 2, "max_tokens": 12, "temperature": 1.2, "top_p": 0.95, "seed": 5}
    status, whole = served.complete(**body)
    assert status == 200
    *events, last = served.events(**body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 48
    assert len(events) > 8
    assert len({each["choices"][0]["text"] for each in events}) > 4
    for choice in whole["choices"]:
        own = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == ["length"]
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 4


def test_a_stop_string_ends_an_answer_before_it(served: Served):
    body = {"prompt": "x = ", "max_tokens": 40, "temperature": 1.0, "seed": 1, "top_k": 40}
    _, free = served.complete(**body)
    text = free["choices"][0]["text"]
    stop = text[10:13]
    _, found = served.complete(**body, stop=["never in it", stop])
    assert found["choices"][0]["text"] == text[: text.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    events = served.events(**body, stop=stop)
    assert "".join(each["choices"][0]["text"] for each in events) == text[: text.index(stop)]
    wait_for(lambda: not served.engine.running)
    assert served.engine.pool.used == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        (b"\xff\xfe{}", "not JSON"),
        ("[" * 100000, "not JSON"),
        ({"prompt": "a", "top_k": 2**40}, "top_k must be"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be"),
        ({"prompt": "a", "max_tokens": 2**70}, "more than the 120"),
        ({}, "prompt is missing"),
        ({"prompt": 3}, "prompt must be"),
        ({"prompt": [[1, True]]}, "prompt must be"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [300]}, "vocabulary of 256"),
        ({"prompt": "a" * 110}, "prompt of 110 tokens and max_tokens=16 are more than the 120"),
        ({"prompt": "a", "max_tokens": 0}, "at least 1, got 0"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens must be an integer"),
        ({"prompt": "a", "temperature": -1}, "temperature must be"),
        ({"prompt": "a", "temperature": True}, "temperature must be a number"),
        ({"prompt": "a", "top_p": 2}, "top_p must be"),
        ({"prompt": "a", "n": 17}, "from 1 to 16"),
        ({"prompt": "a", "stop": [""]}, "stop must be"),
        ({"prompt": "a", "stream": 1}, "stream must be true or false"),
        ({"prompt": "a", "best_of": 2}, "best_of is not served"),
        ({"prompt": "a", "logprobs": 5}, "logprobs may be 0 or 1"),
        ({"prompt": "a", "tempurature": 0}, "unknown fields: tempurature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said(served: Served, body: Any, message: str, stream: bool):
    if isinstance(body, dict) and stream:
        body = {"stream": True, **body}
    status, found = served.ask("POST", "/v1/completions", body)
    assert status == 400
    assert message in found["error"]["message"]
    assert found["error"]["type"] == "invalid_request_error"
    wait_for(lambda: not served.engine.running and not served.engine.waiting)
    assert served.engine.pool.used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away_leave_nothing(served: Served, stream: bool):
    """While they run, and while they wait; and as many may wait as may, while others are told so."""
    body = {"prompt": "for ", "max_tokens": 110, "stream": stream, "n": 1}
    lock = threading.Lock()
    advance = served.engine.advance

    def slowly() -> Any:
        time.sleep(0.02)
        with lock:
            return advance()

    served.engine.advance = slowly  # type: ignore[method-assign]
    try:
        connections = [served.leaving(body) for _ in range(5)]
        wait_for(lambda: len(served.engine.running) == 2 and len(served.engine.waiting) == 3)
        status, found = served.complete(**body)
        assert status == 503
        assert "3 requests wait already" in found["error"]["message"]
        status, health = served.ask("GET", "/health")
        assert (status, health["running"], health["waiting"]) == (200, 2, 3)
        if stream:
            assert b"data: " in connections[0].recv(1000) + connections[0].recv(1000)
        for connection in connections:
            connection.close()
        wait_for(lambda: not served.engine.running and not served.engine.waiting, 10)
    finally:
        served.engine.advance = advance  # type: ignore[method-assign]
    assert served.engine.pool.used == 0
    wait_for(lambda: not served.open)
    assert served.complete(prompt="a", max_tokens=2)[0] == 200


def test_a_body_that_is_too_long(served: Served):
    status, found = served.complete(prompt="a" * (5 << 20))
    assert status == 413
    assert "longer than 4194304 bytes" in found["error"]["message"]


def test_other_routes(served: Served):
    assert served.ask("GET", "/v1/models")[1]["data"][0]["id"] == "bytes"
    assert served.ask("GET", "/health") == (
        200, {"status": "ok", "running": 0, "waiting": 0, "pages_used": 0, "pages": 64}
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_says_so_to_everybody(served: Served):
    engine = new_engine()
    failing = Served(engine)
    advance, calls = engine.advance, iter(range(100))

    def fails() -> Any:
        if next(calls) == 3:
            raise MemoryError("the device is full")
        return advance()

    engine.advance = fails  # type: ignore[method-assign]
    for _ in range(2):
        status, found = failing.complete(prompt="a", max_tokens=50)
        assert status == 503
        assert "the engine stopped: the device is full" in found["error"]["message"]
    status, found = failing.ask("GET", "/health")
    assert status == 503
    assert "the device is full" in found["status"]
    failing.stop()


def test_stop_strings_that_overlap():
    """Of all ways to cut a text into tokens, a stop string is found where it first begins."""
    for stop, text, want in (
        (["aab"], b"aaaab...", "aa"), (["ab", "b"], b"xxab", "xx"), (["abc"], b"ababab", "ababab"), ([], b"abc", "abc")
    ):  # fmt: skip
        found = Text(Bytes().decoder(), stop)
        pieces = []
        for i, token in enumerate(text):
            pieces.append(found.add(token, i == len(text) - 1))
            if found.stopped:
                break
        assert "".join(pieces) == want
    broken = Text(Bytes().decoder(), [])
    assert [broken.add(token, i == 2) for i, token in enumerate("€".encode())] == ["", "", "€"]
    assert Text(Bytes().decoder(), []).add(0xE2, True) == "\N{REPLACEMENT CHARACTER}"


def test_the_program_serves_what_the_demo_saved(tmp_path: Path):
    file = tmp_path / "parameters.npz"
    train_demo.save(bt.initial_parameters(bt.ModelConfig(), jax.random.key(0)), file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, serve.__file__, "--parameters", str(file), "--port", str(port), "--slots", "2"]
    with subprocess.Popen([*command, "--chunk", "16"], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: process.poll() is not None or _answers(port), 120)
            assert process.poll() is None
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "def ", "max_tokens": 5}))
            found = json.loads(connection.getresponse().read())
            assert found["usage"]["completion_tokens"] == 5
            assert found["model"] == "bytes"
        finally:
            process.terminate()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False
