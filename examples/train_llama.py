"""Trains a Llama-like model: packed documents, AdamW, checkpoints that a later run resumes exactly, a log and a plot.

A small model of bytes, on the source of Python's standard library, takes two minutes on a CPU of two cores:

    python examples/train_llama.py

The sizes of Llama 3.2 1B, on all GPUs of a machine, and tokens of a file (a .npy, or a .bin of uint16 or uint32):

    python examples/train_llama.py --size 1b --data tokens.npy --end 128001 --out run

The same command resumes a run that was ended. ``pip install 'tilewright[train]'`` installs what this file imports.
"""

import argparse
import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from token_rows import Corpus, load_tokens

import tilewright
from tilewright.kernels.op.roofline import peaks_of
from tilewright.modules import flash_attention, glu, linear_cross_entropy, rms_norm, rope
from tilewright.ops.utils.device import current_device

type Arrays = dict[str, Any]

POLICIES = jax.checkpoint_policies
POLICY = POLICIES.save_from_both_policies(
    POLICIES.dots_with_no_batch_dims_saveable,
    POLICIES.save_only_these_names("flash_attention_out", "flash_attention_residuals"),
)

ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Of Llama 3.2's ``config.json``."""


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int
    d: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int


MODELS = {"small": Model(4, 128, 4, 2, 32, 384, 256), "1b": Model(16, 2048, 32, 8, 64, 8192, 128256)}
DEFAULTS = {
    "small": {"rows": 4, "length": 256, "steps": 600, "rate": 2e-3},
    "1b": {"rows": 2, "length": 8192, "steps": 10_000, "rate": 3e-4},
}
"""Flags of each size."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What the programs below are compiled for.

    Attributes:
      dtype: of activations and of the matrices that multiply them; parameters are float32.
      end: the token that ends a document.
      mesh: of axes ``data``, each of whose parts has a copy of the parameters, and ``fsdp``, which splits both.
    """

    model: Model
    dtype: Any
    end: int
    mesh: Mesh

    @property
    def rows(self) -> NamedSharding:
        """The sharding of ``[rows, ...]``: over all devices."""
        return NamedSharding(self.mesh, P(("data", "fsdp")))


def parameters(key: jax.Array, model: Model) -> Arrays:
    """Normal matrices of variance 1/fan-in; what is added to the residual stream is scaled by its depth."""
    d, q, kv, ff = model.d, model.heads * model.head_dim, model.kv_heads * model.head_dim, model.ff
    shapes = {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d), "gate": (d, ff), "up": (d, ff), "down": (ff, d)}
    depth = {"o": (2 * model.layers) ** -0.5, "down": (2 * model.layers) ** -0.5}
    keys = dict(zip((*shapes, "embedding"), jax.random.split(key, len(shapes) + 1), strict=True))
    layers = {
        name: jax.random.normal(keys[name], (model.layers, *shape)) * (depth.get(name, 1.0) * shape[0] ** -0.5)
        for name, shape in shapes.items()
    }
    layers |= {name: jnp.ones((model.layers, d)) for name in ("norm_attention", "norm_mlp")}
    embedding = 0.02 * jax.random.normal(keys["embedding"], (model.vocab, d))
    return {"layers": layers, "embedding": embedding, "norm": jnp.ones(d)}


def is_norm(path: Any) -> bool:
    return "norm" in jax.tree_util.keystr(path)


def packed(tokens: jax.Array, end: int) -> tuple[jax.Array, jax.Array]:
    """The number of each token's document in its row, and its position in the document, both ``[rows, length]``."""
    ends = tokens == end
    documents = jnp.cumsum(ends, axis=1) - ends
    starts = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    index = jnp.arange(tokens.shape[1])
    return documents, index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def layer(x: jax.Array, w: Arrays, documents: jax.Array, positions: jax.Array, head_dim: int) -> jax.Array:
    matrix = {name: each.astype(x.dtype) for name, each in w.items() if each.ndim == 2}
    y = rms_norm(x, w["norm_attention"])
    q, k, v = ((y @ matrix[name]).reshape(*x.shape[:2], -1, head_dim) for name in "qkv")
    q, k = (rope(each, positions, scaling=ROPE) for each in (q, k))
    y = flash_attention(q, k, v, causal=True, q_segment_ids=documents, kv_segment_ids=documents)
    y, x = rms_norm(y.reshape(*x.shape[:2], -1) @ matrix["o"], w["norm_mlp"], residual=x)
    return x + glu(y, matrix["gate"], matrix["up"]) @ matrix["down"]


