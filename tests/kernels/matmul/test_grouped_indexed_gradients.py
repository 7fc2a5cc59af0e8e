"""Gradients of grouped matmuls on Hopper over rows that an index names, interpreted on the CPU."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import check, check_candidates
from tests.kernels.conftest import H100
from tests.kernels.matmul.grouped_conformance import GATED, cotangent_of, inputs_of
from tests.kernels.matmul.grouped_oracle import oracle
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.backend import HopperGatedGroupedMatmul, HopperGroupedMatmul
from tilewright.kernels.matmul.hopper.params import HopperGatedBackwardParams, HopperGroupedBackwardParams
from tilewright.kernels.matmul.inputs import MatmulInputs

type Operand = Literal["lhs", "cotangents"]

TILES = {
    "one consumer": MatmulParams(64, 128, 2, band=2),
    "two consumers": MatmulParams(128, 128, 3, band=1),
    "three consumers": MatmulParams(192, 64, 2),
    "two panels of a consumer": MatmulParams(256, 64, 2),
    "a cluster along the rows": MatmulParams(128, 128, 3, cluster_m=2, band=1),
    "a cluster along the columns": MatmulParams(128, 64, 2, cluster_n=2),
    "turns": MatmulParams(128, 192, 2, turns=True),
    "turns of a cluster along the rows": MatmulParams(128, 128, 2, cluster_m=2, band=1, turns=True),
    "turns of a cluster along the columns": MatmulParams(128, 64, 2, cluster_n=2, turns=True),
}
SIZES = (0, 70, 1, 63, 0, 64, 65, 40)
"""Groups without rows, those of a step and a row less and more, and begins at no multiple of a step."""

CASE = GroupedMatmulCase("", rows=330, k=136, n=200, groups=8, dtype="bfloat16", sizes=SIZES)
SHORT = dataclasses.replace(CASE, rows=130, k=72, n=136, groups=4, sizes=(50, 0, 65, 2))


@pytest.fixture(autouse=True)
def few_sms() -> Iterator[None]:
    """Few programs, so that each has several items."""
    with mock.patch.object(products, "num_sms", return_value=4):
        yield


def gathered(array: jax.Array, rows: int, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, of which those that no row is of hold NaN; an index of rows, some of them none; and these rows."""
    random = np.random.default_rng(3)
    index = random.integers(-1, tokens, rows).astype(np.int32)
    index[:3] = (-1, 0, tokens - 1)
    unused = np.isin(np.arange(tokens), index, invert=True)
    array = jnp.where(unused[:, None], jnp.nan, array[:tokens])
    copied = jnp.where((index >= 0)[:, None], array[np.maximum(index, 0)], 0)
    return array, jnp.asarray(index), copied


@dataclasses.dataclass(frozen=True)
class Call:
    """A backward pass that gathers rows of one operand, and the same of rows that were copied.

    The other operand holds NaN in rows behind the last group.
    """

    inputs: MatmulInputs
    d_out: jax.Array
    copied: MatmulInputs
    d_copied: jax.Array

    @classmethod
    def of(cls, case: Any, operand: Operand, tokens: int = 50) -> "Call":
        inputs = inputs_of(case)
        d_out, end = cotangent_of(inputs), sum(case.sizes)
        if operand == "lhs":
            array, index, rows = gathered(inputs.lhs, case.rows, tokens)
            d_out = d_out.at[end:].set(jnp.nan)
            return cls(inputs.replace(lhs=array, row_index=index), d_out, inputs.replace(lhs=rows), d_out)
        array, index, rows = gathered(d_out, case.rows, tokens)
        inputs = inputs.replace(lhs=inputs.lhs.at[end:].set(jnp.nan))
        return cls(inputs.replace(cotangent_index=index), array, inputs, rows)


def gradients(
    backend: Any, inputs: MatmulInputs, d_products: list[jax.Array], params: Any, races: bool = False
) -> dict[str, np.ndarray[Any, Any]]:
    assert not backend.not_supported_reasons(inputs.structs, H100, "backward")
    assert not backend.config_reasons(inputs.structs, H100, "backward", params)
    with interpret_mosaic(detect_races=races):
        found = jax.jit(functools.partial(backend.gradients, params=params))(inputs, d_products)
        return {name: np.asarray(x) for name, x in jax.block_until_ready(found).items()}


def check_call(call: Call, params: HopperGroupedBackwardParams, races: bool = False) -> None:
    """Gradients as the oracle has them, and bit for bit those of copied rows."""
    backend = HopperGroupedMatmul()
    got = gradients(backend, call.inputs, [call.d_out], params, races)
    found = oracle(call.copied, call.d_copied)
    check({f"d_{name}": x for name, x in got.items()}, {name: found[name] for name in ("d_lhs", "d_rhs")})
    same(got, gradients(backend, call.copied, [call.d_copied], params))


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(got[name].view(np.uint16), x.view(np.uint16), err_msg=name)


def takes(params: MatmulParams, operand: Operand, transposed: bool = False) -> bool:
    """True if no cluster shares the gathered operand, which transposed matrices exchange."""
    is_left = (operand == "lhs") != transposed
    return (params.cluster_n if is_left else params.cluster_m) == 1


