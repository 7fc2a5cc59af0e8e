"""Conformance of the backends of matmuls with groups or gates: their cases, beside the oracle in float64."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import ContainedConformance, Found, Poisoned, run_both
from tests.kernels.matmul.grouped_oracle import oracle
from tilewright.kernels.matmul.cases import GatedGroupedMatmulCase, GluCase, GroupedMatmulCase, ProductCase
from tilewright.kernels.matmul.inputs import MatmulInputs, MatmulResults
from tilewright.kernels.matmul.ops.gated_grouped_matmul import GatedGroupedMatmul
from tilewright.kernels.matmul.ops.glu import Glu
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul
from tilewright.kernels.numerics.activations import ACTIVATIONS
from tilewright.kernels.op.backend import Backend
from tilewright.ops.types import Device, Direction

_HUGE = 2**31 - 1
_BASE = GroupedMatmulCase("", rows=37, k=24, n=24, groups=4)


def _case(name: str, **fields: Any) -> GroupedMatmulCase:
    return dataclasses.replace(_BASE, name=name, **fields)


CASES: dict[str, GroupedMatmulCase] = {
    case.name: case
    for case in (
        _case("float32"),
        _case("bfloat16", dtype="bfloat16", rows=41),
        _case("float16", dtype="float16", transpose_rhs=True, n=1),
        _case("transposed", dtype="bfloat16", transpose_rhs=True, k=33),
        _case("float32_from_bfloat16", dtype="bfloat16", preferred_element_type="float32"),
        _case("two_dtypes", dtype="bfloat16", rhs_dtype="float32"),
        _case("empty_groups", sizes=(0, 20, 0, 17)),
        _case("all_in_one", sizes=(0, 0, 37, 0)),
        _case("nothing_in_any", sizes=(0, 0, 0, 0)),
        _case("rows_of_nobody", sizes=(5, 0, 11, 3), dtype="bfloat16"),
        _case("too_many", sizes=(20, 30, 40, 1)),
        _case("negative", sizes=(10, -7, 9, -1)),
        _case("negative_first", sizes=(-5, 9, 3, 2), transpose_rhs=True),
        _case("huge", sizes=(3, _HUGE, _HUGE, _HUGE)),
        _case("of_one_row", rows=1, sizes=(0, 0, 1, 0)),
        _case("no_rows", rows=0),
        _case("no_k", k=0),
        _case("no_n", n=0),
        _case("one_group", groups=1, sizes=(30,)),
        _case("256_groups", groups=256, rows=130, k=8, n=8),
        _case("offset", groups=5, matrices=2, group_offset=2, sizes=(3, 9, 8, 7, 4), dtype="bfloat16"),
        _case("offset_zero", matrices=4, group_offset=0),
        _case("offset_negative", matrices=3, group_offset=-1, transpose_rhs=True),
        _case("offset_beyond", matrices=3, group_offset=3),
        _case("offset_nowhere", matrices=2, group_offset=_HUGE),
        _case("scales", lhs_scale="number", rhs_scale="number"),
        _case("scale_of_rhs", rhs_scale="blocks", k=140, n=130, sizes=(5, 9, 0, 2)),
        _case("blocks", lhs_scale="blocks", rhs_scale="blocks", k=256, n=130, dtype="bfloat16"),
        _case("blocks_transposed", lhs_scale="blocks", rhs_scale="blocks", k=130, n=256, transpose_rhs=True),
        _case("blocks_and_number", lhs_scale="blocks", rhs_scale="number", k=130, dtype="bfloat16"),
    )
}
FUZZED = _case("fuzzed", rows=53, k=16, n=24, groups=7)


GATED = GatedGroupedMatmulCase("", rows=37, k=24, n=20, groups=4)
GLU = GluCase("", rows=13, k=24, n=20)


def _gated(name: str, case: ProductCase = GATED, **fields: Any) -> ProductCase:
    return dataclasses.replace(case, name=name, **fields)


def _activations(case: ProductCase) -> list[ProductCase]:
    kinds = itertools.product(ACTIVATIONS, ("float32", "bfloat16", "float16"))
    return [_gated(f"{name}-{dtype}", case, activation=name, dtype=dtype) for name, dtype in kinds]


GATED_CASES = (
    *_activations(dataclasses.replace(GATED, sizes=(5, 0, 20, 7))),
    _gated("transposed", transpose_rhs=True, sizes=(5, 0, 20, 7), k=33, activation="sigmoid"),
    _gated("transposed_narrow", transpose_rhs=True, dtype="bfloat16", activation="tanh"),
    _gated("transposed_offset", transpose_rhs=True, matrices=2, group_offset=1, sizes=(9, 8, 13, 4)),
    _gated("of_one_row", rows=1, sizes=(0, 0, 1, 0)),
    _gated("no_rows", rows=0),
    _gated("no_n", n=0),
    _gated("no_k", k=0),
    _gated("no_groups", groups=0),
)
GLU_CASES = (
    *_activations(GLU),
    _gated("leading", GLU, leading=(2, 3)),
    _gated("transposed", GLU, transpose_rhs=True, activation="gelu", k=33),
    _gated("transposed_narrow", GLU, transpose_rhs=True, dtype="bfloat16", leading=(2,), activation="tanh"),
    _gated("transposed_half", GLU, transpose_rhs=True, dtype="float16", activation="sigmoid"),
    _gated("square", GLU, transpose_rhs=True, k=24, n=24),
)


def inputs_of(case: ProductCase, seed: int = 0) -> MatmulInputs:
    """A backend's inputs."""
    args, kwargs = case.arguments(seed)
    op = {GroupedMatmulCase: GroupedMatmul, GatedGroupedMatmulCase: GatedGroupedMatmul, GluCase: Glu}[type(case)]
    inputs: MatmulInputs = op().prepare(*args, **kwargs)
    return inputs