def features(w: Arrays, tokens: jax.Array, documents: jax.Array, positions: jax.Array, program: Program) -> jax.Array:
    """The rows that the head multiplies, ``[rows, length, d]``."""
    body = functools.partial(layer, documents=documents, positions=positions, head_dim=program.model.head_dim)
    kept = jax.checkpoint(body, policy=POLICY, prevent_cse=False)
    x = w["embedding"].astype(program.dtype)[tokens]
    x = jax.lax.with_sharding_constraint(x, program.rows)  # the embedding is split, too, and by another dimension
    x, _ = jax.lax.scan(lambda x, each: (kept(x, each), None), x, w["layers"])
    return rms_norm(x, w["norm"])


def loss(w: Arrays, tokens: jax.Array, count: jax.Array, program: Program) -> tuple[jax.Array, jax.Array]:
    """The loss of ``[rows, length + 1]`` tokens as a sum over ``count``, and the pairs that attention compares.

    The token that ends a document predicts nothing.
    """
    inputs = tokens[:, :-1]
    documents, positions = packed(inputs, program.end)
    labels = jnp.where(inputs == program.end, -100, tokens[:, 1:])  # -100 is ignored
    x = features(w, inputs, documents, positions, program)
    head = w["embedding"].astype(program.dtype)
    total = linear_cross_entropy(x, head, labels, vocab_first=True, reduction="sum")
    return total / count, jnp.sum(positions + 1.0)


def predicting(tokens: jax.Array, end: int) -> jax.Array:
    """How many of ``[..., length + 1]`` tokens predict the next one."""
    return jnp.maximum(jnp.sum(tokens[..., :-1] != end), 1)


def step(state: Any, batch: jax.Array, program: Program, optimizer: optax.GradientTransformation) -> tuple[Any, Arrays]:
    """One update, by the mean over all of ``[accumulated, rows, length + 1]`` tokens."""
    w, moments = state
    count = predicting(batch, program.end)

    def add(sums: Any, tokens: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss, has_aux=True)(w, tokens, count, program)), None

    nothing = ((jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, w))
    ((value, pairs), gradients), _ = jax.lax.scan(add, nothing, batch, unroll=batch.shape[0] == 1)
    updates, moments = optimizer.update(gradients, moments, w)
    seen = {"loss": value, "gradient_norm": optax.tree.norm(gradients), "pairs": pairs}
    return (optax.apply_updates(w, updates), moments), seen


def optimizer_and_schedule(steps: int, rate: float) -> tuple[optax.GradientTransformation, optax.Schedule]:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps, rate / 10)

    def decayed(w: Arrays) -> Arrays:
        return jax.tree_util.tree_map_with_path(lambda path, _: not is_norm(path), w)

    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw), schedule


def initial_state(key: jax.Array, model: Model, optimizer: optax.GradientTransformation) -> Any:
    w = parameters(key, model)
    return w, optimizer.init(w)


def split(state: Any, mesh: Mesh) -> Any:
    """The state's shapes with their shardings: the last dimension of every matrix is split over ``fsdp``."""

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        whole = leaf.ndim < 2 or is_norm(path) or leaf.shape[-1] % mesh.shape["fsdp"]
        spec = P() if whole else P(*[None] * (leaf.ndim - 1), "fsdp")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, state)


