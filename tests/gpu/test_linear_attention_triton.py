"""Linear attention in Triton on a GPU: conformance, and real sizes beside the same call in XLA in float32."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.conformance import check_contained, exact, inputs_of
from tests.kernels.linear_attention.gpu_conformance import GpuConformance, relative_error
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.op import LinearAttention
from tilewright.kernels.linear_attention.triton.backend import TritonLinearAttention
from tilewright.kernels.linear_attention.triton.params import TritonLinearAttentionParams
from tilewright.kernels.linear_attention.xla.backend import XlaLinearAttention
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import linear_attention
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

BACKEND = TritonLinearAttention()
CASES = LinearAttention.cases.by_device["gpu"] | {
    "packed": LinearAttentionCase(
        "", length=5000, heads=2, value_heads=8, key_dim=128, sequences="cum_seqlens", dtype="bfloat16",
        qk_l2norm=True, state=True,
    ),
    "odd": LinearAttentionCase(
        "", batch=3, length=777, heads=3, key_dim=100, value_dim=60, sequences="seq_lengths", dtype="float16",
        state=True,
    ),
    "wide": LinearAttentionCase("", length=700, heads=2, key_dim=256, dtype="bfloat16", qk_l2norm=True, state=True),
    "float32": LinearAttentionCase("", length=1000, heads=2, key_dim=128, state=True),
    "split": LinearAttentionCase(
        "", length=8000, heads=2, value_heads=4, key_dim=128, dtype="bfloat16", qk_l2norm=True, state=True
    ),
    "split sums": LinearAttentionCase(
        "", length=8000, heads=2, key_dim=64, update="add", dtype="bfloat16", state=True, sequences="cum_seqlens"
    ),
    "gated": LinearAttentionCase(
        "", length=3000, heads=4, key_dim=128, gate="channel", update="add", dtype="bfloat16", state=True,
    ),
    "kimi delta packed": LinearAttentionCase(
        "", length=3000, heads=2, key_dim=128, gate="channel", sequences="cum_seqlens", dtype="bfloat16",
        qk_l2norm=True, state=True,
    ),
    "kimi delta odd": LinearAttentionCase(
        "", batch=3, length=777, heads=3, key_dim=100, value_dim=60, gate="channel", sequences="seq_lengths",
        dtype="float16", state=True,
    ),
    "kimi delta float32": LinearAttentionCase("", length=500, heads=2, key_dim=128, gate="channel", state=True),
    "kimi delta wide": LinearAttentionCase(
        "", length=700, heads=2, key_dim=256, gate="channel", dtype="bfloat16", qk_l2norm=True, state=True
    ),
    "rwkv6": LinearAttentionCase(
        "", batch=2, length=1500, heads=8, gate="channel", update="bonus", dtype="bfloat16", state=True
    ),
    "removal packed": LinearAttentionCase(
        "", length=2000, heads=2, key_dim=128, gate="channel", update="removal", sequences="cum_seqlens",
        dtype="bfloat16", state=True,
    ),
    "removal float32": LinearAttentionCase("", length=500, heads=2, gate="channel", update="removal", state=True),
    "delta without decays": LinearAttentionCase(
        "", length=2000, heads=4, key_dim=64, gate="none", dtype="bfloat16", qk_l2norm=True, state=True
    ),
}  # fmt: skip


class TestTriton(GpuConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = BACKEND
    # TensorFloat-32 has the digits of float16.
    tolerances: ClassVar[dict[str, float]] = {"float32": 3e-3, "float16": 4e-3, "bfloat16": 1.2e-2}

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        device = current_device()
        return BACKEND.heuristic(inputs, device, "forward"), BACKEND.heuristic(inputs, device, "backward")


def call_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = CASES[name].arguments()
    return tuple(jnp.asarray(x) for x in args), kwargs


def found(name: str, cfg: Any = None, platform: Any = "triton") -> dict[str, Any]:
    """Results and gradients of one call, by name; in XLA from the same values in float32."""
    args, kwargs = call_of(name)
    if platform == "xla":
        args = tuple(x.astype(jnp.float32) for x in args)
    floats = {key: x for key, x in kwargs.items() if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {key: x for key, x in kwargs.items() if key not in floats}

    @jax.jit
    def both(args: Any, floats: Any) -> Any:
        run = lambda args, floats: linear_attention(*args, **floats, **rest, cfg=cfg, platform=platform)
        out, pull_back = jax.vjp(run, args, floats)
        seeds = [jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in jax.tree.leaves(out)]
        cotangents = [seed.astype(x.dtype) for seed, x in zip(seeds, jax.tree.leaves(out), strict=True)]
        return out, pull_back(jax.tree.unflatten(jax.tree.structure(out), cotangents))

    with jax.default_matmul_precision("highest" if platform == "xla" else "default"):
        out, (by_array, by_name) = jax.block_until_ready(both(args, floats))
    names = ("query", "key", "value")
    results = dict(zip(("out", "state"), jax.tree.leaves(out), strict=False))
    return results | {f"d_{n}": x for n, x in zip(names, by_array, strict=True)} | {
        f"d_{n}": x for n, x in by_name.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_at_real_sizes(name: str):
    """Near XLA in float32, and the same bits again."""
    want, got, again = found(name, platform="xla"), found(name), found(name)
    errors = {key: relative_error(x, want[key]) for key, x in got.items()}
    assert max(errors.values()) < (1.5e-2 if CASES[name].dtype == "bfloat16" else 5e-3), errors
    for key, x in got.items():
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[key], np.float32), err_msg=key)


def test_few_heads_are_split():
    """So that the sizes above reach the passes over segments."""
    for name in ("split", "split sums"):
        args, kwargs = call_of(name)
        inputs = LinearAttention().prepare(*args, **kwargs).structs
        assert BACKEND.heuristic(inputs, current_device(), "backward").segment, name


@pytest.mark.parametrize("sequences", ["rows", "cum_seqlens"])
@pytest.mark.parametrize("update", ["add", "delta", "bonus", "removal"])
@pytest.mark.parametrize("platform", ["triton", "xla"])
def test_gradients_with_decays_of_channels(platform: str, update: Any, sequences: Any):
    """Beside the recurrence by token in float64, and the same again, in XLA as well."""
    case = LinearAttentionCase(
        "", length=1000, heads=2, key_dim=128, gate="channel", update=update, sequences=sequences, dtype="bfloat16",
        qk_l2norm=True, state=True,
    )  # fmt: skip
    inputs, run = inputs_of(case), TestTriton()
    cotangents, backend = run.cotangents(inputs), BACKEND if platform == "triton" else XlaLinearAttention()
    params: Any = backend.heuristic(inputs.structs, current_device(), "backward")
    compute = jax.jit(lambda inputs, cotangents: backend.backward(inputs, None, cotangents, params))
    got, again = compute(inputs, cotangents), compute(inputs, cotangents)
    want = exact(inputs, cotangents)
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(got.values(), again.values(), strict=True))
    errors = {name: relative_error(x, want[f"d_{name}"]) for name, x in got.items()}
    assert max(errors.values()) < 1.2e-2, errors


@pytest.mark.parametrize("pattern", ["one channel", "every other token", "by token and channel"])
@pytest.mark.parametrize("update", ["add", "delta", "removal", "bonus"])
def test_strong_decays_of_channels(pattern: str, update: Any):
    """Some channels forget all and others nothing; nothing overflows, in gradients neither."""
    case = LinearAttentionCase("", length=300, heads=2, gate="channel", update=update, state=True)
    inputs = inputs_of(case)
    token, channel = np.ogrid[: case.length, : case.key_dim]
    strong = {"one channel": channel == 3, "every other token": token % 2 == 0}.get(pattern, (token + channel) % 3 == 0)
    decay = np.where(np.broadcast_to(strong, (case.length, case.key_dim))[:, None], -1000.0, -0.01)
    inputs = inputs.replace(log_decay=jnp.asarray(np.broadcast_to(decay, inputs.log_decay.shape), jnp.float32))
    run = TestTriton()
    cotangents = run.cotangents(inputs)
    run.check(run.compiled(inputs)(inputs, cotangents), inputs, cotangents, factor=4.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("update", ["delta", "removal", "bonus"])
def test_later_decays_of_channels_change_no_bit(update: Any, dtype: str):
    """They decide how a chunk is divided."""
    case = LinearAttentionCase("", length=1000, heads=4, key_dim=128, gate="channel", update=update, dtype=dtype)
    inputs = inputs_of(case).replace(initial_state=None, return_state=False)
    params = BACKEND.heuristic(inputs.structs, current_device(), "forward")
    run = jax.jit(lambda inputs: BACKEND.forward(inputs, params).out)
    first = np.asarray(run(inputs).astype(jnp.float32))
    for at in (41, 500, 990):
        for decay in (-2.5, -8.0, -1000.0):
            changed = inputs.replace(log_decay=inputs.log_decay.at[:, at:].set(decay))
            np.testing.assert_array_equal(first[:, :at], np.asarray(run(changed).astype(jnp.float32))[:, :at])


@pytest.mark.parametrize("name", ["packed", "split", "float32"])
def test_every_candidate(name: str):
    args, kwargs = call_of(name)
    inputs, device = LinearAttention().prepare(*args, **kwargs).structs, current_device()
    want = found(name, platform="xla")
    forward: list[TritonLinearAttentionParams] = list(BACKEND.candidates(inputs, device, "forward"))
    backward: list[TritonLinearAttentionParams] = list(BACKEND.candidates(inputs, device, "backward"))
    for number in range(max(len(forward), len(backward))):
        ways = (listed[min(number, len(listed) - 1)] for listed in (forward, backward))
        got = found(name, PerDirection(*(Choice("triton", params) for params in ways)))
        errors = {key: relative_error(x, want[key]) for key, x in got.items()}
        assert max(errors.values()) < 1.5e-2, (number, errors)


@pytest.mark.parametrize(
    ("gate", "update"),
    [("none", "add"), ("none", "delta"), ("token", "delta"), ("channel", "delta"), ("channel", "removal")],
)
@pytest.mark.parametrize("backend", [BACKEND, XlaLinearAttention()], ids=lambda each: each.name)
def test_tokens_that_are_not_finite(backend: Any, gate: Any, update: Any):
    case = LinearAttentionCase(
        "", length=200, heads=2, key_dim=64, gate=gate, update=update, dtype="bfloat16", qk_l2norm=update == "delta"
    )

    def forward(inputs: LinearAttentionInputs) -> Any:
        params = next(iter(backend.candidates(inputs.structs, current_device(), "forward")))
        return jax.jit(lambda inputs: backend.forward(inputs, params))(inputs)

    check_contained(forward, case, 101)
