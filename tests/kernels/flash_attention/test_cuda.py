"""Attention in CUDA C++ as far as a CPU can prove it: compiled, loaded, asked for its facts, selected and lowered."""

import collections
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels import conftest
from tests.kernels.conftest import A100, H100
from tests.kernels.flash_attention.conformance import CASES
from tests.support.machine_code import instructions
from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda import BuildCache, CudaKernel, Group, build, library, toolchain
from tilewright.kernels.cuda.devices import device_values
from tilewright.kernels.cuda.table import VariantTable
from tilewright.kernels.flash_attention.cuda import selection
from tilewright.kernels.flash_attention.cuda.backend import CudaBackwardParams, CudaFlashAttention, CudaForwardParams
from tilewright.kernels.flash_attention.cuda.cutlass_variants import BACKWARD, FIELDS, FORWARD
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.masks import CausalMask
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.serialize import from_json, to_json

BACKEND = CudaFlashAttention()
GROUPS = {"forward": (FORWARD, "bf16_aligned_plain"), "backward": (BACKWARD, "bf16_aligned_k32_dropout")}

MISSING = toolchain.missing(80, FORWARD.packages) + toolchain.missing(90, FORWARD.packages)
needs_nvcc = conftest.needs_nvcc(MISSING)


def call_of(dtype: Any = jnp.bfloat16, head_dim: int = 64, length: int = 128, **kwargs: Any) -> AttentionInputs:
    arrays = [jax.ShapeDtypeStruct((2, length, heads, head_dim), dtype) for heads in (4, 2, 2)]
    return FlashAttention().prepare(*arrays, **kwargs)


@pytest.fixture
def in_real_cache(real_cache: BuildCache, monkeypatch: pytest.MonkeyPatch) -> BuildCache:
    """The backend's kernels build there, those on CUTLASS's example 41 alone: the others take minutes to compile."""
    made = {d: (CudaKernel(selection.TABLES[d][-1], real_cache),) for d in selection.TABLES}
    monkeypatch.setattr(selection, "kernels", made.__getitem__)
    return real_cache


@needs_nvcc
@pytest.mark.parametrize(("direction", "device"), list(itertools.product(GROUPS, [A100, H100])))
def test_a_group_is_compiled_loaded_and_says_its_facts(direction: Direction, device: Device, in_real_cache: BuildCache):
    table, name = GROUPS[direction]
    known = device_values(device)
    assert known is not None
    group = Group(table, name, known["capability"])
    made = library.load(group, in_real_cache, build([group], cache=in_real_cache)[group])
    variants = [variant for variant in table.in_group(name) if variant.runs_on(known["capability"])]
    assert list(made.facts) == [variant.name for variant in variants]
    for variant in variants:
        facts = made.facts[variant.name]
        rows, columns = re.search(r"_(\d+)x(\d+)_", variant.name).groups()  # type: ignore[union-attr]
        assert facts["threads"] == int(rows) * int(columns) // 32  # a warp has 32 × 32 logits
        assert facts["alignment"] == 8
        assert 0 < facts["shared_bytes"] <= known["shared_memory"]


@needs_nvcc
def test_a_kernel_with_one_stage_waits_as_often_as_its_source_says(real_cache: BuildCache):
    """For keys, for values, and before each is copied over: nothing here runs it, and on a GPU such a race hides."""
    (table,) = {table for table in selection.TABLES["forward"] if table.name == "flash_attention_ampere_forward"}
    group = Group(table, "f32_k128_plain", 90)
    waits = collections.Counter(
        name.partition(".")[0] for name in instructions(build([group], cache=real_cache)[group])
    )
    assert {name: waits[name] for name in ("BAR", "LDGDEPBAR", "DEPBAR")} == {"BAR": 4, "LDGDEPBAR": 3, "DEPBAR": 3}


