"""The RMSNorm example where there is no GPU: XLA's form, its gradients, the table, and what the program says."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_rms_norm.rms_norm import DTYPES, KERNEL, TABLE, cuda_reasons, problem_of, rms_norm
from jax.test_util import check_grads

from tests.kernels.conftest import H100
from tilewright.kernels.cuda import Fact, Values
from tilewright.kernels.cuda.devices import device_values
from tilewright.ops.types import Device

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "cuda_rms_norm" / "rms_norm.py"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_it_normalises(dtype, tolerance):
    draw = np.random.default_rng(0)
    x, weight = draw.standard_normal((2, 3, 40)), draw.standard_normal(40)
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    got = rms_norm(jnp.asarray(x, dtype), jnp.asarray(weight, dtype), 1e-5)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=4 * tolerance, rtol=4 * tolerance)


def test_gradients_are_those_of_finite_differences():
    x = jax.random.normal(jax.random.key(0), (3, 8), jnp.float32)
    weight = jax.random.normal(jax.random.key(1), (8,), jnp.float32)
    check_grads(lambda x, w: rms_norm(x, w, 1e-2), (x, weight), order=1, modes=["rev"], rtol=2e-2)
    assert jax.vmap(rms_norm, (0, None))(x[:, None], weight).shape == (3, 1, 8)


def test_every_problem_within_reach_has_a_variant_and_the_widest_loads_come_first():
    for dtype, (_, size) in DTYPES.items():
        for width, pack in ((1024, 16 // size), (4 // size * 3, 4 // size), (777, 1), (16384, 16 // size)):
            values = Values({"rows": 4, "width": width, "dtype": list(DTYPES).index(dtype)}, device_values(H100))
            able = [
                variant
                for variant in TABLE.for_capability(90)
                if all(
                    each.holds(Values(values.problem, values.device, facts_of(variant)))
                    for each in variant.requirements
                )
            ]
            assert able[0].dtype == dtype
            assert able[0].pack == pack
            assert able[0].max_width == min(variant.max_width for variant in able)


def facts_of(variant):
    return {"alignment": variant.pack, "shared_bytes": 64, "threads": 128}


def test_what_the_kernel_cannot_do_is_said():
    assert "dtype must be one of" in cuda_reasons(jnp.ones((2, 8), jnp.int32), H100)[0]
    assert "nothing to normalise" in cuda_reasons(jnp.ones((0, 8)), H100)[0]
    assert "width must be at most 16384, got width=20000" in cuda_reasons(jnp.ones((1, 20000)), H100)
    assert KERNEL.reasons(problem_of(jnp.ones((2, 8))), Device("cpu", "cpu"))
    assert any(requirement.needs_facts for requirement in TABLE.variants[0].requirements)
    assert Fact("alignment") in [each for need in TABLE.variants[0].requirements for each in need.operands()]


def test_the_program_explains_itself_without_a_gpu():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the CUDA kernel cannot run here" in done.stdout
    assert "[2. 2. 2. 2.]" in done.stdout