def declined(
    backend: Backend[Any, Any, Any, Any], device: Device, name: str, direction: Direction = "forward", **fields: Any
) -> str:
    """The reasons why a backend does not serve a case of `grouped_matmul` with other fields."""
    inputs = inputs_of(dataclasses.replace(CASES[name], **fields))
    return "; ".join(backend.not_supported_reasons(inputs, device, direction))


def cotangent_of(inputs: MatmulInputs, seed: int = 1) -> Any:
    drawn = np.random.default_rng(seed).standard_normal(inputs.out_shape)
    return jnp.asarray(drawn, inputs.out_dtype)


def random_sizes(random: np.random.Generator, rows: int, groups: int) -> np.ndarray[Any, Any]:
    """Sizes that sum to less, as much or more than the rows, with empty and negative ones among them."""
    total = random.choice([0, 1, rows // 2, rows, rows, rows, 2 * rows])
    shares = random.gamma(0.5, size=groups) + 1e-9
    sizes = random.multinomial(total, shares / shares.sum())
    return np.where(random.random(groups) < 0.15, -random.integers(0, 9, groups), sizes).astype(np.int32)


def run(backend: Backend[Any, Any, Any, Any], inputs: MatmulInputs, d_out: Any, params: tuple[Any, Any]) -> Found:
    """Result and gradients, of gated ones from the pre-activations that are kept."""
    return named(*run_both(backend, inputs, d_out, params, kept))


def kept(results: MatmulResults) -> Any:
    return results[1:] if len(results) > 1 and results[1] is not None else None


def named(results: MatmulResults, gradients: dict[str, Any]) -> Found:
    return {"out": results.out, **{f"d_{name}": x for name, x in gradients.items()}}


class ProductConformance(ContainedConformance[Any, MatmulInputs]):
    """A backend of a matmul with groups or gates; ``params`` gives those of the forward and of the backward pass."""

    named = staticmethod(named)
    residuals = staticmethod(kept)
    rounded: ClassVar[float] = 2.0
    """The factor of the policy."""

    def inputs(self, case: Any) -> MatmulInputs:
        return inputs_of(case)

    def cotangents(self, inputs: MatmulInputs) -> Any:
        return cotangent_of(inputs)

    def dtypes(self, inputs: MatmulInputs) -> dict[str, Any]:
        return {"out": inputs.out_dtype}

    def oracle(self, inputs: MatmulInputs, cotangents: Any) -> tuple[Found, None]:
        return oracle(inputs, cotangents), None

    def factor(self, case: Any) -> float:
        return self.rounded

    def check_sizes(self, inputs: MatmulInputs, count: int, seed: int) -> None:
        """One program for sizes of any kind: they are data."""
        d_out, run, random = cotangent_of(inputs), self.compiled(inputs), np.random.default_rng(seed)
        for _ in range(count):
            sizes = random_sizes(random, len(inputs.lhs), len(inputs.rhs))
            each = inputs.replace(group_sizes=jnp.asarray(sizes))
            self.check(run(each, d_out), each, d_out, self.rounded, str(sizes))

    def check_mapped(self, inputs: MatmulInputs, names: Sequence[str], every: Sequence[Sequence[bool]]) -> None:
        """Calls of vmap over some of these fields: each gives what it gives alone."""
        random, d_out = np.random.default_rng(5), cotangent_of(inputs)
        sizes = jnp.asarray([random_sizes(random, len(inputs.lhs), len(inputs.rhs)) for _ in range(3)])
        stacks = {name: jnp.stack([x, 2 * x, -x]) for name in names if (x := getattr(inputs, name)) is not None}
        stacks["group_sizes"] = sizes
        inputs = inputs.replace(group_sizes=sizes[0])
        params = self.params_of(inputs.structs)
        for mapped in every:
            given = {name: stacks[name] for name, flag in zip(names, mapped, strict=True) if flag}

            def call(given: Any, inputs: MatmulInputs = inputs) -> Found:
                return run(self.backend, inputs.replace(**given), d_out, params)

            with type(self).machine():
                got = jax.block_until_ready(jax.jit(jax.vmap(call))(given))
            for i in range(3):
                one = inputs.replace(**{name: x[i] for name, x in given.items()})
                self.check({name: x[i] for name, x in got.items()}, one, d_out, self.rounded, str(mapped))

    def of_nobody(self, case: Any, count: int, poison: float, of_cotangent: float) -> Poisoned:
        """The rows behind those of groups: neither their values nor those of their cotangents count."""
        inputs = inputs_of(case)
        d_out = cotangent_of(inputs)
        poisoned = inputs.replace(lhs=inputs.lhs.at[count:].set(poison)), d_out.at[count:].set(of_cotangent)
        behind = slice(count, None)
        return Poisoned((inputs, d_out), poisoned, zero={"out": behind, "d_lhs": behind})


class GroupedConformance(ProductConformance):
    """A backend of ``grouped_matmul``."""

    cases = tuple(CASES.values())
    repeated = FUZZED
    poisons = ("rows of nobody are NaN", "rows of nobody are infinite", "a group")

    @pytest.mark.parametrize("transposed", [False, True])
    def test_sizes_of_any_kind(self, transposed: bool):
        self.check_sizes(inputs_of(dataclasses.replace(self.adapted(FUZZED), transpose_rhs=transposed)), 40, 2)

    def poisoned(self, poison: str) -> Poisoned:
        if poison != "a group":
            value = np.nan if poison.endswith("NaN") else np.inf
            return self.of_nobody(
                dataclasses.replace(self.adapted(FUZZED), sizes=(9, 0, 5, 8, 0, 4, 6)), 32, value, value
            )
        inputs = inputs_of(dataclasses.replace(self.adapted(FUZZED), sizes=(9, 0, 13, 8, 4, 4, 6)))
        spoiled, d_out = inputs.replace(lhs=inputs.lhs.at[12].set(jnp.nan)), cotangent_of(inputs)
        return Poisoned((inputs, d_out), (spoiled, d_out), {"out": 12, "d_rhs": 2})


class GluConformance(ProductConformance):
    """A backend of ``glu``; pre-activations and their gradients are rounded, too, so three roundings count."""

    cases = GLU_CASES
    repeated = GLU
    rounded = 4.0
    poisons: ClassVar[Sequence[str]] = ("a row",)

    def poisoned(self, poison: str) -> Poisoned:
        inputs = inputs_of(GLU)
        d_out, spoiled = cotangent_of(inputs), inputs.replace(lhs=inputs.lhs.at[2, 3].set(jnp.nan))
        return Poisoned((inputs, d_out), (spoiled, d_out), {"out": 2, "d_lhs": 2, "d_rhs": ..., "d_up": ...})


class GatedConformance(GluConformance):
    """A backend of ``gated_grouped_matmul``."""

    cases = GATED_CASES
    repeated = GATED
    poisons = ("rows of nobody",)
    recomputing: ClassVar[Any]
    """Params of a backward pass that computes the pre-activations again."""
    recomputed_within: ClassVar[float] = 0.0

    def test_sizes_of_any_kind(self):
        self.check_sizes(inputs_of(dataclasses.replace(GATED, k=33, n=37)), 12, 3)

    def poisoned(self, poison: str) -> Poisoned:
        return self.of_nobody(dataclasses.replace(GATED, sizes=(5, 0, 20, 7)), 32, np.nan, np.inf)

    @pytest.mark.parametrize("offset", [1, -1, 3, 2**31 - 1])
    def test_matrices_of_some_groups(self, offset: int):
        inputs = inputs_of(dataclasses.replace(GATED, sizes=(9, 8, 13, 4)))
        assert inputs.up is not None
        of_two = inputs.replace(rhs=inputs.rhs[:2], up=inputs.up[:2], group_offset=jnp.int32(offset))
        if declined := self.reasons(of_two, "forward"):
            pytest.skip("; ".join(declined))
        self.run_and_check(of_two, self.rounded)

    def test_recomputing_gives_the_same(self):
        inputs = inputs_of(GATED)
        d_out, (forward, backward) = cotangent_of(inputs), self.params_of(inputs.structs)
        call = lambda backward: jax.jit(functools.partial(run, self.backend, params=(forward, backward)))(inputs, d_out)
        with type(self).machine():
            got, want = (jax.block_until_ready(call(each)) for each in (self.recomputing, backward))
        for name, x in want.items():
            np.testing.assert_allclose(got[name], x, self.recomputed_within, self.recomputed_within)
