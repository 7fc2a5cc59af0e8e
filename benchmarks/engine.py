"""The example's serving engine on a GPU, with random weights of Llama 3's sizes: steps of decoding, and real requests.

"decode": all slots at one length; milliseconds of a step by the wall clock and by the device's kernels, the share of
this package's kernels, and the time that the bytes of weights and cache take at the rate of the better of a copy and a
maximum by rows. Then requests of a recorded mix of lengths, which come one by one as they did, but faster, or all at
once: tokens per second, seconds to the first token and between tokens.
``python -m benchmarks.engine 8b``, or with names of models; ``--tiny`` is a check that it runs, on any device.
"""

import argparse
import csv
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import memory_rates, record
from benchmarks.experts import seconds
from tilewright.ops.tuning.timing import gpu_kernels, traced

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from engine.engine import Engine
from engine.models import LLAMAS, Llama
from engine.programs import EngineConfig
from engine.requests import Request, Sampling

TRACE = Path(__file__).parent / "traces" / "conversation.csv"
STEPS, PROFILED = 50, 8
READ = {"gpu": 1 << 31, "cpu": 1 << 24}
"""Bytes that are read to learn the memory's rate."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    seconds: float
    prompt: int
    answer: int


def trace(speed: float) -> list[Arrival]:
    """The recorded requests, which come faster by a factor."""
    rows = csv.DictReader(line for line in TRACE.read_text().splitlines() if not line.startswith("#"))
    return [
        Arrival(float(row["seconds"]) / speed, int(row["prompt_tokens"]), int(row["answer_tokens"])) for row in rows
    ]


def decode(engine: Engine, length: int, rate: float) -> dict[str, Any]:
    """Steps of all slots, each with a text of a length.

    Args:
      rate: of the memory, bytes per second.
    """
    model, config = engine.models[0], engine.config
    draw = np.random.default_rng(0)
    answer = 2 * STEPS + PROFILED + 10
    sampling = Sampling(temperature=0.7)
    for _ in range(config.slots):
        engine.submit(Request(draw.integers(0, model.vocabulary, length).tolist(), answer, sampling))
    while any(not each.request.answer for each in engine.running) or engine.waiting:
        engine.advance()
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(STEPS // 5):
            engine.advance()
        samples.append((time.perf_counter() - start) / (STEPS // 5))
    data: dict[str, Any] = {"slots": config.slots, "length": length, "step_s": samples}
    if jax.default_backend() == "gpu":
        kernels = gpu_kernels(traced(lambda: [engine.advance() for _ in range(PROFILED)]))
        by_name: dict[str, float] = {}
        for name, ms in kernels:
            by_name[name] = by_name.get(name, 0.0) + ms / PROFILED
        device = sum(by_name.values())
        ours = sum(ms for name, ms in by_name.items() if "tilewright" in name)
        data |= {"device_ms": device, "ours": ours / device, "kernels": len(kernels) / PROFILED}
        data["by_name_ms"] = dict(sorted(by_name.items(), key=lambda each: -each[1])[:30])
    cached = statistics.fmean(each.cached for each in engine.running)
    weights = sum(x.nbytes for x in jax.tree.leaves(engine.parameters[0]))
    weights -= engine.parameters[0]["embedding"].nbytes  # of which a step reads rows
    cache = 2 * cached * config.slots * model.layers * model.kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
    data |= {"weight_bytes": weights, "cache_bytes": cache, "bytes_s": (weights + cache) / rate}
    data["share"] = data["bytes_s"] / statistics.median(samples)
    while engine.advance() is not None:
        pass
    return data


def replay(engine: Engine, arrivals: Sequence[Arrival], at_once: bool) -> dict[str, Any]:
    """Serves recorded requests, with prompts of random tokens."""
    draw = np.random.default_rng(1)
    times: dict[Request, list[float]] = {}
    known: dict[Request, float] = {}
    waiting = []
    for each in arrivals:
        prompt = draw.integers(0, engine.models[0].vocabulary, each.prompt).tolist()

        def listener(request: Request) -> None:
            times[request] += [time.perf_counter()] * (len(request.answer) - len(times[request]))

        waiting.append((0.0 if at_once else each.seconds, Request(prompt, each.answer, listener=listener)))
    start, steps = time.perf_counter(), 0
    while True:
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            arrival, request = waiting.pop(0)
            times[request], known[request] = [], start + arrival
            engine.submit(request)
        if engine.advance() is not None:
            steps += 1
        elif not waiting:
            break
    seconds = time.perf_counter() - start
    first = [own[0] - known[request] for request, own in times.items()]
    between = np.concatenate([np.diff(own) for own in times.values() if len(own) > 1])
    prompts, answers = sum(each.prompt for each in arrivals), sum(each.answer for each in arrivals)
    return {
        "requests": len(arrivals), "steps": steps, "seconds": seconds, "prompt_tokens": prompts,
        "answer_tokens": answers, "answer_tokens_per_s": answers / seconds,
        "tokens_per_s": (prompts + answers) / seconds, "first_token_s": np.percentile(first, (50, 90, 99)).tolist(),
        "between_tokens_s": np.percentile(between, (50, 90, 99)).tolist(), "pages_used_at_the_end": engine.pool.used,
    }  # fmt: skip


def warm_up(engine: Engine) -> float:
    """Seconds until both programs have run."""
    start = time.perf_counter()
    engine.run([Request([1] * (engine.config.slots + 2), 3)])
    return time.perf_counter() - start


def measured(name: str, model: Llama, config: EngineConfig, length: int, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    size = READ[jax.default_backend()]
    rate = max(memory_rates(size, functools.partial(seconds, wait=jax.block_until_ready)).values())
    engine = Engine(model, model.parameters(jax.random.key(0)), config)
    data: dict[str, Any] = {"config": dataclasses.asdict(config), "rate": rate, "first_s": warm_up(engine)}
    data["decode"] = found = decode(engine, length, rate)
    ms = 1e3 * statistics.median(found["step_s"])
    kernels = f", kernels {found['device_ms']:.2f} ms, {100 * found['ours']:.0f} % ours" if "ours" in found else ""
    print(
        f"{name}: first steps {data['first_s']:.1f} s; decode {config.slots} × {length}: {ms:.2f} ms a step{kernels}, "
        f"bytes {1e3 * found['bytes_s']:.2f} ms, {found['share']:.2f}",
        flush=True,
    )
    for label, at_once in (("one by one", False), ("at once", True)) if arrivals else ():
        data[label] = found = replay(engine, arrivals, at_once)
        first, between = found["first_token_s"], found["between_tokens_s"]
        print(
            f"  {label}: {found['seconds']:.1f} s, {found['answer_tokens_per_s']:.0f} tokens/s written, "
            f"{found['tokens_per_s']:.0f} in all; first token {first[0]:.3f} s (99 %: {first[2]:.3f}), then every "
            f"{1e3 * between[0]:.1f} ms (99 %: {1e3 * between[2]:.1f})",
            flush=True,
        )
    return data


TINY = Llama(2, 64, 4, 2, 16, 128, 256, dtype=jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(LLAMAS))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--scanned", action="store_true", help="layers are the body of a loop")
    parser.add_argument("--speed", type=float, default=4.0, help="how much faster recorded requests come than they did")
    parser.add_argument("--decode-only", action="store_true", help="no recorded requests")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--name", default="engine")
    given = parser.parse_args()
    if given.tiny:
        arrivals = [Arrival(each.seconds, each.prompt // 64 + 1, each.answer // 64 + 1) for each in trace(100.0)]
        measured("tiny", TINY, EngineConfig(4, 16, 64, 256, 32), 32, arrivals)
        return
    data: dict[str, Any] = {}
    for name in given.models:
        model = dataclasses.replace(LLAMAS[name], scanned=given.scanned)
        config = EngineConfig(slots=64, page_size=16, num_pages=8192, longest=8192, chunk=2048)
        data[name] = measured(name, model, config, given.length, [] if given.decode_only else trace(given.speed))
        file = record(given.name, {"speed": given.speed, "models": data})
    print(file)


if __name__ == "__main__":
    main()
