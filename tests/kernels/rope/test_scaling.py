"""Scalings and configs: frequencies, factors and rotated heads as the models of Hugging Face have them."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels import kernel
from tilewright.kernels.rope.scaling import frequencies
from tilewright.modules import LinearScaling, Llama3Scaling, LongRopeScaling, NtkScaling, YarnScaling, rope
from tilewright.ops.utils.serialize import tagged, untagged

RECORD = json.loads((Path(__file__).parent / "hugging_face.json").read_text())
"""Made by the libraries that ``made_by`` names, from the configs of models; LongRoPE's factors are not Phi-3's own.

``rotated`` is a head of ``sin(head_dim + i)`` at ``position``, as ``apply_rotary_pos_emb`` of the model returns it.
"""
MODELS: dict[str, Any] = RECORD["models"]
INTERLEAVED = {"glm 4"}
ADDED = {"phi3 long": {"original_max_position_embeddings": 4096, "factor": 32.0, "length": 131072}}
"""What transformers reads from other fields of a config."""


def config_of(name: str) -> dict[str, Any]:
    return {"rope_theta": MODELS[name]["base"], **MODELS[name]["config"], **ADDED.get(name, {})}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_config(name: str):
    model = MODELS[name]
    dim = model["head_dim"]
    x = jnp.sin(jnp.arange(dim, 2.0 * dim))[None, None]
    inputs = kernel("rope").prepare(x, [model["position"]], scaling=config_of(name))
    found, factor = inputs.rotation
    np.testing.assert_allclose(found, model["frequencies"], rtol=2e-6)
    assert factor == pytest.approx(model["factor"], rel=1e-8)
    got = rope(x, [model["position"]], scaling=config_of(name), interleaved=name in INTERLEAVED)
    # A frequency that is rounded otherwise turns by up to 4096 · 2⁻²³ more.
    np.testing.assert_allclose(got[0, 0], model["rotated"], atol=6e-4)


def test_base_and_fraction_beside_a_config():
    config = {"rope_type": "linear", "factor": 4, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    x, positions = jnp.ones((3, 1, 16)), jnp.arange(3)
    wanted = rope(x, positions, base=500.0, fraction=0.5, scaling=LinearScaling(4.0))
    for options in ({}, {"base": 500.0}, {"fraction": 0.5}):
        np.testing.assert_array_equal(rope(x, positions, scaling=config, **options), wanted)
    with pytest.raises(ValueError, match=r"base=600.0, but scaling says 500.0"):
        rope(x, positions, scaling=config, base=600.0)
    with pytest.raises(ValueError, match=r"fraction=0.25, but scaling says 0.5"):
        rope(x, positions, scaling=config, fraction=0.25)


def test_one_key_however_a_config_spells_its_numbers():
    given = [{"type": "llama3", **LLAMA}, {"rope_type": "llama3", **LLAMA, "factor": np.float32(8), "rope_theta": None}]
    found = [kernel("rope").prepare(jnp.ones((1, 1, 8)), [0], scaling=each) for each in given]
    assert found[0].scaling == found[1].scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192.0)
    assert tagged(found[0].scaling) == tagged(found[1].scaling)


YARN = {"factor": 4, "original_max_position_embeddings": 1024}
LLAMA = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
SCALINGS = (
    LinearScaling(4), NtkScaling(2.5), Llama3Scaling(8, 1, 4, 8192),
    YarnScaling(40, 4096, attention_factor=1.25, truncate=False), LongRopeScaling((1, 1), [2.0, 3], 64, 128, factor=2),
)  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda each: type(each).__name__)
def test_scalings_are_static_and_survive_a_cache(scaling: Any):
    assert hash(scaling) == hash(untagged(json.loads(json.dumps(tagged(scaling)))))
    assert scaling == untagged(json.loads(json.dumps(tagged(scaling))))
    x = jnp.ones((3, 1, 4))
    jitted = jax.jit(lambda x: rope(x, jnp.arange(3), scaling=scaling))
    np.testing.assert_allclose(jitted(x), rope(x, jnp.arange(3), scaling=scaling), rtol=1e-6)


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest():
    scaled, factor = NtkScaling(4.0).rotation(10000.0, 64)
    np.testing.assert_allclose(scaled[[0, -1]] / frequencies(10000.0, 64)[[0, -1]], [1.0, 0.25])
    np.testing.assert_allclose(scaled, frequencies(10000.0 * 4.0 ** (64 / 62), 64))
    assert factor == 1.0
    assert NtkScaling(4.0).rotation(10000.0, 2)[0] == [1.0]


def test_long_rope_takes_the_factors_of_its_length():
    for length, divisor in ((64, 2.0), (65, 3.0)):
        scaling = LongRopeScaling((2.0, 2.0), (3.0, 3.0), 64, length, factor=16.0)
        found, factor = scaling.rotation(100.0, 4)
        np.testing.assert_allclose(found, frequencies(100.0, 4) / divisor)
        assert factor == pytest.approx(math.sqrt(1 + math.log(16) / math.log(64)))


@pytest.mark.parametrize(
    ("said", "config"),
    [
        (r"one of \['default', 'linear', 'yarn', 'llama3', 'longrope'\], got", {"rope_type": "mrope"}),
        ("must have a 'rope_type'", {"factor": 2.0}),
        ("must have a 'rope_type'", {"sliding_attention": {"rope_type": "default"}}),
        (r"'dynamic' changes the base .* pass NtkScaling\(factor\)", {"type": "dynamic", "factor": 2.0}),
        (r"missing=\['high_freq_factor'\], unknown=\[\]", {"type": "llama3", **LLAMA, "high_freq_factor": None}),
        (r"unknown=\['mrope_section'\]", {"type": "linear", "factor": 1.0, "mrope_section": [16, 24, 24]}),
        ("one of .*'default'", {"type": "default", "mrope_section": [16, 24, 24]}),
        (r"missing=\['length', 'original_max", {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("LinearScaling.factor must be positive, got 0.0", {"type": "linear", "factor": 0}),
        ("YarnScaling.mscale must be positive, got -1", {"type": "yarn", **YARN, "mscale": -1.0}),
    ],
)  # fmt: skip
def test_a_config_that_it_cannot_read(said: str, config: dict[str, Any]):
    with pytest.raises(ValueError, match=said):
        rope(jnp.ones((1, 1, 2)), [0], scaling=config)


def test_scalings_that_fit_nothing():
    with pytest.raises(TypeError, match=r"LinearScaling.factor must be a number, got 'four'"):
        LinearScaling("four")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be less than"):
        Llama3Scaling(8.0, 4.0, 4.0, 8192)
    with pytest.raises(ValueError, match="needs factor"):
        LongRopeScaling((1.0,), (1.0,), 64, 128)
    with pytest.raises(ValueError, match="needs 2 factors to rotate 4 elements, got 1"):
        rope(jnp.ones((1, 1, 4)), [0], scaling=LongRopeScaling((1.0,), (1.0,), 64, 128, factor=2.0))
