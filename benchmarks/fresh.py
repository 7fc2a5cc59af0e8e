"""A fresh machine: seconds to the first results, the compiled train step and the tuned one, with every cache empty.

Each stage runs in a process of its own that finds neither tuned configs nor built or lowered kernels. Those marked
"again" find what the stage before them left on disk, as the next process of a user does. cuDNN's attention, as JAX
calls it, runs through the same stages; where there is no GPU XLA's takes its place.

    python -m benchmarks.fresh                      # all stages; minutes, most of them in the exhaustive tuning
    python -m benchmarks.fresh --stages forward,gradient,step
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.common import RESULTS, device_name, environment, interleaved
from tilewright.modules import flash_attention

STAGES = ("forward", "gradient", "float32", "step", "tune")
ATTENTIONS = ("tilewright", "peer")


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """A llama-like model whose attention has one shape, and the shape of the single calls.

    Attributes:
      call: batch, length, heads, key heads and head dim of the single calls.
    """

    batch: int = 4
    length: int = 2048
    layers: int = 22
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    hidden: int = 5632
    vocabulary: int = 32000
    call: tuple[int, int, int, int, int] = (1, 4096, 32, 8, 128)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def parameters(self) -> int:
        layer = self.width * (2 * self.heads + 2 * self.kv_heads) * self.head_dim + 3 * self.width * self.hidden
        return self.layers * (layer + 2 * self.width) + (2 * self.vocabulary + 1) * self.width


SMALL = Sizes(1, 64, 2, 2, 1, 16, 64, 128, (1, 64, 2, 1, 16))
"""Sizes that a CPU does in seconds."""


def attention_of(name: str) -> Callable[..., Any]:
    """Causal attention of ``[batch, length, heads, head_dim]``, by us or by the peer."""

    def ours(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return flash_attention(query, key, value, causal=True)

    def peer(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        by_cudnn = jax.default_backend() == "gpu" and query.dtype != jnp.float32  # which cuDNN does not serve
        implementation: Literal["cudnn", "xla"] = "cudnn" if by_cudnn else "xla"
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

    return ours if name == "tilewright" else peer


def call_operands(sizes: Sizes, dtype: Any) -> list[jax.Array]:
    batch, length, heads, kv_heads, head_dim = sizes.call
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(k, (batch, length, n, head_dim), dtype)
        for k, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    ]


def init(sizes: Sizes) -> dict[str, Any]:
    """Parameters in bfloat16, those of all layers stacked, with float32 moments beside them."""
    width, heads, kv = sizes.width, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "query": (width, heads), "key": (width, kv), "value": (width, kv), "out": (heads, width),
        "gate": (width, sizes.hidden), "up": (width, sizes.hidden), "down": (sizes.hidden, width),
        "norm_attention": (width,), "norm_mlp": (width,),
    }  # fmt: skip
    stacked = {name: (sizes.layers, *shape) for name, shape in shapes.items()}
    outer = {"embedding": (sizes.vocabulary, width), "head": (width, sizes.vocabulary), "norm": (width,)}

    def draw(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.startswith("norm"):
            return jnp.ones(shape, jnp.bfloat16)
        return (jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    @jax.jit
    def make(key: jax.Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, len(stacked) + len(outer)))
        layers = {name: draw(next(keys), name, shape) for name, shape in stacked.items()}
        parameters = {"layers": layers} | {name: draw(next(keys), name, shape) for name, shape in outer.items()}
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)
        return {"parameters": parameters, "first": zeros, "second": jax.tree.map(jnp.copy, zeros)}

    return make(jax.random.key(1))


def train_step(
    attention: Callable[..., jax.Array], sizes: Sizes, state: dict[str, Any], tokens: jax.Array
) -> tuple[dict[str, Any], jax.Array]:
    """One step of Adam on the next token, with every layer's activations computed again in the backward pass."""

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight

    @jax.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = norm(x, w["norm_attention"])
        query, key, value = (
            (y @ w[name]).reshape(*y.shape[:2], -1, sizes.head_dim) for name in ("query", "key", "value")
        )
        x = x + attention(query, key, value).reshape(*y.shape[:2], -1) @ w["out"]
        y = norm(x, w["norm_mlp"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(parameters: dict[str, Any]) -> jax.Array:
        x, _ = jax.lax.scan(layer, parameters["embedding"][tokens[:, :-1]], parameters["layers"])
        logits = norm(x, parameters["norm"]) @ parameters["head"]
        wanted = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0].astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), -1) - wanted)

    value, gradients = jax.value_and_grad(loss)(state["parameters"])
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g.astype(jnp.float32) ** 2, state["second"], gradients)
    parameters = jax.tree.map(
        lambda p, m, v: (p.astype(jnp.float32) - 1e-4 * m * jax.lax.rsqrt(v + 1e-12)).astype(p.dtype),
        state["parameters"], first, second,
    )  # fmt: skip
    return {"parameters": parameters, "first": first, "second": second}, value