class Log:
    """Lines of JSON in a file; those of a run that came further than its last checkpoint are dropped."""

    def __init__(self, file: Path, last: int) -> None:
        lines = file.read_text().splitlines() if file.exists() else []
        self.file, self.lines = file, [line for line in map(json.loads, lines) if line["step"] <= last]
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, line: Arrays, steps: int) -> None:
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = f"step {line['step']}/{steps}  loss {line['loss']:.4f}  gradient norm {line['gradient_norm']:.2f}"
        said += f"  {line['tokens_per_s']:,.0f} tokens/s"
        said += f" ({line['share_of_peak']:.0%} of the peak)" if "share_of_peak" in line else ""
        print(said + (f"  validation {line['validation']:.4f}" if "validation" in line else ""), flush=True)

    def plot(self, file: Path, unigram: float) -> None:
        """Writes a PNG; ``unigram`` is the entropy of single tokens."""
        figure = Figure(figsize=(12, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, name, style in ((left, "loss", "-"), (left, "validation", "o-"), (right, "tokens_per_s", "-")):
            points = [(line["step"], line[name]) for line in self.lines if name in line]
            axes.plot(*zip(*points, strict=True), style, label="training" if name == "loss" else name)
        left.axhline(unigram, color="0.5", linestyle="--", label="entropy of single tokens")
        left.set(xlabel="step", ylabel="loss, nats per token", title="loss")
        left.legend(frameon=False)
        right.set(xlabel="step", ylabel="tokens per second", title="speed", ylim=(0, None))
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.savefig(file, dpi=130)


def restored(manager: ocp.CheckpointManager, shapes: Any, described: Arrays) -> tuple[Any, int]:
    """The state of the last checkpoint, and the number of the row that comes next."""
    last = manager.latest_step()
    found = manager.restore(last, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
    row = found.pop("row")
    other = [f"{name}={found.get(name)} there, {now} here" for name, now in described.items() if found.get(name) != now]
    if other:
        raise SystemExit(f"{manager.directory} is of another run, give another --out: {'; '.join(other)}")
    return manager.restore(last, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"], row


def measured(values: list[Arrays], seconds: float, tokens: int, count: int, model: Model, peak: float | None) -> Arrays:
    """What a line says of steps of ``tokens`` tokens by a model of ``count`` parameters.

    The share of the peak is of the FLOPs of matmuls, without those that are computed again and those between documents.
    """
    line = {name: float(np.mean([value[name] for value in values])) for name in ("loss", "gradient_norm")}
    line["tokens_per_s"] = len(values) * tokens / seconds
    if peak is not None:
        attention = 12.0 * model.layers * model.heads * model.head_dim * float(sum(value["pairs"] for value in values))
        line["share_of_peak"] = (6.0 * count * tokens * len(values) + attention) / seconds / peak
    return line


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = functools.partial(parser.add_argument, type=int)
    parser.add_argument("--size", choices=MODELS, default="small")
    parser.add_argument("--data", type=Path, help="a .npy or .bin of tokens; Python's standard library by default")
    add("--end", default=0, help="the token that ends a document")
    add("--rows", help="rows of tokens of each device in a pass")
    add("--length", help="tokens of a row")
    add("--accumulate", default=1, help="passes of a step")
    add("--steps", help="the learning rate falls to a tenth over them")
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 by default, float32 on a CPU")
    add("--devices", help="all by default")
    add("--fsdp", help="devices that share one copy of the parameters; all by default")
    add("--log-every", default=10, help="steps of a line")
    add("--save-every", default=100, help="steps between checkpoints, and between validations")
    add("--validation-rows", default=64)
    add("--seed", default=0)
    parser.add_argument("--explain", action="store_true", help="print what runs each call of a kernel")
    parser.add_argument("--out", type=Path, default=Path(".llama"))
    parser.set_defaults(devices=len(jax.devices()), **DEFAULTS[parser.parse_known_args(given)[0].size])
    arguments = parser.parse_args(given)
    arguments.fsdp = arguments.fsdp or arguments.devices
    if arguments.devices > len(jax.devices()) or arguments.devices % arguments.fsdp:
        parser.error(f"--devices must be at most {len(jax.devices())}, and a multiple of --fsdp")
    return arguments


def train(arguments: argparse.Namespace, program: Program, corpus: Corpus, held_out: Corpus) -> Log:
    """Trains from the last checkpoint on, or from the start if there is none."""
    mesh, model, out = program.mesh, program.model, arguments.out
    optimizer, schedule = optimizer_and_schedule(arguments.steps, arguments.rate)
    first_state = functools.partial(initial_state, model=model, optimizer=optimizer)
    shapes = split(jax.eval_shape(first_state, jax.random.key(0)), mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    options = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
    manager = ocp.CheckpointManager((out / "checkpoints").resolve(), options=options)
    described = dataclasses.asdict(model) | {"length": corpus.length, "seed": corpus.seed, "corpus": corpus.rows}
    done, row = manager.latest_step() or 0, 0
    if done:
        state, row = restored(manager, shapes, described)
        print(f"resumed from step {done} of {out}")
    else:
        state = jax.jit(first_state, out_shardings=shardings)(jax.random.key(arguments.seed))
    log = Log(out / "log.jsonl", done)

    shape = (arguments.accumulate, arguments.rows * arguments.devices)
    batches = NamedSharding(mesh, P(None, *program.rows.spec))
    update = functools.partial(step, program=program, optimizer=optimizer)
    first = jax.device_put(corpus.read(row, *shape), batches)
    if arguments.explain:
        print(tilewright.explain(update, state, first))
    start = time.perf_counter()
    compiled = jax.jit(update, donate_argnums=0, out_shardings=(shardings, None)).lower(state, first).compile()
    validated = jax.jit(lambda w, tokens: loss(w, tokens, predicting(tokens, program.end), program)[0])
    passes = range(max(1, min(arguments.validation_rows, held_out.rows) // shape[1]))
    tokens, count = math.prod(shape) * corpus.length, sum(leaf.size for leaf in jax.tree.leaves(shapes[0]))
    device, peaks = current_device(), peaks_of(current_device())
    peak = None if peaks is None else peaks.flops * arguments.devices
    print(f"{count:,} parameters, {tokens:,} tokens a step, {arguments.devices} × {device.name}; ", end="")
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)

    seen: list[Arrays] = []
    start = time.perf_counter()
    for number in range(done + 1, arguments.steps + 1):
        state, found = compiled(state, jax.device_put(corpus.read(row, *shape), batches))
        row += math.prod(shape)
        seen.append(found)
        saving = number % arguments.save_every == 0 or number == arguments.steps
        if not saving and number % arguments.log_every:
            continue
        values = jax.device_get(seen)  # waits for the steps
        line = {"step": number, "learning_rate": np.asarray(schedule(number - 1)).item()}
        line |= measured(values, time.perf_counter() - start, tokens, count, model, peak)
        if saving:
            rows = (jax.device_put(held_out.read(i * shape[1], shape[1]), program.rows) for i in passes)
            line["validation"] = float(np.mean([validated(state[0], each) for each in rows]))
        log.add(line, arguments.steps)
        if saving:  # after its line, which a run that resumes here keeps
            run = ocp.args.JsonSave(described | {"row": row})
            manager.save(number, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=run))
        seen, start = [], time.perf_counter()
    manager.close()  # waits until the last checkpoint is written
    return log


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    model, out = MODELS[arguments.size], arguments.out
    shape, devices = (arguments.devices // arguments.fsdp, arguments.fsdp), jax.devices()[: arguments.devices]
    mesh = jax.make_mesh(shape, ("data", "fsdp"), (AxisType.Auto,) * 2, devices=devices)
    dtype = arguments.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    program = Program(model, jnp.dtype(dtype), arguments.end, mesh)
    tokens, held_out_tokens = load_tokens(arguments.data, model.vocab)
    one_pass = arguments.rows * arguments.devices
    corpus = Corpus(tokens, arguments.length, model.vocab, arguments.seed, arguments.accumulate * one_pass)
    held_out = Corpus(held_out_tokens, arguments.length, model.vocab, None, one_pass)
    out.mkdir(parents=True, exist_ok=True)
    unigram = held_out.entropy()
    log = train(arguments, program, corpus, held_out)
    log.plot(out / "training.png", unigram)
    last = log.lines[-1]["validation"]
    print(f"validation loss {last:.4f}, entropy of single tokens {unigram:.4f}; the log and its plot are in {out}")


if __name__ == "__main__":
    main()
