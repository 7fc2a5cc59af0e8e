"""The second day: what mypy, pyright, ``help`` and ``inspect.signature`` say of the public functions."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from tilewright import modules
from tools import stubs

ROOT = Path(__file__).parents[2]

TYPES = """
from typing import assert_type

import jax
from jax import Array

import tilewright
from tilewright import modules, ops
from tilewright.kernels.op.choice import Choice
from tilewright.modules import (
    chunked_prefill_paged_decode, context_parallel_attention, context_parallel_mla_decode,
    context_parallel_page_attention, context_parallel_update_pages, decode_attention, dot_product_attention,
    flash_attention, flash_mla, gated_grouped_matmul, glu, grouped_matmul, layer_norm, linear_cross_entropy,
    linear_kl_divergence, linear_log_probs, matmul, mla_decode, mla_ragged_page_attention, page_attention,
    ragged_decode_attention, ragged_page_attention, rms_norm, rope_update_pages, shared_prefix_page_attention,
    unified_attention, update_pages, zigzag,
)


def checks(x: Array, i: Array, flag: bool, maybe: Array | None, pages: tuple[Array, Array]) -> None:
    assert_type(flash_attention(x, x, x, causal=True).sum(), Array)
    assert_type(flash_attention(x, x, x, return_lse=False), Array)
    assert_type(flash_attention(x, x, x, return_lse=True), tuple[Array, Array])
    assert_type(flash_attention(x, x, x, return_lse=flag), Array | tuple[Array, Array])
    assert_type(context_parallel_attention(x, x, x, axis_name="i"), Array)
    assert_type(context_parallel_attention(x, x, x, axis_name="i", return_lse=True), tuple[Array, Array])
    assert_type(dot_product_attention(x, x, x), Array)
    assert_type(dot_product_attention(x, x, x, return_residual=True), tuple[Array, Array])
    assert_type(rms_norm(x, x), Array)
    assert_type(rms_norm(x, x, residual=x), tuple[Array, Array])
    assert_type(layer_norm(x, x, residual=maybe), Array | tuple[Array, Array])
    assert_type(linear_cross_entropy(x, x, i), Array)
    assert_type(linear_cross_entropy(x, x, i, reduction="none", return_lse=True), tuple[Array, Array])
    assert_type(linear_log_probs(x, x, i, return_lse=True), tuple[Array, Array])
    assert_type(linear_kl_divergence(x, x, x, x), Array)
    assert_type(matmul(x, x), Array)
    assert_type(glu(x, x, x), Array)
    assert_type(grouped_matmul(x, x, i), Array)
    assert_type(gated_grouped_matmul(x, x, x, i), Array)
    assert_type(zigzag(x, 1, 2), Array)
    assert_type(decode_attention(x, x, x, i), Array)
    assert_type(page_attention(x, *pages, i, i, return_lse=True), tuple[Array, Array])
    assert_type(ragged_decode_attention(x, x, x, i, i), Array)
    assert_type(unified_attention(x, x, x, i, i, i), Array)
    assert_type(mla_decode(x, x, i, i, return_lse=True), tuple[Array, Array])
    assert_type(flash_mla(x, x, i, i), Array)
    assert_type(mla_ragged_page_attention(x, x, x, i, i, i), Array)
    assert_type(mla_ragged_page_attention(x, x, x, i, i, i, return_lse=True), tuple[Array, Array])
    assert_type(ragged_page_attention(x, *pages, i, i, i), Array)
    assert_type(ragged_page_attention(x, *pages, i, i, i, key_scale=x, return_lse=True), tuple[Array, Array])
    assert_type(ragged_page_attention(x, *pages, i, i, i, new_key=x, new_value=x), tuple[Array, Array, Array])
    assert_type(chunked_prefill_paged_decode(x, x, x, x, x, i, i, i), tuple[Array, Array, Array])
    assert_type(
        chunked_prefill_paged_decode(x, x, x, x, x, i, i, i, key_scale=x, value_scale=x, return_lse=True),
        tuple[Array, Array, Array, Array, Array, Array],
    )
    assert_type(update_pages(*pages, x, x, i, i), tuple[Array, Array])
    assert_type(update_pages(x, None, x, None, i, i), Array)
    assert_type(update_pages(x, None, x, None, i, i, key_scale=x), tuple[Array, Array])
    assert_type(update_pages(*pages, x, x, i, i, key_scale=x, value_scale=x), tuple[Array, Array, Array, Array])
    assert_type(rope_update_pages(x, *pages, x, x, i, i), tuple[Array, Array, Array])
    assert_type(
        rope_update_pages(x, *pages, x, x, i, i, key_scale=x, value_scale=x), tuple[Array, Array, Array, Array, Array]
    )
    assert_type(shared_prefix_page_attention(x, *pages, i, i, i, i), Array)
    assert_type(shared_prefix_page_attention(x, *pages, i, i, i, i, return_lse=True), tuple[Array, Array])
    assert_type(context_parallel_update_pages(*pages, x, x, i, i, axis_name="i"), tuple[Array, Array])
    assert_type(context_parallel_page_attention(x, *pages, i, i, axis_name="i"), Array)
    assert_type(context_parallel_mla_decode(x, x, i, i, axis_name="i", return_lse=True), tuple[Array, Array])
    assert_type(modules.base.detect_platform("flash_attention"), modules.base.Platform)


