"""Biases that are computed from positions: their meaning, their gradients, what is refused, and JAX's transforms."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.flash_attention.conformance import POSITION_BIASES
from tests.kernels.flash_attention.test_reference import bias_of_positions, loops
from tilewright.errors import UnsupportedError
from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.reference import attention_reference
from tilewright.kernels.flash_attention.xla import backward
from tilewright.modules import flash_attention

BATCH, LENGTH, HEADS, DIM = 4, 48, 4, 8


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def operands(length: int = LENGTH) -> tuple[Any, ...]:
    return tuple(draw(seed, BATCH, length, HEADS, DIM) for seed in range(4))


ALIBI, RELATIVE = AlibiBias(draw(5, HEADS) / 8), RelativeBias(draw(6, HEADS, 2 * LENGTH - 1))
BIASES = {"alibi": ALIBI, "relative": RELATIVE, "relative of all heads": RelativeBias(draw(7, 1, 2 * LENGTH - 1))}


def as_array(bias: Any, length: int = LENGTH) -> jax.Array:
    """The bias as an array of all pairs, for arrays of one length."""
    differences = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    if isinstance(bias, AlibiBias):
        return -bias.slopes[:, None, None] * jnp.abs(differences)
    return bias.values[:, differences + length - 1]


def loss(bias: Any, *qkv: Any, dense: bool = False, **options: Any) -> Any:
    *arrays, cotangent = qkv
    out = flash_attention(*arrays, as_array(bias, arrays[0].shape[-3]) if dense else bias, **options)
    return jnp.sum(out * cotangent)


gradients = functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3))


def agree(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = 1 + float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("name", POSITION_BIASES)
def test_the_oracle_agrees_with_loops(name: str) -> None:
    """Positions of packed sequences, of lengths and of both alignments, by NumPy in float64."""
    case = dataclasses.replace(POSITION_BIASES[name], dtype="float32", bias_dtype="float32")
    arrays, options = case.arguments()
    out, lse = attention_reference(FlashAttention().prepare(*arrays, **options))
    want_out, want_lse = loops(case, arrays, options)
    np.testing.assert_allclose(out, want_out, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("name", ["alibi", "relative", "relative of all heads"])
def test_the_gradient_of_the_values_is_the_sum_over_all_pairs(name: str) -> None:
    """By NumPy in float64: dS of every pair, times the derivative of its bias."""
    case = dataclasses.replace(POSITION_BIASES[name], dtype="float32", bias_dtype="float32")
    arrays, options = case.arguments()
    batch, heads, q_length, kv_length = case.score_shape
    d_out = draw(9, batch, q_length, heads, case.head_dim)
    got = jax.grad(lambda bias: jnp.sum(flash_attention(*arrays, **options | {"bias": bias}) * d_out))(options["bias"])
    query, key, value, cotangent = (np.asarray(x, np.float64) for x in (*arrays, d_out))
    key, value = (np.repeat(x, heads // case.kv_heads, axis=2) for x in (key, value))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(case.head_dim) + bias_of_positions(case, options)
    differences = np.arange(kv_length)[None] - np.arange(q_length)[:, None]
    positions = differences - (kv_length - q_length if case.causal_alignment == "bottom_right" else 0)
    logits = np.where(positions > 0, -np.inf, logits) if case.causal else logits
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    dp = np.einsum("bqhd,bkhd->bhqk", cotangent, value)
    ds = (p * (dp - np.sum(p * dp, axis=-1, keepdims=True))).sum(axis=0)
    if name == "alibi":
        terms = ds * np.abs(positions)
        error = np.abs(np.asarray(got.slopes, np.float64) + np.sum(terms, axis=(1, 2)))
        assert np.all(error <= 1e-6 * np.sum(np.abs(terms), axis=(1, 2)))
        return
    want = np.zeros((heads, q_length + kv_length - 1))
    for h in range(heads):
        np.add.at(want[h], differences + q_length - 1, ds[h])
    want = want if name == "relative" else want.sum(axis=0, keepdims=True)
    np.testing.assert_allclose(got.values, want, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    list(itertools.product(BIASES, ["", "causal", "bottom_right", "window", "cap", "sinks"])),
)
def test_agrees_with_an_array_of_all_pairs(name: str, options: str) -> None:
    given: dict[str, Any] = {
        "": {},
        "causal": {"causal": True},
        "bottom_right": {"causal": True, "causal_alignment": "bottom_right"},
        "window": {"sliding_window": (9, 3)},
        "cap": {"logits_soft_cap": 2.0, "causal": True},
        "sinks": {"softmax_aux": draw(8, HEADS)},
    }[options]
    got = gradients(loss)(BIASES[name], *operands(), **given)
    agree(got, gradients(functools.partial(loss, dense=True))(BIASES[name], *operands(), **given))


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda f, bias: jax.jit(gradients(f))(bias, *operands()),
    "unbatched": lambda f, bias: gradients(f)(bias, *(x[0] for x in operands())),
    "vmap": lambda f, bias: jax.vmap(gradients(f), in_axes=(None, 1, 1, 1, 1))(
        bias, *(jnp.stack([x[:1], x[1:2]], axis=1) for x in operands())
    ),
    "vmap of biases": lambda f, bias: jax.vmap(gradients(f), in_axes=(0, None, None, None, None))(
        jax.tree.map(lambda x: jnp.stack([x, -x]), bias), *operands()
    ),
    "grad of vmap": lambda f, bias: jax.grad(
        lambda b: jax.vmap(f, in_axes=(None, 0, 0, 0, 0))(b, *(x[:, None] for x in operands())).sum()
    )(bias),
    "scan and remat": lambda f, bias: jax.grad(
        lambda b: jax.lax.scan(lambda c, _: (c + jax.checkpoint(f)(b, *operands()), None), 0.0, None, length=2)[0]
    )(bias),
    "forward mode": lambda f, bias: jax.jvp(lambda b: f(b, *operands()), (bias,), (bias,)),
}


@pytest.mark.parametrize(
    ("name", "transform"),
    list(itertools.product(BIASES, TRANSFORMS)),
)
def test_transforms(name: str, transform: str) -> None:
    got, want = (
        TRANSFORMS[transform](functools.partial(loss, causal=True, dense=dense), BIASES[name])
        for dense in (False, True)
    )
    agree(got, want)


SPLITS = {
    "batch and heads": P("x", None, "y"),
    "heads": P(None, None, ("x", "y")),
    "length and heads": P(None, "x", "y"),
}


@pytest.mark.parametrize(
    ("name", "split"),
    list(itertools.product(BIASES, SPLITS)),
)
def test_split_over_explicit_axes(name: str, split: str) -> None:
    """The forward pass moves nothing; the gradient of the values is summed over those that share them."""
    run = jax.jit(gradients(functools.partial(loss, causal=True)))
    expected = run(BIASES[name], *operands())
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    spec = SPLITS[split]
    keys = P(*(None if i == 1 else axes for i, axes in enumerate(spec)))
    with jax.set_mesh(mesh):
        parts = [
            jax.device_put(x, NamedSharding(mesh, each))
            for x, each in zip(operands(), (spec, keys, keys, spec), strict=True)
        ]
        bias = jax.device_put(BIASES[name], NamedSharding(mesh, P()))
        forward = jax.jit(lambda *xs: flash_attention(*xs, causal=True)).lower(*parts[:3], bias).compile()
        results = run(bias, *parts)
    assert not re.findall(r"\b(all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", forward.as_text())
    agree(jax.tree.map(np.asarray, results), expected)


@pytest.mark.parametrize("name", BIASES)
def test_inside_shard_map(name: str) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    heads = P() if name == "relative of all heads" else P("y")
    specs = (heads, *(P("x", None, "y"),) * 4)

    def local(*each: Any) -> Any:
        return jax.grad(functools.partial(loss, causal=True), argnums=(0, 1))(*each)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    agree(jax.jit(mapped)(BIASES[name], *operands()), local(BIASES[name], *operands()))


@pytest.mark.parametrize("name", ["alibi", "relative"])
def test_exported_with_symbolic_lengths(name: str) -> None:
    batch, length = export.symbolic_shape("batch, length")
    arrays = [jax.ShapeDtypeStruct((batch, length, HEADS, DIM), jnp.float32)] * 4
    slopes = jax.ShapeDtypeStruct((HEADS,), jnp.float32)
    values = jax.ShapeDtypeStruct((HEADS, 2 * length - 1), jnp.float32)
    bias = AlibiBias(slopes) if name == "alibi" else RelativeBias(values)
    run = jax.jit(gradients(functools.partial(loss, causal=True)))
    exported = export.export(
        jax.jit(lambda values, *rest: jax.tree.leaves(run(jax.tree.unflatten(tree, values), *rest)))
    )
    tree = jax.tree.structure(bias)
    called = exported(jax.tree.leaves(bias), *arrays).call(jax.tree.leaves(BIASES[name]), *operands())
    agree(called, jax.tree.leaves(run(BIASES[name], *operands())))


@pytest.mark.parametrize("name", BIASES)
def test_memory_is_linear_in_the_length(name: str) -> None:
    """Of both passes in tiles: twice the length takes twice the memory, not four times."""

    def temporary(length: int) -> int:
        array = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        values = jax.ShapeDtypeStruct((2 if name == "relative" else 1, 2 * length - 1), jnp.float32)
        bias = AlibiBias(jax.ShapeDtypeStruct((2,), jnp.float32)) if name == "alibi" else RelativeBias(values)
        run = jax.jit(gradients(functools.partial(loss, causal=True, platform="xla")))
        return int(run.lower(bias, *[array] * 4).compile().memory_analysis().temp_size_in_bytes)

    assert temporary(8192) <= 2.3 * temporary(4096)


@pytest.mark.parametrize("argnums", [(1,), (0, 1)])
def test_the_gradient_is_computed_only_where_it_is_used(
    argnums: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Any] = []
    add = backward.add_position_bias
    monkeypatch.setattr(backward, "add_position_bias", lambda *args: added.append(0) or add(*args))
    jax.jit(jax.grad(functools.partial(loss, sliding_window=30, platform="xla"), argnums))(ALIBI, *operands())
    assert bool(added) == (0 in argnums)


def test_a_narrow_array_gets_a_gradient_of_its_dtype() -> None:
    for bias in BIASES.values():
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), bias)
        got = jax.grad(loss)(narrow, *operands())
        want = jax.grad(loss)(jax.tree.map(lambda x: x.astype(jnp.float32), narrow), *operands())
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
        agree(jax.tree.map(lambda x: x.astype(jnp.float32), got), want, 2.0**-8)


WRONG: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "[heads] = [4], got bias.slopes.shape=(3,)", AlibiBias(jnp.zeros(3))),
    (ValueError, "bias.slopes.shape=(4, 1)", AlibiBias(jnp.zeros((4, 1)))),
    (TypeError, "bias.slopes.dtype=dtype('int32')", AlibiBias(jnp.zeros(4, jnp.int32))),
    (TypeError, "bias.slopes must be an array, got 'x'", AlibiBias("x")),  # type: ignore[arg-type]
    (ValueError, "[4 or 1, 95], got bias.values.shape=(4, 94)", RelativeBias(jnp.zeros((4, 94)))),
    (ValueError, "bias.values.shape=(2, 95)", RelativeBias(jnp.zeros((2, 95)))),
    (ValueError, "bias.values.shape=(95,)", RelativeBias(jnp.zeros(95))),
    (TypeError, "bias.values.dtype=dtype('bool')", RelativeBias(jnp.zeros((4, 95), bool))),
]


@pytest.mark.parametrize(("kind", "message", "bias"), WRONG)
def test_wrong_arrays(kind: type[Exception], message: str, bias: Any) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        flash_attention(*operands()[:3], bias)


def test_backends_that_do_not_serve_it_say_so() -> None:
    array = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    call = jax.jit(lambda x, bias: flash_attention(x, x, x, bias, platform=("cuda", "triton")))
    with tilewright.target_device("NVIDIA H100 80GB HBM3"), pytest.raises(UnsupportedError) as raised:
        call.lower(array, ALIBI)
    for name in ("cuda", "cudnn", "fa4", "triton"):
        assert f"  {name}: does not serve position_bias" in str(raised.value)
