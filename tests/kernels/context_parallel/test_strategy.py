"""The model by which a strategy is chosen: its preferences where they are plain, and what was measured."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.context_parallel.calls import mesh_of
from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.distributed.model import best_strategy, predicted_ms
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.distributed import PlanParams
from tilewright.ops import (
    Autotuner,
    AutotuningResult,
    Candidate,
    ConfigCache,
    ConfigSelectorChain,
    TunedCall,
    Tuner,
    find_invocations,
    overlay_cache,
    use_lock,
)
from tilewright.ops.utils.fingerprint import toolchain_fingerprint

CAUSAL = {"highest": 0}
DOCUMENTS = {"q_bounds": jax.ShapeDtypeStruct((3,), jnp.int32)}


def call_of(
    length: int, shards: int = 8, kv_heads: int = 8, q_length: int | None = None, **options: Any
) -> ContextInputs:
    """A device's part of a call."""
    query, key = (
        jax.ShapeDtypeStruct((1, rows, heads, 128), jnp.bfloat16)
        for rows, heads in ((q_length or length, 32), (length, kv_heads))
    )
    given = {"layout": "zigzag", "softmax_scale": 1.0} | options
    return ContextInputs(query, key, key, devices=shards, **given)


def test_short_sequences_with_few_key_heads_are_gathered() -> None:
    assert best_strategy(call_of(256, kv_heads=1, **CAUSAL)) == "all_gather"
    assert best_strategy(call_of(256, kv_heads=1)) == "all_gather"


def test_heads_that_divide_are_exchanged_if_that_is_cheaper() -> None:
    # A contiguous causal ring waits for the last device in every step.
    assert best_strategy(call_of(8192, layout="contiguous", **CAUSAL)) == "ulysses"
    times = predicted_ms(call_of(8192, layout="contiguous", **CAUSAL))
    assert times["ring"] > 1.5 * times["ulysses"]


def test_long_sequences_go_around() -> None:
    assert best_strategy(call_of(65536, kv_heads=4, **CAUSAL)) == "ring"
    assert best_strategy(call_of(16384, kv_heads=4)) == "ring"


def test_a_window_costs_a_ring_two_steps_only() -> None:
    times = {
        shards: predicted_ms(call_of(8192, shards, layout="contiguous", lowest=-1024, highest=0)) for shards in (4, 64)
    }
    assert times[4]["ring"] == pytest.approx(times[64]["ring"])
    assert times[64]["all_gather"] > 4 * times[64]["ring"]


def test_what_cannot_serve_the_call_is_no_choice() -> None:
    assert "ulysses" not in predicted_ms(call_of(8192, kv_heads=4, **CAUSAL))
    # One query beside a million keys.
    assert best_strategy(call_of(1 << 20, kv_heads=4, q_length=1, layout="contiguous")) == "ring"


@pytest.mark.parametrize(
    ("length", "measured"),
    [
        (1024, {"ring": 0.686, "ulysses": 0.595, "all_gather": 0.750}),
        (2048, {"ring": 1.007, "ulysses": 0.884, "all_gather": 0.904}),
        (4096, {"ring": 2.185, "ulysses": 2.253, "all_gather": 2.867}),
        (8192, {"ring": 7.472, "ulysses": 7.618, "all_gather": 10.06}),
    ],
)
def test_two_cards_take_what_was_measured(length: int, measured: dict[str, float]) -> None:
    """Milliseconds of both passes, causal, on two H100; the choice is the fastest there."""
    times = predicted_ms(call_of(length, 2, **CAUSAL))
    assert best_strategy(call_of(length, 2, **CAUSAL)) == min(measured, key=lambda name: measured[name])
    assert times == pytest.approx(measured, rel=0.27 if length < 2048 else 0.17)


def test_documents_are_not_left_to_where_they_begin() -> None:
    """16384 packed tokens on each of two H100: 9.28 ms around, 9.08 exchanged; 32768: 25.7, 22.2."""
    assert best_strategy(call_of(16384, 2, **CAUSAL)) == "ring"
    assert best_strategy(call_of(16384, 2, **CAUSAL, **DOCUMENTS)) == "ulysses"
    assert best_strategy(call_of(16384, 16, **CAUSAL, **DOCUMENTS)) == "ring"  # heads do not divide


def explained_calls(length: int = 8192, **options: Any) -> list[Any]:
    """What is explained of a forward pass over eight devices with as many rows each."""

    def on_device(*qkv: jax.Array) -> jax.Array:
        return tilewright.context_parallel_attention(*qkv, axis_name="s", **options)

    rows, x = P(None, "s"), jax.ShapeDtypeStruct((1, 8 * length, 32, 128), jnp.bfloat16)
    split = jax.shard_map(on_device, mesh=mesh_of(8), in_specs=(rows,) * 3, out_specs=rows)
    explained = tilewright.explain(split, x, x, x)
    assert ("faster: " in explained._repr_html_()) == ("faster: " in str(explained))
    return [each for each in explained if each.op == "context_parallel_attention"]


