"""Configs that a simulator ranks: what they decide, and which figures are believed. Its compiler is not needed here."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.ops.kernel.samples import Config, Product
from tilewright.modules import flash_attention
from tilewright.ops import AutotunePolicy, ConfigSelectorChain, Invocation, PersistentCache
from tilewright.ops.config.selection import simulated_key
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.program import find_invocations
from tilewright.ops.tuning import libtpu, simulated
from tilewright.ops.tuning.libtpu import TpuReport, cycle_seconds, estimated_seconds, flops_per_cycle
from tilewright.ops.utils.known_devices import find_device

V6E, V5E = find_device("TPU v6e").device, find_device("TPU v5e").device
STRUCT = jax.ShapeDtypeStruct((64, 64), jnp.float32)
KERNEL = Product("tests.simulated")


def call(device=V6E):
    return Invocation(KERNEL, (STRUCT, STRUCT), device=device)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    return tmp_path


def reported(monkeypatch, cycles):
    """Makes reports of the configs' blocks: cycles, or the error that is given in their place."""

    def report(tpu, make, inv, config, *, simulate):
        assert (tpu, simulate, make) == ("TPU v6 lite", True, "tilewright.ops.tuning.simulated:program")
        found = cycles[config.block]
        if isinstance(found, str):
            return TpuReport(error=found)
        return TpuReport(cycles={"tilewright_a.1": found, "copy.1": 10**9} if found else {}, unsimulated="FIFO is full")

    monkeypatch.setattr(simulated, "report", report)


def ranked(monkeypatch, cycles, flops=0.0, bytes_accessed=0.0):
    reported(monkeypatch, cycles)
    return simulated.ranked(call(), list(map(Config, cycles)), flops=flops, bytes_accessed=bytes_accessed)


def test_the_fewest_cycles_of_kernels_are_first_and_what_has_none_is_last(monkeypatch):
    found = ranked(monkeypatch, {16: 900, 32: 0, 64: 300, 128: "no VMEM\nis left"})
    assert [each.config.block for each in found] == [64, 16, 32, 128]
    assert found[0].seconds == 300 * cycle_seconds("TPU v6e")
    assert [each.why_not for each in found] == ["", "", "the simulator fails: FIFO is full", "no VMEM"]


def test_fewer_cycles_than_the_matmuls_take_are_not_believed(monkeypatch):
    per_cycle = flops_per_cycle("TPU v6e")
    found = ranked(monkeypatch, {16: 100, 32: 1000}, flops=500.0 * per_cycle)
    assert [each.config.block for each in found] == [32, 16]
    assert found[1].seconds is None
    assert "depend on data" in found[1].why_not


@pytest.mark.parametrize(("tpu", "ghz"), [("TPU v5e", 1.5), ("TPU v5p", 1.75), ("TPU v6e", 1.75), ("TPU7x", 2.2)])
def test_clocks_and_bandwidths_bound_times(tpu, ghz):
    assert 1e-9 / cycle_seconds(tpu) == pytest.approx(ghz, rel=0.01)
    bandwidth = find_device(tpu).bandwidth_gbs * 1e9
    assert estimated_seconds(tpu, 10, 0, bandwidth) == 1.0
    assert estimated_seconds(tpu, 10, 10 * flops_per_cycle(tpu), 0) == 10 * cycle_seconds(tpu)
    assert estimated_seconds(tpu, 10, 11 * flops_per_cycle(tpu), 0) is None
    assert estimated_seconds(tpu, 0, 0, 0) is None


def test_a_simulated_config_decides_that_call_on_that_tpu_alone(folder, monkeypatch):
    chain = ConfigSelectorChain(persistent=PersistentCache())
    assert chain.lookup(call()).step == "heuristic"
    assert simulated.store(call(), ranked(monkeypatch, {16: 900, 32: 300}))
    selection = chain.lookup(call())
    assert (selection.config, selection.step, selection.time_ms) == (Config(32), "simulated", None)
    assert chain.choose(call()).step == chain.choose(call()).step == "simulated"  # nor is it taken for a measured one
    other = Invocation(KERNEL, (STRUCT, jax.ShapeDtypeStruct((64, 32), jnp.float32)), device=V6E)
    assert {chain.lookup(each).step for each in (call(V5E), other)} == {"heuristic"}


def test_what_was_measured_wins_over_what_was_simulated(folder, monkeypatch):
    chain = ConfigSelectorChain(persistent=PersistentCache())
    simulated.store(call(), ranked(monkeypatch, {32: 300}))
    assert chain.lookup(call()).step == "simulated"
    assert chain.measurements(call()) is None
    chain.store(call(), Config(16), [], 1.0, complete=True)
    assert (chain.lookup(call()).config, chain.lookup(call()).step) == (Config(16), "memory")
    fresh = ConfigSelectorChain(persistent=PersistentCache())
    assert (fresh.lookup(call()).config, fresh.lookup(call()).step) == (Config(16), "disk")


