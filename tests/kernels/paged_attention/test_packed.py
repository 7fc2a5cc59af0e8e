"""What the kernels for packed queries on Hopper decline alike, and where they leave a call to others."""

from typing import Any

import pytest

from tests.kernels.conftest import A100, H100
from tests.kernels.paged_attention.conformance import packed_structs
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.paged_attention.cuda.packed import CudaPackedAttention
from tilewright.kernels.paged_attention.hopper.packed_backend import PallasGpuPackedAttention


@pytest.fixture(params=[CudaPackedAttention(), PallasGpuPackedAttention()], ids=["cuda", "pallas"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    return request.param


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"page_size": 8}, ["power of two"]),
        ({"page_size": 48}, ["power of two"]),
        ({"head_dim": 96}, ["64 or 128"]),
        ({"head_dim": 64, "value_dim": 128}, ["64 or 128"]),
        ({"dtype": "float32"}, ["bfloat16 or float16"]),
        ({"kv_dtype": "int8", "scale": "token"}, ["key_scale", "value_scale", "query's dtype"]),
        ({"heads": 72}, ["8 heads"]),
        ({"heads": 16, "kv_heads": 1}, ["8 heads"]),
        ({"logits_soft_cap": 20.0}, ["logits_soft_cap=20.0"]),
        ({"alibi": True}, ["alibi_slopes"]),
        ({"sinks": 1}, ["softmax_aux"]),
    ],
)
def test_reasons(backend: Backend, fields: dict[str, Any], reasons: list[str]):
    found = backend.not_supported_reasons(packed_structs(**fields), H100, "forward")
    assert all(reason in why for reason, why in zip(reasons, found, strict=True)), found


def test_trees_are_for_pallas(backend: Backend):
    found = backend.not_supported_reasons(packed_structs(tree=True), H100, "forward")
    assert found == (["does not serve tree_mask"] if backend.name == "cuda" else [])


def test_reasons_of_devices_directions_and_calls(backend: Backend):
    assert backend.not_supported_reasons(packed_structs(), H100, "forward") == []
    assert "9.0" in backend.reasons(packed_structs(), A100, "forward")[0]
    assert backend.not_supported_reasons(packed_structs(), H100, "backward")
    dense = packed_structs().replace(page_table=None)
    assert "page table" in backend.reasons(dense, H100, "forward")[0]


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"sequences": 64, "kv_length": 8192, "q_lengths": (*(1,) * 7, 512)}, False),
        ({"sequences": 64, "kv_length": 8192, "q_lengths": (2,)}, False),
        ({"sequences": 64, "kv_length": 8192, "q_lengths": (1, 1, 1, 3)}, True),  # most are decoded
        ({"sequences": 4, "kv_length": 16384, "q_lengths": (64,)}, True),  # too few tiles
        ({"sequences": 4, "kv_length": 2048, "q_lengths": (2048,)}, False),
    ],
)
def test_what_others_are_likely_faster_at(backend: Backend, fields: dict[str, Any], others: bool):
    assert backend.deprioritized(packed_structs(**fields), H100, "forward") == others
