"""The layer of experts on a GPU, behind the router: ``moe_mlp`` beside layers written by hand, in JAX and in torch.

Forward as in training, with what the backward pass needs, and backward alone; milliseconds of queued calls and
TFLOP/s of 6 and of 12 · tokens · k · d · n. Experts are chosen alike, or by Zipf's law. "hand" is a sort, gathers,
``gated_grouped_matmul`` and ``grouped_matmul`` of this package; "torch" the same with ``torch._grouped_mm``.
``python -m benchmarks.experts``, or with names of cases.
"""

import argparse
import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import record
from benchmarks.step_models import experts_by_hand
from tilewright.kernels.experts.cases import CASES, ExpertsCase
from tilewright.modules import moe_mlp, top_k_router

ROUNDS, CALLS = 7, 10
LIMIT = 0.02
"""The greatest difference from the first contender, relative to the norm."""

type Pass = Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A layer.

    Attributes:
      forward, backward: both passes, the former as in training.
      out, gradient: their results for tokens as JAX arrays.
      wait: for the device.
      kept: bytes that the forward pass keeps beside its operands and its result.
    """

    forward: Pass
    backward: Pass
    out: Callable[[], jax.Array]
    gradient: Callable[[], jax.Array]
    wait: Callable[[Any], object]
    kept: Callable[[], int] = lambda: 0


def drawn(case: ExpertsCase) -> tuple[jax.Array, ...]:
    """Tokens, weights, three matrices, cotangents and, last, the experts of each token."""
    keys = jax.random.split(jax.random.key(0), 6)
    e, d, n = case.num_experts, case.d, case.n
    shapes = ((case.tokens, d), (e, d, n), (e, d, n), (e, n, d), (case.tokens, d))
    scales = (1.0, d**-0.5, d**-0.5, n**-0.5, 1.0)
    x, *matrices, d_out = (
        (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)
        for key, shape, scale in zip(keys, shapes, scales, strict=False)
    )
    logits = jax.random.gumbel(keys[5], (case.tokens, e)) - case.zipf * jnp.log1p(jnp.arange(e, dtype=jnp.float32))
    weights, experts = top_k_router(logits, case.k)
    return x, weights, *matrices, d_out, experts


def in_jax(layer: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> Contender:
    """Both passes as programs: the forward pass does not copy the operands that the backward pass needs."""
    *operands, d_out = arrays
    trees = []

    def forward(*xs: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        out, pull_back = jax.vjp(layer, *xs)
        leaves, tree = jax.tree.flatten(pull_back)
        sources = [next((i for i, x in enumerate(xs) if leaf is x), None) for leaf in leaves]
        trees.append((tree, sources))
        return out, [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def backward(kept: list[jax.Array], d_out: jax.Array, *xs: jax.Array) -> Any:
        tree, sources = trees[0]
        rest = iter(kept)
        leaves = [next(rest) if source is None else xs[source] for source in sources]
        return jax.tree.unflatten(tree, leaves)(d_out)

    run, pull = jax.jit(forward), jax.jit(backward)
    _, kept = run(*operands)
    return Contender(
        lambda: run(*operands),
        lambda: pull(kept, d_out, *operands),
        lambda: run(*operands)[0],
        lambda: pull(kept, d_out, *operands)[0],
        jax.block_until_ready,
        lambda: sum(x.nbytes for x in kept),
    )


def _torch() -> Any:
    return importlib.import_module("torch")


def in_torch(arrays: Sequence[jax.Array]) -> Contender:
    """The layer that PyTorch users write with its grouped matmul."""
    torch = _torch()
    *operands, d_out, experts = (torch.from_dlpack(x) for x in arrays)
    leaves = [x.clone().requires_grad_() for x in operands]

    def run(x: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        order = experts.reshape(-1).argsort(stable=True)
        ends = torch.bincount(experts.reshape(-1), minlength=gate.shape[0]).cumsum(0).to(torch.int32)
        token = order // experts.shape[1]
        rows = x[token]
        hidden = torch.nn.functional.silu(torch._grouped_mm(rows, gate, ends)) * torch._grouped_mm(rows, up, ends)
        out = torch._grouped_mm(hidden, down, ends) * weights.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, out)

    out = run(*leaves)

    def backward() -> Any:
        for leaf in leaves:
            leaf.grad = None
        out.backward(d_out, retain_graph=True)
        return leaves[0].grad

    def taken(x: Any) -> jax.Array:
        return jnp.from_dlpack(x.detach().contiguous())

    return Contender(
        lambda: run(*leaves), backward, lambda: taken(run(*leaves)), lambda: taken(backward()),
        lambda _: torch.cuda.synchronize(),
    )  # fmt: skip


def contenders(names: list[str]) -> dict[str, Callable[[Sequence[jax.Array]], Contender]]:
    def jax_layer(layer: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> Contender:
        *operands, experts = arrays
        return in_jax(lambda x, weights, *matrices: layer(x, weights, experts, *matrices), operands)

    every: dict[str, Any] = {
        "moe_mlp": functools.partial(jax_layer, moe_mlp),
        "moe_mlp, triton": functools.partial(jax_layer, functools.partial(moe_mlp, platform="triton")),
        "hand": functools.partial(jax_layer, experts_by_hand),
        "torch": in_torch,
    }
    return {name: every[name] for name in names or every}


def differences(found: Contender, reference: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], list[float]]:
    """The result and the gradient of x, and how far both are from those of another contender."""
    out, gradient = (x().astype(jnp.float32) for x in (found.out, found.gradient))
    own = out, gradient
    if reference is None:
        return own, [0.0, 0.0]
    pairs = zip(own, reference, strict=True)
    return reference, [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]


def seconds(run: Pass, wait: Callable[[Any], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS - 1):
        run()
    wait(run())
    return (time.perf_counter() - start) / CALLS


def measured(case: ExpertsCase, names: list[str]) -> dict[str, Any]:
    """Of each contender samples of both passes, or why it does not run."""
    arrays, data, reference = drawn(case), dict[str, Any](), None
    flops = 6.0 * case.tokens * case.k * case.d * case.n
    for name, make in contenders(names).items():
        try:
            found = make(arrays)
            reference, apart = differences(found, reference)
            for run in (found.forward, found.backward):
                found.wait(run())
            pairs = [(found.forward, found.backward)] * ROUNDS
            samples = [[1e3 * seconds(run, found.wait) for run in pair] for pair in pairs]
        except Exception as error:  # a peer may fail in any way, and the others are still measured
            data[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"  {name:18} {data[name]['failed'][:120]}", flush=True)
            continue
        forward, backward = (list(each) for each in zip(*samples, strict=True))
        ms = [statistics.median(each) for each in (forward, backward)]
        rates = [flops / ms[0] / 1e9, 2 * flops / ms[1] / 1e9]
        data[name] = {"forward_ms": forward, "backward_ms": backward, "tflops": rates, "apart": apart}
        data[name]["kept_bytes"] = found.kept()
        wrong = "" if max(apart) < LIMIT else "  WRONG"
        print(f"  {name:18} {ms[0]:8.3f} {ms[1]:8.3f} ms {rates[0]:6.0f} {rates[1]:6.0f} TFLOP/s{wrong}", flush=True)
        del found
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    cases = CASES.by_device["gpu"]
    parser.add_argument("cases", nargs="*", default=list(cases))
    parser.add_argument("--contenders", nargs="+", default=[])
    parser.add_argument("--zipf", type=float, nargs="+", default=[0.0])
    parser.add_argument("--name", default="experts")
    arguments = parser.parse_args()
    data: dict[str, Any] = {}
    for name in arguments.cases:
        for zipf in arguments.zipf:
            label = f"{name}, zipf {zipf:g}" if zipf else name
            print(label, flush=True)
            data[label] = measured(dataclasses.replace(cases[name], zipf=zipf), arguments.contenders)
            file = record(arguments.name, {"calls": CALLS, "cases": data})
    print(file)


if __name__ == "__main__":
    main()
