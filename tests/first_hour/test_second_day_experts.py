"""The layer of experts of the page is exact, and repeats bit for bit in both directions."""

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.draws import draw
from tools.pages import ROOT, python_examples

TOKENS, WIDTH, EXPERTS, HIDDEN = 64, 32, 8, 48
EVERY = (0, 1, 2, 3, 4)
ARRAYS = (
    draw(TOKENS, WIDTH), draw(WIDTH, EXPERTS) / 6, draw(EXPERTS, WIDTH, HIDDEN) / 6,
    draw(EXPERTS, WIDTH, HIDDEN) / 6, draw(EXPERTS, HIDDEN, WIDTH) / 7,
)  # fmt: skip
SLOPE = draw(TOKENS, WIDTH)


@pytest.fixture(scope="module")
def page() -> Any:
    module = types.ModuleType("examples_of_experts")
    layer = python_examples((ROOT / "docs/experts.md").read_text(encoding="utf-8"))[0]
    exec(compile(layer, "experts.md", "exec"), module.__dict__)
    return module


def both_ways(layer: Any) -> Any:
    """The layer and its gradients as one program."""

    def loss(*arrays: Any) -> Any:
        out = layer(*arrays)
        return jnp.sum(out * SLOPE.astype(out.dtype)), out

    return jax.jit(jax.grad(loss, EVERY, has_aux=True))


def test_it_is_the_layer_of_one_hot_matrices_in_float64(page: Any) -> None:
    got = both_ways(page.expert_layer)(*ARRAYS)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        want = both_ways(page.one_hot_layer)(*(jnp.asarray(np.asarray(x, np.float64)) for x in ARRAYS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_bits_repeat(page: Any) -> None:
    """No sum goes by index, in either direction."""
    program = both_ways(page.expert_layer)
    arrays = [x.astype(jnp.bfloat16) for x in ARRAYS]
    lowered = program.lower(*arrays).as_text()
    scatters = re.findall(r'"stablehlo.scatter".*?\}\) :', lowered, flags=re.DOTALL)
    assert len(scatters) == lowered.count('"stablehlo.scatter"') > 0
    assert not any("stablehlo.add" in each for each in scatters)
    first, again = (jax.tree.map(np.asarray, program(*arrays)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize("of_experts", ["data", "model"])
def test_tokens_and_experts_may_be_split(page: Any, of_experts: str) -> None:
    """Over one axis, as FSDP does, and over two."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = P("data"), P(), P(of_experts), P(of_experts), P(of_experts)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(ARRAYS, specs, strict=True)]
    program = both_ways(page.expert_layer)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), program(*placed), program(*ARRAYS)
    )
