"""cuDNN's attention as far as a CPU can prove it: declined, mapped, lowered, and run as cuDNN would."""

import contextlib
import dataclasses
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import A100, B200, H100, RTX5090
from tests.kernels.flash_attention.conformance import cotangents, inputs_of
from tests.kernels.flash_attention.library import (
    BIAS,
    CUDNN_CASES,
    CUDNN_PAIRWISE,
    LENGTHS,
    LibraryConformance,
    call_of,
    case_of,
)
from tests.kernels.flash_attention.library import CUDNN as BACKEND
from tilewright.errors import UnsupportedError
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.flash_attention.cudnn import jax_calls
from tilewright.kernels.flash_attention.cudnn.backend import (
    CudnnBackwardParams,
    CudnnForwardParams,
    CudnnMask,
    with_d_lse_columns,
)
from tilewright.kernels.masks import CausalMask, LengthMask, WindowMask
from tilewright.kernels.op.backend import loaded
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.serialize import from_json, to_json

FORWARD, BACKWARD = CudnnForwardParams(), CudnnBackwardParams()


@contextlib.contextmanager
def with_cudnn() -> Iterator[None]:
    """JAX takes the machine for one with cuDNN 9.19."""
    with (
        mock.patch.object(fused, "cuda_versions", object()),
        mock.patch.object(fused, "check_cudnn_version", return_value=91900),
    ):
        yield


@pytest.fixture
def cudnn() -> Iterator[None]:
    with with_cudnn():
        yield


def reasons(direction: Direction = "forward", device: Device = H100, **kwargs: Any) -> list[str]:
    return BACKEND.not_supported_reasons(call_of(**kwargs), device, direction)


@pytest.mark.usefixtures("cudnn")
def test_devices_and_directions():
    assert "compute capability 8.0 or up, got cpu" in reasons(device=Device("cpu", "cpu"))[0]
    assert "compute capability 8.0 or up" in reasons(device=Device("gpu", "Tesla T4", (7, 5), 40))[0]
    assert reasons(device=A100, head_dim=128) == []
    assert "up to 128 elements" in reasons(device=A100, head_dim=136)[0]
    for blackwell in (B200, RTX5090):
        assert reasons(device=blackwell, head_dim=256) == reasons("backward", device=blackwell, head_dim=128) == []
        assert "up to 256 elements" in reasons(device=blackwell, head_dim=264)[0]
        assert "up to 128 elements" in reasons(device=blackwell, head_dim=136, q_length=1)[0]
        assert "up to 128 elements" in reasons("backward", device=blackwell, head_dim=136)[0]
    assert reasons(device=H100, head_dim=256, q_length=1) == reasons(kv_length=1) == []
    assert "more than one key" in reasons("backward", kv_length=1)[0]
    # Only the gradient to lse takes columns.
    assert reasons("backward", head_dim=256) == reasons("forward", head_dim=256, return_lse=True) == []
    assert "3 of it for the gradient to lse" in reasons("backward", head_dim=256, return_lse=True)[0]


def test_versions(cudnn: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91001)
    assert reasons() == ["needs cuDNN 9.10.2 or later, got 9.10.1"]
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91002)
    assert reasons() == []
    assert reasons(device=Device("gpu", "NVIDIA B300", (10, 3), 148)) == ["needs cuDNN 9.11.0 or later, got 9.10.2"]
    monkeypatch.setattr(fused, "cuda_versions", None)
    assert reasons() == ["JAX finds no cuDNN here, which pip install 'tilewright[cuda13]' brings"]


def test_masks_in_cudnn_s_terms():
    def terms(mask: Any, q_length: int = 40, kv_length: int = 60) -> tuple[bool, int | None]:
        found = CudnnMask.of(mask, q_length, kv_length)
        assert found.reasons(q_length, kv_length) == []
        return found.causal, found.window

    assert terms(None) == (False, None)
    assert terms(CausalMask()) == (True, None)
    assert terms(CausalMask(59)) == (False, None)
    assert terms(WindowMask(3, 0)) == terms(CausalMask() & WindowMask(3, 8)) == (True, 4)
    assert terms(WindowMask(39, 0)) == (True, None)
    assert terms(WindowMask(0, 0)) == (True, 1)


# What JAX is asked for.


def lowered(function: Any, *arrays: Any) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """One of cuDNN's in a lowered program."""

    target: str
    config: dict[str, Any]
    types: str


