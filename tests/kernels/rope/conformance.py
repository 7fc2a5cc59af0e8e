"""Conformance of the backends of the rotary embedding: cases, and complex numbers in float64 as the oracle."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import ContainedConformance, Found, Poisoned
from tilewright.kernels import kernel
from tilewright.kernels.rope.cases import RopeCase
from tilewright.kernels.rope.inputs import RopeInputs

CASES = (
    RopeCase("halves", tokens=5, heads=3, head_dim=16),
    RopeCase("interleaved", tokens=5, heads=3, head_dim=16, interleaved=True),
    RopeCase("bfloat16", tokens=300, heads=2, head_dim=64, dtype="bfloat16", scaling="yarn"),
    RopeCase("float16_interleaved", tokens=33, heads=1, head_dim=30, dtype="float16", interleaved=True, scaling="ntk"),
    RopeCase("by_row", batch=3, tokens=40, heads=2, head_dim=8, by_row=True, base=500.0),
    RopeCase("a_fraction", tokens=7, heads=2, head_dim=80, fraction=0.4),
    RopeCase(
        "a_fraction_interleaved", tokens=7, heads=2, head_dim=16, fraction=0.5, interleaved=True, dtype="bfloat16"
    ),
    RopeCase("inverse", tokens=7, heads=2, head_dim=32, inverse=True, scaling="yarn"),
    RopeCase("inverse_interleaved", tokens=7, heads=2, head_dim=32, inverse=True, interleaved=True, fraction=0.25),
    RopeCase("llama3", tokens=64, heads=2, head_dim=64, scaling="llama3", base=500000.0, dtype="bfloat16"),
    RopeCase("one_pair", tokens=9, heads=2, head_dim=2, interleaved=True),
    RopeCase("no_tokens", tokens=0, heads=2, head_dim=4),
    RopeCase("no_rows", batch=0, tokens=3, heads=2, head_dim=4, interleaved=True),
)


def inputs_of(case: RopeCase) -> RopeInputs:
    args, kwargs = case.arguments()
    found: RopeInputs = kernel("rope").prepare(*args, **kwargs)
    return found


def turned(inputs: RopeInputs, x: Any, *, back: bool = False) -> np.ndarray:
    """x times ``exp(i · angle)``, an angle being the product in float32 that the contract says."""
    wide = np.dtype(inputs.compute_dtype)
    frequencies, factor = inputs.rotation
    angles = (np.asarray(inputs.positions)[..., None].astype(wide) * frequencies.astype(wide)).astype(np.float64)
    sign = -1.0 if inputs.inverse != back else 1.0
    turns = (1 / factor if inputs.inverse else factor) * np.exp(sign * 1j * angles)
    out, count = np.array(x, np.float64), 2 * len(frequencies)
    first = slice(0, count, 2) if inputs.interleaved else slice(0, count // 2)
    second = slice(1, count, 2) if inputs.interleaved else slice(count // 2, count)
    products = (out[..., first] + 1j * out[..., second]) * turns
    out[..., first], out[..., second] = products.real, products.imag
    return out


class RopeConformance(ContainedConformance[RopeCase, RopeInputs]):
    """A backend of the rotary embedding."""

    cases = CASES
    repeated = RopeCase("", tokens=33, heads=2, head_dim=40, scaling="yarn")
    poisons = ("halves", "interleaved")

    def inputs(self, case: RopeCase) -> RopeInputs:
        return inputs_of(case)

    def cotangents(self, inputs: RopeInputs) -> Any:
        return jnp.asarray(np.random.default_rng(1).standard_normal(inputs.x.shape), inputs.x.dtype)

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return {"out": results, "d_x": gradients["x"]}

    def dtypes(self, inputs: RopeInputs) -> dict[str, Any]:
        return {"out": inputs.x.dtype}

    def oracle(self, inputs: RopeInputs, cotangents: Any) -> tuple[Found, None]:
        return {"out": turned(inputs, inputs.x), "d_x": turned(inputs, cotangents, back=True)}, None

    def poisoned(self, poison: str) -> Poisoned:
        """An element that is not finite reaches its pair alone."""
        inputs = inputs_of(RopeCase("", tokens=4, heads=3, head_dim=16, interleaved=poison == "interleaved"))
        cotangents = self.cotangents(inputs)
        spoiled = inputs.replace(x=inputs.x.at[0, 2, 1, 3].set(jnp.nan))
        pair = (0, 2, 1, [2, 3] if poison == "interleaved" else [3, 11])
        return Poisoned((inputs, cotangents), (spoiled, cotangents), {"out": pair})