def params_of(name: str) -> HopperGroupedBackwardParams:
    """A sum in these tiles, and rows of cotangents in tiles of up to 128."""
    return HopperGroupedBackwardParams(TILES[name if TILES[name].block_m <= 128 else "two consumers"], TILES[name])


TAKEN = [each for each in itertools.product(TILES, ("lhs", "cotangents")) if takes(TILES[each[0]], each[1])]


@pytest.mark.parametrize(("name", "operand"), TAKEN)
def test_tiles(name: str, operand: Operand):
    """Sizes that no tile divides, and rows that an index does not name."""
    check_call(Call.of(CASE, operand), params_of(name))


@pytest.mark.parametrize("operand", ["lhs", "cotangents"])
def test_transposed_matrices(operand: Operand):
    """Their gradients are sums with the operands exchanged."""
    check_call(Call.of(dataclasses.replace(CASE, transpose_rhs=True), operand), params_of("two consumers"))


@pytest.mark.parametrize("operand", ["lhs", "cotangents"])
def test_float16(operand: Operand):
    params = params_of("two consumers")
    check_call(Call.of(dataclasses.replace(CASE, dtype="float16"), operand), params)


@pytest.mark.parametrize("operand", ["lhs", "cotangents"])
def test_unaligned_rows(operand: Operand):
    """Of rows that are not at multiples of 16 bytes copies are gathered."""
    case = dataclasses.replace(CASE, rows=600, k=67, n=133, groups=2, sizes=(290, 300))
    check_call(Call.of(case, operand, 90), params_of("two consumers"))


@pytest.mark.parametrize("operand", ["lhs", "cotangents"])
def test_rows_of_nobody(operand: Operand):
    """No group has rows: all gradients are zeros."""
    case = dataclasses.replace(SHORT, sizes=(0, 0, 0, 0))
    check_call(Call.of(case, operand), params_of("turns"))


@pytest.mark.parametrize(("name", "operand"), TAKEN)
def test_no_races(name: str, operand: Operand):
    check_call(Call.of(SHORT, operand), params_of(name), races=True)


@pytest.mark.parametrize("wanted", ["rhs", "lhs"])
def test_gated(wanted: str):
    """Sums of both matrices over the same rows; the gradient of the rows needs none of them."""
    case = dataclasses.replace(GATED, rows=200, k=72, n=136, groups=4, dtype="bfloat16", sizes=(65, 0, 100, 3))
    call, backend = Call.of(case, "lhs"), HopperGatedGroupedMatmul()
    d_products = [call.d_out.at[: sum(case.sizes)].multiply(factor) for factor in (1, -2)]
    params = HopperGatedBackwardParams(TILES["two consumers"], TILES["a cluster along the rows"])
    kinds = frozenset({"lhs"} if wanted == "lhs" else {"rhs", "up"})
    got = gradients(backend, call.inputs.replace(wanted=kinds), d_products, params)
    same(got, gradients(backend, call.copied.replace(wanted=kinds), d_products, params))
    assert got.keys() == kinds
    if wanted == "lhs":
        assert got["lhs"].shape == (case.rows, case.k)


@pytest.mark.parametrize("operand", ["lhs", "cotangents"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [64, 8192])
def test_candidates(rows: int, operand: Operand, transposed: bool):
    """None shares what is gathered, and some share the other operand."""
    case = dataclasses.replace(CASE, rows=rows, k=512, n=1024, groups=4, sizes=None, transpose_rhs=transposed)
    inputs, index = inputs_of(case).structs, jax.ShapeDtypeStruct((rows,), jnp.int32)
    if operand == "lhs":
        inputs = inputs.replace(lhs=jax.ShapeDtypeStruct((rows // 4, 512), "bfloat16"), row_index=index)
    else:
        inputs = inputs.replace(cotangent_index=index)
    listed = check_candidates(HopperGroupedMatmul(), inputs, H100)["backward"]
    assert all(takes(params.rhs, operand, transposed) for params in listed)
    assert any(params.rhs.cluster > 1 for params in listed)
    assert operand == "lhs" or all(params.lhs.block_m <= 128 for params in listed)


def test_what_is_declined():
    backend, pair = HopperGroupedMatmul(), TILES["two consumers"]
    lhs, cotangents = (Call.of(CASE, operand).inputs.structs for operand in ("lhs", "cotangents"))
    along_m, along_n = (TILES[f"a cluster along the {name}"] for name in ("rows", "columns"))
    for inputs, params in ((lhs, along_n), (cotangents, along_m)):
        wrong = HopperGroupedBackwardParams(pair, params)
        (reason,) = backend.config_reasons(inputs, H100, "backward", wrong)
        assert "no rows that an index names" in reason
        assert not backend.config_reasons(inputs_of(CASE).structs, H100, "backward", wrong)
    wide = HopperGroupedBackwardParams(MatmulParams(256, 64, 2), pair)
    assert "up to 128 rows" in backend.config_reasons(cotangents, H100, "backward", wide)[0]
    assert not backend.config_reasons(lhs, H100, "backward", wide)
    both = lhs.replace(cotangent_index=cotangents.cotangent_index)
    assert "rows of one operand alone" in backend.not_supported_reasons(both, H100, "backward")[0]