def custom_calls(text: str) -> list[CustomCall]:
    found = []
    for line in text.splitlines():
        match = re.search(r'stablehlo\.custom_call @"?(__cudnn\$\w+)"?\(', line)
        if match:
            config = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', line)
            assert config is not None
            fields = json.loads(config[1].replace("\\22", '"').replace('\\"', '"'))["cudnn_fmha_backend_config"]
            found.append(CustomCall(match[1], fields, line.rpartition(" : ")[2]))
    return found


def arrays_of(*batch: int, length: int = 128, dim: int = 24) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((*batch, length, heads, dim), jnp.bfloat16) for heads in (4, 2, 2)]


def by_cudnn(*arrays: Any, **kwargs: Any) -> Any:
    return flash_attention(*arrays, platform="cuda", cfg=BOTH, **kwargs)


def gradients_by_cudnn(*arrays: Any, **kwargs: Any) -> Any:
    def loss(*arrays: Any) -> Any:
        return by_cudnn(*arrays, **kwargs).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


BOTH = PerDirection(Choice("cudnn", FORWARD), Choice("cudnn", BACKWARD))


@pytest.mark.usefixtures("on_an_h100", "cudnn")
@pytest.mark.parametrize(
    ("options", "mask_type", "window"),
    [
        ({}, "NO_MASK", 0),
        ({"causal": True}, "CAUSAL", 0),
        ({"causal": True, "sliding_window": 16}, "CAUSAL", 17),
        ({"query_seq_lengths": jnp.array([5, 0])}, "PADDING", 0),
        ({"causal": True, "key_value_seq_lengths": jnp.array([5, 128])}, "PADDING_CAUSAL", 0),
    ],
    ids=["plain", "causal", "window", "lengths", "causal lengths"],
)
def test_calls_are_lowered_for_cuda(options: dict[str, Any], mask_type: str, window: int):
    x = arrays_of(2)
    (only,) = custom_calls(lowered(lambda *a: by_cudnn(*a, softmax_scale=-0.5, **options), *x))
    assert only.target == "__cudnn$fmhaSoftmax"
    assert only.types.endswith("(tensor<2x4x128x24xbf16>, tensor<2x4x128xf32>, tensor<0xui8>)")
    first, second = custom_calls(lowered(lambda *a: gradients_by_cudnn(*a, softmax_scale=-0.5, **options), *x))
    assert (first, second.target) == (only, "__cudnn$fmhaSoftmaxBackward")
    assert "tensor<2x4x128xf32>, tensor<2x128x4x24xbf16>" in second.types
    for each in (first, second):
        assert (each.config["mask_type"], each.config["sliding_window_length"]) == (mask_type, window)
        assert (each.config["fmha_scale"], each.config["dropout_rate"]) == (0.5, 0.0)


