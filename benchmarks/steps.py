"""Whole training steps of models, in plain JAX, with one op of this package after another, and with all of them.

Float32 parameters, bfloat16 matmuls, AdamW; cuDNN's attention in the plain form where it serves; the rematerialisation
of the model's users. Nothing is tuned. Of each form: milliseconds of a step, in turns with the others; share of the
peak; bytes that the program allocates; seconds to trace and lower, and to compile; and losses of three steps, or the
error of one that does not compile or run, as for want of memory. ``experts_today`` is a mixture of experts by sorts and
matmuls of groups, and ``all_today`` takes all ops with it. The last form keeps attention's results in addition to what
its policy keeps.

``python -m benchmarks.steps llama_1b gpt2 --forms plain all``; ``--profile plain all`` prints the device's kernels, and
``--starts`` measures in processes of their own how long a form takes to its first step, from nothing and once more.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import interleaved, queued, record
from benchmarks.step_models import MODELS, OURS, PLAIN, SWAPS, TODAY, Arrays, Model, Ops
from tilewright.kernels.op.roofline import peaks_of
from tilewright.ops.tuning.timing import gpu_kernels, traced
from tilewright.ops.utils.device import current_device

RATE, BETAS, DECAY = 1e-4, (0.9, 0.95), 0.1
STEPS = 3
"""Steps of a sample, of a trace, and of the losses that are compared."""
KEPT = "all, attention kept"
WHOLE = {"plain": PLAIN, "all_today": TODAY, "all": OURS, KEPT: OURS}
FORMS = ("plain", *SWAPS, "all_today", "all", KEPT)


def ops_of(form: str) -> Ops:
    """Plain ops, with those of a form taken from this package."""
    if form in WHOLE:
        return WHOLE[form]
    ours, fields = SWAPS[form]
    return dataclasses.replace(PLAIN, **{field: getattr(ours, field) for field in fields})


def forms_of(model: Model) -> list[str]:
    """The forms that are different programs of a model."""
    same = {"mlp"} if model.stack.experts else {"experts", "experts_today", "all_today"}
    return [form for form in FORMS if form not in same]


def step_of(model: Model, ops: Ops) -> Callable[..., Any]:
    """``(loss, parameters, moments)`` after a step of AdamW, of these and the inputs."""

    def step(state: tuple[Arrays, Arrays, Arrays, jax.Array], inputs: Arrays) -> Any:
        w, first, second, count = state
        loss, gradients = jax.value_and_grad(functools.partial(model.loss, ops))(w, inputs)
        count = count + 1
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradients)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradients)

        def moved(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = m / (1 - BETAS[0] ** count), v / (1 - BETAS[1] ** count)
            return w - RATE * (m / (jnp.sqrt(v) + 1e-8) + DECAY * w)

        return (jax.tree.map(moved, w, first, second), first, second, count), loss

    return step


def first_state(model: Model) -> Any:
    @jax.jit
    def make(key: jax.Array) -> Any:
        w = model.parameters(key)
        first, second = (jax.tree.map(jnp.zeros_like, w) for _ in range(2))
        return w, first, second, jnp.zeros((), jnp.float32)

    return make(jax.random.key(0))


def measured(model: Model, forms: Sequence[str], rounds: int, profiled: Sequence[str]) -> dict[str, Any]:
    """The figures of each form that can be compiled and run."""
    inputs = jax.jit(model.inputs)(jax.random.key(1))
    found: dict[str, Any] = {}
    programs: dict[str, Any] = {}
    for form in forms:
        found[form] = {}
        try:
            compiled, times = compiled_step(model, form)
            memory: Any = compiled.memory_analysis()
            found[form] |= times | {
                "temporary_bytes": memory.temp_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
            }
            found[form]["losses"] = losses(model, compiled, inputs)
        except jax.errors.JaxRuntimeError as error:
            found[form]["error"] = str(error).splitlines()[0]
            continue
        programs[form] = compiled

    state = [first_state(model)]

    def steps(program: Any) -> Callable[[], Any]:
        def run(*_: object) -> Any:
            state[0], loss = program(state[0], inputs)
            return loss

        return queued(run, (), STEPS)

    timings = interleaved({form: steps(program) for form, program in programs.items()}, rounds, warmup=1)
    peaks = peaks_of(current_device())
    for form, timing in timings.items():
        seconds = timing.median / STEPS
        found[form] |= {"time": timing.to_json(), "steps_of_a_sample": STEPS, "step_s": seconds}
        found[form] |= {
            "tokens_per_s": model.tokens / seconds,
            "share_of_peak": peaks and model.flops() / seconds / peaks.flops,
        }
    for form in profiled:
        if form in programs:
            found[form]["kernels"] = kernels(steps(programs[form]))
    return found


def compiled_step(model: Model, form: str) -> tuple[Any, dict[str, float]]:
    """The step of a form, and the seconds that it took."""
    if form == KEPT:
        model = dataclasses.replace(model, stack=model.stack.keeping_attention())
    state = jax.eval_shape(functools.partial(first_state, model))
    inputs = jax.eval_shape(model.inputs, jax.random.key(1))
    started = time.perf_counter()
    lowered = jax.jit(step_of(model, ops_of(form)), donate_argnums=0).lower(state, inputs)
    after = time.perf_counter()
    compiled = lowered.compile()
    return compiled, {"lower_s": after - started, "compile_s": time.perf_counter() - after}


def starts(name: str, form: str) -> list[dict[str, float]]:
    """The seconds of two processes, of which the second one finds what the first one has kept on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "TILEWRIGHT_CACHE_DIR": f"{folder}/tilewright",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        command = [sys.executable, "-c", f"from benchmarks import steps; steps.start({name!r}, {form!r})"]
        done = [subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True) for _ in range(2)]
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


