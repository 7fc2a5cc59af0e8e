"""Tunes, then trains, a small byte-level transformer on the source of Python's standard library.

Run it with ``make demo``. It writes the parameters and a plot to ``.demo/``; a second run finds the tuned configs on
disk and measures nothing.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from byte_transformer import (
    Attention,
    ModelConfig,
    OptimizerConfig,
    TrainState,
    generate,
    initial_state,
    loss,
    train_step,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stdlib_text import batches, load_text
from train_plot import Comparison, plot

import tilewright
from tilewright.modules import flash_attention
from tilewright.ops import AutotuningResult, PersistentCache
from tilewright.ops.tuning.progress import progress_for

# The two attentions sum in different orders, in float32; relative differences above these are a mistake in one of them.
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-2
PROMPT = b"def read_lines(path):\n    "


def tilewright_attention(query: Any, key: Any, value: Any, *, sliding_window: int | None) -> jax.Array:
    return flash_attention(query, key, value, causal=True, sliding_window=sliding_window)


def jax_attention(query: Any, key: Any, value: Any, *, sliding_window: int | None) -> jax.Array:
    window = None if sliding_window is None else (sliding_window, 0)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=window)


class History(NamedTuple):
    """What the training saw; ``validation`` holds (step, loss)."""

    losses: list[float]
    comparisons: list[Comparison]
    validation: list[tuple[int, float]]
    seconds: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024, help="bytes of each text")
    parser.add_argument("--compare-every", type=int, default=40, help="steps between two steps of JAX's attention")
    parser.add_argument("--budget", type=float, help="seconds for the tuning, 120 for each call by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".demo"))
    return parser.parse_args()


def tune(console: Console, step: Callable[..., Any], *args: Any, budget_s: float | None) -> AutotuningResult:
    """Tunes every kernel call of the train step and shows what was chosen and why."""
    console.rule("tuning the train step")
    with progress_for(console.file) as on_event:
        result = tilewright.tune(step, *args, budget_s=budget_s, on_event=on_event)
    print(result)
    known = sum(1 for call in result if call.step != "measured")
    place = PersistentCache().path
    if known == len(result):
        console.print(f"[bold]configs for {known} calls found on disk ({place}), nothing measured")
    else:
        console.print(f"{len(result) - known} of {len(result)} calls measured, configs kept in {place}")
    for call in result:
        console.print("  " + reason(call))
    return result


def reason(call: tilewright.ops.TunedCall) -> str:
    """Why a call runs with what it runs with."""
    tried = sum(1 for candidate in call.candidates if candidate.eligible)
    name = f"{call.op} {call.direction}"
    if len(call.candidates) == 1:
        return f"{name}: the heuristic, for these shapes leave no other choice"
    if call.winner.heuristic:
        return f"{name}: the heuristic stays, no other of {tried} candidates was faster by more than the noise"
    return f"{name}: the fastest of {tried} candidates, {call.speedup or 1:.2f}× the heuristic's speed"


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - start


def train(
    console: Console,
    state: TrainState,
    steps: dict[str, Callable[..., Any]],
    text: Iterator[np.ndarray],
    validate: Callable[[Any], float],
    arguments: argparse.Namespace,
    beta: float,
) -> tuple[TrainState, History]:
    """Trains on our attention; every so often the same step is made on JAX's too, timed, compared and dropped.

    ``beta`` is the decay of the optimizer's running mean of gradients.
    """
    tokens_per_step = arguments.batch * arguments.length
    history = History([], [], [(0, validate(state.parameters))], 0.0)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )
    busy = 0.0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=arguments.steps, said="")
        for index in range(arguments.steps):
            tokens = next(text)
            compared = index % arguments.compare_every == 0
            before = state
            if compared:
                theirs, their_seconds = timed(steps["jax"], before, tokens)
            (state, our_loss), our_seconds = timed(steps["tilewright"], before, tokens)
            busy += our_seconds
            history.losses.append(float(our_loss))
            if compared:
                difference = float(gradient_difference(before, state, theirs[0], beta))
                comparison = Comparison(index, float(theirs[1]), their_seconds, our_seconds, difference)
                check(comparison, float(our_loss))
                history.comparisons.append(comparison)
            said = (
                f"loss {np.mean(history.losses[-25:]):.3f}  {tokens_per_step * (index + 1) / busy:,.0f} tokens/s"
                f"  (jax.nn.dot_product_attention: {tokens_per_step / median(history, 'their_seconds'):,.0f})"
            )
            bar.update(task, advance=1, said=said)
    history.validation.append((arguments.steps, validate(state.parameters)))
    return state, history._replace(seconds=busy)


@jax.jit
def gradient_difference(before: TrainState, ours: TrainState, theirs: TrainState, beta: float) -> jax.Array:
    """How far apart two steps from one state have moved the gradients' running mean, relative to the move itself."""

    def distance(left: Any, right: Any) -> jax.Array:
        squares = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), left, right)
        return jnp.sqrt(sum(jax.tree.leaves(squares)))

    decayed = jax.tree.map(lambda mean: beta * mean, before.mean)
    return distance(ours.mean, theirs.mean) / distance(theirs.mean, decayed)