@pytest.mark.usefixtures("on_an_h100", "cudnn")
def test_a_bias_and_the_gradient_to_lse_are_lowered():
    bias = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)

    def loss(*arrays: Any) -> Any:
        out, lse = by_cudnn(*arrays, return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    first, second = custom_calls(lowered(jax.grad(loss, argnums=(0, 3)), *arrays_of(2), bias))
    assert (first.target, second.target) == (
        "__cudnn$fmhaScaleBiasSoftmax",
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
    )
    assert "tensor<2x128x4x24xbf16>" in first.types
    assert "tensor<1x4x128x128xbf16>" in first.types
    assert "tensor<2x128x4x32xbf16>" in second.types  # 24 and the three columns, padded
    assert "tensor<2x4x128x128xbf16>" in second.types


@pytest.mark.usefixtures("on_an_h100", "cudnn")
def test_one_direction_may_be_another_backend_s():
    for cfg, target in (
        (PerDirection(BOTH.forward, Choice("xla", BwdParams())), "__cudnn$fmhaSoftmax"),
        (PerDirection(Choice("xla", FwdParams()), BOTH.backward), "__cudnn$fmhaSoftmaxBackward"),
    ):
        loss = lambda *a, cfg=cfg: flash_attention(*a, causal=True, cfg=cfg).astype(jnp.float32).sum()
        assert [each.target for each in custom_calls(lowered(jax.grad(loss), *arrays_of(2)))] == [target]


@pytest.mark.usefixtures("on_an_h100", "cudnn")
def test_a_mapped_axis_becomes_a_part_of_the_batch():
    bias = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
    x = [*arrays_of(3, 2), bias]
    (mapped,) = custom_calls(lowered(jax.vmap(by_cudnn, in_axes=(0, 0, 0, None)), *x))
    assert "tensor<6x128x4x24xbf16>" in mapped.types
    assert "tensor<1x4x128x128xbf16>" in mapped.types  # what is shared stays one
    over_queries = jax.vmap(gradients_by_cudnn, in_axes=(0, None, None, None))
    first, second = custom_calls(lowered(over_queries, x[0], *arrays_of(2)[1:], bias))
    assert "tensor<6x4x128x128xbf16>" in second.types
    assert first.types.startswith("(tensor<6x128x4x24xbf16>, tensor<6x128x2x24xbf16>")


@pytest.mark.usefixtures("on_an_h100", "cudnn")
@pytest.mark.parametrize("checked", [True, False])
def test_inside_shard_map(checked: bool):
    """Each device calls on its part; where types vary, the gradient of what is shared is summed."""

    def gradients(query: Any, key: Any, value: Any) -> Any:
        def loss(query: Any, *shared: Any) -> Any:
            keys = [jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in shared]
            return by_cudnn(query, *keys, causal=True).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1))(query, key, value)

    mapped = jax.shard_map(
        gradients,
        mesh=jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=(P("x"), P(), P()),
        out_specs=(P("x"), P() if checked else P("x")),
        check_vma=checked,
    )
    query, key, value = arrays_of(4)
    text = lowered(mapped, query, *(each.update(shape=(1, *each.shape[1:])) for each in (key, value)))
    calls = custom_calls(text)
    assert [each.target for each in calls] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert all(each.types.startswith("(tensor<2x128x4x24xbf16>") for each in calls)
    assert ("stablehlo.all_reduce" in text) == checked


@pytest.mark.usefixtures("on_an_h100", "cudnn")
def test_on_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    split = NamedSharding(mesh, P("x"))
    x = [each.update(sharding=split) for each in arrays_of(4)]
    with jax.set_mesh(mesh):
        calls = custom_calls(lowered(gradients_by_cudnn, *x))
    assert len(calls) == 2
    assert all(each.types.startswith("(tensor<2x128x4x24xbf16>") for each in calls)


# Selection.


@pytest.mark.usefixtures("on_an_h100", "cudnn")
def test_a_platform_of_two_implementations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "missing", lambda *_: ["there is no nvcc"])
    x = arrays_of(2)
    # Where nothing can be compiled, the other one serves the platform.
    (only,) = custom_calls(lowered(lambda *a: flash_attention(*a, platform="cuda"), *x))
    assert only.target == "__cudnn$fmhaSoftmax"
    with pytest.raises(UnsupportedError) as raised:
        lowered(lambda *a: flash_attention(*a, platform="cuda", logits_soft_cap=3.0), *x)
    assert "there is no nvcc" in str(raised.value)
    assert "cudnn" in str(raised.value)
    assert "does not serve logits_soft_cap=3.0" in str(raised.value)
    with pytest.raises(UnsupportedError, match="does not serve logits_soft_cap"):
        lowered(lambda *a: flash_attention(*a, logits_soft_cap=3.0, cfg=BOTH), *x)


def test_without_cudnn_the_call_goes_elsewhere(on_an_h100: Device):
    assert not custom_calls(lowered(flash_attention, *arrays_of(2)))
    with pytest.raises(UnsupportedError, match="JAX finds no cuDNN here"):
        lowered(by_cudnn, *arrays_of(2))


def test_params_survive_json():
    for params in (FORWARD, BACKWARD):
        choice = Choice("cudnn", params)
        assert from_json(to_json(choice), Choice) == choice
        assert str(choice) == "cudnn()"
        assert BACKEND.config_reasons(call_of(), H100, "forward", params) == []
    assert BACKEND.candidates(call_of(), H100, "backward") == [BACKWARD]


# JAX's interface, which may change.


NAMES = (*jax_calls.OPERANDS, "check_cudnn_version", "cuda_versions", "MaskType", "AttentionLayout")