@needs_nvcc
def test_workspaces(in_real_cache: BuildCache):
    fields = selection.problem_fields(call_of(head_dim=32, length=100), False)
    kernel = selection.kernels("forward")[-1]
    sizes = [
        kernel.workspace(variant, {**fields, "value_dim": 200}, H100)
        for variant in FORWARD.in_group("bf16_aligned_plain")
    ]
    # Only the output that is kept in global memory is kept there in float32.
    assert sizes == [0, 0, 2 * 100 * 4 * 200 * 4]


@needs_nvcc
def test_workspaces_of_the_backward_pass(in_real_cache: BuildCache):
    fields = selection.problem_fields(call_of(head_dim=32, length=100), False)
    (variant,) = BACKWARD.in_group("bf16_aligned_k32_dropout")
    kernel = selection.kernels("backward")[-1]
    fields = {**fields, "dropout": 1}
    terms, tiles = 2 * 2 * 4 * 100, 2 * 4 * 2  # two floats for each row, and the tiles of 64 queries
    assert kernel.workspace(variant, {**fields, "deterministic": 1}, H100) == 4 * terms
    assert kernel.workspace(variant, fields, H100) == 4 * (terms + tiles * 64 * 64)


def lowered(function: Any, *arrays: Any) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def variants_in(text: str) -> list[str]:
    return re.findall(r'variant = "(\w+)"', text)


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100", "in_real_cache")
def test_calls_are_lowered_for_cuda():
    x = [jax.ShapeDtypeStruct((2, 128, heads, 24), jnp.bfloat16) for heads in (4, 2, 2)]

    forward = "fmha_cutlassF_bf16_aligned_64x64_rf_plain_sm80"
    text = lowered(lambda *a: flash_attention(*a, causal=True, platform="cuda"), *x)
    assert variants_in(text) == [forward]
    assert "tilewright_flash_attention_forward_bf16_aligned_plain_sm_90a" in text


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100", "in_real_cache")
def test_the_backward_pass_is_lowered_for_cuda():
    x = [jax.ShapeDtypeStruct((2, 128, heads, 24), jnp.bfloat16) for heads in (4, 2, 2)]
    text = lowered(lambda *a: BACKEND.backward(*residuals(*a), CudaBackwardParams()), *x)
    assert variants_in(text) == ["fmha_cutlassB_bf16_aligned_64x64_k32_dropout_sm80"]


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100", "in_real_cache")
def test_a_negative_scale_is_turned_into_one_of_the_query():
    x = [jax.ShapeDtypeStruct((2, 128, heads, 24), jnp.bfloat16) for heads in (4, 2, 2)]
    text = lowered(lambda *a: flash_attention(*a, softmax_scale=-0.5, platform="cuda"), *x)
    assert "scale = 5.000000e-01 : f32" in text
    assert "stablehlo.negate" in text


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100", "in_real_cache")
@pytest.mark.parametrize("checked", [True, False])
def test_inside_shard_map(checked: bool):
    """Each device runs the kernels on its part; where types vary, the gradient of what is shared is summed."""
    backward = CudaBackwardParams("fmha_cutlassB_bf16_aligned_64x64_k32_dropout_sm80")
    shapes = [(4, 128, 4, 24), (1, 128, 2, 24), (1, 128, 2, 24)]

    def loss(query: Any, *shared: Any) -> Any:
        keys = [jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in shared]
        cfg = PerDirection(backward=Choice("cuda", backward))
        return flash_attention(query, *keys, causal=True, platform="cuda", cfg=cfg).astype(jnp.float32).sum()

    mapped = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=(P("x"), P(), P()),
        out_specs=(P("x"), P() if checked else P("x")),
        check_vma=checked,
    )
    text = lowered(mapped, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert variants_in(text)[1] == backward.variant
    assert "tensor<2x128x4x24xbf16>" in text
    assert ("stablehlo.all_reduce" in text) == checked


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100", "in_real_cache")
def test_on_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    split = NamedSharding(mesh, P("x"))
    x = [jax.ShapeDtypeStruct((4, 128, heads, 24), jnp.bfloat16, sharding=split) for heads in (4, 2, 2)]
    with jax.set_mesh(mesh):
        text = lowered(lambda *a: flash_attention(*a, platform="cuda"), *x)
    assert len(variants_in(text)) == 1
    assert re.search(r"custom_call @tilewright_\w+\(.*: \(tensor<2x128x4x24xbf16>", text)


def residuals(*arrays: Any) -> tuple[Any, Any, Any]:
    """Inputs with dropout, results and cotangents."""
    inputs = FlashAttention().prepare(*arrays, causal=True, dropout_prob=0.1, dropout_seed=3)
    out = arrays[0] * 2
    return inputs, (out, jnp.zeros((2, 4, 128), jnp.float32)), (out, None)


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100", "in_real_cache")
def test_a_mapped_axis_becomes_a_part_of_the_batch():
    x = [jax.ShapeDtypeStruct((3, 2, 128, heads, 24), jnp.bfloat16) for heads in (4, 2, 2)]
    sinks = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    attend = lambda *a: flash_attention(*a[:3], softmax_aux=None if len(a) == 3 else a[3], platform="cuda")
    text = lowered(jax.vmap(attend), *x)
    assert len(variants_in(text)) == 1
    assert "tensor<6x128x4x24xbf16>" in text
    # What is shared stays one; a bias of which there is one for each element is copied to all of the batch.
    text = lowered(jax.vmap(attend, in_axes=(0, None, None)), x[0], *(s.update(shape=s.shape[1:]) for s in x[1:]))
    assert len(variants_in(text)) == 1
    # Sinks have no batch.
    text = lowered(jax.vmap(attend), *x, sinks)
    assert "stablehlo.while" in text


def test_reasons():
    assert "compute capability" in BACKEND.not_supported_reasons(call_of(), Device("cpu", "cpu"), "forward")[0]
    kepler = Device("gpu", "NVIDIA K80", (3, 7), 13)
    assert BACKEND.not_supported_reasons(call_of(), kepler, "forward")[-1].endswith("for compute capability 3.7")
    odd = call_of(np.float64)
    assert "got dtype=float64" in BACKEND.not_supported_reasons(odd, H100, "forward")[0]
    long = call_of(length=1 << 30)
    assert "32 bits" in BACKEND.not_supported_reasons(long, H100, "backward")[0]


@pytest.mark.usefixtures("on_an_h100")
def test_without_a_compiler_it_says_so_and_the_call_goes_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "missing", lambda *_: ["there is no nvcc"])
    for device in (A100, H100):  # and nothing about tables that are for other dtypes
        for dtype in (jnp.float16, jnp.float32):
            assert BACKEND.not_supported_reasons(call_of(dtype), device, "forward") == ["there is no nvcc"]
    x = [jnp.zeros((1, 16, 2, 16), jnp.float32)] * 3
    assert "stablehlo.custom_call @tilewright" not in lowered(flash_attention, *x)
    with pytest.raises(UnsupportedError, match="there is no nvcc"):
        lowered(lambda *a: flash_attention(*a, platform="cuda"), *x)


