"""Named calls of the matmuls, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.matmul.inputs import SCALE_BLOCK
from tilewright.kernels.numerics.activations import ACTIVATIONS, Activation, gated
from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class ProductCase(Case):
    """The sizes of one call of any of the ops; ``rows`` are those of lhs, of all groups together."""

    rows: int = 1024
    k: int = 1024
    n: int = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class DenseCase(ProductCase):
    """A call without groups; ``leading`` are dimensions of lhs before its rows."""

    leading: tuple[int, ...] = ()

    def lhs(self, random: np.random.Generator, *, transposed: bool = False) -> jax.Array:
        shape = (self.k, self.rows) if transposed else (*self.leading, self.rows, self.k)
        return normal(random, shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulCase(DenseCase):
    """The sizes and options of one call of ``matmul``."""

    transpose_lhs: bool = False
    transpose_rhs: bool = False
    rhs_dtype: str | None = None
    preferred_element_type: str | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        lhs = self.lhs(random, transposed=self.transpose_lhs)
        rhs = (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        options: dict[str, Any] = {"transpose_lhs": self.transpose_lhs, "transpose_rhs": self.transpose_rhs}
        if self.preferred_element_type is not None:
            options["preferred_element_type"] = self.preferred_element_type
        return (lhs, normal(random, rhs, self.rhs_dtype or self.dtype)), options


@dataclasses.dataclass(frozen=True, slots=True)
class GluCase(DenseCase):
    """The sizes and options of one call of ``glu``."""

    activation: Activation = "silu"
    transpose_rhs: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        # Matrices as a model has them: pre-activations are about 1, where activations are not linear.
        x = self.lhs(random)
        scale, shape = max(self.k, 1) ** -0.5, (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        gate, up = ((scale * normal(random, shape, "float32")).astype(self.dtype) for _ in range(2))
        return (x, gate, up), {"activation": self.activation, "transpose_rhs": self.transpose_rhs}


def jax_matmul(case: MatmulCase) -> Peer | str:
    """``jnp.matmul``."""

    def matmul(lhs: Any, rhs: Any, *, transpose_lhs: bool, transpose_rhs: bool, **options: Any) -> Any:
        return jnp.matmul(lhs.T if transpose_lhs else lhs, rhs.T if transpose_rhs else rhs, **options)

    return matmul


def jax_glu(case: GluCase) -> Peer | str:
    """Two ``jnp.matmul`` and the activation."""

    def glu(x: Any, gate: Any, up: Any, *, activation: str, transpose_rhs: bool) -> Any:
        gates, ups = (jnp.matmul(x, each.T if transpose_rhs else each) for each in (gate, up))
        return gated(activation, gates, ups)

    return glu


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
        | {f"`{name}`": {"activation": name} for name in ACTIVATIONS}
        | {"`transpose_rhs`": {"transpose_rhs": True}},
    ),
    peers={"two jnp.matmul": jax_glu},
    brief={"rows": 16, "k": 128, "n": 128},
)


type Scaling = Literal["none", "number", "blocks"]


def group_sizes(random: np.random.Generator, rows: int, groups: int) -> np.ndarray[Any, Any]:
    """Sizes that sum to ``rows``, as unequal as those of the experts of a trained model: some are empty."""
    shares = random.gamma(2.0, size=groups) if groups else np.zeros(0)
    return random.multinomial(rows, shares / shares.sum()).astype(np.int32) if groups else shares.astype(np.int32)


def group_offset_of(random: np.random.Generator, groups: int, matrices: int) -> np.ndarray[Any, Any]:
    """The group of the first of some matrices, int32, so that all of them have a group."""
    return np.asarray(random.integers(0, groups - matrices, endpoint=True), np.int32)


def _scale(random: np.random.Generator, kind: Scaling, shape: tuple[int, ...], blocked: tuple[int, ...]) -> Any:
    """A scale for an array of ``shape``, by blocks along the axes ``blocked``."""
    if kind == "none":
        return None
    blocks = tuple(-(-size // SCALE_BLOCK) if axis in blocked else size for axis, size in enumerate(shape))
    drawn = random.uniform(0.5, 2.0, blocks if kind == "blocks" else ()).astype(np.float32)
    return jnp.asarray(drawn)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedCase(ProductCase):
    """A call with groups.

    Attributes:
      matrices: matrices of the call, the groups from ``group_offset`` on; as many as groups if ``None``.
      sizes: the group sizes; drawn if ``None``.
    """

    k: int = 512
    n: int = 512
    groups: int = 8
    matrices: int | None = None
    group_offset: int | None = None
    sizes: tuple[int, ...] | None = None

    def lhs(self, random: np.random.Generator) -> jax.Array:
        return normal(random, (self.rows, self.k), self.dtype)

    def matrix_shape(self, *, transposed: bool = False) -> tuple[int, int, int]:
        matrices = self.groups if self.matrices is None else self.matrices
        return (matrices, self.n, self.k) if transposed else (matrices, self.k, self.n)

    def group_sizes(self, random: np.random.Generator) -> jax.Array:
        return jnp.asarray(group_sizes(random, self.rows, self.groups) if self.sizes is None else self.sizes, jnp.int32)

    @property
    def offset(self) -> dict[str, jax.Array]:
        """The option ``group_offset``, if the case has it."""
        return {} if self.group_offset is None else {"group_offset": jnp.int32(self.group_offset)}


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedMatmulCase(GroupedCase):
    """The sizes and options of one call of ``grouped_matmul``.

    Attributes:
      rhs_dtype: dtype of rhs; that of lhs if ``None``.
    """

    transpose_rhs: bool = False
    lhs_scale: Scaling = "none"
    rhs_scale: Scaling = "none"
    rhs_dtype: str | None = None
    preferred_element_type: str | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        lhs = self.lhs(random)
        rhs = normal(random, self.matrix_shape(transposed=self.transpose_rhs), self.rhs_dtype or self.dtype)
        sizes = self.group_sizes(random)
        options: dict[str, Any] = {
            "lhs_scale": _scale(random, self.lhs_scale, lhs.shape, (1,)),
            "rhs_scale": _scale(random, self.rhs_scale, rhs.shape, (1, 2)),
            "preferred_element_type": self.preferred_element_type,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return (lhs, rhs, sizes), self.offset | given | {"transpose_rhs": self.transpose_rhs}


def jax_ragged_dot(case: GroupedMatmulCase) -> Peer | str:
    """``jax.lax.ragged_dot``, or the reason why it cannot do the case."""
    if case.group_offset is not None:
        return "jax.lax.ragged_dot has no group_offset"
    if "blocks" in (case.lhs_scale, case.rhs_scale) or "number" in (case.lhs_scale, case.rhs_scale):
        return "jax.lax.ragged_dot has no scales"

    def ragged_dot(lhs: Any, rhs: Any, sizes: Any, *, transpose_rhs: bool, **options: Any) -> Any:
        return jax.lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if transpose_rhs else rhs, sizes, **options)

    return ragged_dot


_SMALL = GroupedMatmulCase("small", rows=24, k=16, n=16, groups=3)
_OPTION = GroupedMatmulCase("", rows=256, k=256, n=256, groups=4)

GROUPED_CASES = OpCases(
    shape=("rows", "k", "n", "groups"),
    small=_SMALL,
    large=dataclasses.replace(_SMALL, name="large", rows=40, groups=5),
    by_device={
        "cpu": variants(
            GroupedMatmulCase(""),
            {
                "8x1k": {"rows": 1024, "k": 512, "n": 1024},
                "64x2k": {"rows": 2048, "k": 256, "n": 512, "groups": 64},
                "decode": {"rows": 64, "k": 512, "n": 1024, "groups": 64},
            },
        ),
        "gpu": variants(
            GroupedMatmulCase("", dtype="bfloat16"),
            {
                "8x8k": {"rows": 8192, "k": 4096, "n": 14336},
                "64x16k": {"rows": 16384, "k": 7168, "n": 2048, "groups": 64},
                "256x16k": {"rows": 16384, "k": 7168, "n": 2048, "groups": 256},
                "128x64k": {"rows": 65536, "k": 2048, "n": 768, "groups": 128},
                "decode_8": {"rows": 64, "k": 4096, "n": 14336},
                "decode_64": {"rows": 64, "k": 7168, "n": 2048, "groups": 64},
            },
        ),
    },
    options=variants(
        _OPTION,
        {
            "float32": {},
            "bfloat16": {"dtype": "bfloat16"},
            "float16": {"dtype": "float16"},
            "float8_e4m3fn": {"dtype": "float8_e4m3fn", "preferred_element_type": "bfloat16"},
            "`transpose_rhs`": {"dtype": "bfloat16", "transpose_rhs": True},
            "`preferred_element_type`": {"dtype": "bfloat16", "preferred_element_type": "float32"},
            "`group_offset`": {"dtype": "bfloat16", "matrices": 2, "group_offset": 1},
            "a scale for each operand": {"dtype": "float8_e4m3fn", "lhs_scale": "number", "rhs_scale": "number"},
            "scales for blocks": {"dtype": "float8_e4m3fn", "lhs_scale": "blocks", "rhs_scale": "blocks"},
            "scales for blocks, `transpose_rhs`": {
                "dtype": "float8_e4m3fn",
                "lhs_scale": "blocks",
                "rhs_scale": "blocks",
                "transpose_rhs": True,
            },
            "k or n of no multiple of 8": {"dtype": "bfloat16", "rows": 1024, "k": 130, "n": 77},
        },
    ),
    peers={"jax.lax.ragged_dot": jax_ragged_dot},
    brief={"rows": 16, "groups": 2, "k": 128, "n": 128},
)


@dataclasses.dataclass(frozen=True, slots=True)
class GatedGroupedMatmulCase(GroupedCase):
    """The sizes and options of one call of ``gated_grouped_matmul``."""

    activation: Activation = "silu"
    transpose_rhs: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        # Matrices as a model has them: pre-activations are about 1, where activations are not linear.
        lhs, shape = self.lhs(random), self.matrix_shape(transposed=self.transpose_rhs)
        gate, up = ((normal(random, shape, "float32") / max(self.k, 1) ** 0.5).astype(self.dtype) for _ in range(2))
        return (lhs, gate, up, self.group_sizes(random)), self.offset | {
            "activation": self.activation,
            "transpose_rhs": self.transpose_rhs,
        }


def jax_gated_ragged_dot(case: GatedGroupedMatmulCase) -> Peer | str:
    """Two ``jax.lax.ragged_dot`` and the activation, or the reason why that cannot do the case."""
    if case.group_offset is not None:
        return "jax.lax.ragged_dot has no group_offset"

    def gated_dots(lhs: Any, gate: Any, up: Any, sizes: Any, *, activation: str, transpose_rhs: bool) -> Any:
        matrices = (each.swapaxes(1, 2) if transpose_rhs else each for each in (gate, up))
        return gated(activation, *(jax.lax.ragged_dot(lhs, each, sizes) for each in matrices))

    return gated_dots


_GATED_SMALL = GatedGroupedMatmulCase("small", rows=24, k=16, n=20, groups=3)

GATED_CASES = OpCases(
    shape=("rows", "k", "n", "groups"),
    small=_GATED_SMALL,
    large=dataclasses.replace(_GATED_SMALL, name="large", rows=40, groups=5),
    by_device={
        "cpu": variants(GatedGroupedMatmulCase(""), {"8x1k": {"rows": 1024, "k": 512, "n": 1024}}),
        "gpu": variants(
            GatedGroupedMatmulCase("", dtype="bfloat16"),
            {
                "mixtral": {"rows": 16384, "k": 4096, "n": 14336},
                "qwen3_30b": {"rows": 65536, "k": 2048, "n": 768, "groups": 128},
                "decode_8": {"rows": 64, "k": 4096, "n": 14336},
            },
        ),
    },
    options=variants(
        GatedGroupedMatmulCase("", rows=256, k=256, n=256, groups=4, dtype="bfloat16"),
        {"float32": {"dtype": "float32"}, "bfloat16": {}, "float16": {"dtype": "float16"}}
        | {f"`{name}`": {"activation": name} for name in ACTIVATIONS}
        | {"`transpose_rhs`": {"transpose_rhs": True}, "`group_offset`": {"matrices": 2, "group_offset": 1}},
    ),
    peers={"two jax.lax.ragged_dot": jax_gated_ragged_dot},
    brief={"rows": 16, "groups": 2, "k": 128, "n": 128},
)
