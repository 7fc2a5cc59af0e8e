"""What a newcomer reads on the second day: explanations, for this machine and another one, and measurements."""

import dataclasses
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import typer.testing

import tilewright
from tilewright.cli import benching
from tilewright.cli.app import app
from tilewright.errors import TargetDeviceError
from tilewright.kernels import OPS, kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.triton import requirements
from tilewright.modules import flash_attention, grouped_matmul, linear_cross_entropy, rms_norm
from tilewright.ops import default_executor

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
Q = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.bfloat16)


def attention(query: Any, platform: Any = None) -> Any:
    return flash_attention(query, query, query, causal=True, platform=platform)


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Triton, nvcc and FlashAttention-4; it has no cuDNN in any case."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("triton", "torch", *cute.MIN_VERSIONS):
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    for cached in (requirements._version, cute.missing_packages):
        cached.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    yield
    for cached in (requirements._version, cute.missing_packages):
        cached.cache_clear()


# Extras of the machine that will run it.


@pytest.mark.parametrize(
    ("name", "extra", "backend"),
    [(A100, "triton", "triton"), (A100, "cudnn", "cudnn"), (H100, "fa4", "fa4"), (A100, "nvcc", "cuda:cuda")],
)
def test_a_laptop_explains_what_the_machine_with_the_package_will_run(laptop, name, extra, backend):
    def explained(**there: Any) -> list[str]:
        with tilewright.target_device(name, **there):
            return [call.config.backend for call in tilewright.explain(attention, Q, platform=backend)]

    with pytest.raises(tilewright.errors.UnsupportedError):
        explained()
    assert explained(extras=(extra,)) == [backend.rpartition(":")[2]]
    with pytest.raises(tilewright.errors.UnsupportedError):  # nothing of it is left
        explained()


def test_the_extra_that_pip_takes_stands_for_what_it_brings(laptop):
    with tilewright.target_device(A100, extras=("cuda13",)):
        (call,) = explained = tilewright.explain(attention, Q)
    assert call.config.backend == "cudnn"
    assert "nvcc must compile it first" in call.choice.rejected["cuda"][0]
    assert str(explained).startswith(f"on {A100}, with cudnn, nvcc installed there\n")


@pytest.mark.parametrize(
    ("name", "extra", "backend"), [(A100, "triton", "triton"), (H100, "fa4", "fa4"), (A100, "nvcc", "cuda:cuda")]
)
def test_lowering_says_which_package_must_be_here_as_well(laptop, name, extra, backend):
    with (
        tilewright.target_device(name, extras=(extra,)),
        pytest.raises(TargetDeviceError, match=f"says that {extra} is installed there.* must be installed here too: "),
    ):
        jax.jit(lambda q: attention(q, backend)).lower(Q)


def test_one_function_is_chosen_for_anew_for_each_set_of_packages(laptop):
    jitted, chain = jax.jit(attention), default_executor().chooser
    before, version = len(chain.cache), chain.version
    lowered = {}
    for extras in ((), ("cudnn",), (), ("cudnn",)):
        with tilewright.target_device(A100, extras=extras):
            text = jitted.lower(Q).as_text()
        lowered.setdefault(extras, []).append("cudnn" in text)
        if extras:
            assert (len(chain.cache), chain.version) == (before, version)
        before = len(chain.cache)
    assert lowered == {(): [False, False], ("cudnn",): [True, True]}


def test_what_was_chosen_without_a_package_does_not_answer_for_it():
    """The best config of a shipped table that can run depends on the packages."""
    query, said = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16), []
    for extras in ((), ("fa4",), ()):
        with tilewright.target_device(H100, extras=extras):
            if not extras:
                jax.jit(lambda q: attention(q)).lower(query)
            said.append(tilewright.explain(attention, query)[0].step)
    assert said == ["memory", "shipped", "memory"]


@pytest.mark.parametrize(("extras", "error"), [(("tritn",), ValueError), ("triton", TypeError)])
def test_an_unknown_extra_is_one_error_that_lists_them(extras, error):
    with pytest.raises(error) as caught:
        tilewright.target_device(A100, extras=extras)
    words = ("cudnn", "fa4", "nvcc", "triton") if error is ValueError else ("('triton',)",)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def command(*arguments: str) -> tuple[int, str]:
    result = typer.testing.CliRunner().invoke(app, arguments)
    return result.exit_code, result.output + str(result.exception or "")


def test_the_command_line_takes_extras(laptop):
    call = ("explain", "flash_attention", "--shape", "1,2048,8,64", "--dtype", "bf16", "--no-backward")
    assert "forward: cudnn" in command(*call, "--device", A100, "--extras", "triton,cudnn")[1]
    assert "names of cuda12, cuda13, cudnn" in command(*call, "--device", A100, "--extras", "cudn")[1]
    assert "--device" in command(*call, "--extras", "cudnn")[1]