def test_an_interface_that_changed_is_an_import_error():
    given = {name: getattr(fused, name) for name in NAMES}
    known = jax_calls.known_parameters(types.SimpleNamespace(**given))
    assert all({"scale", "seed", "mask_type"} <= set(names) for names in known.values())
    for name in given:
        rest = {each: value for each, value in given.items() if each != name}
        with pytest.raises(ImportError, match=f"in another way: .*{name}"):
            jax_calls.known_parameters(types.SimpleNamespace(**rest))
    for name in jax_calls.OPERANDS:
        names = list(inspect.signature(getattr(fused, name).impl).parameters)
        for changed in ([*names, "news"], [names[1], names[0], *names[2:]], names[1:]):
            made: dict[str, Any] = {}
            exec(f"def impl({', '.join(changed)}): pass", made)
            with pytest.raises(ImportError, match="with other arguments"):
                jax_calls.known_parameters(types.SimpleNamespace(**given | {name: Primitive(made["impl"])}))


def test_a_changed_interface_is_a_reason_and_no_crash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "MaskType", None)
    monkeypatch.delitem(sys.modules, jax_calls.__name__)
    said = loaded(f"{jax_calls.__name__}:known_parameters").error
    assert said.startswith("cannot be loaded: this JAX calls cuDNN's attention in another way")


# What cuDNN computes, as ``jax.numpy`` does, with NaN wherever cuDNN promises nothing.


@dataclasses.dataclass(frozen=True)
class Primitive:
    """One of JAX's, as far as it is called here."""

    impl: Any


def logits_of(query: Any, key: Any, bias: Any, q_seqlen: Any, kv_seqlen: Any, parameters: Any) -> tuple[Any, Any]:
    """Logits ``[batch, heads, queries, keys]`` and whether each takes part."""
    rows, columns = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])[None, :]
    group = query.shape[2] // key.shape[2]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, group, 2), preferred_element_type=jnp.float32)
    logits = logits * parameters["scale"]
    if parameters["variadic_args"][0]:
        logits = jnp.where(jnp.any(jnp.isinf(bias)), jnp.nan, logits + bias.astype(jnp.float32))
    kind, window = parameters["mask_type"].name, parameters["sliding_window_length"]
    seen = jnp.ones(logits.shape, bool)
    if "CAUSAL" in kind:
        seen &= columns <= rows
    if window is not None:
        assert "CAUSAL" in kind
        seen &= columns > rows - window
    if "PADDING" in kind:
        logits = jnp.where(jnp.minimum(q_seqlen, kv_seqlen)[:, None, None, None] < 1, jnp.nan, logits)
        seen &= (rows < q_seqlen[:, None, None, None]) & (columns < kv_seqlen[:, None, None, None])
    return logits, seen


def emulated_forward(query: Any, key: Any, value: Any, bias: Any, q_seqlen: Any, kv_seqlen: Any, *_: Any, **p: Any):
    logits, seen = logits_of(query, key, bias, q_seqlen, kv_seqlen, p)
    assert p["is_training"]
    weights = jax.nn.softmax(logits, where=seen)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], 2)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(query.dtype), value, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1, where=seen)
    blind = ~jnp.any(seen, -1)
    out = jnp.where(blind.transpose(0, 2, 1)[..., None], jnp.nan, out)
    return [out.astype(query.dtype), jnp.where(blind, jnp.nan, lse)]


