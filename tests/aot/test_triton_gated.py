"""Every config of the gated ops in Triton that selection or tuning can take compiles without spills."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.aot.test_triton_grouped_matmul import CARDS
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.triton.backend import TritonGatedGroupedMatmul
from tilewright.kernels.triton import recorded_launches

pytest.importorskip("triton")

from tilewright.kernels.triton.compiler import report

BACKEND = TritonGatedGroupedMatmul()
CALLS: dict[str, dict[str, Any]] = {
    "large": {"rows": 8192, "k": 4096, "n": 14336},
    "decode": {"rows": 64, "k": 4096, "n": 14336},
    "float32": {"rows": 8192, "k": 1024, "n": 2048, "dtype": "float32"},
    "float32_decode": {"rows": 64, "k": 1024, "n": 2048, "dtype": "float32"},
    "odd": {"rows": 1000, "k": 130, "n": 77, "dtype": "float16"},
    "odd_decode": {"rows": 64, "k": 130, "n": 77},
    "gelu": {"rows": 8192, "k": 1024, "n": 2048, "activation": "gelu"},
    "gelu_tanh": {"rows": 8192, "k": 1024, "n": 2048, "activation": "gelu_tanh"},
}
FIRST_ALONE = ("gelu", "gelu_tanh")


def inputs_of(
    rows: int, k: int, n: int, dtype: str = "bfloat16", activation: str = "silu", keeps: bool = True
) -> MatmulInputs:
    lhs: Any = jax.ShapeDtypeStruct((rows, k), jnp.dtype(dtype))
    matrices: Any = jax.ShapeDtypeStruct((8, k, n), jnp.dtype(dtype))
    sizes: Any = jax.ShapeDtypeStruct((8,), jnp.int32)
    return MatmulInputs(lhs, matrices, dtype, matrices, sizes, activation=activation, keeps=keeps)


def faults(device: Any, trace: Any, *args: Any) -> list[Any]:
    with tilewright.target_device(device.name), recorded_launches() as launches:
        jax.eval_shape(trace, *args)
    reports = [report(launch, device.capability) for launch in launches]
    assert reports
    return [(each.name, each.registers, fault) for each in reports for fault in each.faults]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", CALLS)
def test_forward_compiles_without_spills(name: str, card: str):
    device, inputs = CARDS[card], inputs_of(**CALLS[name])
    candidates = list(BACKEND.candidates(inputs, device, "forward"))
    for params, keeps in itertools.product(candidates[: 1 if name in FIRST_ALONE else None], (True, False)):
        each = inputs.replace(keeps=keeps)
        found = faults(device, lambda inputs, params=params: BACKEND.forward(inputs, params), each)
        assert not found, f"{params}: {found}"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in FIRST_ALONE])
def test_backward_compiles_without_spills(name: str, card: str):
    device, inputs = CARDS[card], inputs_of(**CALLS[name])
    d_out = jax.ShapeDtypeStruct((inputs.lhs.shape[0], inputs.n), inputs.lhs.dtype)
    for params in BACKEND.candidates(inputs, device, "backward"):

        def run(inputs: MatmulInputs, d_out: Any, params: Any = params) -> Any:
            return BACKEND.backward(inputs, (d_out, d_out), d_out, params)

        found = faults(device, run, inputs, d_out)
        assert not found, f"{params}: {found}"