@pytest.mark.parametrize("device", [A100, H100], ids=["A100", "H100"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_it_declares_every_case_of_the_conformance_suite(
    direction: Direction, device: Device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    for case in CASES[::4]:
        inputs = case.prepared(seed=0).structs
        assert BACKEND.not_supported_reasons(inputs, device, direction) == []
        if 0 not in inputs.score_shape:
            found = BACKEND.candidates(inputs, device, direction)
            assert len(found) == len(set(found)) >= 2
            for params in found:
                assert BACKEND.config_reasons(inputs, device, direction, params) == []
                choice = Choice("cuda", params)
                assert from_json(to_json(choice), Choice) == choice


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_drops_is_for_calls_that_drop(direction: Direction, monkeypatch: pytest.MonkeyPatch):
    """It reads the keys of a generator, which other calls do not have: on a GPU an illegal address."""
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    for drops in (False, True):
        inputs = call_of(**({"dropout_prob": 0.5, "dropout_seed": 1} if drops else {}))
        params = BACKEND.candidates(inputs, H100, direction)
        ampere = [each.variant for each in params if each.variant is not None and "ampere" in each.variant]
        assert ampere
        assert all(("_dropout_" in name) == drops for name in ampere)
        assert len(params) < 20
        fields = selection.problem_fields(inputs, False)
        for kernel, variant, each in selection.each_variant(direction, fields, 2):
            if "ampere" in variant.name and ("_dropout_" in variant.name) != drops:
                assert any("dropout" in why for why in kernel.variant_reasons(variant, each, H100))


def test_a_variant_that_is_asked_for_by_name_must_exist_and_fit():
    inputs = call_of(head_dim=128)
    said = BACKEND.config_reasons(inputs, H100, "forward", CudaForwardParams("nonesuch"))
    assert said == ["there is no variant 'nonesuch'"]
    narrow = CudaForwardParams("fmha_cutlassF_bf16_aligned_64x64_rf_sm80")
    assert any("head_dim must be at most 64" in why for why in BACKEND.config_reasons(inputs, H100, "forward", narrow))
    with pytest.raises(ValueError, match="no CUDA variant 'nonesuch'"):
        selection.select("forward", selection.problem_fields(inputs, False), 2, H100, "nonesuch")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_kernel_for_hopper_is_for_wide_heads_alone(dtype: Any, monkeypatch: pytest.MonkeyPatch):
    """It computes 512 columns whatever the head dim is."""
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    for dim in (8, 64, 128, 255, 256, 257, 320, 512, 520):
        (group,) = BACKEND.builds(call_of(dtype, head_dim=dim, causal=True), H100, "forward", CudaForwardParams())
        kind = "ampere_" if dim <= 512 else ""
        if 256 < dim <= 512 and dtype != jnp.float32:
            kind = "hopper_wide_"
        assert str(group).startswith(f"flash_attention_{kind}forward ")


@pytest.mark.parametrize(("capability", "least"), [((8, 0), 512), ((8, 6), 256), ((9, 0), None)])
def test_nothing_is_compiled_to_find_out_that_it_has_too_little_shared_memory(
    capability: tuple[int, int], least: int | None, monkeypatch: pytest.MonkeyPatch
):
    """The float32 backward pass at wide head dims, where no tile of ours is small enough for every device."""
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    device = Device("gpu", "a GPU", capability, 80)
    kernel = selection.kernels("backward")[0]
    for dim in (64, 128, 256, 512):
        fields = selection.problem_fields(call_of(jnp.float32, head_dim=dim), False)
        assert bool(kernel.reasons(fields, device)) == (least is not None and dim >= least)


@pytest.mark.parametrize(
    ("precision", "default", "exact"),
    [
        (None, None, 0),
        (None, "highest", 1),
        (None, "tensorfloat32", 0),
        ("highest", None, 1),
        ("default", "highest", 0),
        ("F32_F32_F32", None, 1),
        ("TF32_TF32_F32", None, 0),
        ("TF32_TF32_F32_X3", None, 1),
    ],
)
def test_precision(precision: Any, default: Any, exact: int):
    with jax.default_matmul_precision(default):
        fields = selection.problem_fields(call_of(jnp.float32, precision=precision), False)
        assert selection.problem_fields(call_of(jnp.float16, precision=precision), False)["exact"] == 0
    assert fields["exact"] == exact


def test_fields_are_those_of_the_tables():
    inputs = call_of().replace(mask=CausalMask(3))
    fields = selection.problem_fields(inputs, True)
    assert tuple(fields) == FIELDS
    assert (fields["lowest"], fields["highest"], fields["deterministic"]) == (-(1 << 30), 3, 1)
    tables: list[VariantTable] = [table for tables in selection.TABLES.values() for table in tables]
    assert all(table.fields == FIELDS for table in tables)
