"""Latent attention on Hopper, interpreted on the CPU: conformance, races, barriers; what selection sees of it."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import A100, H100
from tests.kernels.hopper.schedule import check_schedules
from tests.kernels.paged_attention.conformance import check
from tests.kernels.paged_attention.latent_conformance import LatentConformance, latent_inputs
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.paged_attention.hopper.latent_backend import (
    HopperLatentParams,
    PallasGpuPagedAttention,
    filling_ranges,
)
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_decode import MlaDecode
from tilewright.ops.utils.serialize import from_json, to_json
from tilewright.ops.utils.target import traced_as

GPU_CASES = MlaDecode.cases.by_device["gpu"]

BACKEND = PallasGpuPagedAttention()


class TestPallasGpu(LatentConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_mosaic)

    def params(self, ranges: int) -> Any:
        return HopperLatentParams(ranges, ranges - 1)  # with and without loads into the L2 cache


def forward(inputs: PagedInputs, ranges: int = 1, cluster: int = 1) -> Any:
    return BACKEND.forward(inputs, HopperLatentParams(ranges, 2, cluster))


HOSTILE = {"heads": 64, "q_lengths": (2,), "sequences": 2}
"""Two tiles of rows for each sequence."""


def hostile_inputs(**fields: Any) -> PagedInputs:
    inputs = latent_inputs(**HOSTILE | fields)
    assert inputs.page_table is not None
    table = inputs.page_table.at[0, 2].set(-1)
    return dataclasses.replace(inputs, page_table=table, kv_lengths=jnp.asarray([250, 3], jnp.int32))


@pytest.mark.parametrize(("ranges", "cluster"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_races(ranges: int, cluster: int):
    """Several items of a CTA, some of them cut; the CTAs of a cluster are interpreted side by side."""
    inputs = hostile_inputs(kv_length=640)
    inputs = dataclasses.replace(inputs, kv_lengths=jnp.asarray([250, 450], jnp.int32))
    with interpret_mosaic(detect_races=True):
        got = jax.block_until_ready(jax.jit(functools.partial(forward, ranges=ranges, cluster=cluster))(inputs))
    check(got, inputs)


@pytest.mark.parametrize(
    ("lengths", "ranges", "fields"),
    [
        ([64, 1, 450], 3, {"heads": 128}),
        ([84, 300, 20], 2, {"heads": 2, "q_lengths": (64,)}),  # the first tile of rows sees a block less
        ([130, 64], 1, {"heads": 64, "q_lengths": (4,), "sinks": 1}),
    ],
)
def test_clusters(lengths: list[int], ranges: int, fields: dict[str, Any]):
    """The same bits as without."""
    inputs = latent_inputs(lengths, **{"sequences": len(lengths), "kv_length": 450} | fields)
    with interpret_mosaic():
        run = lambda cluster: jax.jit(functools.partial(forward, ranges=ranges, cluster=cluster))(inputs)
        want, got = jax.block_until_ready((run(1), run(2)))
    check(got, inputs)
    for one, other in zip(want, got, strict=True):
        assert bool(jnp.array_equal(one, other))


@pytest.mark.parametrize(("lengths", "ranges"), list(itertools.product([[1000, 3], [640, 0], [65, 64]], [1, 2, 3])))
def test_barriers(lengths: list[int], ranges: int):
    """More tiles than stages; the checker follows known lengths and tables."""
    inputs = dataclasses.replace(hostile_inputs(kv_length=640), kv_lengths=jnp.asarray(lengths, jnp.int32))
    assert check_schedules(functools.partial(forward, ranges=ranges), inputs) > 100


@pytest.mark.parametrize("cluster", [1, 2])
def test_types_in_shard_map(cluster: int):
    """Traced with arrays that vary over a mesh axis, whose types loops in the kernels must keep."""
    inputs = structs_of(heads=128, sinks=1, sequences=4)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = jax.tree.map(lambda x: P("x") if x.shape[0] == inputs.sequences else P(), inputs)
    run = functools.partial(forward, ranges=3, cluster=cluster)
    with traced_as(H100.name):
        split = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=(P("x"), P("x")), check_vma=True)
        out, lse = jax.jit(split).trace(inputs).out_info
    assert (out.shape, lse.shape) == ((4, 128, 512), (4, 128))


def structs_of(**fields: Any) -> PagedInputs:
    return jax.eval_shape(lambda: latent_inputs(**fields))


@pytest.mark.parametrize("name", GPU_CASES)
def test_what_ships_can_run_and_fills_the_card(name: str):
    fields = dataclasses.asdict(GPU_CASES[name])
    inputs = structs_of(**{key: value for key, value in fields.items() if key != "name"})
    assert not BACKEND.not_supported_reasons(inputs, H100, "forward")
    candidates = BACKEND.candidates(inputs, H100, "forward")
    assert len(set(candidates)) == len(candidates)
    assert BACKEND.heuristic(inputs, H100, "forward") == candidates[0]
    (footprint,) = BACKEND.footprints(inputs, H100, "forward", candidates[0])
    rounds = footprint.blocks / H100.cores
    assert rounds / -(-rounds // 1) > 0.9


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"page_size": 16}, ["multiple of 64"]),
        ({"head_dim": 320, "value_dim": 256}, ["latents of 576"]),
        ({"dtype": "float32"}, ["bfloat16 or float16"]),
        ({"kv_dtype": "float8_e4m3fn", "scale": "tensor"}, ["key_scale", "query's dtype"]),
        ({"sliding_window": 40}, ["left=40"]),
        ({"logits_soft_cap": 20.0}, ["logits_soft_cap=20.0"]),
        ({"alibi": True}, ["alibi_slopes"]),
    ],
)
def test_reasons(fields: dict[str, Any], reasons: list[str]):
    found = BACKEND.not_supported_reasons(structs_of(**fields), H100, "forward")
    assert all(reason in why for reason, why in zip(reasons, found, strict=True)), found


def test_reasons_of_devices_and_directions():
    assert "9.0" in BACKEND.forward_reasons(structs_of(), A100)[0]
    assert BACKEND.not_supported_reasons(structs_of(), H100, "backward")


def test_params():
    params = HopperLatentParams(3, 1)
    assert from_json(to_json(params), HopperLatentParams) == params
    for wrong in (0, 1025, True, 2.0):
        with pytest.raises(ValueError, match="ranges"):
            HopperLatentParams(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetched"):
        HopperLatentParams(1, -1)
    with pytest.raises(ValueError, match="cluster"):
        HopperLatentParams(1, 2, 4)


@pytest.mark.parametrize(("heads", "cluster"), [(16, 1), (128, 2), (192, 1)])
def test_tiles_of_rows_that_make_no_clusters(heads: int, cluster: int):
    inputs = structs_of(heads=heads)
    assert BACKEND.heuristic(inputs, H100, "forward").cluster == cluster
    assert bool(BACKEND.config_reasons(inputs, H100, "forward", HopperLatentParams(None, 2, 2))) == (cluster == 1)


def test_params_of_version_0_1():
    """Splits of each sequence became ranges of all of them: as many as fill the device."""
    text = to_json(HopperLatentParams(None, 4)).replace('"ranges": null', '"num_key_splits": 8')
    assert "num_key_splits" in text
    assert from_json(text, HopperLatentParams) == HopperLatentParams(None, 4)


def test_few_long_sequences_fill_the_card():
    inputs = structs_of(sequences=1, kv_length=1 << 17, heads=128)
    (footprint,) = BACKEND.footprints(inputs, H100, "forward", BACKEND.heuristic(inputs, H100, "forward"))
    assert footprint.blocks == H100.cores


def test_row_tiles_that_do_not_divide_the_card():
    """70 of them: several rounds of CTAs, or half of the card would idle."""
    ranges = filling_ranges(structs_of(sequences=4, kv_length=1 << 16, heads=70, q_lengths=(64,)), H100)
    rounds = 70 * ranges / H100.cores
    assert rounds / -(-rounds // 1) > 0.9


def test_blocks_beyond_int32_are_declined():
    inputs = structs_of()
    many = dataclasses.replace(inputs, page_table=jax.ShapeDtypeStruct((2, 1 << 30), jnp.int32))
    assert "blocks" in BACKEND.not_supported_reasons(many, H100, "forward")[0]
