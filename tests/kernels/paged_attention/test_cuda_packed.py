"""Packed queries in CUDA C++ as far as a CPU can prove it: reasons, compiled, asked for its facts, lowered."""

import collections
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import conftest
from tests.kernels.conftest import H100
from tests.kernels.paged_attention.conformance import PACKED_ON_HOPPER, packed_structs
from tests.support.machine_code import instructions
from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda import BuildCache, CudaKernel, Group, build, toolchain
from tilewright.kernels.cuda.kernel import recording_groups
from tilewright.kernels.paged_attention.cuda import packed as cuda_packed
from tilewright.kernels.paged_attention.cuda.packed import (
    MAX_SEQUENCES,
    TABLE,
    CudaPackedAttention,
    CudaPackedParams,
    problem_fields,
)
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.modules import ragged_page_attention
from tilewright.ops.utils.serialize import from_json, to_json

BACKEND = CudaPackedAttention()

MISSING = toolchain.missing(90, TABLE.packages)
needs_nvcc = conftest.needs_nvcc(MISSING)


@pytest.fixture
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "float16", "page_size": 16},
        {"head_dim": 64, "page_size": 256},
        {"heads": 64},
        {"sliding_window": 40},
        {"causal": False},
    ],
)
def test_it_serves(fields: dict[str, Any]):
    assert BACKEND.not_supported_reasons(packed_structs(**fields), H100, "forward") == []


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"softmax_scale": -0.5}, "positive scale"),
        ({"softmax_scale": 0.0}, "positive scale"),
        ({"sequences": MAX_SEQUENCES + 1, "kv_length": 1, "q_lengths": (1,), "page_size": 16}, "sequences"),
    ],
)
def test_reasons_of_its_own(fields: dict[str, Any], reason: str):
    (why,) = BACKEND.not_supported_reasons(packed_structs(**fields), H100, "forward")
    assert reason in why


@pytest.mark.usefixtures("with_compiler")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "missing", lambda *_: ["there is no nvcc"])
    assert BACKEND.not_supported_reasons(packed_structs(), H100, "forward") == ["there is no nvcc"]
    assert BACKEND.footprints(packed_structs(), H100, "forward", CudaPackedParams())[0].blocks == H100.cores


def test_fields():
    assert problem_fields(packed_structs(sliding_window=(5, None), page_size=16)) == {
        "tokens": 42, "sequences": 3, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": 1,
        "num_pages": packed_structs(page_size=16).num_pages, "page_size": 16, "columns": 19, "left": 5, "right": 0,
    }  # fmt: skip
    assert problem_fields(packed_structs(causal=False))["left"] == FAR
    assert from_json(to_json(CudaPackedParams()), CudaPackedParams) == CudaPackedParams()


@pytest.mark.usefixtures("with_compiler", "on_an_h100")
def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch):
    """The attributes in the dtypes that C++ asks for: of another one a call fails, or the scale is rounded."""
    given = []

    def call(*arguments: Any) -> list[Any]:
        *_, outputs, attributes = arguments
        given.append(attributes)
        return [jnp.zeros(each.shape, each.dtype) for each in outputs]

    monkeypatch.setattr(CudaKernel, "call", call)
    with recording_groups():
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, CudaPackedParams()), packed_structs(softmax_scale=0.1))
    ((name, scale),) = given[0].items()
    assert (name, scale, scale.dtype) == ("scale", np.float32(0.1), np.float32)


@needs_nvcc
@pytest.mark.usefixtures("on_an_h100")
def test_it_is_compiled_says_its_facts_and_is_lowered(real_cache: BuildCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_packed, "KERNEL", CudaKernel(TABLE, real_cache))
    fields = problem_fields(packed_structs())
    variant, _ = cuda_packed.KERNEL.select(fields, H100)
    assert variant is not None
    facts = cuda_packed.KERNEL.facts(variant, H100)
    assert facts["threads"] == 512
    assert 216 << 10 < facts["shared_bytes"] <= 227 << 10
    # The plan, a counter for each head whose keys are cut, and results of parts: eight rows in float32, with two sums.
    segments = 2 * (fields["sequences"] + 2)
    blocks = fields["sequences"] * -(-fields["columns"] * fields["page_size"] // 64)
    parts = math.ceil(4 / 3 * 144 * (1 + math.log(blocks)))
    counters = -(-(32 * (segments + 1) + 4 * parts) // 128) * 128
    assert cuda_packed.KERNEL.workspace(variant, fields, H100) == counters + parts * 4 * 8 * (128 + 2)

    args, keywords = RaggedPageCase("", **PACKED_ON_HOPPER).arguments()
    call = jax.jit(lambda *args: ragged_page_attention(*args, **keywords, platform="cuda"))
    text = call.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'variant = "(\w+)"', text) == ["packed_hopper_bf16_k128"]
    (scale,) = re.findall(r"scale = ([0-9.e+-]+) : f32", text)
    assert np.float32(scale) == np.float32(128**-0.5)
    with pytest.raises(UnsupportedError, match="logits_soft_cap"):
        ragged_page_attention(*args, **keywords, logits_soft_cap=3.0, platform="cuda")


@needs_nvcc
def test_products_of_the_machine_code(real_cache: BuildCache):
    """Decoded tokens have products of eight columns, keys or head dims by 64 rows, and no register is spilled."""
    group = Group(TABLE, "bf16_k128", 90)
    names = instructions(build([group], cache=real_cache)[group])
    products = collections.Counter(name for name in names if re.match("[HIQ]G?MMA", name))
    # Of decoded tokens 128 head dims in steps of 16, and 64 keys in steps of 16 for two times 64 head dims. Of chunks
    # 128 head dims and 128 keys in steps of 16, for an item's first and last block and for the others.
    assert products == {"HGMMA.64x8x16.F32.BF16": 8 + 4 * 2, "HGMMA.64x128x16.F32.BF16": 2 * 8 + 2 * 8}
    assert not {name for name in names if name.startswith(("STL", "LDL"))}
    # Of the barriers one in each place that the source has; of the fences those behind which a part is counted.
    waits = collections.Counter(name.partition(".")[0] for name in names)
    assert {name: waits[name] for name in ("BAR", "MEMBAR", "FENCE")} == {"BAR": 17, "MEMBAR": 10, "FENCE": 8}
