"""The dispatcher: which variant it takes, when it builds, and how it explains itself."""

import dataclasses
import itertools
import os
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.conftest import A100, H100
from tests.support import fake_nvcc
from tests.support.plain_variant import PlainVariant
from tilewright.errors import BuildError
from tilewright.kernels.cuda import (
    AnyOf,
    Compare,
    CudaKernel,
    DeviceField,
    Fact,
    Field,
    Group,
    MultipleOf,
    Values,
    VariantTable,
    build,
    kernel,
    library,
)
from tilewright.kernels.cuda.devices import device_values
from tilewright.ops.types import Device

V100 = Device("gpu", "NVIDIA V100", (7, 0), 80)
CPU = Device("cpu", "cpu")


def test_the_first_variant_that_can_is_taken(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    assert ours.reasons({"rows": 3, "width": 80}, H100) == []
    assert nvcc.compilations() == []
    variant, reasons = ours.select({"rows": 3, "width": 80}, H100)
    assert variant.name == "large_fast"
    assert reasons == {"small_fast": ["width must be at most 64, got width=80"]}
    assert len(nvcc.compilations()) == 1  # the other group was not needed
    assert ours.facts(variant, H100) == {"shared_bytes": 2048, "threads": 128, "alignment": 4}
    assert ours.workspace(variant, {"rows": 3, "width": 80}, H100) == 241


def test_facts_decide_once_a_group_is_built(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    problem = {"rows": 3, "width": 62}
    assert ours.select(problem, H100)[0].name == "small_fast"
    odd = {"rows": 3, "width": 61}
    assert ours.reasons(odd, H100) == []  # not known yet of the slow group
    variant, reasons = ours.select(odd, H100)
    assert variant is None
    assert set(reasons) == {variant.name for variant in table.variants}
    assert reasons["small_fast"] == ["width must be a multiple of alignment, got width=61, alignment=2"]
    assert ours.reasons(odd, H100) == [
        "width must be a multiple of alignment, got width=61, alignment=2",
        "width must be a multiple of alignment, got width=61, alignment=4",
    ]
    assert len(nvcc.compilations()) == 2


def test_what_no_variant_can_is_told_without_building(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    assert ours.reasons({"rows": 1, "width": 300}, H100) == ["width must be at most 256, got width=300"]
    assert ours.closest({"rows": 1, "width": 300}, H100)[0] == 1
    assert ours.closest({"rows": 1, "width": 8}, H100) == (0, [])
    assert ours.select({"rows": 1, "width": 300}, A100)[0] is None
    assert ours.select({"rows": 1, "width": 300}, A100)[1]["small_fast"] == [
        "capability must be in [90, 100), got capability=80",
        "width must be at most 64, got width=300",
    ]
    assert nvcc.compilations() == []


def test_one_variant_can_be_asked_for(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    small, large = table.variants[:2]
    odd = {"rows": 1, "width": 61}
    assert ours.variant_reasons(large, odd, H100) == []
    assert nvcc.compilations() == []
    assert ours.variant_reasons(small, {"rows": 1, "width": 80}, H100) == ["width must be at most 64, got width=80"]
    against = ["width must be a multiple of alignment, got width=61, alignment=4"]
    assert ours.variant_reasons(large, odd, H100, compiled=True) == against
    assert ours.variant_reasons(large, odd, H100) == against  # now it is known
    assert ours.variant_reasons(large, odd, CPU) == ["cpu has no CUDA compute capability that is known here"]


def test_devices_that_no_variant_is_for(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    assert ours.reasons({"rows": 1, "width": 8}, CPU) == ["cpu has no CUDA compute capability that is known here"]
    assert ours.select({"rows": 1, "width": 8}, CPU)[0] is None
    ancient = Device("gpu", "NVIDIA P100", (6, 0), 56)
    assert ours.reasons({"rows": 1, "width": 8}, ancient) == ["no variant of sample is for compute capability 6.0"]


def test_what_the_compiler_no_longer_compiles_is_a_reason(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    assert ours.reasons({"rows": 1, "width": 8}, V100) == ["nvcc 99.1.0 compiles for 80, 90, not for 70"]
    variant, reasons = ours.select({"rows": 1, "width": 8}, V100)
    assert variant is None
    assert reasons["small_slow"] == ["nvcc 99.1.0 compiles for 80, 90, not for 70"]


def test_without_a_compiler_the_next_variant_that_is_built_is_taken(nvcc, cache, table, tmp_path, monkeypatch):
    build([Group(table, "slow", 90)], cache=cache)
    fake_nvcc.take_away(monkeypatch, tmp_path)
    ours = CudaKernel(table, cache)
    problem = {"rows": 1, "width": 8}
    assert ours.reasons(problem, H100) == []
    variant, reasons = ours.select(problem, H100)
    assert variant.name == "small_slow"
    assert "there is no nvcc" in reasons["small_fast"][0]


def test_without_a_compiler_nothing_runs(cache, table, no_nvcc):
    ours = CudaKernel(table, cache)
    (reason,) = ours.reasons({"rows": 1, "width": 8}, H100)
    assert "there is no nvcc" in reason
    assert ours.select({"rows": 1, "width": 8}, H100)[0] is None


def test_a_compiler_that_fails_is_an_error_with_its_message(nvcc, cache, table, monkeypatch):
    monkeypatch.setenv("FAKE_NVCC_ERROR", "error: no such thing")
    with pytest.raises(BuildError, match="no such thing"):
        CudaKernel(table, cache).select({"rows": 1, "width": 8}, H100)


def test_a_cache_of_somebody_else_is_a_reason(nvcc, cache, table, monkeypatch):
    cache.path.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(cache.path).st_uid + 1)
    (reason,) = CudaKernel(table, cache).reasons({"rows": 1, "width": 8}, H100)
    assert "belongs to user" in reason


@pytest.mark.parametrize("problem", [{"rows": 1}, {"rows": 1, "width": 2, "depth": 3}, {}])
def test_a_problem_has_the_tables_fields(problem, cache, table):
    for use in (CudaKernel(table, cache).reasons, CudaKernel(table, cache).select):
        with pytest.raises(ValueError, match="has the fields"):
            use(problem, H100)


def test_a_call_is_lowered_for_cuda(nvcc, cache, table):
    ours = CudaKernel(table, cache)
    problem = {"rows": 3, "width": 8}
    variant, _ = ours.select(problem, H100)

    def function(x):
        return ours.call(
            variant,
            problem,
            H100,
            [x],
            [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((3,), jnp.float32)],
            {"scale": np.float32(0.5), "threshold": np.int64(1 << 40)},
        )

    traced = jax.jit(function).trace(jax.ShapeDtypeStruct((3, 8), jnp.bfloat16))
    assert [out.shape for out in traced.out_info] == [(3, 8), (3,)]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for part in (
        "@tilewright_sample_fast_sm_90a_",
        'variant = "small_fast"',
        "problem = dense<[3, 8]> : tensor<2xi64>",
        "scale = 5.000000e-01 : f32",
        "threshold = 1099511627776 : i64",
        "tensor<24xui8>",
    ):
        assert part in text


def test_a_variant_of_another_architecture_is_refused(nvcc, cache, table):
    fast = table.variants[0]
    with pytest.raises(ValueError, match="no CUDA compute capability"):
        CudaKernel(table, cache).facts(fast, CPU)


# The selector against a brute-force walk.


NUMBERS = st.integers(0, 6)
OPERANDS = st.one_of(
    st.sampled_from([Field("a"), Field("b")]),
    st.sampled_from([Fact("threads"), Fact("alignment")]),
    st.just(DeviceField("multiprocessors")),
    NUMBERS,
)
SIMPLE = st.one_of(
    st.builds(Compare, st.sampled_from([Field("a"), Field("b")]), st.sampled_from(["<", "<=", "==", "!="]), OPERANDS),
    st.builds(MultipleOf, st.sampled_from([Field("a"), Field("b")]), OPERANDS),
)
PREDICATES = st.one_of(SIMPLE, st.lists(SIMPLE, min_size=1, max_size=2).map(lambda several: AnyOf(*several)))
RANGES = st.sampled_from(list(itertools.combinations([70, 75, 80, 90, 100], 2)))


VARIANTS = st.builds(
    PlainVariant,
    group=st.sampled_from(["a", "b", "c"]),
    sort_key=st.tuples(st.integers(0, 3)),
    arch_range=RANGES,
    requirements=st.lists(PREDICATES, max_size=3).map(tuple),
)


@given(
    drawn=st.integers(1, 8).flatmap(lambda count: st.lists(VARIANTS, min_size=count, max_size=count)),
    facts=st.lists(
        st.fixed_dictionaries({"shared_bytes": NUMBERS, "threads": NUMBERS, "alignment": NUMBERS}), min_size=8
    ),
    a=NUMBERS,
    b=NUMBERS,
    device=st.sampled_from([H100, A100, V100]),
)
def test_the_selector_against_a_brute_force_walk(drawn, facts, a, b, device):
    variants = [dataclasses.replace(variant, name=f"variant{i}") for i, variant in enumerate(drawn)]
    facts = {variant.name: each for variant, each in zip(variants, facts, strict=False)}
    table = VariantTable("drawn", Path("drawn.cuh"), ("a", "b"), tuple(variants))
    compiled = library.Library("target", facts, mock.Mock(), {})
    known = device_values(device)
    with mock.patch.object(kernel.library, "loaded", return_value=compiled):
        chosen, reasons = CudaKernel(table).select({"a": a, "b": b}, device)
        said = CudaKernel(table).reasons({"a": a, "b": b}, device)

    able = [
        (variant.sort_key, variant.name, variant)
        for variant in variants
        if known["capability"] in range(*variant.arch_range)
        and all(each.holds(Values({"a": a, "b": b}, known, facts[variant.name])) for each in variant.requirements)
    ]
    assert chosen == (min(able, key=lambda each: each[:2])[2] if able else None)
    assert bool(said) == (not able)
    first = [v.name for v in table.variants].index(chosen.name) if chosen else len(variants)
    assert list(reasons) == [variant.name for variant in table.variants[:first]]
    assert all(reasons.values())