class Doubled(ops.Kernel[int, Array]):
    def run(self, x: Array, *, cfg: int) -> Array:
        return x * cfg

    def heuristic_cfg(self, inv: ops.Invocation[int, Array]) -> int:
        return 2


class Untyped(ops.Kernel):
    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return None


def framework(x: Array) -> None:
    assert_type(tilewright.explain(rms_norm, x), ops.ProgramExplanation)
    assert_type(tilewright.tune(rms_norm, x), ops.AutotuningResult)
    with tilewright.target_device("NVIDIA H200") as target:
        assert_type(target, ops.Target)
    assert_type(tilewright.zigzag(x, 1, 2), Array)
    assert_type(ops.autotune(Doubled(), x), int)
    assert_type(ops.autotune(modules.RmsNorm(), x), Choice)
    assert_type(ops.benchmark(rms_norm, x), float)
    assert_type(Doubled()(x), Array)
    assert_type(ops.vmap_with_config(Doubled())(x), Array)
    executor = ops.Executor(ops.ConfigSelectorChain())
    executor(Untyped(), x)
    assert_type(ops.from_json("3", int), int)


def wrong(x: Array, i: Array) -> None:
    tilewright.explian(rms_norm, x)  # wrong
    flash_attention(x, x, x, return_lse=True).sum()  # wrong
    flash_attention(x, x, x, casual=True)  # wrong
    rms_norm(x, residual=x).sum()  # wrong
    modules.flash_atention(x, x, x)  # wrong
"""
WRONG = [number for number, line in enumerate(TYPES.splitlines(), 1) if line.endswith("# wrong")]
CHECKERS = {
    "mypy": (["--config-file", "pyproject.toml", "--no-error-summary"], r":(\d+): error"),
    "pyright": (["--pythonpath", sys.executable], r":(\d+):\d+ - error"),
}
FUNCTIONS = [name for name in modules.__all__ if inspect.isfunction(getattr(modules, name))]


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_knows_what_each_function_returns(checker, tmp_path):
    pytest.importorskip(checker)
    options, pattern = CHECKERS[checker]
    file = tmp_path / "types_of_results.py"
    file.write_text(TYPES)
    command = [sys.executable, "-m", checker, *options, str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert sorted({int(line) for line in re.findall(pattern, found.stdout)}) == WRONG, found.stdout + found.stderr


def test_the_stub_is_what_the_functions_say():
    """If this fails: make stubs."""
    pytest.importorskip("ruff")
    assert ast.dump(ast.parse(stubs.STUB.read_text())) == ast.dump(ast.parse(stubs.stub()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_shows_an_argument_list_that_can_be_read(name):
    signature = inspect.signature(getattr(modules, name))
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())
    assert all(len(str(parameter)) < 125 for parameter in signature.parameters.values())
    assert len(str(signature.return_annotation)) < 300
    shown = pydoc.plain(pydoc.render_doc(getattr(modules, name)))
    for unreadable in ("numpy.ndarray", "jaxtyping", "SupportsDType", "-> Any"):
        assert unreadable not in shown


def test_results_are_of_the_declared_number():
    x = jnp.ones((1, 2, 2, 16))
    pages, new = jnp.zeros((2, 4, 2, 16)), jnp.ones((1, 2, 16))
    table, lengths, cum = jnp.zeros((1, 1), int), jnp.ones(1, int), jnp.arange(2)
    scales = {"key_scale": jnp.ones((2, 4, 2)), "value_scale": jnp.ones((2, 4, 2))}
    int8 = pages.astype(jnp.int8)
    out, lse = modules.flash_attention(x, x, x, return_lse=True)
    assert out.shape == x.shape
    assert lse.shape == (1, 2, 2)
    assert len(modules.rms_norm(x, residual=x)) == 2
    assert len(modules.update_pages(pages, pages, new, new, table, lengths)) == 2
    assert modules.update_pages(pages, None, new, None, table, lengths).shape == pages.shape
    assert len(modules.update_pages(int8, None, new, None, table, lengths, key_scale=0.5)) == 2
    assert len(modules.update_pages(int8, int8, new, new, table, lengths, **scales)) == 4
    read = modules.ragged_page_attention(new, int8, int8, table, lengths, cum, **scales)
    assert read.shape == new.shape
    call = new, new, new, int8, int8, table, lengths, cum
    assert len(modules.chunked_prefill_paged_decode(*call, **scales)) == 5
    assert len(modules.chunked_prefill_paged_decode(*call, **scales, return_lse=True)) == 6
