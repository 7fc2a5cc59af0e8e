"""The collectives of each op on split operands, counted in compiled programs: docs/distributed.md has this table."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.kernels import OPS
from tilewright.modules import (
    all_gather_matmul,
    causal_conv1d,
    causal_conv1d_step,
    context_parallel_attention,
    context_parallel_causal_conv1d,
    context_parallel_linear_attention,
    context_parallel_mla_decode,
    context_parallel_page_attention,
    context_parallel_update_pages,
    flash_attention,
    gated_grouped_matmul,
    glu,
    grouped_matmul,
    layer_norm,
    linear_attention,
    linear_attention_step,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    linear_sample,
    matmul,
    matmul_reduce_scatter,
    mla_decode,
    mla_ragged_page_attention,
    moe_mlp,
    page_attention,
    quantize,
    quantize_weight,
    rms_norm,
    rope,
    rope_update_pages,
    sample,
    selective_scan,
    selective_scan_step,
    shared_prefix_page_attention,
    top_k_router,
    update_pages,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "distributed.md"
COLLECTIVE = re.compile(
    r"= (\([^=]*?\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
SHARDS, HEADS, ROWS = 4, 8, P(None, "s")


@dataclasses.dataclass(frozen=True)
class Split:
    """A call whose operands are split over four devices.

    Attributes:
      function: of ``operands``; its gradients are taken for those that are floating-point.
      axis_type: Explicit: the types of the operands split the call. Auto: ``function`` runs inside ``shard_map``.
      out: the spec of the result inside ``shard_map``.
      inference: True if there is no backward pass.
    """

    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], P], ...]
    axis_type: AxisType = AxisType.Auto
    out: Any = ROWS
    integers: tuple[tuple[int, ...], ...] = ()
    inference: bool = False

    def counts(self, backward: bool) -> dict[str, int]:
        """The collectives of the forward pass, or of the backward pass alone."""
        if not backward:
            return self._counted(self.function)

        def both(*operands: Any) -> Any:
            floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

            def of_floats(*values: Any) -> Any:
                given = dict(zip(floats, values, strict=True))
                return self.function(*(given.get(i, x) for i, x in enumerate(operands)))

            out, pull = jax.vjp(of_floats, *(operands[i] for i in floats))
            # Not ones: of a constant XLA gathers nothing.
            return out, pull(jax.tree.map(jnp.cos, out))

        total, forward = self._counted(both, tuple(s for _, s in self.operands)), self.counts(False)
        return {name: total[name] - forward.get(name, 0) for name in total if total[name] > forward.get(name, 0)}

    def compiled(self, function: Callable[..., Any], gradients: tuple[P, ...] | None = None) -> str:
        """The text of the compiled program."""
        mesh = jax.make_mesh((SHARDS,), ("s",), axis_types=(self.axis_type,), devices=jax.devices()[:SHARDS])
        structs = [
            *(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, s)) for shape, s in self.operands),
            *(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P())) for shape in self.integers),
        ]
        if self.axis_type == AxisType.Auto:
            specs = (*(spec for _, spec in self.operands), *(P() for _ in self.integers))
            out = self.out if gradients is None else (self.out, gradients)
            function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
        with jax.set_mesh(mesh):
            text: str = jax.jit(function).lower(*structs).compile().as_text()
        return text

    def _counted(self, function: Callable[..., Any], gradients: tuple[P, ...] | None = None) -> dict[str, int]:
        found: collections.Counter[str] = collections.Counter()
        for result, name in COLLECTIVE.findall(self.compiled(function, gradients)):
            # XLA may sum several arrays by one all-reduce, also one of the forward and one of the backward pass.
            found[name] += result.count("[") if name == "all-reduce" else 1
        return dict(found)


def attention_operands(queries: P, keys: P, batch: int = 1) -> tuple[Any, ...]:
    shape = (batch, 32, HEADS, 16)
    return ((shape, queries), (shape, keys), (shape, keys))


def over_axis(strategy: str, **options: Any) -> Split:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return context_parallel_attention(
            query, key, value, axis_name="s", strategy=strategy, layout="contiguous", causal=True, **options
        )

    return Split(attend, attention_operands(ROWS, ROWS))


def causal(query: Any, key: Any, value: Any) -> Any:
    return flash_attention(query, key, value, causal=True)


def split_loss(x: Any, weight: Any, labels: Any) -> Any:
    return linear_cross_entropy(x, weight, labels, axis_name="s")


def drawn(x: Any, weight: Any) -> Any:
    return linear_sample(x, weight, jax.random.key(0)), sample(x, jax.random.key(1), top_p=0.9)


SEQUENCES, TABLE = 8, (8, 4)
QUERY, PAGES, TOKENS = (SEQUENCES, HEADS, 16), (32, 8, HEADS, 16), (SEQUENCES, HEADS, 16)


def serving(function: Callable[..., Any], *specs: P, **options: Any) -> Split:
    """Decoding, whose query and pages are split by ``specs``."""
    return Split(
        functools.partial(function, **options),
        tuple(zip((QUERY, PAGES, PAGES), specs, strict=True)),
        AxisType.Auto if options else AxisType.Explicit,
        out=P(), integers=(TABLE, (SEQUENCES,)), inference=True,
    )  # fmt: skip


def of_latents(query: Any, pages: Any, table: Any, lengths: Any) -> Any:
    cum = jnp.arange(SEQUENCES + 1)
    packed = mla_ragged_page_attention(query[..., :8], query[..., 8:], pages, table, lengths, cum)
    return mla_decode(query, pages, table, lengths, kv_lora_rank=8), packed


def latents(query: Any, pages: Any, table: Any, lengths: Any) -> Any:
    return context_parallel_mla_decode(query, pages, table, lengths, axis_name="s", kv_lora_rank=8)


def writing(function: Callable[..., Any], pages: P, tokens: P, **options: Any) -> Split:
    """A new token of each sequence."""
    return Split(
        functools.partial(function, **options),
        ((PAGES, pages), (PAGES, pages), (TOKENS, tokens), (TOKENS, tokens)),
        AxisType.Auto if options else AxisType.Explicit,
        out=(pages, pages), integers=(TABLE, (SEQUENCES,)), inference=True,
    )  # fmt: skip


BY_HEAD, BY_PAGE = P(None, None, "s"), P("s")
BY_ROW, BY_COLUMN = P("s"), P(None, "s")


def experts_operands(tokens: P, columns: P, rows: P) -> tuple[Any, ...]:
    """Tokens with their weights, and the matrices of experts of two layouts."""
    return (((16, 8), tokens), ((16, 2), tokens), ((4, 8, 12), columns), ((4, 8, 12), columns), ((4, 12, 8), rows))


def of_experts(x: Any, weights: Any, *matrices: Any, **options: Any) -> Any:
    return moe_mlp(x, weights, jnp.argsort(weights, axis=1), *matrices, **options)


def delta_rule(query: Any, key: Any, value: Any, beta: Any, states: Any = None) -> Any:
    return context_parallel_linear_attention(
        query, key, value, axis_name="s", beta=beta, initial_state=states, return_state=states is not None
    )


def stepping(rows: P, pool: P) -> Split:
    return Split(
        linear_attention_step, (*[((4, 4, 8), rows)] * 3, ((4, 4, 8, 8), pool)), AxisType.Explicit, inference=True
    )


CALLS = {
    "`flash_attention` | batch or heads": Split(
        causal, attention_operands(P(None, None, "s"), P(None, None, "s")), AxisType.Explicit
    ),
    "`flash_attention` | batch, beside whole keys": Split(
        causal, attention_operands(P("s"), P(), batch=4), AxisType.Explicit
    ),
    "`flash_attention` | length of the query, beside whole keys": Split(
        causal, attention_operands(ROWS, P()), AxisType.Explicit
    ),
    "`flash_attention` | length of the keys, beside a whole query": Split(
        causal, attention_operands(P(), ROWS), AxisType.Explicit
    ),
    "`context_parallel_attention`, ring | length": over_axis("ring"),
    "the same with a window shorter than a shard | length": over_axis("ring", sliding_window=4),
    "`context_parallel_attention`, all_gather | length": over_axis("all_gather"),
    "`context_parallel_attention`, ulysses | length": over_axis("ulysses"),
    "`matmul` | rows": Split(matmul, (((16, 8), BY_ROW), ((8, 4), P())), AxisType.Explicit),
    "`matmul` | n": Split(matmul, (((16, 8), P()), ((8, 4), BY_COLUMN)), AxisType.Explicit),
    "`matmul` | k": Split(matmul, (((16, 8), BY_COLUMN), ((8, 4), BY_ROW)), AxisType.Explicit),
    "`glu` | n": Split(glu, (((16, 8), P()), ((8, 4), BY_COLUMN), ((8, 4), BY_COLUMN)), AxisType.Explicit),
    "`all_gather_matmul`, collective | rows and n": Split(
        functools.partial(all_gather_matmul, axis_name="s", strategy="collective"),
        (((16, 8), BY_ROW), ((8, 4), BY_COLUMN)), out=BY_COLUMN,
    ),
    "`matmul_reduce_scatter`, collective | k": Split(
        functools.partial(matmul_reduce_scatter, axis_name="s", strategy="collective"),
        (((16, 8), BY_COLUMN), ((8, 4), BY_ROW)), out=BY_ROW,
    ),
    "`grouped_matmul` | rows": Split(
        grouped_matmul, (((16, 8), BY_ROW), ((8, 8, 4), P())), AxisType.Explicit, integers=((8,),)
    ),
    "`grouped_matmul` | groups": Split(
        grouped_matmul, (((16, 8), P()), ((8, 8, 4), P("s"))), AxisType.Explicit, integers=((8,),)
    ),
    "`gated_grouped_matmul` | n": Split(
        gated_grouped_matmul, (((16, 8), P()), *[((8, 8, 4), P(None, None, "s"))] * 2), AxisType.Explicit,
        integers=((8,),),
    ),
    "`gated_grouped_matmul` | groups": Split(
        gated_grouped_matmul, (((16, 8), P()), *[((8, 8, 4), P("s"))] * 2), AxisType.Explicit, integers=((8,),)
    ),
    "`causal_conv1d` | rows": Split(causal_conv1d, (((4, 8, 8), P("s")), ((8, 4), P())), AxisType.Explicit),
    "`causal_conv1d` | channels": Split(
        causal_conv1d, (((4, 8, 8), P(None, None, "s")), ((8, 4), P("s"))), AxisType.Explicit
    ),
    "`context_parallel_causal_conv1d` | length": Split(
        functools.partial(context_parallel_causal_conv1d, axis_name="s"), (((2, 32, 8), ROWS), ((8, 4), P()))
    ),
    "`causal_conv1d_step` | channels": Split(
        causal_conv1d_step, (((4, 8), ROWS), ((4, 8, 3), ROWS), ((8, 4), P("s"))), AxisType.Explicit, inference=True
    ),
    "`linear_attention` | batch": Split(linear_attention, (((4, 8, 4, 4), P("s")),) * 3, AxisType.Explicit),
    "`linear_attention` | heads": Split(linear_attention, (((4, 8, 4, 4), P(None, None, "s")),) * 3, AxisType.Explicit),
    "`context_parallel_linear_attention` | length": Split(
        delta_rule, (*[((2, 32, 4, 4), ROWS)] * 3, ((2, 32, 4), ROWS)), out=ROWS
    ),
    "the same, states given and returned | length": Split(
        delta_rule, (*[((2, 32, 4, 4), ROWS)] * 3, ((2, 32, 4), ROWS), ((2, 4, 4, 4), P())), out=(ROWS, P())
    ),
    "`linear_cross_entropy` | tokens": Split(
        lambda x, weight: linear_cross_entropy(x, weight, jnp.zeros(16, int)),
        (((16, 8), BY_ROW), ((8, 64), P())), AxisType.Explicit,
    ),
    "`linear_cross_entropy` | vocabulary": Split(
        lambda x, weight: linear_cross_entropy(x, weight, jnp.zeros(16, int)),
        (((16, 8), P()), ((8, 64), BY_COLUMN)), AxisType.Explicit,
    ),
    "`linear_cross_entropy` with `axis_name` | vocabulary": Split(
        split_loss, (((16, 8), P()), ((8, 64), P(None, "s"))), out=P(), integers=((16,),)
    ),
    "`linear_log_probs` | tokens and, by the same axis, vocabulary or d": Split(
        linear_log_probs, (((16, 8), BY_ROW), ((8, 64), BY_COLUMN)), AxisType.Explicit, integers=((16,),)
    ),
    "`linear_kl_divergence` | vocabulary": Split(
        linear_kl_divergence, (((16, 8), P()), ((8, 64), BY_COLUMN)) * 2, AxisType.Explicit
    ),
    "`rms_norm` | rows": Split(rms_norm, (((16, 8), P("s")), ((8,), P())), AxisType.Explicit),
    "`layer_norm` | rows": Split(layer_norm, (((16, 8), P("s")), ((8,), P()), ((8,), P())), AxisType.Explicit),
    "`rope` | tokens": Split(rope, ((QUERY, P("s")),), AxisType.Explicit, integers=(QUERY[:1],)),
    "`rope` | heads": Split(rope, ((QUERY, ROWS),), AxisType.Explicit, integers=(QUERY[:1],)),
    "`selective_scan` | rows": Split(
        selective_scan,
        (*[((4, 8, 8), P("s"))] * 2, ((8, 4), P()), *[((4, 8, 4), P("s"))] * 2),
        AxisType.Explicit,
    ),
    "`selective_scan` | channels": Split(
        selective_scan,
        (*[((1, 8, 8), P(None, None, "s"))] * 2, ((8, 4), P("s")), *[((1, 8, 4), P())] * 2),
        AxisType.Explicit,
    ),
    "`selective_scan_step` | channels": Split(
        selective_scan_step,
        (((4, 8, 4), ROWS), *[((4, 8), ROWS)] * 2, ((8, 4), P("s")), *[((4, 4), P())] * 2),
        AxisType.Explicit, inference=True,
    ),
    "`top_k_router` | tokens": Split(lambda x: top_k_router(x, 2)[0], (((16, 8), P("s")),), AxisType.Explicit),
    "`moe_mlp` | tokens": Split(of_experts, experts_operands(P("s"), P(), P()), AxisType.Explicit),
    "`moe_mlp` | n": Split(of_experts, experts_operands(P(), P(None, None, "s"), P(None, "s")), AxisType.Explicit),
    "`moe_mlp` with `axis_name` | tokens and experts": Split(
        functools.partial(of_experts, axis_name="s"), experts_operands(*[P("s")] * 3), out=P("s")
    ),
    "`page_attention` and the like | heads": serving(page_attention, ROWS, BY_HEAD, BY_HEAD),
    "`page_attention` and the like | sequences, beside whole pages": serving(page_attention, P("s"), P(), P()),
    "`mla_decode`, `mla_ragged_page_attention` | heads, beside whole latents": Split(
        of_latents, ((QUERY, ROWS), ((32, 8, 16), P())), AxisType.Explicit,
        integers=(TABLE, (SEQUENCES,)), inference=True,
    ),
    "`update_pages` | heads": writing(update_pages, BY_HEAD, ROWS),
    "`update_pages` | new tokens by sequences, beside whole pages": writing(update_pages, P(), P("s")),
    "`rope_update_pages` | heads": Split(
        rope_update_pages, ((QUERY, ROWS), *[(PAGES, BY_HEAD)] * 2, *[(TOKENS, ROWS)] * 2), AxisType.Explicit,
        integers=(TABLE, (SEQUENCES,)), inference=True,
    ),
    "`shared_prefix_page_attention` | heads": Split(
        shared_prefix_page_attention, ((QUERY, ROWS), *[(PAGES, BY_HEAD)] * 2), AxisType.Explicit,
        integers=((1, 4), (1,), TABLE, (SEQUENCES,)), inference=True,
    ),
    "`context_parallel_page_attention` | pages": serving(
        context_parallel_page_attention, P(), BY_PAGE, BY_PAGE, axis_name="s"
    ),
    "`context_parallel_mla_decode` | pages": Split(
        latents, ((QUERY, P()), ((32, 8, 16), BY_PAGE)), out=P(), integers=(TABLE, (SEQUENCES,)), inference=True
    ),
    "`context_parallel_update_pages` | pages": writing(context_parallel_update_pages, BY_PAGE, P(), axis_name="s"),
    "`linear_attention_step` | heads": stepping(P(None, "s"), P(None, "s")),
    "`linear_attention_step` | rows and slots": stepping(P("s"), P("s")),
    "`quantize` | rows": Split(
        lambda x: quantize(x, scaling="row").scales, (((16, 8), P("s")),), AxisType.Explicit, inference=True
    ),
    "`weight_only_matmul` | rows": Split(
        lambda x: matmul(x, quantize_weight(jnp.ones((64, 32)), group=64)), (((16, 64), P("s")),), AxisType.Explicit
    ),
    "`sample`, `linear_sample` | rows": Split(
        drawn, (((SEQUENCES, 32), P("s")), ((32, 64), P())), AxisType.Explicit, inference=True
    ),
}  # fmt: skip


LIKE_PAGE_ATTENTION = {
    "decode_attention", "ragged_decode_attention", "ragged_page_attention", "unified_attention",
    "chunked_prefill_paged_decode",
}  # fmt: skip


WHOLE = {"permute", "unpermute"}
"""Whose arrays may not be split."""


def described(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


@pytest.mark.parametrize("call", CALLS)
def test_the_page_says_what_each_split_costs(call: str) -> None:
    forward = described(CALLS[call].counts(backward=False))
    backward = "–" if CALLS[call].inference else described(CALLS[call].counts(backward=True))
    assert f"| {call} | {forward} | {backward} |" in PAGE.read_text()


def test_every_op_has_a_row() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(CALLS)))
    assert set(OPS) == (named & set(OPS)) | LIKE_PAGE_ATTENTION | WHOLE


def test_the_page_has_no_other_row() -> None:
    table = PAGE.read_text().partition("| op | split | forward | backward |\n")[2].partition("\n\n")[0]
    assert [line.rsplit(" | ", 2)[0].removeprefix("| ") for line in table.splitlines()[1:]] == list(CALLS)