def test_it_is_explained_what_zigzag_would_gain() -> None:
    (call,) = explained_calls(causal=True, strategy="ring")
    (gain,) = call.choice.advice
    before, after = (
        predicted_ms(call_of(8192, kv_heads=32, layout=layout, **CAUSAL))["ring"] for layout in ("contiguous", "zigzag")
    )
    assert before > 1.5 * after
    assert f"{after:.3g} ms by 'ring' instead of {before:.3g} ms" in gain
    assert f"  faster: {gain}" in str(call)


def test_nothing_is_said_where_zigzag_gains_nothing() -> None:
    for options in (
        {"strategy": "ring"},
        {"strategy": "ring", "layout": "zigzag", "causal": True},
        {"strategy": "ulysses", "causal": True},
        {"strategy": "ring", "causal": True, "length": 127},
        {"strategy": "ring", "causal": True, "sliding_window": 16},
    ):
        (call,) = explained_calls(**options)
        assert call.choice.advice == (), options
        assert "faster:" not in str(call)


def attend(**options: Any) -> Any:
    """A function of a whole call over four devices, and its operands."""

    def on_device(*qkv: jax.Array) -> jax.Array:
        return tilewright.context_parallel_attention(*qkv, axis_name="s", causal=True, **options)

    rows, x = P(None, "s"), jax.ShapeDtypeStruct((1, 32, 1, 16), jnp.float32)
    return jax.shard_map(on_device, mesh=mesh_of(), in_specs=(rows,) * 3, out_specs=rows), (x, x, x)


@pytest.mark.parametrize(("strategy", "name"), [("auto", "all_gather"), ("ring", "collective_permute")])
def test_a_call_runs_the_strategy(strategy: str, name: str) -> None:
    function, operands = attend(strategy=strategy)
    text = jax.jit(function).lower(*operands).as_text()
    names = ("all_gather", "collective_permute", "all_to_all")
    assert [each for each in names if f"stablehlo.{each}" in text] == [name]


def plan_of(explained: Any) -> Any:
    (found,) = (call for call in explained if call.op == "context_parallel_attention")
    return found


def test_the_plan_is_explained() -> None:
    function, operands = attend()
    call = plan_of(tilewright.explain(function, *operands))
    assert str(call.config).startswith("all_gather")
    assert "probably slower" in call.choice.rejected["ring"][0]
    assert "4 devices must divide" in call.choice.rejected["ulysses"][0]


def test_the_derivative_has_one_choice_for_both_passes() -> None:
    function, operands = attend()
    gradients = jax.grad(lambda *qkv: function(*qkv).sum(), (0, 1, 2))
    call = plan_of(tilewright.explain(gradients, *operands))
    assert (call.direction, call.config.backend) == ("forward", "all_gather")


def invocation(function: Any, operands: Any) -> Any:
    (found,) = (inv for inv in find_invocations(function, *operands) if inv.kernel.name == "context_parallel_attention")
    return found


def test_another_choice_takes_another_plan() -> None:
    function, operands = attend()
    cache = ConfigCache()
    cache.put(invocation(function, operands).key, Choice("ring", PlanParams()))
    with overlay_cache(cache):
        assert plan_of(tilewright.explain(function, *operands)).config.backend == "ring"
        assert "collective_permute" in jax.jit(function).lower(*operands).as_text()


def test_the_plans_are_measured_on_a_mesh_with_their_derivatives() -> None:
    function, operands = attend()
    chain = ConfigSelectorChain(ConfigCache())
    entry = Autotuner(Tuner(1, 2, isolation="none"), chooser=chain).tune(invocation(function, operands)).entries[0]
    assert [each.config.backend for each in entry.candidates] == ["all_gather", "ring"]
    assert all(each.eligible and each.time_ms for each in entry.candidates), entry


def test_a_lock_holds_a_plan(tmp_path: Path) -> None:
    function, operands = attend()
    inv, ring = invocation(function, operands), Choice("ring", PlanParams())
    entry = TunedCall.of(inv, [Candidate(ring, (1.0,))], 0, source=inv.kernel.source(ring))
    result = AutotuningResult((entry,), device=inv.device_fingerprint, toolchain=toolchain_fingerprint())
    result.to_lock().save(tmp_path / "lock.json")
    with use_lock(tmp_path / "lock.json"):
        call = plan_of(tilewright.explain(function, *operands))
        assert (call.config, call.step) == (ring, "lock")


def test_a_call_over_more_devices_than_there_are_is_left_out_of_a_tuning() -> None:
    inv = dataclasses.replace(invocation(*attend()), args=(call_of(16, shards=64),))
    result = Autotuner(Tuner(1, 2, isolation="none")).tune(inv)
    assert not result.entries
    assert "needs 64 devices of this process" in result.left_out[0]
