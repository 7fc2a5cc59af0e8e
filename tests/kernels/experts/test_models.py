"""Whole layers of experts of Hugging Face's models: router, experts, biases and what all tokens share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.modules import glu, matmul, moe_mlp, top_k_router

RECORD = json.loads((Path(__file__).parent / "hugging_face.json").read_text())
"""Made by the libraries that ``made_by`` names, in float32, with two experts of four for each of 2 × 4 tokens of 6.

The parameters, in the order of ``shapes``, then x and the cotangent of the result are standard normal numbers of
``numpy.random.default_rng(seed)``; gpt-oss's ``gate_up_proj`` is times 3, so that a third of them pass the limits.
"""
MODELS: dict[str, Any] = RECORD["models"]


def routed(parameters: dict[str, Any], x: Any, **options: Any) -> Any:
    """Experts in the layout of torch: one matrix of gate and up, ``[experts, out, in]``."""
    weights, experts = top_k_router(jnp.matmul(x, parameters["gate.weight"].T), 2, **options)
    gate, up = jnp.split(parameters["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=2)
    return moe_mlp(x, weights, experts, gate, up, parameters["experts.down_proj"].swapaxes(1, 2))


def gpt_oss(parameters: dict[str, Any], x: Any) -> Any:
    logits = jnp.matmul(x, parameters["router.weight"].T) + parameters["router.bias"]
    both, biases = parameters["experts.gate_up_proj"], parameters["experts.gate_up_proj_bias"]
    return moe_mlp(
        x, *top_k_router(logits, 2, scoring="softmax_after"),
        both[..., ::2], both[..., 1::2], parameters["experts.down_proj"],
        biases=(biases[:, ::2], biases[:, 1::2], parameters["experts.down_proj_bias"]), activation="swiglu_oai",
    )  # fmt: skip


def deepseek_v3(parameters: dict[str, Any], x: Any) -> Any:
    bias = parameters["gate.e_score_correction_bias"]
    out = routed(parameters, x, scoring="sigmoid", bias=bias, num_groups=2, top_groups=1, scale=2.5)
    gate, up, down = (parameters[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return out + matmul(glu(x, gate, up), down)


LAYERS: dict[str, Callable[..., Any]] = {
    "mixtral": routed,
    "qwen3_moe": lambda parameters, x: routed(parameters, x, normalize=False),
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_layer(name: str) -> None:
    record = MODELS[name]
    rng = np.random.default_rng(record["seed"])
    drawn = {key: jnp.asarray(rng.standard_normal(shape), jnp.float32) for key, shape in record["shapes"].items()}
    x, cotangent = (jnp.asarray(rng.standard_normal((2, 4, 6)), jnp.float32) for _ in range(2))
    if name == "gpt_oss":
        drawn["experts.gate_up_proj"] *= 3
    with jax.default_matmul_precision("highest"):
        out, pull = jax.vjp(LAYERS[name], drawn, x)
        of_parameters, of_x = pull(cotangent)
    gradients = {"x": of_x, **of_parameters}
    assert gradients.keys() - record["gradients"].keys() <= {"gate.e_score_correction_bias"}
    for got, want in ((out, record["out"]), *((gradients[key], want) for key, want in record["gradients"].items())):
        np.testing.assert_allclose(got.ravel(), want, rtol=1e-4, atol=2e-4)
