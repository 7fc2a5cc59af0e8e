"""The convolution as users call it: its definition, its gradients, how it is mapped and split, what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.causal_conv1d.conformance import CASES, cotangents_of, inputs_of, oracle
from tests.kernels.conformance import check
from tilewright.kernels import kernel
from tilewright.kernels.causal_conv1d.cases import ConvCase
from tilewright.kernels.causal_conv1d.reference import conv_reference
from tilewright.modules import causal_conv1d

X, WEIGHT, BIAS = jnp.ones((2, 6, 8)), jnp.ones((8, 4)), jnp.ones(8)


@pytest.mark.parametrize("name", ["packed_states", "segments", "width_8"])
def test_the_oracles_agree(name: str):
    """The gathers of the op's reference and JAX's derivative of them, and the loops of the tests, which say both."""
    inputs = inputs_of(CASES[name])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, inputs)
        cotangents = cotangents_of(wide)
        floating = {each: getattr(wide, each) for each in wide.gradients}

        def run(given: Any, cotangents: Any) -> Any:
            results, pull_back = jax.vjp(lambda given: conv_reference(wide.replace(**given)), given)
            return results, pull_back(cotangents)[0]

        results, gradients = jax.jit(run)(floating, cotangents)
    want = oracle(wide, cotangents)
    got = {"out": results.out, "state": results.state} | {f"d_{each}": x for each, x in gradients.items()}
    for each, exact in want.items():
        np.testing.assert_allclose(got[each], exact, rtol=1e-12, atol=1e-12, err_msg=each)


def test_by_numpy():
    """Each channel is what numpy.convolve gives of it, with the window reversed."""
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((1, 20, 8), np.float32), random.standard_normal((8, 4), np.float32)
    got = causal_conv1d(x, weight)
    for channel in range(8):
        want = np.convolve(x[0, :, channel].astype(np.float64), weight[channel, ::-1])[:20]
        np.testing.assert_allclose(got[0, :, channel], want, rtol=1e-5, atol=1e-5)


def test_gradients_through_the_function():
    inputs = inputs_of(CASES["packed_states"])
    cotangents = cotangents_of(inputs)
    options = {"activation": "swish", "return_state": True, "cum_seqlens": inputs.cum_seqlens}

    def call(x: Any, weight: Any, bias: Any, state: Any) -> Any:
        return causal_conv1d(x, weight, bias, initial_state=state, **options)

    arrays = (inputs.x, inputs.weight, inputs.bias, inputs.initial_state)
    (out, state), pull_back = jax.vjp(jax.jit(call), *arrays)
    gradients = dict(
        zip(("d_x", "d_weight", "d_bias", "d_initial_state"), pull_back((out * 0, state * 0)), strict=True)
    )
    assert not any(np.any(x) for x in gradients.values())
    names = ("d_x", "d_weight", "d_bias", "d_initial_state")
    got = dict(zip(names, pull_back((cotangents.out, cotangents.state)), strict=True)) | {"out": out, "state": state}
    check(got, oracle(inputs, cotangents))


def test_vmap_and_scan():
    """Over rows, as over a batch; and chunk by chunk, with the state as the carry."""
    case = ConvCase("", batch=3, length=12, channels=8)
    (x, weight, bias), options = case.arguments()
    want = causal_conv1d(x, weight, bias, **options)
    mapped = jax.vmap(lambda row: causal_conv1d(row[None], weight, bias, **options)[0])(x)
    np.testing.assert_allclose(mapped, want, rtol=1e-6, atol=1e-6)

    def chunk(state: Any, piece: Any) -> Any:
        out, state = causal_conv1d(piece, weight, bias, initial_state=state, **(options | {"return_state": True}))
        return state, out

    pieces = x.reshape(3, 4, 3, 8).swapaxes(0, 1)
    _, outs = jax.lax.scan(chunk, jnp.zeros((3, 8, 3)), pieces)
    np.testing.assert_allclose(outs.swapaxes(0, 1).reshape(x.shape), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_split_by_rows_and_channels(packed: bool):
    axis = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axis, devices=jax.devices()[:4])
    packing: Any = "cum_seqlens" if packed else "seq_lengths"
    case = ConvCase("", batch=1 if packed else 4, length=12, channels=8, packing=packing, initial_state=True,
                    return_state=True)  # fmt: skip
    (x, weight, bias), options = case.arguments()
    state = options.pop("initial_state")

    def loss(x: Any, weight: Any, bias: Any, state: Any) -> Any:
        out, last = causal_conv1d(x, weight, bias, initial_state=state, **options)
        return (out**3).sum() + (last**2).sum()

    arrays = x, weight, bias, state
    want = jax.grad(loss, (0, 1, 2, 3))(*arrays)
    rows = None if packed else "data"
    specs = (P(rows, None, "model"), P("model"), P(None), P(rows, "model"))
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*split)
        by_width = jax.device_put(weight, jax.NamedSharding(mesh, P(None, "data")))
        with pytest.raises(ValueError, match="by rows and channels alone"):
            jax.jit(lambda weight: causal_conv1d(x, weight))(by_width)
    assert jax.typeof(got[0]).sharding.spec == P(rows, None, "model")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_sampled_lengths_are_lengths():
    op = kernel("causal_conv1d")
    for packing in ("cum_seqlens", "seq_lengths"):
        inputs = inputs_of(ConvCase("", length=50, channels=8, packing=packing, sequences=4))
        drawn = op.sampled(inputs.structs, jax.random.key(1))
        given = np.asarray(getattr(drawn, packing))
        assert given.shape == getattr(inputs, packing).shape
        assert ((given >= 0) & (given <= 50)).all()
        assert (np.diff(given) >= 0).all()
        assert given[-1] > 1


@pytest.mark.parametrize(
    ("said", "error", "arguments", "options"),
    [
        ("x must be a floating-point array", ValueError, (jnp.ones((6, 8)), WEIGHT), {}),
        ("x must be a floating-point array", ValueError, (jnp.ones((2, 6, 8), jnp.int32), WEIGHT), {}),
        ("weight must be floating-point", ValueError, (X, jnp.ones((4, 8))), {}),
        ("1 at least", ValueError, (X, jnp.ones((8, 0))), {}),
        ("bias must be floating-point", ValueError, (X, WEIGHT, jnp.ones(4)), {}),
        ("activation must be", ValueError, (X, WEIGHT), {"activation": "gelu"}),
        ("batch must be 1", ValueError, (X, WEIGHT), {"cum_seqlens": [0, 6]}),
        ("in one way", ValueError, (X, WEIGHT), {"seq_lengths": [1, 2], "segment_ids": jnp.ones((2, 6), int)}),
        (r"\[2, 8, 3\]", ValueError, (X, WEIGHT), {"initial_state": jnp.ones((1, 8, 3))}),
        (r"\[2, 8, 3\]", ValueError, (X, WEIGHT), {"initial_state": jnp.ones((2, 3, 8))}),
        ("by cum_seqlens", ValueError, (X, WEIGHT), {"segment_ids": jnp.ones((2, 6), int), "return_state": True}),
        ("return_state must be", TypeError, (X, WEIGHT), {"return_state": 1}),
        ("seq_lengths must hold integers", TypeError, (X, WEIGHT), {"seq_lengths": [1.0, 2.0]}),
    ],
)  # fmt: skip
def test_refusals(said: str, error: Any, arguments: Any, options: Any):
    with pytest.raises(error, match=said):
        causal_conv1d(*arguments, **options)
