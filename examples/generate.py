"""Serves the demo's model: requests of different lengths join and leave a batch over a paged cache.

Run it with ``make generate``, after ``make demo`` or on its own, which then trains first. Some answers are compared,
byte for byte, with the model run densely without a cache.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from byte_transformer import ModelConfig, Parameters, initial_parameters
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from serving import Request, Server, ServerConfig, dense_answer
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
    for name in range(arguments.requests):
        length = int(draw.integers(1, arguments.longest_prompt + 1))
        start = int(draw.integers(0, len(text) - length))
        count = int(draw.integers(1, arguments.longest_answer + 1))
        found.append(Request(name, text[start : start + length].tolist(), count))
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

    def render(self, server: Server) -> Group:
        used = server.config.num_pages - len(server.free)
        said = (
            f"step {self.steps}: {self.done} of {self.total} requests done, {len(server.waiting)} waiting, {used} of "
            f"{server.config.num_pages} pages used; {self.answer_bytes / self.seconds:,.0f} bytes/s written, "
            f"{self.prompt_bytes / self.seconds:,.0f} bytes/s of prompts read"
        )
        table = Table(box=None, pad_edge=False)
        for column in ("slot", "request", "prompt", "answer", "pages"):
            table.add_column(column, justify="right")
        table.add_column("the end of its text", no_wrap=True)
        for slot, request in enumerate(server.slots):
            if request is None:
                table.add_row(str(slot), "–")
                continue
            read = f"{min(request.cached, len(request.prompt))}/{len(request.prompt)}"
            written = f"{len(request.answer)}/{request.count}"
            end = bytes(request.text[-60:]).decode("ascii", "replace")
            shown = "".join(c if c.isprintable() else "·" for c in end)
            table.add_row(str(slot), str(request.name), read, written, str(len(request.pages)), Text(shown))
        return Group(Text(said), table)


def serve(console: Console, server: Server, requests: list[Request]) -> Display:
    """Runs all requests to their end."""
    server.submit(requests)
    display = Display(len(requests))
    with Live(console=console, refresh_per_second=8, transient=not console.is_terminal) as live:
        while (info := server.advance()) is not None:
            display.steps += 1
            display.done += len(info.left)
            display.prompt_bytes += info.prompt_bytes
            display.answer_bytes += info.answer_bytes
            live.update(display.render(server))
    return display


def warm_up(parameters: Parameters, model: ModelConfig, config: ServerConfig) -> None:
    """Compiles both programs: a step with a chunk, and one without."""
    server = Server(parameters, model, config)
    server.submit([Request(0, [1] * 8, 2)])
    while server.advance() is not None:
        pass


def check(console: Console, requests: list[Request], parameters: Any, model: ModelConfig, size: int) -> None:
    """Raises if an answer is not that of the model without a cache."""
    for request in requests:
        want = dense_answer(parameters, request.prompt, request.count, model, tilewright_attention, size)
        if request.answer != want:
            first = next(i for i, (a, b) in enumerate(zip(request.answer, want, strict=True)) if a != b)
            raise ArithmeticError(f"request {request.name} differs from the model without a cache at byte {first}")
        console.print(f"request {request.name}: all {request.count} bytes are those of the model without a cache")


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    model = ModelConfig()
    longest = arguments.longest_prompt + arguments.longest_answer
    pages = arguments.slots * -(-longest // arguments.page_size)
    config = ServerConfig(arguments.slots, arguments.page_size, pages, longest, max(128, arguments.slots))
    parameters = load_parameters(arguments.parameters, model)
    requests = random_requests(load_text()[1], arguments)
    console.print(
        f"{len(requests)} requests, {config.slots} at the same time, over {config.num_pages} pages of "
        f"{config.page_size} bytes in each of {model.layers} layers; {jax.devices()[0].device_kind}"
    )
    warm_up(parameters, model, config)
    display = serve(console, Server(parameters, model, config), requests)
    console.rule("result")
    console.print(
        f"{display.done} requests in {display.steps} steps and {display.seconds:.1f} s: "
        f"{display.answer_bytes / display.seconds:,.0f} bytes/s written, "
        f"{display.prompt_bytes / display.seconds:,.0f} bytes/s of prompts read"
    )
    check(console, requests[: arguments.check], parameters, model, longest)


if __name__ == "__main__":
    main()