def start(name: str, form: str) -> None:
    """Compiles a step in this process, and prints the seconds."""
    print(json.dumps(compiled_step(MODELS[name], form)[1]))


def losses(model: Model, program: Any, inputs: Arrays) -> list[float]:
    """The losses of three steps from the first parameters."""
    state, said = first_state(model), []
    for _ in range(STEPS):
        state, loss = program(state, inputs)
        said.append(float(loss))
    return said


def kernels(run: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Milliseconds and launches of a step in each kernel of the device, most first, from a trace of three steps."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, time_ms in gpu_kernels(traced(lambda: jax.block_until_ready(run()))):
        times[name].append(time_ms)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {name: (sum(each) / STEPS, len(each) / STEPS) for name, each in ordered}


def table(name: str, found: dict[str, Any]) -> str:
    plain = found.get("plain", {}).get("step_s")
    lines = [f"{name}: {MODELS[name].source}, {MODELS[name].tokens} tokens"]
    for form, each in found.items():
        if "step_s" not in each:
            lines.append(f"  {form:20} {each.get('error')}")
            continue
        speed = f"{plain / each['step_s']:.3f} x plain" if plain else ""
        share = f"{each['share_of_peak']:.3f} of peak" if each["share_of_peak"] else ""
        memory = (each["temporary_bytes"] + each["argument_bytes"]) / 2**30
        lines.append(
            f"  {form:20} {1e3 * each['step_s']:8.2f} ms  {speed}  {share}  {memory:.2f} GiB"
            f"  lower {each['lower_s']:.1f} s, compile {each['compile_s']:.1f} s"
            f"  losses {' '.join(f'{loss:.4f}' for loss in each['losses'])}"
        )
        for kernel, (ms, launches) in list(each.get("kernels", {}).items())[:40]:
            lines.append(f"      {ms:8.3f} ms  {launches:5.0f} x  {kernel[:110]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=[name for name, each in MODELS.items() if not each.held_back])
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="by default all that differ for a model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", nargs="*", default=(), choices=FORMS)
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--name", default="steps")
    arguments = parser.parse_args()
    data: dict[str, Any] = {}
    for name in arguments.models:
        forms = arguments.forms or forms_of(MODELS[name])
        if arguments.starts:
            data[name] = {form: starts(name, form) for form in forms}
            print(name, json.dumps(data[name], indent=1), flush=True)
            record(arguments.name, {"models": data})
            continue
        data[name] = measured(MODELS[name], forms, arguments.rounds, arguments.profile)
        print(table(name, data[name]), flush=True)
        record(arguments.name, {"models": data})


if __name__ == "__main__":
    main()
