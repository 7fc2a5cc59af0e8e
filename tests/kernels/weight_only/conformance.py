"""Conformance of the backends of matmuls with weights of few bits: cases, and the matmul in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import ContainedConformance, Found, Poisoned
from tests.kernels.weight_only import literal
from tilewright.kernels.op.cases import variants
from tilewright.kernels.weight_only.cases import WeightOnlyCase
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs
from tilewright.kernels.weight_only.op import WEIGHT_ONLY_MATMUL

CASES = variants(
    WeightOnlyCase("", rows=5, k=128, n=24, group=64, dtype="bfloat16"),
    {
        "int4": {},
        "float16": {"dtype": "float16", "scale_dtype": "float16"},
        "groups_of_32": {"group": 32, "zeros": True},
        "one_group": {"group": None, "zeros": True, "preferred_element_type": "float32"},
        "short_last_group": {"k": 200, "n": 20, "group": 128, "zeros": True},
        "short_last_unit": {"k": 100, "group": None, "dtype": "float16"},
        "int8": {"format": "int8", "zeros": True},
        "int8_float16": {"format": "int8", "group": 32, "dtype": "float16", "k": 72},
        "mxfp4": {"format": "mxfp4", "group": 32, "k": 96},
        "mxfp4_float16": {"format": "mxfp4", "group": 32, "dtype": "float16"},
        "ordered": {"ordered": True},
        "one_row": {"rows": 1, "scale_dtype": "bfloat16"},
    },
)


def weight_of(inputs: WeightOnlyInputs) -> np.ndarray:
    """``[k, n]`` in float64, with its rows in the order of x's columns."""
    stored = literal.weight_of(inputs.codes, inputs.scales, inputs.zeros, inputs.format, inputs.group, inputs.k)
    return stored if inputs.order is None else stored[np.argsort(inputs.order)]


class WeightOnlyConformance(ContainedConformance[WeightOnlyCase, WeightOnlyInputs]):
    """A backend of the matmul."""

    cases = tuple(CASES.values())
    repeated = CASES["short_last_group"]
    poisons = ("a row", "a scale")

    def inputs(self, case: WeightOnlyCase) -> WeightOnlyInputs:
        args, options = case.arguments()
        return WEIGHT_ONLY_MATMUL.prepare(*args, **options)

    def cotangents(self, inputs: WeightOnlyInputs) -> jax.Array:
        random = np.random.default_rng(1)
        return jnp.asarray(random.standard_normal(inputs.out_shape), inputs.out_dtype)

    @staticmethod
    def residuals(results: Any) -> None:
        return None

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return {"out": results} | {f"d_{name}": x for name, x in gradients.items()}

    def dtypes(self, inputs: WeightOnlyInputs) -> dict[str, Any]:
        return {"out": jnp.dtype(inputs.out_dtype)}

    def oracle(self, inputs: WeightOnlyInputs, cotangents: Any) -> tuple[Found, Found]:
        """In float64, and of the weight in x's dtype, rounded."""
        x, d_out = np.asarray(inputs.x, np.float64), np.asarray(cotangents, np.float64)
        exact = weight_of(inputs)
        low = exact.astype(inputs.x.dtype).astype(np.float64)

        dtypes = {"out": inputs.out_dtype, "d_x": inputs.x.dtype, "d_scales": inputs.scales.dtype}

        def of(weight: np.ndarray) -> Found:
            found = {"out": x @ weight, "d_x": d_out @ weight.T}
            if inputs.format != "mxfp4":
                ordered = x if inputs.order is None else x[:, np.asarray(inputs.order)]
                units = literal.weight_of(
                    inputs.codes, np.ones(inputs.scales.shape), inputs.zeros, inputs.format, inputs.group, inputs.k
                )
                each = (ordered.T @ d_out) * units
                starts = np.arange(0, inputs.k, inputs.group or inputs.k)
                found["d_scales"] = np.add.reduceat(each, starts, axis=0)
            return found

        rounded = {name: each.astype(dtypes[name]).astype(np.float64) for name, each in of(low).items()}
        return of(exact), rounded

    def poisoned(self, poison: str) -> Poisoned:
        inputs = self.inputs(self.adapted(CASES["int4"]))
        cotangents = self.cotangents(inputs)
        if poison == "a row":
            spoiled = inputs.replace(x=inputs.x.at[2, 70].set(jnp.nan))
            return Poisoned((inputs, cotangents), (spoiled, cotangents), {"out": 2, "d_scales": 1})
        spoiled = inputs.replace(scales=inputs.scales.at[1, 3].set(jnp.nan))
        reached = {"out": np.s_[:, 3], "d_x": np.s_[:, 64:]}
        return Poisoned((inputs, cotangents), (spoiled, cotangents), reached)