def check(comparison: Comparison, our_loss: float) -> None:
    """Raises if the two attentions give different losses or gradients for the same parameters and text."""
    theirs = comparison.their_loss
    same_loss = abs(our_loss - theirs) <= LOSS_TOLERANCE * abs(theirs)
    if not (same_loss and comparison.gradient_difference <= GRADIENT_TOLERANCE):
        raise ArithmeticError(f"the two attentions disagree: {our_loss=}, {comparison=}")


def median(history: History, field: str) -> float:
    return float(np.median([getattr(comparison, field) for comparison in history.comparisons]))


def compiled_steps(
    optimizer: OptimizerConfig, model: ModelConfig, state: TrainState, tokens: np.ndarray
) -> dict[str, Callable[..., Any]]:
    """The train step on either attention, compiled for these shapes."""
    attentions: dict[str, Attention] = {"tilewright": tilewright_attention, "jax": jax_attention}
    return {
        name: jax.jit(functools.partial(train_step, model=model, optimizer=optimizer, attention=attention))
        .lower(state, tokens)
        .compile()
        for name, attention in attentions.items()
    }


def report(console: Console, history: History, tokens_per_step: int) -> None:
    console.rule("result")
    theirs, ours = median(history, "their_seconds"), median(history, "our_seconds")
    console.print(
        f"one step: {ours * 1e3:.0f} ms on tilewright, {theirs * 1e3:.0f} ms on jax.nn.dot_product_attention "
        f"({theirs / ours:.2f}×), medians of {len(history.comparisons)} steps made side by side"
    )
    loss_difference = max(abs(each.their_loss - history.losses[each.step]) for each in history.comparisons)
    gradient = max(each.gradient_difference for each in history.comparisons)
    console.print(
        f"they agree: losses differ by at most {loss_difference:.1e}, gradients by {gradient:.1e} of their norm"
    )
    for step, value in history.validation:
        console.print(f"validation loss after {step} steps: {value:.3f} nats per byte")
    console.print(f"trained on {tokens_per_step * len(history.losses):,} bytes in {history.seconds:.0f} s")


def show_sample(console: Console, parameters: Any, model: ModelConfig, seed: int) -> None:
    """What the model writes after a prompt."""
    context = np.frombuffer(PROMPT.rjust(256, b"\n"), np.uint8).astype(np.int32)
    drawn = generate(
        parameters, jnp.asarray(context), jax.random.key(seed), count=160, config=model, attention=tilewright_attention
    )
    console.rule("sample")
    text = (PROMPT + bytes(np.asarray(drawn, np.uint8))).decode("ascii", "replace")
    console.print(text.translate({code: " " for code in range(32) if code != 10}), markup=False, highlight=False)


def save(parameters: Any, file: Path) -> None:
    """Writes the parameters as an npz, a path such as ``layers/0/query`` for each array."""
    flat, _ = jax.tree_util.tree_flatten_with_path(parameters)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}
    np.savez(file, allow_pickle=False, **named)


def main() -> None:
    start = time.perf_counter()
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    model, optimizer = ModelConfig(), OptimizerConfig(steps=arguments.steps)
    training_text, validation_text = load_text()
    text = batches(training_text, arguments.batch, arguments.length, arguments.seed)
    state = initial_state(model, jax.random.key(arguments.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.parameters))
    console.print(
        f"{count:,} parameters; {len(training_text):,} bytes of training text and {len(validation_text):,} of "
        f"validation text from the standard library; {jax.devices()[0].device_kind}"
    )

    tokens = next(text)
    step = functools.partial(train_step, model=model, optimizer=optimizer, attention=tilewright_attention)
    tuned = tune(console, step, state, tokens, budget_s=arguments.budget)

    held_out = batches(validation_text, 4, arguments.length, 1)
    held_out_batches = [next(held_out) for _ in range(4)]
    evaluate = jax.jit(functools.partial(loss, config=model, attention=tilewright_attention))

    def validate(parameters: Any) -> float:
        return float(np.mean([evaluate(parameters, batch) for batch in held_out_batches]))

    console.rule("training")
    steps = compiled_steps(optimizer, model, state, tokens)
    state, history = train(console, state, steps, text, validate, arguments, optimizer.beta1)
    report(console, history, arguments.batch * arguments.length)
    show_sample(console, state.parameters, model, arguments.seed)
    save(state.parameters, arguments.out / "parameters.npz")
    plot(arguments.out / "training.png", history.losses, history.validation, history.comparisons, tuned)
    console.print(f"parameters and plot in {arguments.out}/; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