def timed_program(function: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Seconds of every part of a program's first run."""
    jitted, found, begun = jax.jit(function), {}, time.perf_counter()

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        found[name] = time.perf_counter() - start

    with part("trace"):
        traced = jitted.trace(*args)
    with part("lower"):
        lowered = traced.lower()
    with part("compile"):
        compiled = lowered.compile()
    with part("run"):
        jax.block_until_ready(compiled(*args))
    return found | {"total": time.perf_counter() - begun}


def calls_stage(stage: str, attention: Callable[..., jax.Array], sizes: Sizes) -> dict[str, Any]:
    """A call by itself, and then the same call in another program of the process."""
    operands = jax.block_until_ready(call_operands(sizes, jnp.float32 if stage == "float32" else jnp.bfloat16))

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value).astype(jnp.float32).sum()

    function: Any = jax.grad(loss, argnums=(0, 1, 2)) if stage == "gradient" else forward
    return {
        "first": timed_program(function, *operands),
        "second": timed_program(lambda *args: jax.tree.map(lambda x: x * 2, function(*args)), *operands),
    }


def step_stage(attention: Callable[..., jax.Array], sizes: Sizes) -> dict[str, Any]:
    state, tokens = step_operands(sizes)
    return {"first": timed_program(functools.partial(train_step, attention, sizes), state, tokens)}


def step_operands(sizes: Sizes) -> tuple[dict[str, Any], jax.Array]:
    tokens = jax.random.randint(jax.random.key(2), (sizes.batch, sizes.length + 1), 0, sizes.vocabulary)
    return jax.block_until_ready((init(sizes), tokens))


def tune_stage(sizes: Sizes, budget_s: float, rounds: int, exhaustive_s: float) -> dict[str, Any]:
    """The train step tuned within a budget, its speed beside what it was and the peer's; then a search without haste.

    That one samples all that is not hopeless to the end, for up to ``exhaustive_s`` seconds.
    """
    import tilewright
    from tilewright.ops import Tuner

    state, tokens = step_operands(sizes)
    step = functools.partial(train_step, attention_of("tilewright"), sizes)
    compiled = {
        "untuned": jax.jit(step).lower(state, tokens).compile(),
        "peer": jax.jit(functools.partial(train_step, attention_of("peer"), sizes)).lower(state, tokens).compile(),
    }
    seconds = {}
    start = time.perf_counter()
    result = tilewright.tune(jax.jit(step), state, tokens, budget_s=budget_s)
    seconds["tune"] = time.perf_counter() - start
    start = time.perf_counter()
    compiled["tuned"] = jax.jit(lambda *args: step(*args)).lower(state, tokens).compile()
    seconds["compile tuned"] = time.perf_counter() - start
    timings = interleaved({name: functools.partial(each, state, tokens) for name, each in compiled.items()}, rounds)
    found: dict[str, Any] = {
        "budget_s": budget_s,
        "seconds": seconds,
        "steps": {name: timing.to_json() for name, timing in timings.items()},
        "calls": [call_of(entry) for entry in result],
        "left_out": list(result.left_out),
    }
    if exhaustive_s:
        start = time.perf_counter()
        tuner = Tuner(search="exhaustive")
        every = tilewright.tune(jax.jit(step), state, tokens, budget_s=exhaustive_s, reuse=False, tuner=tuner)
        seconds["exhaustive"] = time.perf_counter() - start
        found["exhaustive"] = [call_of(entry) for entry in every]
        found["regret"] = [regret(a, b) for a, b in zip(found["calls"], found["exhaustive"], strict=True)]
    return found


def call_of(entry: Any) -> dict[str, Any]:
    return {
        "op": entry.op,
        "direction": entry.direction,
        "winner": str(entry.winner.config),
        "left_out": entry.left_out,
        "candidates": {
            str(each.config): {"ms": each.time_ms, "check": each.check, "error": each.error[:300]}
            for each in entry.candidates
        },
    }


