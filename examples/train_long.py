"""Trains the demo's transformer on long texts whose bytes are split over all devices.

Every device has some bytes of each text and a copy of the parameters. Only attention needs other devices' bytes. On a
machine without several accelerators let a CPU stand for eight:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/train_long.py --length 32768 --steps 2
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from byte_transformer import Attention, ModelConfig, OptimizerConfig, embed, features, initial_state, train_step
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from stdlib_text import batches, load_text

from tilewright import context_parallel_attention, zigzag

AXIS = "sequence"

type Strategy = Literal["auto", "ring", "all_gather", "ulysses"]


def split_loss(mesh: Mesh, strategy: Strategy = "auto") -> Callable[..., jax.Array]:
    """The loss of ``byte_transformer`` with the bytes of each text split over a mesh axis.

    The result takes the place of ``loss`` in ``train_step``; its attention is ours.
    """
    shards = mesh.shape[AXIS]

    def local_loss(
        parameters: Any, tokens: Any, earlier: Any, positions: Any, targets: Any, config: ModelConfig
    ) -> jax.Array:
        """The mean over the whole text, from this device's bytes."""

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
            return context_parallel_attention(
                query, key, value, axis_name=AXIS, strategy=strategy, layout="zigzag", causal=True,
                sliding_window=config.sliding_window(layer),
            )  # fmt: skip

        x = embed(parameters, tokens, earlier, config)
        logits = features(parameters, x, positions, config, attend) @ parameters["embedding"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return -jax.lax.pmean(chosen.mean(), AXIS)

    def loss(parameters: Any, tokens: jax.Array, config: ModelConfig, attention: Attention | None = None) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        earlier = [jnp.pad(inputs, ((0, 0), (back, 0)))[:, :length] for back in range(1, config.longest_ngram)]
        # Everything that has a row for each byte is reordered alike, once; a mean does not depend on the order.
        rows = [zigzag(x, 1, shards) for x in (inputs, targets, *earlier)]
        positions = zigzag(jnp.arange(length), 0, shards)
        row = P(None, AXIS)
        split: Any = jax.shard_map(
            functools.partial(local_loss, config=config),
            mesh=mesh,
            in_specs=(P(), row, row, P(AXIS), row),
            out_specs=P(),
        )
        mean: jax.Array = split(parameters, rows[0], tuple(rows[2:]), positions, rows[1])
        return mean

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192, help="bytes of each text, on all devices together")
    parser.add_argument("--strategy", default="auto", choices=["auto", "ring", "all_gather", "ulysses"])
    arguments = parser.parse_args()

    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    model, optimizer = ModelConfig(), OptimizerConfig(steps=arguments.steps)
    step = jax.jit(
        functools.partial(
            train_step,
            model=model,
            optimizer=optimizer,
            attention=None,
            objective=split_loss(mesh, arguments.strategy),
        )
    )
    state = initial_state(model, jax.random.key(0))
    text = batches(load_text()[0], arguments.batch, arguments.length, 0)
    print(f"{arguments.length:,} bytes over {jax.device_count()} devices ({jax.devices()[0].device_kind})")
    for index in range(arguments.steps):
        start = time.perf_counter()
        state, loss = step(state, np.asarray(next(text)))
        print(f"step {index}: loss {float(loss):.4f}, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
