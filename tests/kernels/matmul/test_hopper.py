"""The dense matmuls on Hopper, interpreted on the CPU, beside NumPy in float64."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import A100, H100
from tests.kernels.matmul.gates import gate_oracle, near, of_arguments
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.store import stores_in_flight
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.backend import HopperGlu, HopperMatmul
from tilewright.kernels.matmul.hopper.params import HopperGluBackwardParams, HopperMatmulBackwardParams
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.modules import matmul
from tilewright.ops.utils.serialize import tagged, untagged

SMALL = MatmulParams(64, 64, 2, band=2)
PARAMS = {
    "small": SMALL,
    "pair": MatmulParams(128, 128, 3, cluster_m=2, band=1),
    "side": MatmulParams(256, 128, 2, cluster_n=2, band=2),
    "three": MatmulParams(192, 128, 2, band=2),
    "wide": MatmulParams(128, 256, 2, cluster_m=2, band=1),
    "turns": MatmulParams(128, 128, 3, band=2, turns=True),
    "turns of a pair": MatmulParams(64, 256, 3, cluster_m=2, band=1, turns=True),
    "turns side by side": MatmulParams(128, 192, 2, cluster_n=2, band=2, turns=True),
}


@pytest.fixture(autouse=True)
def few_sms() -> Iterator[None]:
    """Few programs, so that each has several items."""
    with mock.patch.object(products, "num_sms", return_value=4):
        yield


def drawn(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(x: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(x).astype(np.float64)


def check(
    m: int, n: int, k: int, flags: tuple[bool, bool], params: MatmulParams, races: bool = False, **options: Any
) -> None:
    lhs, rhs = drawn(0, *((k, m) if flags[0] else (m, k))), drawn(1, *((n, k) if flags[1] else (k, n)))
    d_out = drawn(2, m, n)
    inputs = MatmulInputs(lhs, rhs, "bfloat16", transpose_lhs=flags[0], transpose_rhs=flags[1])
    backend = HopperMatmul()

    def both(inputs: MatmulInputs, d_out: Any) -> dict[str, Any]:
        gradients = backend.backward(inputs, None, d_out, HopperMatmulBackwardParams(params, params))
        return {"out": backend.forward(inputs, params).out, **gradients}

    with interpret_mosaic(detect_races=races):
        got = jax.block_until_ready(jax.jit(both)(inputs, d_out))
    left, right = (exact(x).T if flag else exact(x) for x, flag in zip((lhs, rhs), flags, strict=True))
    want = {"out": left @ right, "lhs": exact(d_out) @ right.T, "rhs": left.T @ exact(d_out)}
    want |= {name: want[name].T for name, flag in zip(("lhs", "rhs"), flags, strict=True) if flag}
    near(got, want)


SIZES = {"whole": (256, 256, 128), "odd": (200, 136, 72), "small": (8, 520, 8), "unaligned": (264, 133, 75)}
FLAGS = {"NN": (False, False), "NT": (False, True), "TN": (True, False), "TT": (True, True)}


@pytest.mark.parametrize("layout", list(FLAGS))
@pytest.mark.parametrize("name", list(SIZES))
def test_layouts(layout: str, name: str):
    """Of whole atoms and not, of rows that are copied to be aligned, and all four layouts, forward and backward."""
    check(*SIZES[name], FLAGS[layout], PARAMS["pair"])


@pytest.mark.parametrize("name", list(PARAMS))
@pytest.mark.parametrize("layout", list(FLAGS))
def test_tiles(name: str, layout: str):
    check(392, 328, 136, FLAGS[layout], PARAMS[name])


@pytest.mark.parametrize("name", list(PARAMS))
def test_no_races(name: str):
    check(264, 136, 200, (True, False), PARAMS[name], races=True)


def test_leading_dimensions_and_float32_results():
    lhs, rhs = drawn(0, 2, 3, 40, 64), drawn(1, 64, 24)
    inputs = MatmulInputs(lhs, rhs, "float32")
    with interpret_mosaic():
        out = jax.block_until_ready(jax.jit(lambda inputs: HopperMatmul().forward(inputs, SMALL).out)(inputs))
    assert out.shape == (2, 3, 40, 24)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(lhs) @ exact(rhs), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "transposed", "recompute", "sizes"),
    [
        ("gelu_tanh", False, False, (70, 72, 200)),
        ("gelu_tanh", False, True, (70, 72, 200)),
        ("sigmoid", True, False, (70, 72, 200)),
        ("tanh", True, True, (70, 72, 200)),
        ("silu", False, False, (130, 70, 201)),
        ("silu", True, True, (130, 72, 199)),
    ],
)
def test_glu(activation: str, transposed: bool, recompute: bool, sizes: tuple[int, int, int]):
    rows, k, n = sizes
    x, gate, up = drawn(0, 2, rows, k), 0.1 * drawn(1, k, n), 0.1 * drawn(2, k, n)
    d_out = drawn(3, 2, rows, n)
    stored = [each.T if transposed else each for each in (gate, up)]
    inputs = MatmulInputs(x, stored[0], "bfloat16", stored[1], activation=activation, transpose_rhs=transposed)
    backend = HopperGlu()
    assert backend.not_supported_reasons(inputs.structs, H100, "backward") == []
    params = MatmulParams(128, 128, 2)
    of_backward = HopperGluBackwardParams(SMALL, PARAMS["pair"], params if recompute else None)

    def both(inputs: MatmulInputs, d_out: Any) -> dict[str, Any]:
        out, *kept = backend.forward(inputs, params)
        gradients = backend.backward(inputs, kept, d_out, of_backward)
        return {"out": out, **of_arguments(gradients, "x")}

    with interpret_mosaic():
        got = jax.block_until_ready(jax.jit(both)(inputs, d_out))
    got = {name: each.reshape(-1, each.shape[-1]) if each.ndim == 3 else each for name, each in got.items()}
    flat = exact(x).reshape(-1, k), exact(gate), exact(up), exact(d_out).reshape(-1, n)
    near(got | {name: got[name].T for name in ("d_gate", "d_up") if transposed}, gate_oracle(activation, *flat))


@pytest.mark.usefixtures("on_an_h100")
def test_the_op_takes_it_by_name():
    lhs, rhs = drawn(0, 64, 64), drawn(1, 64, 64)
    with interpret_mosaic():
        out = jax.block_until_ready(jax.jit(functools.partial(matmul, platform="pallas"))(lhs, rhs))
    near({"out": out}, {"out": exact(lhs) @ exact(rhs)})


def test_vmap():
    lhs, rhs = drawn(0, 3, 64, 64), drawn(1, 64, 64)
    one = lambda x: HopperMatmul().forward(MatmulInputs(x, rhs, "bfloat16"), SMALL).out
    with interpret_mosaic():
        out = jax.block_until_ready(jax.jit(jax.vmap(one))(lhs))
    near({"out": out}, {"out": exact(lhs) @ exact(rhs)})


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_no_buffer_is_written_before_it_is_read(parts: int, units: int):
    """Stores finish in order, and as late as they may; three tiles, each of which ends with any unit."""
    for buffers in range(1, parts * units + 1):
        allowed = stores_in_flight(parts * units, buffers, parts)
        for stored in itertools.product(range(units + 1), repeat=3):
            in_flight: list[int] = []
            for part in itertools.chain.from_iterable(range(count * parts) for count in stored):
                del in_flight[: max(len(in_flight) - allowed[part], 0)]
                assert part % buffers not in in_flight
                in_flight.append(part % buffers)
    # Where all tiles are whole and end with the last buffer, all others may be in flight.
    assert stores_in_flight(2 * parts, parts, 2 * parts) == [parts - 1] * 2 * parts


def test_params_and_what_is_declined():
    inputs = MatmulInputs(drawn(0, 64, 64), drawn(1, 64, 128), "bfloat16")
    backend = HopperMatmul()
    for direction in ("forward", "backward"):
        for params in backend.candidates(inputs, H100, direction):
            assert untagged(tagged(params)) == params
            assert not backend.config_reasons(inputs, H100, direction, params)
    assert backend.config_reasons(inputs, H100, "forward", MatmulParams(128, 256, 5))
    assert "9.0" in "; ".join(backend.not_supported_reasons(inputs, A100, "forward"))
    odd = MatmulInputs(drawn(0, 63, 64), drawn(1, 64, 128), "bfloat16")
    assert not backend.not_supported_reasons(odd, H100, "forward")
    assert "rows=63" in "; ".join(backend.not_supported_reasons(odd, H100, "backward"))
    # Operands of 8 bits are the rows of one group.
    narrow = MatmulInputs(*(drawn(i, 64, 64, dtype="float8_e4m3fn") for i in range(2)), "bfloat16", transpose_rhs=True)
    assert not backend.not_supported_reasons(narrow, H100, "forward")
    for wrong in ({"transpose_rhs": False}, {"transpose_lhs": True}):
        assert "K in their rows" in "; ".join(backend.not_supported_reasons(narrow.replace(**wrong), H100, "forward"))
    assert "no gradients" in "; ".join(backend.not_supported_reasons(narrow, H100, "backward"))
    gated = narrow.replace(up=drawn(2, 64, 64, dtype="float8_e4m3fn"), activation="silu")
    assert "up must be" in "; ".join(HopperGlu().not_supported_reasons(gated, H100, "forward"))
    glu = MatmulInputs(drawn(0, 64, 64), drawn(1, 64, 128), "bfloat16", drawn(2, 64, 128), activation="silu")
    for direction in ("forward", "backward"):
        for params in HopperGlu().candidates(glu, H100, direction):
            assert untagged(tagged(params)) == params
            assert not HopperGlu().config_reasons(glu, H100, direction, params)
