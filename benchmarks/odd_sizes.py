"""Sizes as they come: calls whose length, width or vocabulary is no multiple of 128, beside the next one that is.

Default calls in bfloat16, forward and with both passes, and plain JAX where there is a formula of one line. Of each
call the milliseconds of queued calls and the ratio to the last size of its family.

``python -m benchmarks.odd_sizes``, or with the names of some ops.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import interleaved, queued, record
from benchmarks.step_models import plain_loss, plain_mlp
from tilewright.modules import (
    flash_attention,
    glu,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    matmul,
    rms_norm,
)

CALLS = 20
"""Calls of a sample."""

type Problem = tuple[Callable[..., jax.Array], tuple[jax.Array, ...], int]
"""A function, its arguments, and how many of these, from the first on, have gradients."""
type Family = tuple[str, tuple[int, ...], Callable[[int], Problem]]


def drawn(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def loss(vocab: int, tokens: int, d: int, function: Callable[..., Any], vocab_first: bool, **options: Any) -> Problem:
    weight = drawn(1, *((vocab, d) if vocab_first else (d, vocab)), scale=d**-0.5)
    labels = jax.random.randint(jax.random.key(2), (tokens,), 0, vocab)
    return functools.partial(function, vocab_first=vocab_first, **options), (drawn(0, tokens, d), weight, labels), 2


def losses() -> Iterator[Family]:
    sizes = (50257, 50260, 50264, 50304)
    for layout, first in (("[vocab, d]", True), ("[d, vocab]", False)):
        options: dict[str, Any] = {"tokens": 8192, "d": 768, "vocab_first": first}
        yield f"loss {layout}", sizes, functools.partial(loss, function=linear_cross_entropy, **options)
        yield f"plain loss {layout}", (50257, 50304), functools.partial(loss, function=plain_loss, cap=None, **options)
        by_triton = functools.partial(linear_cross_entropy, platform="triton")
        yield f"triton loss {layout}", (50257, 50304), functools.partial(loss, function=by_triton, **options)
    options = {"d": 2048, "vocab_first": True, "function": linear_cross_entropy}
    yield "loss, d 2048", (32001, 32128), functools.partial(loss, tokens=8192, **options)
    yield "loss, tokens", (8191, 8192), lambda tokens: loss(32128, tokens, **options)
    yield "loss, few classes", (100, 128), functools.partial(loss, tokens=8192, **options)
    yield "loss, few tokens", (50257, 50304), functools.partial(loss, tokens=1024, **options | {"d": 4096})


def attention(length: int, dim: int) -> Problem:
    heads = (drawn(seed, 4, length, heads, dim) for seed, heads in enumerate((16, 4, 4)))
    return functools.partial(flash_attention, causal=True), tuple(heads), 3


def attentions() -> Iterator[Family]:
    yield "attention, length", (4001, 4095, 4096, 4097, 4224), lambda length: attention(length, 128)
    yield "attention, head dim", (72, 80, 96, 100, 112, 128), lambda dim: attention(4096, dim)


def products(op: str, tokens: int, k: int, n: int) -> Problem:
    x, *weights = drawn(0, tokens, k), *(drawn(seed, k, n, scale=k**-0.5) for seed in (1, 2))
    if op == "matmul":
        return matmul, (x, weights[0]), 2
    if op == "plain glu":
        return functools.partial(plain_mlp, activation="silu"), (x, *weights), 3
    return glu, (x, *weights), 3


def matmuls() -> Iterator[Family]:
    for op in ("glu", "plain glu", "matmul"):
        yield f"{op}, n", (5461, 5462, 5464, 5504), functools.partial(products, op, 8192, 2048)
        yield f"{op}, k", (2043, 2044, 2048), lambda k, op=op: products(op, 8192, k, 5504)  # type: ignore[misc]
        yield f"{op}, tokens", (8191, 8192), lambda tokens, op=op: products(op, tokens, 2048, 5504)  # type: ignore[misc]


def groups(k: int, n: int, platform: str | None) -> Problem:
    sizes = jnp.full(16, 1024, jnp.int32)
    rows, matrices = drawn(0, 16384, k), drawn(1, 16, k, n, scale=k**-0.5)
    return functools.partial(grouped_matmul, platform=platform), (rows, matrices, sizes), 2


def grouped() -> Iterator[Family]:
    for name, platform in (("grouped", None), ("triton grouped", "triton")):
        yield f"{name}, n", (1365, 1366, 1368, 1408), functools.partial(groups, 2048, platform=platform)
        yield f"{name}, k", (1365, 1366, 1368, 1408), lambda k, on=platform: groups(k, 2048, on)  # type: ignore[misc]


def norms() -> Iterator[Family]:
    def rms(d: int) -> Problem:
        return rms_norm, (drawn(0, 16384, d), jnp.ones(d)), 2

    def residual(d: int) -> Problem:
        def function(x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
            normed, total = rms_norm(x, weight, residual=y)
            return normed + total

        return function, (drawn(0, 16384, d), drawn(1, 16384, d), jnp.ones(d)), 3

    def layer(d: int) -> Problem:
        return layer_norm, (drawn(0, 16384, d), jnp.ones(d), jnp.zeros(d)), 3

    yield "rms", (2046, 2047, 2048), rms
    yield "rms", (4095, 4096), rms
    yield "rms with a residual", (2047, 2048), residual
    yield "layer", (1000, 1001, 1023, 1024), layer


FAMILIES = {"losses": losses, "attention": attentions, "matmuls": matmuls, "grouped": grouped, "norms": norms}


def programs(problem: Problem) -> dict[str, tuple[Any, tuple[jax.Array, ...]]]:
    """A forward pass alone, and both."""
    function, arguments, count = problem

    def both(*given: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda *first: function(*first, *given[count:]), *given[:count])
        return pull_back(jnp.ones_like(out))

    return {"forward": (jax.jit(function), arguments), "both": (jax.jit(both), arguments)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("ops", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    data: dict[str, Any] = {}
    for name, sizes, make in (family for op in arguments.ops for family in FAMILIES[op]()):
        found = {size: programs(make(size)) for size in sizes}
        for which in ("forward", "both"):
            calls = {str(size): queued(*each[which], CALLS) for size, each in found.items()}
            timings = interleaved(calls, arguments.rounds)
            last = timings[str(sizes[-1])].median
            data[f"{name}, {sizes[-1]}, {which}"] = {
                size: {"time": each.to_json(), "calls_of_a_sample": CALLS, "ratio": each.median / last}
                for size, each in timings.items()
            }
            shown = (f"{s} {1e3 * t.median / CALLS:.3f} ({t.median / last:.3f})" for s, t in timings.items())
            print(f"{name:24} {which:8} {'  '.join(shown)}", flush=True)
        record("odd_sizes", {"families": data})


if __name__ == "__main__":
    main()
