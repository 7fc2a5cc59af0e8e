"""Serves the demo's model without a server: requests of different lengths join and leave a batch over a paged cache.

Run it with ``make generate``, after ``make demo`` or on its own, which then trains first. Some answers are compared,
byte for byte, with the model run densely without a cache.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from byte_transformer import Attention, ModelConfig, Parameters, initial_parameters, logits
from engine.engine import Engine
from engine.models import ByteModel
from engine.programs import EngineConfig
from engine.requests import Request
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from stdlib_text import load_text
from train_demo import tilewright_attention


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--parameters", type=Path, default=Path(".demo/parameters.npz"))
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8, help="requests that run at the same time")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--longest-prompt", type=int, default=300)
    parser.add_argument("--longest-answer", type=int, default=120)
    parser.add_argument("--check", type=int, default=3, help="answers to compare with the model without a cache")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_parameters(file: Path, model: ModelConfig) -> Parameters:
    """What ``train_demo`` has written.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds another model.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: `make demo` trains the model and writes it")
    wanted = jax.eval_shape(lambda: initial_parameters(model, jax.random.key(0)))
    paths, tree = jax.tree_util.tree_flatten_with_path(wanted)
    leaves = []
    with np.load(file) as saved:
        for path, leaf in paths:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name not in saved or saved[name].shape != leaf.shape:
                raise ValueError(f"{file} holds another model: {name} of shape {leaf.shape} was expected")
            leaves.append(jax.numpy.asarray(saved[name]))
    return jax.tree.unflatten(tree, leaves)


def random_requests(text: np.ndarray, arguments: argparse.Namespace) -> list[Request]:
    """Pieces of held-out text of random lengths, each to be continued for a random length."""
    draw = np.random.default_rng(arguments.seed)
    found = []
    for _ in range(arguments.requests):
        length = int(draw.integers(1, arguments.longest_prompt + 1))
        start = int(draw.integers(0, len(text) - length))
        count = int(draw.integers(1, arguments.longest_answer + 1))
        found.append(Request(text[start : start + length].tolist(), count))
    return found


class Display:
    """What is shown while requests run."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.prompt_bytes = self.answer_bytes = self.steps = 0
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def render(self, engine: Engine) -> Group:
        said = (
            f"step {self.steps}: {self.done} of {self.total} requests done, {len(engine.waiting)} waiting, "
            f"{engine.pool.used} of {engine.config.num_pages} pages used; "
            f"{self.answer_bytes / self.seconds:,.0f} bytes/s written, "
            f"{self.prompt_bytes / self.seconds:,.0f} bytes/s of prompts read"
        )
        table = Table(box=None, pad_edge=False)
        for column in ("slot", "prompt", "answer", "pages"):
            table.add_column(column, justify="right")
        table.add_column("the end of its text", no_wrap=True)
        for slot, running in enumerate(engine.slots):
            if running is None:
                table.add_row(str(slot), "–")
                continue
            request = running.request
            read = f"{min(running.cached, len(request.prompt))}/{len(request.prompt)}"
            written = f"{len(request.answer)}/{request.max_tokens}"
            end = bytes(request.text[-60:]).decode("ascii", "replace")
            shown = "".join(c if c.isprintable() else "·" for c in end)
            table.add_row(str(slot), read, written, str(len(running.pages)), Text(shown))
        return Group(Text(said), table)


def serve(console: Console, engine: Engine, requests: list[Request]) -> Display:
    """Runs all requests to their end."""
    for request in requests:
        engine.submit(request)
    display = Display(len(requests))
    with Live(console=console, refresh_per_second=8, transient=not console.is_terminal) as live:
        while (info := engine.advance()) is not None:
            display.steps += 1
            display.done += len(info.left)
            display.prompt_bytes += info.prompt_tokens
            display.answer_bytes += info.answer_tokens
            live.update(display.render(engine))
    return display


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


def check(console: Console, requests: list[Request], parameters: Any, model: ModelConfig, size: int) -> None:
    """Raises if an answer is not that of the model without a cache."""
    for number, request in enumerate(requests):
        count = request.max_tokens
        want = dense_answer(parameters, request.prompt, count, model, tilewright_attention, size)
        if request.answer != want:
            first = next(i for i, (a, b) in enumerate(zip(request.answer, want, strict=True)) if a != b)
            raise ArithmeticError(f"request {number} differs from the model without a cache at byte {first}")
        console.print(f"request {number}: all {count} bytes are those of the model without a cache")


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    model = ModelConfig()
    longest = arguments.longest_prompt + arguments.longest_answer
    pages = arguments.slots * -(-longest // arguments.page_size) + 1
    config = EngineConfig(arguments.slots, arguments.page_size, pages, longest, max(128, 2 * arguments.slots))
    parameters = load_parameters(arguments.parameters, model)
    requests = random_requests(load_text()[1], arguments)
    console.print(
        f"{len(requests)} requests, {config.slots} at the same time, over {config.num_pages} pages of "
        f"{config.page_size} bytes in each of {model.layers} layers; {jax.devices()[0].device_kind}"
    )
    engine = Engine(ByteModel(model), parameters, config)
    engine.run([Request([1] * (arguments.slots + 2), 2)])  # compiles a step with a chunk, and one without
    display = serve(console, engine, requests)
    console.rule("result")
    console.print(
        f"{display.done} requests in {display.steps} steps and {display.seconds:.1f} s: "
        f"{display.answer_bytes / display.seconds:,.0f} bytes/s written, "
        f"{display.prompt_bytes / display.seconds:,.0f} bytes/s of prompts read"
    )
    check(console, requests[: arguments.check], parameters, model, longest)


if __name__ == "__main__":
    main()