# What explain says.


def step(parameters: Any, x: Any, labels: Any, sizes: Any) -> Any:
    """A training step of a model with four ops."""

    def loss(parameters: Any) -> Any:
        def layer(hidden: Any, _: Any) -> tuple[Any, None]:
            normed = rms_norm(hidden, parameters["norm"])
            heads = normed.reshape(2, 256, 4, 64)
            hidden = hidden + flash_attention(heads, heads, heads, causal=True).reshape(hidden.shape)
            rows = grouped_matmul(hidden.reshape(512, 256), parameters["experts"], sizes)
            return hidden + rows.reshape(hidden.shape), None

        hidden, _ = jax.lax.scan(layer, x, None, length=3)
        return linear_cross_entropy(hidden, parameters["head"], labels)

    return jax.value_and_grad(loss)(parameters)


def arguments() -> tuple[Any, ...]:
    shapes = {"norm": (256,), "experts": (4, 256, 256), "head": (256, 1024)}
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    return structs, jax.ShapeDtypeStruct((2, 256, 256), jnp.bfloat16), *ids


def test_a_training_step_is_explained_in_a_few_lines():
    text = str(tilewright.explain(step, *arguments()))
    assert text.startswith("on cpu\nrms_norm × 3 of bf16[2,256,256] ")
    assert "flash_attention × 3 of bf16[2,256,4,64]×3 mask=causal softmax_scale=0.125\n  forward:  xla " in text
    assert text.count("GPU") == 1  # there is none, and that is said once
    assert len(text.splitlines()) <= 1 + 4 * 4 + 2
    assert text.endswith("\n8 calls: 8 on xla")


@pytest.mark.parametrize("name", [None, A100, H100])
def test_no_objects_and_no_repeated_lines(name):
    if name is None:
        text = str(tilewright.explain(step, *arguments()))
    else:
        with tilewright.target_device(name, extras=("cudnn",)):
            text = str(tilewright.explain(step, *arguments()))
    for word in ("ShapeDtypeStruct", "dtype(", "<", "Choice(", "Params(", "Mask", "inputs.", "capability=", "  from"):
        assert word not in text
    assert text.count(" × 3 of ") == 3  # on every device the steps of a scan are known
    for block in text.split("\n  forward:"):
        lines = block.splitlines()
        assert len(lines) == len(set(lines))


# Measurements.


def test_bench_compares_every_op_with_what_a_program_would_have_in_its_place():
    for name in OPS:
        op = kernel(name)
        first, *others = benching.measure(name, op.cases.small, backward=op.differentiable, iters=1)
        assert first.implementation.startswith("tilewright ")
        peers = [m for m in others if not m.implementation.startswith("tilewright ")]
        assert [m for m in peers if m.time_ms], name
        assert not any(m.failed for m in others), name


def test_bench_says_which_way_is_better():
    call = ("bench", "rms_norm", "--shape", "8,64", "--iters", "2", "--no-backward")
    code, text = command(*call)
    assert code == 0
    assert "plain jax.numpy" in text
    assert "baseline" in text
    assert "time: lower is better; speedup over the baseline and GFLOP/s: higher is better" in text


def test_a_formula_that_would_fill_the_memory_is_not_run():
    case = dataclasses.replace(kernel("flash_attention").cases.small, name="long", q_length=32768, logits_soft_cap=3.0)
    positional, keywords = case.abstract_arguments()
    assert "gigabytes" in benching.plain_formula(kernel("flash_attention"), positional, keywords)


def test_a_tuning_prints_as_the_command_prints_it(capsys):
    x = jnp.ones((8, 64))
    tuner = tilewright.ops.Tuner(warmup=0, iters=1)
    chooser = tilewright.ops.ConfigSelectorChain()
    result = tilewright.tune(lambda x: rms_norm(x), x, tuner=tuner, chooser=chooser, call_budget_s=5)
    print(result)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].strip() == "tuned calls"
    better = "time: lower is better; speedup over the heuristic: higher is better"
    for word in ("rms_norm forward", "f32[8,64]", "→ xla", "call, and what it will run with", better):
        assert word in text
    assert "TunedCall" not in text
    code, said = command("tune", "rms_norm", "--shape", "8,64", "--no-backward", "--isolation", "none")
    assert code == 0
    assert better in said
    assert "call, and what it will run with" in said
    assert str(tilewright.ops.AutotuningResult()) == "no call was tuned"


def test_calls_that_differ_in_their_config_alone_are_told_apart():
    cfg = tilewright.explain(attention, Q)[0].config
    text = str(tilewright.explain(lambda q: attention(q) + flash_attention(q, q, q, causal=True, cfg=cfg), Q))
    assert text.count("flash_attention of bf16[1,2048,8,64]×3") == 2
    assert text.count("  forward: xla ") == 2
    assert "(explicit; not measured)" in text
