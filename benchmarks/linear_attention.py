"""The gated delta rule beside what a JAX user has: a loop over chunks, and one over tokens.

"chunks in turn" is the usual form in JAX: a ``scan`` over chunks of 64 tokens, each with a triangular solve and all its
products in float32, of keys that are repeated for value heads. "tokens in turn" is a ``scan`` over tokens. Milliseconds
of the forward pass, and of the gradients of all arrays. Results are compared with each other before they are timed.
``python -m benchmarks.linear_attention``, or with names of shapes.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.common import interleaved, record
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.op import LinearAttention
from tilewright.kernels.linear_attention.reference import linear_attention_reference
from tilewright.kernels.op.cases import variants
from tilewright.modules import linear_attention

CHUNK = 64
LIMIT = 0.03
"""The greatest difference from our results, relative to their norm."""

_BASE = LinearAttentionCase("", heads=16, value_heads=32, key_dim=128, qk_l2norm=True, dtype="bfloat16")
SHAPES: Mapping[str, LinearAttentionCase] = variants(
    _BASE,
    {
        "smoke": {"length": 256, "heads": 1, "value_heads": 2, "key_dim": 32, "dtype": "float32"},
        "4x8192": {"batch": 4, "length": 8192},
        "1x8192": {"length": 8192},
        "1x32768": {"length": 32768},
        "2/8, 1x8192": {"length": 8192, "heads": 2, "value_heads": 8},
    },
)


def chunks_in_turn(query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> jax.Array:
    """The gated delta rule with norms and scale, in float32, for lengths that are multiples of a chunk."""
    batch, length, _, key_dim = query.shape
    value_heads = value.shape[2]

    def chunked(x: Any) -> Any:
        x = jnp.repeat(x.astype(jnp.float32), value_heads // x.shape[2], axis=2)
        x = x.reshape(batch, length // CHUNK, CHUNK, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)  # [chunks, batch, heads, chunk, ...]

    query, key = (x.astype(jnp.float32) for x in (query, key))
    query, key = (x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (query, key))
    lower, product = jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), functools.partial(jnp.matmul, precision="highest")

    def step(state: Any, chunk: Any) -> Any:
        q, k, v, g, b = chunk
        g = jnp.cumsum(g, -1)
        decay = jnp.exp(jnp.where(lower, g[..., :, None] - g[..., None, :], -jnp.inf))
        system = jnp.tril(b[..., None] * decay * product(k, k.mT), -1) + jnp.eye(CHUNK)
        right = b[..., None] * (v - jnp.exp(g)[..., None] * product(k, state))
        new = lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
        out = jnp.exp(g)[..., None] * product(q, state) + product(decay * product(q, k.mT), new)
        end = g[..., -1:]
        kept = jnp.exp(end)[..., None] * state
        return kept + product((jnp.exp(end - g)[..., None] * k).mT, new), out

    state = jnp.zeros((batch, value_heads, key_dim, value.shape[3]))
    _, out = lax.scan(step, state, tuple(map(chunked, (query * key_dim**-0.5, key, value, log_decay, beta))))
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)
    return out.reshape(value.shape).astype(value.dtype)


def tokens_in_turn(query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> Any:
    inputs = LinearAttention().prepare(query, key, value, log_decay=log_decay, beta=beta, qk_l2norm=True)
    out: Any = linear_attention_reference(inputs).out
    return out.astype(value.dtype)


def ours(query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> jax.Array:
    return linear_attention(query, key, value, log_decay=log_decay, beta=beta, qk_l2norm=True)


CONTENDERS: Mapping[str, Callable[..., Any]] = {
    "tilewright": ours,
    "chunks in turn": chunks_in_turn,
    "tokens in turn": tokens_in_turn,
}


def measured(case: LinearAttentionCase, names: list[str], rounds: int) -> dict[str, Any]:
    """Of each contender the times of both programs, or why it has none."""
    (query, key, value), options = case.arguments()
    arrays = (query, key, value, options["log_decay"], options["beta"])
    programs: dict[str, Callable[[], Any]] = {}
    data: dict[str, Any] = {}
    wanted: Any = None
    for name in names:
        function = CONTENDERS[name]

        def loss(*xs: Any, function: Callable[..., Any] = function) -> Any:
            return jnp.sum(jnp.sin(function(*xs).astype(jnp.float32)))

        try:
            forward = functools.partial(jax.jit(function).lower(*arrays).compile(), *arrays)
            both = functools.partial(jax.jit(jax.grad(loss, range(5))).lower(*arrays).compile(), *arrays)
            found = [x.astype(jnp.float32) for x in (forward(), *both())]
        except jax.errors.JaxRuntimeError as error:  # out of memory
            data[name] = {"failed": str(error)[:300]}
            continue
        wanted = wanted or found
        apart = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(found, wanted, strict=True)]
        data[name] = {"apart": apart}
        programs |= {f"{name}: forward": forward, f"{name}: gradients": both}
    for name, timing in interleaved(programs, rounds).items():
        contender, what = name.split(": ")
        data[contender][what] = timing.to_json()
        wrong = "" if max(data[contender]["apart"]) < LIMIT else "  WRONG"
        print(f"  {name:28} {1e3 * timing.median:10.3f} ms{wrong}", flush=True)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shapes", nargs="*", default=[name for name in SHAPES if name != "smoke"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--name", default="linear_attention")
    arguments = parser.parse_args()
    data = {}
    for name in arguments.shapes:
        print(name, flush=True)
        data[name] = measured(SHAPES[name], arguments.contenders, arguments.rounds)
    if arguments.shapes != ["smoke"]:
        print(record(arguments.name, data))


if __name__ == "__main__":
    main()