def regret(chosen: dict[str, Any], every: dict[str, Any]) -> dict[str, float | None]:
    """How much slower the winner is, by the exhaustive search's times, than the best there, and of those measured."""
    times = {name: each["ms"] for name, each in every["candidates"].items() if each["ms"] and not each["error"]}
    mine = times.get(chosen["winner"])
    measured = [times[name] for name, each in chosen["candidates"].items() if each["ms"] and name in times]
    return {
        "of_all": None if mine is None else mine / min(times.values()) - 1,
        "of_measured": None if mine is None or not measured else mine / min(measured) - 1,
    }


def run_stage(stage: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one stage in this process."""
    start = time.perf_counter()
    jax.block_until_ready(jnp.ones(8) + 1)
    device_s = time.perf_counter() - start
    sizes = SMALL if options.small else Sizes()
    if stage == "tune":
        found = tune_stage(sizes, options.budget, options.rounds, options.exhaustive)
    elif stage == "step":
        found = step_stage(attention_of(name), sizes)
    else:
        found = calls_stage(stage, attention_of(name), sizes)
    return found | {"device_s": device_s}


def in_process(stage: str, name: str, caches: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A stage in a process of its own that keeps its files in a folder."""
    child = [sys.executable, "-m", "benchmarks.fresh", "--stage", stage, "--attention", name]
    child += [f"--budget={options.budget}", f"--rounds={options.rounds}"]
    child += [f"--exhaustive={options.exhaustive}", *["--small"] * options.small]
    environment = os.environ | {"TILEWRIGHT_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
    environment |= {"CUDA_CACHE_DISABLE": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        start = time.perf_counter()
        code = subprocess.run([*child, "--out", out.name], env=environment).returncode
        took_s = time.perf_counter() - start
        said = out.read()
    if code or not said:
        return {"stage": stage, "attention": name, "error": f"exit code {code}", "process_s": took_s}
    return {"stage": stage, "attention": name, **json.loads(said), "process_s": took_s}


def line(cell: dict[str, Any]) -> str:
    name = f"{cell['stage']:>9} {cell['attention']:>10} {cell.get('when', ''):>6}"
    if "error" in cell:
        return f"{name}  failed: {cell['error']}"
    if "first" in cell:
        programs = (f"{key} {_parts(cell[key])}" for key in ("first", "second") if key in cell)
        return f"{name}  {'  '.join(programs)}"
    steps = ", ".join(f"{key} {value['median'] * 1e3:.1f} ms" for key, value in cell["steps"].items())
    seconds = ", ".join(f"{key} {value:.1f} s" for key, value in cell["seconds"].items())
    return f"{name}  {seconds}; steps: {steps}; regret {cell.get('regret')}; left out {cell['left_out']}"


def _parts(parts: dict[str, float]) -> str:
    inner = " ".join(f"{name} {parts[name]:.2f}" for name in ("trace", "lower", "compile", "run"))
    return f"{parts['total']:.2f} s ({inner})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the tuning of the train step")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each train step")
    parser.add_argument(
        "--exhaustive", type=float, default=math.inf, help="seconds for the exhaustive search after it; 0 for none"
    )
    parser.add_argument("--small", action="store_true", help="a model and a call that a CPU does in seconds")
    parser.add_argument("--out", type=Path, help="the record; results/<device>/fresh.json by default")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--attention", choices=ATTENTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.stage:
        options.out.write_text(json.dumps(run_stage(options.stage, options.attention, options)))
        return 0
    cells: list[dict[str, Any]] = []
    for stage in options.stages.split(","):
        for name in ATTENTIONS[:1] if stage == "tune" else ATTENTIONS:
            # Builds that a tuning left to go on may still write there.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
                for when in ("fresh", "again") if stage != "tune" and name == "tilewright" else ("fresh",):
                    cells.append({"when": when, **in_process(stage, name, Path(caches), options)})
                    print(line(cells[-1]), flush=True)
    sizes = dataclasses.asdict(SMALL if options.small else Sizes())
    out = options.out or RESULTS / device_name() / "fresh.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {"benchmark": "fresh", "environment": environment(), "sizes": sizes, "cells": cells}
    out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"written to {out}")
    return int(any("error" in cell for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
