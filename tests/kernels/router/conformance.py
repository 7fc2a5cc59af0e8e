"""Conformance of the backends of the router: cases, and a loop over tokens in float64 as the oracle."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import Conformance, Found
from tilewright.kernels import kernel
from tilewright.kernels.router.cases import RouterCase
from tilewright.kernels.router.inputs import RouterInputs

CASES = (
    RouterCase("mixtral", tokens=5, experts=8, k=2),
    RouterCase("bfloat16", tokens=40, experts=60, k=6, dtype="bfloat16", normalize=False),
    RouterCase("float16_after", tokens=33, experts=32, k=4, dtype="float16", scoring="softmax_after", scale=0.5),
    RouterCase("softmax_with_bias", tokens=9, experts=12, k=3, bias=True),
    RouterCase("softmax_in_groups", tokens=9, experts=12, k=3, normalize=False, num_groups=3, top_groups=2),
    RouterCase("after_in_groups", tokens=9, experts=12, k=3, scoring="softmax_after", num_groups=4, top_groups=1),
    RouterCase("sigmoid", tokens=9, experts=12, k=3, scoring="sigmoid", normalize=False, dtype="bfloat16"),
    RouterCase(
        "deepseek", tokens=20, experts=64, k=8, scoring="sigmoid", bias=True, num_groups=8, top_groups=4, scale=2.5
    ),
    RouterCase("groups_of_one", tokens=9, experts=6, k=2, scoring="sigmoid", bias=True, num_groups=6, top_groups=3),
    RouterCase("all_groups", tokens=9, experts=6, k=2, scoring="sigmoid", bias=True, num_groups=2, top_groups=2),
    RouterCase("all_experts", tokens=3, experts=4, k=4),
    RouterCase("one_expert", tokens=3, experts=1, k=1),
    RouterCase("no_tokens", tokens=0, experts=4, k=2),
)


def inputs_of(case: RouterCase) -> RouterInputs:
    args, kwargs = case.arguments()
    found: RouterInputs = kernel("top_k_router").prepare(*args, **kwargs)
    return found


def chosen_by(inputs: RouterInputs, scores: np.ndarray, bias: np.ndarray) -> list[int]:
    """The choice of one token by sorting: Python's sort keeps the order of equals."""
    keys = (scores + bias).tolist()
    size = len(keys) // inputs.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(inputs.num_groups)]
    groups.sort(key=lambda group: -sum(sorted((keys[e] for e in group), reverse=True)[:2]))
    allowed = sorted(e for group in groups[: inputs.top_groups] for e in group)
    return sorted(allowed, key=lambda e: -keys[e])[: inputs.k]


def of_token(inputs: RouterInputs, logits: np.ndarray, bias: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Experts, weights, and the derivatives of the weights ``[k, experts]``."""
    powers = np.exp(logits - logits.max())
    if inputs.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        slopes = np.diag(scores * (1 - scores))
    else:
        scores = powers / powers.sum()
        slopes = np.diag(scores) - np.outer(scores, scores)
    experts = chosen_by(inputs, logits if inputs.scoring == "softmax_after" else scores, bias)
    weights, slopes = scores[experts], slopes[experts]
    if inputs.normalize:
        total = weights.sum()
        weights, slopes = weights / total, slopes / total - np.outer(weights, slopes.sum(0)) / total**2
    return experts, inputs.scale * weights, inputs.scale * slopes


class RouterConformance(Conformance[RouterCase, RouterInputs]):
    """A backend of the router."""

    cases = CASES
    repeated = CASES[7]

    def inputs(self, case: RouterCase) -> RouterInputs:
        return inputs_of(case)

    def cotangents(self, inputs: RouterInputs) -> Any:
        shape = (*inputs.logits.shape[:-1], inputs.k)
        return jnp.asarray(np.random.default_rng(1).standard_normal(shape), inputs.compute_dtype), None

    @staticmethod
    def residuals(results: Any) -> Any:
        return results[1]

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return {"weights": results[0], "experts": results[1], "d_logits": gradients["logits"]}

    def dtypes(self, inputs: RouterInputs) -> dict[str, Any]:
        return {"weights": inputs.compute_dtype, "experts": np.int32, "d_logits": inputs.logits.dtype}

    def oracle(self, inputs: RouterInputs, cotangents: Any) -> tuple[Found, None]:
        logits = np.asarray(inputs.logits, np.float64)
        bias = np.zeros(logits.shape[-1]) if inputs.bias is None else np.asarray(inputs.bias, np.float64)
        found = [of_token(inputs, row, bias) for row in logits]
        shape = (len(logits), inputs.k)
        slopes = np.array([each for *_, each in found]).reshape(*shape, logits.shape[-1])
        return {
            "weights": np.array([each for _, each, _ in found]).reshape(shape),
            "experts": np.array([each for each, *_ in found], np.int32).reshape(shape),
            "d_logits": np.einsum("tk,tke->te", np.asarray(cotangents[0], np.float64), slopes),
        }, None
