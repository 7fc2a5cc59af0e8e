"""The tables of variants on CUTLASS's example 41: counts, names, order, sources, and which variant a problem gets."""

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.cuda import CudaKernel, generate, library
from tilewright.kernels.cuda.devices import device_values
from tilewright.kernels.cuda.table import Variant
from tilewright.kernels.flash_attention.cuda import cutlass_variants, selection
from tilewright.kernels.flash_attention.cuda.cutlass_variants import (
    BACKWARD,
    DTYPES,
    FIELDS,
    FORWARD,
    BackwardVariant,
    ForwardVariant,
)
from tilewright.ops.types import Device

GOLDEN = Path(__file__).with_name("golden")


def counts(variants: list) -> dict[str, list[int]]:
    found = Counter((variant.dtype, variant.sm_range[0]) for variant in variants)
    return {dtype: [found[dtype, low] for low in (50, 70, 75, 80)] for dtype in DTYPES}


def test_forward_enumeration():
    variants = ForwardVariant.get_all()
    assert (len(variants), len({variant.group for variant in variants})) == (45, 5)
    assert counts(variants) == {"f32": [6, 6, 6, 3], "f16": [6, 6, 6, 3], "bf16": [0, 0, 0, 3]}
    assert {variant.sm_range for variant in variants} == {(50, 70), (70, 75), (75, 80), (80, 100)}


def test_backward_enumeration():
    variants = BackwardVariant.get_all()
    assert (len(variants), len({variant.group for variant in variants})) == (162, 42)
    assert counts(variants) == {"f32": [16, 16, 16, 12], "f16": [16, 28, 24, 17], "bf16": [0, 0, 0, 17]}
    special = [variant for variant in variants if variant.capabilities]
    assert [(v.block_i, v.block_j, v.max_dim, v.capabilities) for v in special] == [(128, 64, 96, (86, 89))] * 2


def test_names():
    names = {variant.name for variant in FORWARD.variants}
    assert {
        "fmha_cutlassF_f32_notaligned_32x128_gmem_sm50",
        "fmha_cutlassF_f16_aligned_32x128_rf_sm75",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80",
        "fmha_cutlassF_bf16_aligned_64x64_rf_plain_sm80",
    } <= names
    names = {variant.name for variant in BACKWARD.variants}
    assert {
        "fmha_cutlassB_f16_aligned_64x64_k32_dropout_sm50",
        "fmha_cutlassB_bf16_aligned_128x128_k128_seqaligned_sm80",
        "fmha_cutlassB_f16_aligned_128x64_k96_sm80",
        "fmha_cutlassB_f32_aligned_128x64_k65536_sm80",
    } <= names


def order(variants: tuple[Variant, ...], dtype: str, low: int) -> list[str]:
    mine = [v for v in variants if (v.dtype, v.sm_range[0]) == (dtype, low)]  # type: ignore[attr-defined]
    return [variant.name.removeprefix("fmha_cutlass").removesuffix(f"_sm{low}") for variant in mine]


def test_order():
    assert order(FORWARD.variants, "f16", 75) == [
        "F_f16_aligned_64x64_rf_plain",
        "F_f16_aligned_64x64_rf",
        "F_f16_aligned_32x128_rf_plain",
        "F_f16_aligned_32x128_rf",
        "F_f16_aligned_32x128_gmem_plain",
        "F_f16_aligned_32x128_gmem",
        "F_f16_notaligned_64x64_rf",
        "F_f16_notaligned_32x128_rf",
        "F_f16_notaligned_32x128_gmem",
    ]
    assert order(BACKWARD.variants, "bf16", 80) == [
        "B_bf16_aligned_64x64_k32_seqaligned",
        "B_bf16_aligned_64x64_k32",
        "B_bf16_aligned_64x64_k64_seqaligned",
        "B_bf16_aligned_64x64_k64",
        "B_bf16_aligned_128x64_k96",
        "B_bf16_aligned_128x128_k128_seqaligned",
        "B_bf16_aligned_128x128_k128",
        "B_bf16_aligned_64x64_k128_seqaligned",
        "B_bf16_aligned_64x64_k128",
        "B_bf16_aligned_128x64_k65536",
        "B_bf16_aligned_64x64_k65536",
        "B_bf16_aligned_64x64_k32_dropout",
        "B_bf16_aligned_64x64_k64_dropout",
        "B_bf16_aligned_128x128_k128_dropout",
        "B_bf16_aligned_64x64_k128_dropout",
        "B_bf16_aligned_128x64_k65536_dropout",
        "B_bf16_aligned_64x64_k65536_dropout",
    ]


