"""The oracle of a part of a call: what the whole one says of it, and what a tuning finds with it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.flash_attention import op
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.masks import CausalMask, ExplicitMask, WindowMask
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, Tuner
from tilewright.ops.tuning.workload import Workload

pytestmark = pytest.mark.usefixtures("unoptimised")

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
CASES = {
    "plain": AttentionCase("", 2, 40, 56, **SIZES),
    "causal, lse is not wanted": AttentionCase("", 3, 48, causal=True, sliding_window=9, **SIZES),
    "bias of every head": AttentionCase("", 2, 40, bias="bhqk", logits_soft_cap=5.0, **SIZES),
    "bias shared by the batch": AttentionCase("", 2, 40, bias="hqk", sinks=2, **SIZES),
    "alibi": AttentionCase("", 2, 40, 56, position_bias="alibi", causal=True, **SIZES),
    "relative bias, lengths": AttentionCase(
        "", 3, 40, 56, position_bias="relative", lengths=True, causal_alignment="bottom_right", **SIZES
    ),
    "relative bias, one element": AttentionCase("", 1, 40, position_bias="relative", **SIZES),
    "one element": AttentionCase("", 1, 40, bias="qk", sinks=1, **SIZES),
    "dropout": AttentionCase("", 2, 40, dropout_prob=0.3, **SIZES),
    "values of their own size": AttentionCase("", 2, 40, value_dim=24, dtype="bfloat16", **SIZES),
    "segments": AttentionCase("", 3, 40, segments=True, causal=True, **SIZES),
    "lengths": AttentionCase("", 3, 40, 56, lengths=True, **SIZES),
    "lengths whose last rows are aligned": AttentionCase(
        "", 3, 40, 56, lengths=True, causal=True, causal_alignment="bottom_right", **SIZES
    ),
    "packed": AttentionCase("", 1, 64, packed=True, causal=True, **SIZES),
    "packed, other keys": AttentionCase("", 1, 40, 56, packed=True, sliding_window=9, **SIZES),
    "mask of every head": AttentionCase("", 2, 40, mask="bhqk", **SIZES),
    "mask shared by the batch": AttentionCase("", 2, 40, mask="hqk", segments=True, **SIZES),
    "dropout and segments": AttentionCase("", 2, 40, dropout_prob=0.3, segments=True, **SIZES),
}


def invocation(case: AttentionCase, direction: Any, **more: Any) -> Invocation[Any, Any]:
    arrays, kwargs = case.arguments()
    inputs = FlashAttention().prepare(*arrays, **kwargs | more)
    return Invocation(FlashAttention(), (inputs,), direction=direction).abstract()


def without_batch(direction: Any) -> Invocation[Any, Any]:
    """A packed call whose arrays lack the batch dimension, with both results."""
    arrays, kwargs = CASES["packed"].arguments()
    inputs = FlashAttention().prepare(*(a[0] for a in arrays), **kwargs, return_lse=True)
    return Invocation(FlashAttention(), (inputs,), direction=direction).abstract()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MAX_LOGIT_BYTES", 0)


def check_finds_errors(inv: Invocation[Any, Any], *, rows_axis: int = 1) -> None:
    """That what is right is, and a wrong element of a part is found, as are wrong rows of its last head."""
    work = Workload(inv, ConfigSelectorChain())
    results = work.compile(inv.kernel.heuristic_cfg(inv))(*work.operands)
    assert work.check(results) == []
    first = (0, 3, 0)[1 - rows_axis :]
    tile = (0, slice(16, 32), 0)[1 - rows_axis :]
    for i in range(1 if inv.direction == "forward" else 3):  # out, or the gradients of query, key and value
        for where in (first, tile):
            wrong = list(results)
            wrong[i] = wrong[i].at[where].add(0.5)
            assert work.check(wrong), (i, where)
    assert any("not numbers" in said for said in work.check([results[0].at[..., 1, 0].set(jnp.nan), *results[1:]]))


@pytest.mark.parametrize(
    ("name", "direction"),
    list(itertools.product(CASES, ["forward", "backward"])),
)
def test_what_is_right_is_and_an_error_in_a_part_is_found(name: str, direction: Any, small: None):
    inv = invocation(CASES[name], direction)
    assert len(inv.kernel.oracle_parts(inv)) == (1 if "dropout" in name else 2)
    check_finds_errors(inv)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_without_a_batch_dimension(direction: Any, small: None):
    inv = without_batch(direction)
    assert len(inv.kernel.oracle_parts(inv)) == 2
    check_finds_errors(inv, rows_axis=0 if direction == "forward" else 1)


WITH_PARTS = ["plain", *(name for name in list(CASES)[7:] if "dropout" not in name)]


@pytest.mark.parametrize("name", WITH_PARTS)
def test_the_last_part_is_of_the_last_element_and_heads(name: str, small: None):
    inv = invocation(CASES[name], "forward")
    work = Workload(inv, ConfigSelectorChain())
    results = work.compile(inv.kernel.heuristic_cfg(inv))(*work.operands)
    assert work.check([results[0].at[-1, 5, -1, 0].add(0.5)])
    elsewhere = (0, 5, 2) if CASES[name].batch == 1 else (-1, 5, 0)
    checked = CASES[name].batch == 1  # of one element, both heads of keys are
    assert bool(work.check([results[0].at[(*elsewhere, 0)].add(0.5)])) == checked


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_of_a_part_is_that_of_the_whole(name: str, small: None):
    arrays, given = CASES[name].arguments(seed=3)
    kernel = FlashAttention()
    inputs = kernel.prepare(*arrays, **given, return_lse=True)
    inv = Invocation(kernel, (inputs,))
    whole = kernel.reference(inputs)
    for part in kernel.oracle_parts(inv.abstract()):
        (part_inputs,), _ = part.arguments((inputs,), {})
        assert jax.tree.structure(part_inputs) == jax.tree.structure(inputs)
        assert part_inputs.heads == 2  # the query heads of one head of keys
        mine = kernel.reference(part_inputs)
        for said, wanted in zip(mine, part.results(whole), strict=True):
            np.testing.assert_allclose(np.float32(said), np.float32(wanted), rtol=1e-2, atol=1e-5)


def test_masks_of_any_make(small: None):
    """A user's own, with positions of queries and keys, and alternatives."""
    case = CASES["plain"]
    q_positions = jnp.arange(40)[None] * jnp.array([[1], [2]])
    positions = CausalMask(0, q_positions, jnp.arange(56)[None])
    either = (positions & WindowMask(5, 5)) | ExplicitMask(jnp.zeros((1, 4, 1, 56), bool).at[:, 1::2, :, 7].set(True))
    inv = invocation(case, "forward", mask=either)
    assert len(inv.kernel.oracle_parts(inv)) == 2
    check_finds_errors(inv)


def test_the_whole_is_checked_where_it_fits():
    inv = invocation(CASES["plain"], "forward")
    assert inv.kernel.oracle_parts(inv) == []


@pytest.mark.parametrize("name", ["bias shared by the batch", "segments"])
def test_a_tuning_by_parts(name: str, small: None):
    inv = invocation(CASES[name], "backward")
    (call,) = Autotuner(Tuner(0, 1), chooser=ConfigSelectorChain()).tune(inv)
    assert {candidate.check for candidate in call.candidates} == {"passed"}
