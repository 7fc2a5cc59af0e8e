"""Named calls of the dense matmuls, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.numerics.activations import ACTIVATIONS, Activation
from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulCase(Case):
    """The sizes and options of one call of ``matmul``; ``leading`` are dimensions of lhs before its rows."""

    rows: int = 1024
    k: int = 1024
    n: int = 1024
    leading: tuple[int, ...] = ()
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    rhs_dtype: str | None = None
    preferred_element_type: str | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        lhs = (self.k, self.rows) if self.transpose_lhs else (*self.leading, self.rows, self.k)
        rhs = (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        options: dict[str, Any] = {"transpose_lhs": self.transpose_lhs, "transpose_rhs": self.transpose_rhs}
        if self.preferred_element_type is not None:
            options["preferred_element_type"] = self.preferred_element_type
        return (normal(random, lhs, self.dtype), normal(random, rhs, self.rhs_dtype or self.dtype)), options


@dataclasses.dataclass(frozen=True, slots=True)
class GluCase(Case):
    """The sizes and options of one call of ``glu``."""

    rows: int = 1024
    k: int = 1024
    n: int = 1024
    leading: tuple[int, ...] = ()
    activation: Activation = "silu"

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        # Matrices as a model has them: pre-activations are about 1, where activations are not linear.
        x = normal(random, (*self.leading, self.rows, self.k), self.dtype)
        scale = max(self.k, 1) ** -0.5
        gate, up = ((scale * normal(random, (self.k, self.n), "float32")).astype(self.dtype) for _ in range(2))
        return (x, gate, up), {"activation": self.activation}


def jax_matmul(case: MatmulCase) -> Peer | str:
    """``jnp.matmul``."""

    def matmul(lhs: Any, rhs: Any, *, transpose_lhs: bool, transpose_rhs: bool, **options: Any) -> Any:
        return jnp.matmul(lhs.T if transpose_lhs else lhs, rhs.T if transpose_rhs else rhs, **options)

    return matmul


_GPU = {
    "2k": {"rows": 2048, "k": 2048, "n": 2048},
    "8k": {"rows": 8192, "k": 8192, "n": 8192},
    "mlp": {"rows": 8192, "k": 4096, "n": 14336},
    "logits": {"rows": 8192, "k": 4096, "n": 131072},
}
_SIZES = {"rows": 256, "k": 256, "n": 256}

CASES = OpCases(
    shape=("rows", "k", "n"),
    small=MatmulCase("small", rows=16, k=24, n=16),
    large=MatmulCase("large", rows=20, k=24, n=20),
    by_device={
        "cpu": variants(MatmulCase(""), {"1k": {}, "tall": {"rows": 16384, "k": 256, "n": 256}}),
        "gpu": variants(MatmulCase("", dtype="bfloat16"), _GPU),
    },
    options=variants(
        MatmulCase("", dtype="bfloat16", **_SIZES),  # type: ignore[arg-type]
        {
            "float32": {"dtype": "float32"},
            "bfloat16": {},
            "float16": {"dtype": "float16"},
            "`transpose_lhs`": {"transpose_lhs": True},
            "`transpose_rhs`": {"transpose_rhs": True},
            "`preferred_element_type`": {"preferred_element_type": "float32"},
        },
    ),
    peers={"jnp.matmul": jax_matmul},
    brief={"rows": 16, "k": 128, "n": 128},
)

GLU_CASES = OpCases(
    shape=("rows", "k", "n"),
    small=GluCase("small", rows=16, k=24, n=20),
    large=GluCase("large", rows=20, k=24, n=22),
    by_device={
        "cpu": variants(GluCase(""), {"1k": {}}),
        "gpu": variants(GluCase("", dtype="bfloat16"), {name: _GPU[name] for name in ("2k", "mlp")}),
    },
    options=variants(
        GluCase("", dtype="bfloat16", **_SIZES),  # type: ignore[arg-type]
        {"float32": {"dtype": "float32"}, "bfloat16": {}, "float16": {"dtype": "float16"}}
        | {f"`{name}`": {"activation": name} for name in ACTIVATIONS},
    ),
    brief={"rows": 16, "k": 128, "n": 128},
)