@pytest.mark.parametrize("table", sum(selection.TABLES.values(), ()), ids=lambda table: table.name)
def test_the_sources_are_those_of_the_golden_files(table):
    """Two files whole, all by their hashes."""
    made = generate(table)
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(made.items())}
    whole = {FORWARD.name: "f32_notaligned.cu", BACKWARD.name: "f16_aligned_k96.cu"}.get(table.name)
    files = {f"{table.name}.json": json.dumps(hashes, indent=1) + "\n"}
    if whole is not None:
        files[f"{table.name}_{whole}"] = made[whole]
    for name, text in files.items():
        if os.environ.get("TILEWRIGHT_WRITE_GOLDEN"):
            (GOLDEN / name).write_text(text)
        assert (GOLDEN / name).read_text() == text


def fields(**given: int) -> dict[str, int]:
    plain = dict.fromkeys(FIELDS, 0) | {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 100, "kv_length": 200}
    plain |= {"lowest": -(1 << 30), "highest": 0, "head_dim": 64, "value_dim": 64, "dtype": 1}
    return plain | given


PROBLEMS = st.fixed_dictionaries(
    {
        "head_dim": st.integers(1, 300),
        "value_dim": st.integers(1, 300),
        "q_length": st.sampled_from([64, 100, 128, 192]),
        "kv_length": st.sampled_from([64, 100, 128, 192]),
        "batch": st.sampled_from([1, 65535, 65536]),
        "dtype": st.integers(0, 2),
        **{name: st.integers(0, 1) for name in ("bias", "rows", "mask", "soft_cap", "dropout", "deterministic")},
    }
).map(lambda given: fields(**given))
CAPABILITIES = st.sampled_from([(5, 2), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])


def facts_of(variant: ForwardVariant | BackwardVariant) -> dict[str, int]:
    """Made up, but such that every kind of requirement is decisive for some problem."""
    aligned = 4 if variant.dtype == "f32" else 8
    dim = min(variant.max_dim, 256)
    alignment = aligned if variant.aligned else 1 if variant.sm_range[0] < 70 else 2
    return {"shared_bytes": dim << 9, "threads": 128, "alignment": alignment}


def meets(variant: ForwardVariant | BackwardVariant, problem: Mapping[str, int], device: Device) -> bool:
    """Written out, from the facts in the comments of the tables' classes."""
    known = device_values(device)
    assert known is not None
    low, high = variant.sm_range
    facts = facts_of(variant)
    dims = problem["head_dim"], problem["value_dim"]
    if not low <= known["capability"] < high or DTYPES[problem["dtype"]] != variant.dtype:
        return False
    if max(dims) > variant.max_dim or facts["shared_bytes"] > known["shared_memory"]:
        return False
    vector = 8 if variant.dtype != "f32" else 4
    stores = vector if low >= (80 if variant.dtype == "f32" else 70) else 1
    if any(dim % facts["alignment"] or dim % stores for dim in dims):
        return False
    if max(problem["batch"], problem["heads"]) > 65535:
        return False
    if isinstance(variant, ForwardVariant):
        modified = any(problem[name] for name in ("bias", "rows", "mask", "soft_cap"))
        return (variant.supports_bias or not modified) and (variant.supports_dropout or not problem["dropout"])
    if variant.whole_blocks and (problem["q_length"] % variant.block_i or problem["kv_length"] % variant.block_j):
        return False
    if variant.max_dim == 96 and device.capability not in ((8, 6), (8, 9)):
        return False
    return variant.apply_dropout or not problem["dropout"]


@pytest.mark.parametrize("table", [FORWARD, BACKWARD], ids=lambda table: table.name)
@given(problem=PROBLEMS, capability=CAPABILITIES)
def test_the_selector_takes_the_first_that_fits(table, problem, capability):
    device = Device("gpu", "some GPU", capability, 100)
    compiled = library.Library("target", {each.name: facts_of(each) for each in table.variants}, mock.Mock(), {})
    with mock.patch.object(library, "loaded", return_value=compiled):
        variant, reasons = CudaKernel(table).select(problem, device)
    able = [each for each in table.variants if meets(each, problem, device)]
    # Its own order, by the documented keys.
    keys = [(not v.aligned, v.max_dim, v.block_k, v.supports_dropout, v.supports_bias) for v in able] if (
        table is FORWARD
    ) else [(not v.aligned, v.apply_dropout, v.max_dim, -v.block_i, not v.whole_blocks) for v in able]  # fmt: skip
    assert keys == sorted(keys)
    assert variant == (able[0] if able else None)
    assert all(reasons[name] for name in reasons)


def test_padded_fields():
    odd = fields(head_dim=20, value_dim=64)
    assert [each["head_dim"] for each in selection.padded_fields(odd, 2)] == [20, 24]
    assert [each["head_dim"] for each in selection.padded_fields(odd, 4)] == [20]
    assert len(list(selection.padded_fields(fields(), 2))) == 1


def test_every_field_is_given():
    """The order of the fields is the C++ side's; the names are this side's."""
    assert set(fields()) == set(cutlass_variants.FIELDS)
    assert len(set(itertools.chain(FIELDS))) == len(FIELDS)
