"""What a newcomer met on the second day that was wrong without a word, each in the words of a program that met it."""

import logging
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilewright
from tests.support.draws import draw
from tilewright.integrations import jax_serving
from tilewright.integrations.equinox import MultiheadAttention
from tilewright.integrations.flax import dot_product_attention as flax_attention
from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.masks import ExplicitMask, LengthMask
from tilewright.modules import (
    all_gather_matmul,
    context_parallel_attention,
    context_parallel_page_attention,
    dot_product_attention,
    flash_attention,
    gated_grouped_matmul,
    grouped_matmul,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    matmul_reduce_scatter,
    page_attention,
)
from tilewright.ops import Kernel

Q = draw(1, 16, 4, 8)
TRI = jnp.tri(16, dtype=bool)[None, None]
X, W = draw(32, 4), draw(4, 8)
LABELS = jnp.arange(32) % 8
MESH = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


class Held:
    """Another library's holder of an array, which is no pytree."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __jax_array__(self) -> Any:
        return self.array


def on_four(function: Any, in_specs: Any, out_specs: Any, *operands: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs))(*operands)


def equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def calls(of: Any) -> dict[str, Any]:
    """Functions that are no op of the matrix, or arguments that no case of it has; ``of`` is called with each array."""
    rows = P(None, "s")
    pages, table, lengths = draw(3, 4, 4, 8), jnp.array([[0, 1], [2, 0]]), jnp.array([5, 3])
    query, layer = draw(2, 4, 8), MultiheadAttention(4, 16, key=jax.random.key(0))
    side = draw(5, 16)

    def split_loss(x: Any, w: Any, labels: Any) -> Any:
        return linear_cross_entropy(of(x), of(w), of(labels), axis_name="s", label_smoothing=0.1)

    def split_pages(query: Any, pages: Any) -> Any:
        return context_parallel_page_attention(of(query), of(pages), of(pages), of(table), of(lengths), axis_name="s")

    def two_matmuls(x: Any, w: Any) -> Any:
        whole = all_gather_matmul(of(x), of(w), axis_name="s")
        return matmul_reduce_scatter(of(whole), of(w.T), axis_name="s")

    def split_attention(strategy: str) -> Any:
        def attend(q: Any) -> Any:
            return context_parallel_attention(
                of(q), of(q), of(q), axis_name="s", strategy=strategy, causal=True, softmax_aux=of(jnp.ones(4))
            )

        return lambda q=Q: on_four(attend, rows, rows, q)

    return {
        "ring": split_attention("ring"),
        "gathered": split_attention("all_gather"),
        "exchanged": split_attention("ulysses"),
        "dropout": lambda: flash_attention(
            of(Q), of(Q), of(Q), dropout_prob=0.5, dropout_seed=of(jax.random.key(1))
        ),
        "alibi": lambda: flash_attention(of(Q), of(Q), of(Q), bias=AlibiBias(of(jnp.ones(4)))),
        "relative": lambda: flash_attention(of(Q), of(Q), of(Q), bias=RelativeBias(of(jnp.ones((4, 31))))),
        "mask": lambda: flash_attention(of(Q), of(Q), of(Q), mask=ExplicitMask(of(TRI))),
        "lengths": lambda: flash_attention(of(Q), of(Q), of(Q), mask=LengthMask(None, of(jnp.array([7])))),
        "scale": lambda: flash_attention(of(Q), of(Q), of(Q), softmax_scale=of(jnp.float32(0.5))),
        "log_probs": lambda: linear_log_probs(of(X), of(W), of(LABELS), bias=of(jnp.ones(8))),
        "divergence": lambda: linear_kl_divergence(of(X), of(W), of(X), of(2 * W)),
        "split_loss": lambda: on_four(split_loss, (P(), rows, P()), P(), X, W, LABELS),
        "split_pages": lambda: on_four(split_pages, (P(), P("s")), P(), query, draw(12, 4, 4, 8)),
        "two_matmuls": lambda: on_four(two_matmuls, (P("s"), rows), P("s"), X, W),
        "jax": lambda: dot_product_attention(
            of(Q), of(Q), of(Q), of(jnp.ones((1, 1, 16, 16))), of(TRI[0, 0]), local_window_size=(3, -1),
            scale=of(jnp.float32(0.5)), query_seq_lengths=of(jnp.array([5])),
        ),
        "flax": lambda: flax_attention(of(Q), of(Q), of(Q), mask=of(TRI)),
        "equinox": lambda: layer(of(side), of(side), of(side), of(TRI[0, 0, :5, :5])),
        "jax_ragged": lambda: jax_serving.ragged_paged_attention(
            *map(of, (draw(4, 2, 8), pages, lengths, table, jnp.array([0, 2, 4]), jnp.array([2])))
        ),
        "jax_paged": lambda: jax_serving.paged_attention(
            *map(of, (draw(2, 2, 8), draw(2, 3, 4, 8), draw(2, 3, 4, 8), lengths, table)), pages_per_compute_block=1
        ),
        "zigzag": lambda: tilewright.zigzag(of(Q), 1, 4),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls(lambda x: x))
def test_a_strict_program_calls_what_a_plain_one_does(name: str) -> None:
    """``jax_numpy_rank_promotion="raise"`` and ``jax_numpy_dtype_promotion="strict"``, as test suites set them."""
    call = calls(lambda x: x)[name]
    wanted = call()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        equal(call(), wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_strict_program_trains_on_explicit_axes(reduction: str) -> None:
    mesh = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        rows = jax.device_put(Q.astype(jnp.bfloat16), jax.NamedSharding(mesh, P(None, "s")))
        parts = jax.device_put(W.astype(jnp.bfloat16), jax.NamedSharding(mesh, P(None, "s")))

        def loss(q: Any, w: Any) -> Any:
            attended = flash_attention(q, q, q, causal=True).astype(jnp.float32)
            of_tokens = linear_cross_entropy(X.astype(w.dtype), w, LABELS, label_smoothing=0.1, reduction=reduction)
            return jnp.sum(attended * attended) + jnp.sum(of_tokens)

        gradients = jax.jit(jax.grad(loss, (0, 1)))
        wanted = gradients(rows, parts)
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            equal(gradients(rows, parts), wanted)


@pytest.mark.parametrize("strategy", ["ring", "gathered", "exchanged"])
def test_a_strict_program_trains_over_a_split_sequence(strategy: str) -> None:
    call, q = calls(lambda x: x)[strategy], Q.astype(jnp.bfloat16)
    gradient = jax.grad(lambda q: jnp.sum(call(q).astype(jnp.float32)))
    wanted = gradient(q)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        equal(gradient(q), wanted)


@pytest.mark.parametrize("kind", [nnx.Param, Held])
@pytest.mark.parametrize("name", calls(lambda x: x))
def test_a_parameter_of_flax_is_an_array(name: str, kind: Any) -> None:
    equal(calls(kind)[name](), calls(lambda x: x)[name]())


def test_a_users_own_kernel_gets_the_array_of_a_parameter() -> None:
    class Doubled(Kernel[int, Any]):
        def run(self, x: Any, *, cfg: int) -> Any:
            return x * 2

        def heuristic_cfg(self, inv: Any) -> int:
            return 1

    doubled = Doubled("tests.doubled")
    for kind in (nnx.Param, Held):
        assert not isinstance(doubled(kind(X)), nnx.Param)
        equal(doubled(kind(X)), X * 2)


def test_tune_takes_a_parameter_of_flax(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    result = tilewright.tune(lambda x, w: grouped_matmul(x, w, jnp.array([32])), nnx.Param(X), nnx.Param(W[None]))
    assert len(result.entries) == 1


def test_rows_that_are_split_the_ordinary_way_are_attended_in_their_order() -> None:
    out = calls(lambda x: x)["ring"]()
    np.testing.assert_allclose(
        out, flash_attention(Q, Q, Q, causal=True, softmax_aux=jnp.ones(4)), rtol=1e-5, atol=1e-5
    )


SIZES, LENGTHS = [100, 100, 100, 100], [5, 11]
MATRICES = draw(4, 4, 4)
WRONG: dict[str, tuple[Any, list[int], str]] = {
    "grouped_matmul": (
        lambda sizes: grouped_matmul(X, MATRICES, sizes), SIZES,
        r"grouped_matmul: group_sizes must not add up to more than the 32 rows of lhs, got .* of sum 400",
    ),
    "gated_grouped_matmul": (
        lambda sizes: gated_grouped_matmul(X, MATRICES, MATRICES, sizes), [1, -2, 3, 4],
        r"gated_grouped_matmul: group_sizes must not be negative, got \[1, -2, 3, 4\]",
    ),
    "lengths as boundaries": (
        lambda ends: flash_attention(Q, Q, Q, cum_seqlens_q=ends, cum_seqlens_k=ends), LENGTHS,
        r"flash_attention: cum_seqlens_q\[0\] = 5 is not 0, and cum_seqlens_q\[1\] = 11 is not the length 16: "
        r"cum_seqlens_q says where sequences begin and end, .* not how long they are",
    ),
    "boundaries that fall": (
        lambda ends: flash_attention(Q, Q, Q, cum_seqlens_q=[0, 5, 5, 16], cum_seqlens_k=ends), [0, 7, 6, 16],
        r"cum_seqlens_k\[2\] = 6 is less than the boundary before",
    ),
    "boundaries that end early": (
        lambda ends: flash_attention(Q, Q, Q, cum_seqlens_q=ends, cum_seqlens_k=ends), [0, 5, 11],
        r"cum_seqlens_q\[2\] = 11 is not the length 16.*what pads the last one is a sequence of its own",
    ),
    "query lengths": (
        lambda ends: flash_attention(Q, Q, Q, query_seq_lengths=ends), [17],
        r"query_seq_lengths\[0\] = 17 is more than the length 16",
    ),
    "key lengths": (
        lambda ends: dot_product_attention(Q, Q, Q, key_value_seq_lengths=ends), [-1],
        r"dot_product_attention: key_value_seq_lengths\[0\] = -1 is negative",
    ),
    "split rows": (
        lambda ends: on_four(
            lambda q: context_parallel_attention(q, q, q, axis_name="s", cum_seqlens_q=ends, cum_seqlens_k=ends),
            P(None, "s"), P(None, "s"), Q,
        ),
        [0, 4], r"context_parallel_attention: cum_seqlens_q\[1\] = 4 is not the length 16",
    ),
    "labels": (
        lambda labels: linear_cross_entropy(X, W, labels), [*range(8)] * 3 + [8] * 8,
        r"linear_cross_entropy: labels must be from 0 to 7 or ignore_index=-100, got 8",
    ),
    "labels of a split vocabulary": (
        lambda labels: on_four(
            lambda x, w: linear_cross_entropy(x, w, labels, axis_name="s"), (P(), P(None, "s")), P(), X, W
        ),
        [*range(8)] * 3 + [8] * 8, r"labels must be from 0 to 7 or ignore_index=-100, got 8",
    ),
}  # fmt: skip
"""A call, the numbers that it cannot mean, and what is said of them."""

wrong = pytest.mark.parametrize("name", WRONG)


@wrong
@pytest.mark.parametrize("kind", [list, np.array, tuple])
def test_numbers_that_the_host_knows_are_checked(name: str, kind: Any) -> None:
    call, numbers, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(kind(numbers))
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda: call(np.array(numbers)))()


@pytest.mark.parametrize("name", [each for each in WRONG if "split" not in each])  # a shard_map traces its function
def test_so_are_those_that_a_cpu_has_computed(name: str) -> None:
    call, numbers, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(jax.block_until_ready(jnp.array(numbers)))


@wrong
def test_those_of_a_device_are_named_if_asked_for(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    caplog.set_level(logging.ERROR, "tilewright.debug")
    call, numbers, message = WRONG[name]
    jax.jit(lambda given: call(given))(jnp.array(numbers))
    jax.effects_barrier()
    said = {record.getMessage() for record in caplog.records}
    named = message.replace("dot_product_attention: ", "flash_attention: ")
    assert any(re.search(named, each) for each in said), said


@wrong
def test_and_else_nothing_waits_for_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_DEBUG", raising=False)
    call, numbers, _ = WRONG[name]
    lowered = jax.jit(lambda given: call(given)).lower(jnp.array(numbers))
    assert "callback" not in lowered.as_text()


def test_right_numbers_are_not_mentioned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    caplog.set_level(logging.ERROR)
    for as_given in (np.array, jnp.array):
        ends = as_given([0, 5, 5, 16])
        flash_attention(Q, Q, Q, cum_seqlens_q=ends, cum_seqlens_k=ends)
        flash_attention(Q, Q, Q, query_seq_lengths=as_given([0]), key_value_seq_lengths=as_given([16]))
        grouped_matmul(X, MATRICES, as_given([0, 32, 0, 0]))
        grouped_matmul(X, MATRICES, as_given([0, 3, 0, 0]))
        linear_cross_entropy(X, W, as_given([0, 7, -100, 3] * 8))
    page_attention(draw(2, 4, 8), draw(3, 4, 4, 8), draw(3, 4, 4, 8), jnp.array([[0, 1], [2, 0]]), jnp.array([5, 3]))
    jax.effects_barrier()
    assert caplog.records == []


def test_a_script_that_tunes_its_own_kernel_says_once_what_to_do(tmp_path: Any) -> None:
    (tmp_path / "sums.py").write_text(
        textwrap.dedent("""
            import dataclasses
            import jax.numpy as jnp
            import tilewright
            from tilewright.ops import Kernel

            @dataclasses.dataclass(frozen=True)
            class Blocks:
                rows: int

            class RowSum(Kernel):
                def run(self, x, *, cfg):
                    return jnp.concatenate([b.sum(1) for b in jnp.split(x, x.shape[0] // cfg.rows)])
                def heuristic_cfg(self, inv):
                    return Blocks(inv.args[0].shape[0])
                def config_space(self, inv):
                    return [Blocks(16), Blocks(64)]

            row_sum, x = RowSum("row_sum"), jnp.ones((64, 8))
            if __name__ == "__main__":
                print(tilewright.tune(row_sum, x))
        """)
    )
    root = os.path.dirname(os.path.dirname(tilewright.__file__))
    env = os.environ | {"TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root}
    run = lambda *command: subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    assert "row_sum forward" in run("sums.py").stdout
    found = run("-c", "import sums, tilewright; print(tilewright.explain(sums.row_sum, sums.x)); sums.row_sum(sums.x)")
    assert "(heuristic; not measured)" in found.stdout
    (said,) = [line for line in found.stderr.splitlines() if "is not used" in line]
    assert "it is a __main__:Blocks, not a sums:Blocks" in said
    assert "move Blocks, and the kernel that it is a config of, into a module that both import, and tune again" in said