def emulated_backward(
    query: Any, key: Any, value: Any, bias: Any, q_seqlen: Any, kv_seqlen: Any,
    q_offsets: Any, kv_offsets: Any, page_table_k: Any, page_table_v: Any,
    activation: Any, fwd_output: Any, grad_output: Any, **p: Any,
):  # fmt: skip
    assert p["dropout_rate"] == 0.0
    assert p.get("score_mod") is None
    assert not any(x.size for x in (q_offsets, kv_offsets, page_table_k, page_table_v))
    logits, seen = logits_of(query, key, bias, q_seqlen, kv_seqlen, p)
    dtype, group = query.dtype, query.shape[2] // key.shape[2]
    f32 = {"preferred_element_type": jnp.float32}
    weights = jnp.where(seen, jnp.exp(logits - activation[..., None]), 0.0)
    delta = jnp.sum(fwd_output.astype(jnp.float32) * grad_output.astype(jnp.float32), -1).transpose(0, 2, 1)
    products = jnp.einsum("bqhd,bkhd->bhqk", grad_output, jnp.repeat(value, group, 2), **f32)
    d_logits = weights * (products - delta[..., None])
    narrow = d_logits.astype(dtype)
    d_query = jnp.einsum("bhqk,bkhd->bqhd", narrow, jnp.repeat(key, group, 2), **f32) * p["scale"]
    d_key = jnp.einsum("bhqk,bqhd->bkhd", narrow, query, **f32) * p["scale"]
    d_value = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(dtype), grad_output, **f32)
    d_key, d_value = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (d_key, d_value))
    if "PADDING" in p["mask_type"].name:
        d_query = jnp.where(jnp.any(seen, 3)[:, 0, :, None, None], d_query, jnp.nan)
        in_length = (jnp.arange(key.shape[1]) < kv_seqlen[:, None])[:, :, None, None]
        d_key, d_value = (jnp.where(in_length, x, jnp.nan) for x in (d_key, d_value))
    gradients = [d_query, d_key, d_value]
    if p["variadic_args"][1]:
        assert bias.shape == logits.shape
        gradients.append(jnp.where(seen, d_logits, jnp.nan))
    return [gradient.astype(dtype) for gradient in gradients]


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    with (
        with_cudnn(),
        mock.patch.object(fused, "_dot_product_attention_fwd_p_wrapper", Primitive(emulated_forward)),
        mock.patch.object(fused, "_dot_product_attention_bwd_p_wrapper", Primitive(emulated_backward)),
    ):
        yield


class TestCudnn(LibraryConformance):
    backend = BACKEND
    present = staticmethod(with_cudnn)
    machine = staticmethod(emulated)
    both = BOTH
    cases = CUDNN_PAIRWISE
    exchanged = CUDNN_CASES
    mapped: ClassVar[dict[str, Any]] = {
        "causal": True, "bias": jnp.asarray(np.random.default_rng(0).standard_normal((4, 40, 40)), jnp.bfloat16)
    }  # fmt: skip
    served: ClassVar[list[dict[str, Any]]] = [
        {"head_dim": 256},
        {"q_length": 1, "causal": True, "causal_alignment": "bottom_right"},
        {"causal": True, "sliding_window": 16},
        {"sliding_window": (16, 0), "query_seq_lengths": LENGTHS},
        {"sliding_window": (200, 200)},
        {"causal": True, "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
        {"mask": LengthMask(None, LENGTHS) & LengthMask(LENGTHS, None)},
        {"bias": BIAS, "causal": True},
        {"bias": jax.ShapeDtypeStruct((1, 128), jnp.bfloat16)},
    ]
    declined: ClassVar[list[tuple[str, dict[str, Any]]]] = [
        ("does not serve logits_soft_cap=30.0", {"logits_soft_cap": 30.0}),
        ("does not serve dropout_seed", {"dropout_prob": 0.1, "dropout_seed": 0}),
        ("up to 256 elements on NVIDIA H100 80GB HBM3, got 264 after padding", {"head_dim": 257}),
        ("got keys up to 72 after", {"kv_length": 200, "causal": True, "causal_alignment": "bottom_right"}),
        ("got keys up to 3 after", {"sliding_window": (20, 3)}),
        ("windows that end at the query's own key", {"sliding_window": (20, None)}),
        ("windows that end at the query's own key", {"mask": WindowMask(4, 4, 8)}),
        ("at least as many as queries, got q_length=128, kv_length=64", {"kv_length": 64, "sliding_window": (9, 0)}),
        ("both lengths are even", {"kv_length": 127, "bias": jax.ShapeDtypeStruct((128, 127), jnp.bfloat16)}),
        ("a bias only of the query's dtype", {"bias": jax.ShapeDtypeStruct((128, 128), jnp.float32)}),
    ]

    def abstract(self) -> AbstractContextManager[Any]:
        return with_cudnn()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e5])
def test_the_gradient_to_lse_is_carried_in_full(size: float, dtype: str):
    inputs = inputs_of(case_of(dtype=dtype))
    d_out, d_lse = cotangents(inputs)
    out, d_out = jax.jit(with_d_lse_columns)(jnp.zeros_like(d_out), d_out, d_lse * size)
    assert out.dtype == d_out.dtype == dtype
    sums = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1).transpose(0, 2, 1)
    assert (
        np.abs(np.asarray(sums + d_lse * size)).max() <= size * 2.0**-20 + 2.0**-23
    )  # where float16 has no smaller numbers