def test_a_simulated_config_keeps_nobody_from_measuring(folder, monkeypatch):
    policy = AutotunePolicy(allow_autotune=True, cache_miss_fallback="autotune")
    chain = ConfigSelectorChain(policy=policy, persistent=PersistentCache())
    simulated.store(call(), ranked(monkeypatch, {32: 300}))
    asked = []
    monkeypatch.setattr(
        ConfigSelectorChain, "_autotune", lambda self, inv, *rest: asked.append(inv) or self._guess(inv)
    )
    here = dataclasses.replace(V6E, present=True)
    assert chain.choose(call(here)).step == "simulated"
    assert len(asked) == 1


def test_one_of_other_sources_is_not_used(folder, monkeypatch):
    chain = ConfigSelectorChain(persistent=PersistentCache())
    simulated.store(call(), ranked(monkeypatch, {32: 300}))
    monkeypatch.setattr(Product, "source", lambda self, cfg: "changed")
    assert chain.lookup(call()).step == "heuristic"


def test_nothing_is_stored_where_no_time_is_known(folder, monkeypatch):
    assert not simulated.store(call(), ranked(monkeypatch, {16: 0, 32: "no"}))
    assert len(PersistentCache()) == 0


def test_an_entry_says_how_it_was_found(folder, monkeypatch):
    simulated.store(call(), ranked(monkeypatch, {16: 900, 32: 0}))
    entry = PersistentCache().entry(simulated_key(call()))
    assert entry.metadata == {
        "op": "tests.simulated",
        "direction": "forward",
        "estimated_s": 900 * cycle_seconds("TPU v6e"),
    }
    assert [each["cycles"] for each in entry.measurements] == [900, 0]
    json.dumps([{**each, "config": None} for each in entry.measurements])


def test_explain_says_that_a_config_was_simulated(folder, monkeypatch):
    query = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    with tilewright.target_device("TPU v6e"):
        (inv,) = find_invocations(lambda x: flash_attention(x, x, x), query)
        choice = dataclasses.replace(inv, device=V6E).kernel.heuristic_cfg(inv)
        PersistentCache().put(simulated_key(inv), choice, source=inv.kernel.source(choice))
        chooser = ConfigSelectorChain(persistent=PersistentCache())
        explained = tilewright.explain(lambda x: flash_attention(x, x, x), query, chooser=chooser)
    assert explained[0].step == "simulated"
    assert "(simulated; not measured)" in str(explained)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_direction_is_a_program_of_its_own(direction):
    """As the process that compiles makes it: the backward pass alone, from residuals and cotangents."""
    query = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.float32)
    inv, _ = prepared(tilewright.kernels.kernel("flash_attention"), (query,) * 3, {}, concrete=False)
    inv = dataclasses.replace(inv, direction=direction, device=V6E)
    with tilewright.target_device("TPU v6e"):
        config = inv.kernel.preferred_cfg(inv)
    function, operands = simulated.program(inv, config)
    assert [x.shape for x in operands[:3]] == [query.shape] * 3
    assert (len(operands) > 4) == (direction == "backward")  # out, its cotangent and the statistics
    with tilewright.target_device("TPU v6e"):
        results = jax.eval_shape(function, *operands)
    if direction == "backward":
        assert [x.shape for x in results] == [query.shape] * 3
    else:
        assert results[0].shape == query.shape


def test_reports_of_libtpu_are_read(tmp_path):
    (tmp_path / "1-hlo-static-bundle-profile.txt").write_text(
        "HLO: %tilewright_a_forward.1 = f32\n - VECTOR_ALU: (70/800)\n - VMEM_SPILL_COUNT: (3/200)\n"
        " - VMEM_FILL_COUNT: (5/600)\nHLO: %fusion.1\n - VECTOR_MISC: (1/9)\n"
    )
    (tmp_path / "x.static_llo_profile.textproto").write_text(
        'a { hlo_op_name: "tilewright_a_forward.1" estimated_cycles: 77 }\n'
        'b { hlo_op_name: "copy" estimated_cycles: 5 }'
    )
    kernels = dict(libtpu._kernels(tmp_path))
    assert kernels == {"tilewright_a_forward.1": {"bundles": 200, "spills": 3, "fills": 5}}
    cycles = dict(libtpu._cycles(tmp_path))
    assert cycles == {"tilewright_a_forward.1": 77, "copy": 5}
    assert TpuReport(cycles=cycles).kernel_cycles == 77


def test_a_tpu_without_figures_is_an_error():
    with pytest.raises(ValueError, match="TPU v4 are not simulated"):
        flops_per_cycle("TPU v4")
