"""What every backend of the grouped matmul must do, in the cases that it declares to support."""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.matmul.grouped_oracle import Found, oracle
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul
from tilewright.kernels.op.backend import Backend
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

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
QUICK = ("float32", "transposed", "rows_of_nobody", "negative", "offset", "blocks")
TEST = [name for name in CASES if name not in ("offset_zero", "no_k", "no_n", "two_dtypes", "all_in_one")]

FUZZED = _case("fuzzed", rows=53, k=16, n=24, groups=7)


def inputs_of(case: GroupedMatmulCase, seed: int = 0) -> MatmulInputs:
    """A backend's inputs."""
    args, kwargs = case.arguments(seed)
    return GroupedMatmul().prepare(*args, **kwargs)


def cotangent_of(inputs: MatmulInputs, seed: int = 1) -> Any:
    drawn = np.random.default_rng(seed).standard_normal(inputs.out_shape)
    return jnp.asarray(drawn, inputs.out_dtype)


def random_sizes(random: np.random.Generator, rows: int, groups: int) -> np.ndarray[Any, Any]:
    """Sizes that sum to less, as much or more than the rows, with empty and negative ones among them."""
    total = random.choice([0, 1, rows // 2, rows, rows, rows, 2 * rows])
    shares = random.gamma(0.5, size=groups) + 1e-9
    sizes = random.multinomial(total, shares / shares.sum())
    return np.where(random.random(groups) < 0.15, -random.integers(0, 9, groups), sizes).astype(np.int32)


def check(got: Found, want: Found, where: str = "") -> None:
    assert got.keys() == want.keys()
    for name, exact in want.items():
        rounded = np.asarray(jnp.asarray(exact, got[name].dtype), np.float64)  # what no result can do better than
        said = violations(np.asarray(got[name]), exact, rounded)
        assert not said, f"{name} {where}: {said}"


class GroupedConformance:
    """A backend gives what the definition gives in float64, in every case and direction that it declares to support."""

    backend: ClassVar[Backend[Any, Any, Any, Any]]

    def machine(self) -> AbstractContextManager[Any]:
        """What stands in for the device, if it is not there."""
        return contextlib.nullcontext()

    def device(self) -> Device:
        """The device that the backend is asked about."""
        return current_device()

    def adapted(self, case: GroupedMatmulCase) -> GroupedMatmulCase:
        """The case, in dtypes that the backend serves."""
        return case

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        """Params of the forward and of the backward pass."""
        raise NotImplementedError

    def reasons(self, inputs: MatmulInputs, direction: Direction) -> list[str]:
        return self.backend.not_supported_reasons(inputs, self.device(), direction)

    def compiled(self, inputs: MatmulInputs) -> Any:
        """All that the backend declares to support of a call, as a function; skips the test if that is nothing."""
        if declined := self.reasons(inputs, "forward"):
            pytest.skip("; ".join(declined))
        forward, backward = self.params(inputs)
        if self.reasons(inputs, "backward"):
            backward = None

        @jax.jit
        def both(inputs: MatmulInputs, d_out: Any) -> Found:
            found = {"out": self.backend.forward(inputs, forward).out}
            if backward is not None:
                gradients = self.backend.backward(inputs, None, d_out, backward)
                found |= {f"d_{name}": gradient for name, gradient in gradients.items()}
            return found

        def run(inputs: MatmulInputs, d_out: Any) -> Found:
            with self.machine():
                return jax.block_until_ready(both(inputs, d_out))

        return run

    def check(self, got: Found, inputs: MatmulInputs, d_out: Any, where: str = "") -> None:
        want = oracle(inputs, d_out)
        check(got, {name: want[name] for name in got}, where)

    @pytest.mark.parametrize("name", CASES)
    def test_results_and_gradients(self, name: str):
        inputs = inputs_of(self.adapted(CASES[name]))
        d_out = cotangent_of(inputs)
        got = self.compiled(inputs)(inputs, d_out)
        assert {each: x.dtype.name for each, x in got.items()} == {
            each: dtype
            for each, dtype in (
                ("out", inputs.out_dtype),
                ("d_lhs", inputs.lhs.dtype.name),
                ("d_rhs", inputs.rhs.dtype.name),
            )
            if each in got
        }
        self.check(got, inputs, d_out)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_sizes_of_any_kind(self, transposed: bool):
        """One program for all of them: sizes are data."""
        inputs = inputs_of(dataclasses.replace(self.adapted(FUZZED), transpose_rhs=transposed))
        d_out, run, random = cotangent_of(inputs), self.compiled(inputs), np.random.default_rng(2)
        for _ in range(40):
            sizes = random_sizes(random, FUZZED.rows, FUZZED.groups)
            each = inputs.replace(group_sizes=jnp.asarray(sizes))
            self.check(run(each, d_out), each, d_out, str(sizes))

    def test_rows_of_nobody_reach_nothing(self):
        """Neither their NaN nor that of their cotangents; in their places there are zeros."""
        inputs = inputs_of(dataclasses.replace(self.adapted(FUZZED), sizes=(9, 0, 5, 8, 0, 4, 6)))
        clean_cotangent = cotangent_of(inputs)
        run, count = self.compiled(inputs), 32
        want = run(inputs, clean_cotangent)
        for poison in (np.nan, np.inf):
            lhs, d_out = (x.at[count:].set(poison) for x in (inputs.lhs, clean_cotangent))
            got = run(inputs.replace(lhs=lhs), d_out)
            jax.tree.map(np.testing.assert_array_equal, got, want)
        for name in got.keys() & {"out", "d_lhs"}:
            assert not np.any(got[name][count:])

    def test_a_group_that_is_not_finite_spoils_no_other(self):
        inputs = inputs_of(dataclasses.replace(self.adapted(FUZZED), sizes=(9, 0, 13, 8, 4, 4, 6)))
        d_out, run = cotangent_of(inputs), self.compiled(inputs)
        want = run(inputs, d_out)
        got = run(inputs.replace(lhs=inputs.lhs.at[12].set(jnp.nan)), d_out)
        others = np.arange(FUZZED.rows) != 12
        assert np.all(np.isnan(got["out"][12]))
        np.testing.assert_array_equal(got["out"][others], want["out"][others])
        if "d_rhs" in got:
            np.testing.assert_array_equal(got["d_lhs"], want["d_lhs"])
            others = np.arange(FUZZED.groups) != 2
            assert np.all(np.isnan(got["d_rhs"][2]))
            np.testing.assert_array_equal(got["d_rhs"][others], want["d_rhs"][others])
