"""A training step over data × model on automatic mesh axes, beside the same step inside ``shard_map``.

Blocks of attention and a gated MLP, tensor-parallel as Megatron-LM splits them (arXiv 1909.08053), and the loss of a
vocabulary that is whole or split; gradients and an update by SGD. On automatic axes ``jit`` gets the arrays' shardings
and nothing else. Losses and parameters of both are compared before anything is timed. ``plain`` is the automatic step
with ``jax.nn.dot_product_attention`` by cuDNN, and XLA's norms, MLP and loss.

``python -m benchmarks.automatic_axes``
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import interleaved, queued, record
from tilewright.modules import flash_attention, glu, linear_cross_entropy, rms_norm

AUTOMATIC, MANUAL, PLAIN = "automatic axes", "shard_map", "plain, automatic axes"
RATE = 1e-3
LIMIT = 2e-2
"""Difference of an updated parameter, relative to the largest update."""


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int = 4
    d: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    f: int = 14336
    vocab: int = 131072
    batch: int = 4
    length: int = 4096
    splits_vocabulary: bool = False

    def specs(self) -> dict[str, P]:
        column, row = P(None, None, "model"), P(None, "model", None)
        head = P(None, "model") if self.splits_vocabulary else P()
        layers = {"wq": column, "wk": column, "wv": column, "wo": row, "gate": column, "up": column, "down": row}
        return layers | {"norm1": P(), "norm2": P(), "final": P(), "head": head}

    def parameters(self) -> dict[str, jax.Array]:
        d, q, kv, f, n = self.d, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.f, self.layers
        shapes: dict[str, tuple[int, ...]] = {
            "wq": (n, d, q),
            "wk": (n, d, kv),
            "wv": (n, d, kv),
            "wo": (n, q, d),
            "gate": (n, d, f),
        }
        shapes |= {"up": (n, d, f), "down": (n, f, d), "head": (d, self.vocab)}
        keys = jax.random.split(jax.random.key(0), len(shapes))
        drawn = {
            name: (jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5).astype(jnp.bfloat16)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms: dict[str, tuple[int, ...]] = {"norm1": (n, d), "norm2": (n, d), "final": (d,)}
        return drawn | {name: jnp.ones(shape, jnp.bfloat16) for name, shape in norms.items()}

    def tokens(self) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(jax.random.key(1), (self.batch, self.length, self.d), jnp.bfloat16)
        return x, jax.random.randint(jax.random.key(2), (self.batch, self.length), 0, self.vocab)


@dataclasses.dataclass(frozen=True)
class Ops:
    """What a step is made of.

    Attributes:
      summed: completes a product of operands that are split along their sum.
      loss: the loss of a device's tokens, or of all.
    """

    attention: Callable[..., Any]
    norm: Callable[..., Any]
    mlp: Callable[..., Any]
    loss: Callable[..., Any]
    summed: Callable[[jax.Array], jax.Array] = lambda x: x


def plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def plain_loss(x: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
    own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - own)


def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    return flash_attention(query, key, value, causal=True)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    on: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=on)


OURS = Ops(causal, rms_norm, glu, linear_cross_entropy)
THEIRS = Ops(cudnn, plain_norm, lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up), plain_loss)


def loss_of(model: Model, ops: Ops, parameters: dict[str, Any], x: jax.Array, labels: jax.Array) -> jax.Array:
    def block(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, None]:
        h = ops.norm(x, w["norm1"])
        q, k, v = ((h @ w[name]).reshape(*h.shape[:2], -1, model.head_dim) for name in ("wq", "wk", "wv"))
        x = x + ops.summed(ops.attention(q, k, v).reshape(*h.shape[:2], -1) @ w["wo"])
        return x + ops.summed(ops.mlp(ops.norm(x, w["norm2"]), w["gate"], w["up"]) @ w["down"]), None

    layers = {name: w for name, w in parameters.items() if name not in ("final", "head")}
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    found: jax.Array = ops.loss(ops.norm(x, parameters["final"]), parameters["head"], labels)
    return found


def updated(loss: Callable[..., Any], parameters: dict[str, Any], x: jax.Array, labels: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(parameters, x, labels)
    return value, jax.tree.map(lambda w, g: w - RATE * g, parameters, gradients)


def manual_step(model: Model, mesh: Mesh) -> Callable[..., Any]:
    """The step inside ``shard_map``, whose types say which gradients to sum."""
    options: dict[str, Any] = {"axis_name": "model"} if model.splits_vocabulary else {}
    ops = dataclasses.replace(
        OURS, loss=functools.partial(linear_cross_entropy, **options), summed=lambda x: lax.psum(x, "model")
    )

    def loss(parameters: dict[str, Any], x: jax.Array, labels: jax.Array) -> Any:
        return lax.pmean(loss_of(model, ops, parameters, x, labels), "data")

    specs, rows = model.specs(), P("data")
    return jax.shard_map(
        functools.partial(updated, loss), mesh=mesh, in_specs=(specs, rows, rows), out_specs=(P(), specs)
    )


def measured(model: Model, mesh: Mesh, rounds: int, kinds: list[str]) -> list[dict[str, Any]]:
    specs = model.specs()
    parameters = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in model.parameters().items()}
    operands = (parameters, *(jax.device_put(x, NamedSharding(mesh, P("data"))) for x in model.tokens()))
    steps: dict[str, Callable[..., Any]] = {
        AUTOMATIC: functools.partial(updated, functools.partial(loss_of, model, OURS)),
        MANUAL: manual_step(model, mesh),
        PLAIN: functools.partial(updated, functools.partial(loss_of, model, THEIRS)),
    }
    compiled, compile_s = {}, {}
    for kind in kinds:
        began = time.perf_counter()
        compiled[kind] = jax.jit(steps[kind]).lower(*operands).compile()
        compile_s[kind] = time.perf_counter() - began
    collectives = {kind: collectives_of(program.as_text() or "") for kind, program in compiled.items()}
    memory = {kind: temporaries(program) for kind, program in compiled.items()}
    if {AUTOMATIC, MANUAL} <= set(kinds):
        compare(parameters, compiled[AUTOMATIC](*operands), compiled[MANUAL](*operands))
    timings = interleaved({kind: queued(program, operands, 2) for kind, program in compiled.items()}, rounds)
    rows = []
    for kind, timing in timings.items():
        ms = 1e3 * timing.median / 2
        row = {"model": dataclasses.asdict(model), "mesh": dict(mesh.shape), "kind": kind}
        relative = timing.median / timings[MANUAL].median if MANUAL in timings else None
        found = {"ms": ms, "of_shard_map": relative, "temporaries": memory[kind], "collectives": collectives[kind]}
        found["compile_s"] = compile_s[kind]
        rows.append(row | found | {"timing": timing.to_json()})
        about = f"{ms:9.2f} ms {memory[kind] / 2**30:6.2f} GiB, compiled in {compile_s[kind]:.1f} s"
        print(dict(mesh.shape), f"{kind:24s}", about, collectives[kind], flush=True)
    return rows


def temporaries(program: Any) -> int:
    """Bytes beside operands and results."""
    size: int = program.memory_analysis().temp_size_in_bytes
    return size


def compare(before: dict[str, jax.Array], one: Any, other: Any) -> None:
    if abs(float(one[0]) - float(other[0])) > 1e-3 * abs(float(other[0])):
        raise ArithmeticError(f"the losses differ: {one[0]} and {other[0]}")
    for name, w in before.items():
        a, b, c = (np.asarray(x[..., :256], np.float32) for x in (one[1][name], other[1][name], w))
        off = float(np.abs(a - b).max() / max(np.abs(b - c).max(), 1e-30))
        if not off <= LIMIT and np.abs(a - b).max() > 2**-7 * np.abs(c).max():
            raise ArithmeticError(f"{name} differs by {off} of its largest update")


def collectives_of(text: str) -> dict[str, int]:
    names = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    return {name: n for name in names if (n := text.count(f" {name}(") + text.count(f" {name}-start("))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model-axis", type=int, nargs="+", default=[1, 2], help="devices along the axis model")
    parser.add_argument("--kinds", nargs="+", default=[AUTOMATIC, MANUAL, PLAIN])
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can run")
    arguments = parser.parse_args()
    rows, count = [], jax.device_count()
    for model_axis in arguments.model_axis:
        shape = (count // model_axis, model_axis)
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        for splits in (False, True) if model_axis > 1 else (False,):
            model = Model(splits_vocabulary=splits)
            if arguments.tiny:
                sizes: dict[str, Any] = {
                    "layers": 2,
                    "d": 64,
                    "heads": 4,
                    "kv_heads": 2,
                    "head_dim": 16,
                    "f": 128,
                    "vocab": 256,
                }
                model = dataclasses.replace(model, **sizes, length=64)
            rows += measured(model, mesh, arguments.rounds, arguments.kinds)
    if not arguments.tiny:
        print(record(f"automatic_axes_{count}", {"dtype": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
