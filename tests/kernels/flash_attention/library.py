"""Backends that call a library's attention: what they serve, and one suite for all; run where a library is emulated.

And where it is: the tests for GPUs take their cases from here.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tests.kernels.flash_attention.conformance import (
    Conformance,
    ConformanceCase,
    as_case,
    check_kinds,
    cotangents,
    inputs_of,
    judge,
    oracles,
    pairwise,
)
from tilewright.kernels.biases import AlibiBias
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cudnn.backend import CudnnFlashAttention
from tilewright.kernels.flash_attention.fa4.backend import Fa4FlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.masks import CausalMask, LengthMask, WindowMask
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils import device as devices

CUDNN, FA4 = CudnnFlashAttention(), Fa4FlashAttention()
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def case_of(**options: Any) -> AttentionCase:
    sizes = {"batch": 2, "q_length": 40, "heads": 4, "kv_heads": 2, "head_dim": 24, "dtype": "bfloat16"}
    return AttentionCase("", **sizes | options)


CUDNN_CASES = {
    "plain": case_of(),
    "causal": case_of(causal=True, dtype="float16", softmax_scale=-0.4),
    "wide values": case_of(head_dim=20, value_dim=50, kv_length=64),
    "more queries": case_of(kv_length=26, causal=True),
    "window": case_of(causal=True, sliding_window=5, kv_length=48, dtype="float16"),
    "lengths": case_of(lengths=True, kv_length=70),
    "lengths in a window": case_of(lengths=True, causal=True, sliding_window=7),
    "bias": case_of(bias="bhqk", causal=True),
    "shared bias": case_of(bias="hqk", lengths=True, causal=True, dtype="float16"),
    "bias by rows": case_of(bias="q"),
    "bias by columns": case_of(bias="bk", causal=True),
    "bias in a window": case_of(bias="hqk", causal=True, sliding_window=5),
}

FA4_CASES = {
    "plain": case_of(),
    "causal": case_of(causal=True, dtype="float16", softmax_scale=-0.4),
    "wide values": case_of(head_dim=20, value_dim=50, kv_length=64),
    "more queries": case_of(kv_length=26, causal=True),
    "more queries from the end": case_of(kv_length=26, causal=True, causal_alignment="bottom_right"),
    "more keys": case_of(kv_length=90, causal=True),
    "more keys from the end": case_of(kv_length=90, causal=True, causal_alignment="bottom_right", heads=2),
    "window": case_of(causal=True, sliding_window=5, kv_length=48, dtype="float16"),
    "window to both sides": case_of(sliding_window=(7, 3), kv_length=48),
    "window without a left": case_of(sliding_window=(None, 4), heads=2),
    "window that ends": case_of(sliding_window=(3, 1), kv_length=20),
    "soft cap": case_of(causal=True, logits_soft_cap=5.0, softmax_scale=0.7),
    "soft cap in float16": case_of(logits_soft_cap=20.0, dtype="float16", kv_length=64),
    "lengths": case_of(lengths=True, kv_length=70),
    "lengths for each head": case_of(lengths=True, kv_length=70, heads=2, dtype="float16"),
}

FA4_OF_192 = {
    "heads of 192": case_of(head_dim=192, value_dim=128, q_length=150, kv_length=130),
    "heads of 192, padded": case_of(head_dim=136, value_dim=72, heads=2, causal=True, dtype="float16"),
    "heads of 192, lengths": case_of(head_dim=192, value_dim=128, lengths=True, kv_length=300),
}
FA4_OF_256 = {
    "full": case_of(head_dim=256, q_length=140, kv_length=200),
    "causal": case_of(head_dim=256, causal=True, dtype="float16"),
    "causal from the end": case_of(head_dim=256, heads=6, kv_length=90, causal=True, causal_alignment="bottom_right"),
    "padded, lengths": case_of(head_dim=200, value_dim=24, lengths=True, kv_length=70),
}
"""Calls that data-center Blackwell computes as heads of 256 elements."""

FACTORS: dict[str, Sequence[Any]] = {
    "lengths": [(64, 64), (33, 33), (48, 80), (40, 17), (1, 37)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (24, 8), (5, 20)],
    "dtype": ["bfloat16", "float16"],
}


def cases_of(**factors: Sequence[Any]) -> list[ConformanceCase]:
    """Cases in which all pairs of options occur that a library serves."""
    absent = {"soft_cap": None, "sinks": 0, "mask": None, "bias": None, "dropout": 0.0, "variable": ""}
    return [
        as_case(index, absent | row)
        for index, row in enumerate(pairwise(FACTORS | factors | {"scale": [None, 0.7, -0.2]}))
    ]


CUDNN_PAIRWISE = cases_of(causality=[None, "top_left"], window=[None, (3, 0), (9, 0)], variable=["", "lengths"])
FA4_PAIRWISE = cases_of(
    lengths=[*FACTORS["lengths"], (29, 0)],
    causality=[None, "top_left", "bottom_right"],
    window=[None, 6, (3, None), (None, 2), (0, 9)],
    soft_cap=[None, 4.0],
)


def inputs_for(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """Those of a case, with its bias in the query's dtype."""
    inputs = inputs_of(case, seed)
    if inputs.bias is None:
        return inputs
    return inputs.replace(bias=inputs.bias.astype(inputs.query.dtype))


def check_residuals(
    inputs: AttentionInputs,
    device: Device,
    others: Sequence[Backend],
    ours: Backend = CUDNN,
    factor: float = 2.0,
) -> None:
    """Forward and backward, each also with other backends' halves, against the oracle, with a gradient to lse."""
    structs = inputs.structs.replace(return_lse=True)

    def forward(backend: Backend) -> Any:
        params = backend.heuristic(structs, device, "forward")
        return jax.jit(lambda inputs: backend.forward(inputs, params))(inputs)

    def backward(backend: Backend, results: Any) -> Any:
        params = backend.heuristic(structs, device, "backward")
        run = jax.jit(lambda inputs, results, cotangents: backend.backward(inputs, results, cotangents, params))
        return run(inputs, results, (d_out, d_lse))

    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    own = forward(ours)
    assert [x.dtype for x in own] == [inputs.query.dtype, jnp.float32]
    judge(dict(zip(("out", "lse"), own, strict=True)), exact.results, low.results, factor)
    pairs = [(ours, own)]
    for other in others:
        pairs += [(other, own), (ours, forward(other))]
    for backend, results in pairs:
        gradients = backward(backend, results)
        check_kinds(gradients, inputs)
        judge(gradients, exact.gradients, low.gradients, factor, type(backend).__name__)


LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)
IDS = jax.ShapeDtypeStruct((2, 128), jnp.int32)
BIAS = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)

SERVED: list[dict[str, Any]] = [
    {},
    {"dtype": jnp.float16, "causal": True, "softmax_scale": -0.3},
    {"head_dim": 100, "value_dim": 20, "return_lse": True},
    {"q_length": 7, "kv_length": 1000, "causal": True},
    {"causal": True, "causal_alignment": "bottom_right"},
    {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
]
DECLINED: list[tuple[str, dict[str, Any]]] = [
    ("computes in float16 or bfloat16, got dtype=float32", {"dtype": jnp.float32}),
    ("does not serve softmax_aux", {"softmax_aux": jax.ShapeDtypeStruct((4,), jnp.float32)}),
    ("does not serve dropout_prob=0.1", {"dropout_prob": 0.1, "dropout_seed": 0}),
    ("does not serve position_bias", {"bias": AlibiBias(jax.ShapeDtypeStruct((4,), jnp.float32))}),
    ("a scale of 0", {"softmax_scale": 0.0}),
    ("has no segments", {"q_segment_ids": IDS, "kv_segment_ids": IDS}),
    ("takes a query's index for its position", {"mask": CausalMask(0, IDS)}),
    ("got a mask that is none of them", {"mask": jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)}),
    ("got a mask that is none of them", {"mask": CausalMask() | WindowMask(3, 3)}),
]
"""What every library serves and declines; what one alone does, its test says."""


def call_of(
    dtype: Any = jnp.bfloat16, head_dim: int = 64, q_length: int = 128, kv_length: int = 128, **kwargs: Any
) -> AttentionInputs:
    value_dim, kv_heads, heads = kwargs.pop("value_dim", head_dim), kwargs.pop("kv_heads", 2), kwargs.pop("heads", 4)
    shapes = [(2, q_length, heads, head_dim), (2, kv_length, kv_heads, head_dim), (2, kv_length, kv_heads, value_dim)]
    return FlashAttention().prepare(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), **kwargs)


class LibraryConformance(Conformance):
    """A backend of a library, which ``machine`` emulates: in 16 bits, results and residuals as of every backend."""

    device: ClassVar[Device] = H100
    present: ClassVar[Callable[[], AbstractContextManager[Any]]] = contextlib.nullcontext
    """The library counts as installed."""
    low_bias = False
    additive_dtype = "bfloat16"
    dtype = "bfloat16"
    repeated = ConformanceCase(case_of(), False)
    both: ClassVar[PerDirection]
    exchanged: ClassVar[Mapping[str, AttentionCase]]
    """Calls of which each half is also computed by other backends."""
    served: ClassVar[list[dict[str, Any]]]
    declined: ClassVar[list[tuple[str, dict[str, Any]]]]
    mapped: ClassVar[Mapping[str, Any]] = {}
    """Options of a call under vmap."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        test = metafunc.definition.name
        if test in ("test_residuals_are_those_of_every_backend", "test_shapes_and_dtypes_are_those_of_the_contract"):
            metafunc.parametrize("name", self.exchanged)
        if test == "test_what_it_serves":
            metafunc.parametrize("options", SERVED + self.served, ids=str)
        if test == "test_what_it_declines":
            metafunc.parametrize(("said", "options"), DECLINED + self.declined)

    def inputs(self, case: ConformanceCase) -> AttentionInputs:
        return inputs_for(case.case)

    def params_of(self, inputs: AttentionInputs) -> tuple[Any, Any]:
        return self.both.forward.params, self.both.backward.params

    @pytest.fixture
    def on_its_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Selection takes every device for that of the class."""
        for name in ("_device", "_device_of_mesh"):
            monkeypatch.setattr(devices, name, lambda *_: self.device)

    @classmethod
    def said(cls, direction: Direction = "forward", device: Device | None = None, **options: Any) -> list[str]:
        """The reasons why a call is not served."""
        with cls.present():
            return cls.backend.not_supported_reasons(call_of(**options), device or cls.device, direction)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_what_it_serves(self, options: dict[str, Any], direction: Direction):
        assert self.said(direction, **options) == []

    def test_what_it_declines(self, said: str, options: dict[str, Any]):
        found = self.said(**options)
        assert any(said in why for why in found), found

    def test_residuals_are_those_of_every_backend(self, name: str):
        case = self.exchanged[name]
        inputs = inputs_for(case)
        with type(self).machine():
            structs = inputs.structs.replace(return_lse=True)
            for direction in DIRECTIONS:
                assert self.backend.not_supported_reasons(structs, self.device, direction) == []
            check_residuals(inputs, self.device, [XlaFlashAttention()], self.backend, case.tolerance_factor)

    @pytest.mark.parametrize("kv_heads", [2, 4])
    def test_lengths_beyond_and_below_the_arrays(self, kv_heads: int):
        lengths = LengthMask(jnp.array([50, 17]), jnp.array([0, 99])) & LengthMask(jnp.array([33]), None)
        found = self.run_and_check(inputs_of(case_of(kv_heads=kv_heads)).replace(mask=lengths))
        assert np.all(np.isneginf(np.asarray(found["lse"])[0]))
        assert not np.any(np.asarray(found["value"][0]))

    @pytest.mark.usefixtures("on_its_device")
    def test_mapped_calls_give_what_single_ones_do(self):
        """Lengths and queries are mapped, keys and a bias shared."""
        (query, key, value), _ = case_of(batch=6).arguments()
        query, key, value = jnp.stack([query[:2], query[2:4], query[4:]]), key[:2], value[:2]
        lengths = jnp.array([[40, 3], [0, 17], [39, 40]])
        bias = {name: self.mapped[name] for name in ("bias",) if name in self.mapped}
        rest = {name: option for name, option in self.mapped.items() if name != "bias"}

        def loss(query: Any, key: Any, bias: Any, lengths: Any) -> Any:
            options = {"key_value_seq_lengths": lengths, "return_lse": True, "cfg": self.both, **bias, **rest}
            out, lse = flash_attention(query, key, value, **options)
            return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isinf(lse), 0.0, lse).sum()

        one = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        with type(self).machine():
            mapped = jax.jit(jax.vmap(one, in_axes=(0, None, None, 0)))(query, key, bias, lengths)
            single = [one(query[i], key, bias, lengths[i]) for i in range(3)]
        for i, each in enumerate(single):
            for want, got in zip(*map(jax.tree.leaves, (each, mapped)), strict=True):
                want, got = np.asarray(want, np.float32), np.asarray(got[i], np.float32)
                assert np.abs(want - got).max() <= 2.0**-7 * np.abs(want).max()

    @pytest.mark.usefixtures("on_its_device")
    def test_shapes_and_dtypes_are_those_of_the_contract(self, name: str):
        """Of the library's own operations, where JAX knows their shapes."""
        inputs = inputs_for(self.exchanged[name])
        forward, backward = self.params_of(inputs)
        with self.abstract():
            out, lse = jax.eval_shape(lambda inputs: self.backend.forward(inputs, forward), inputs)
            run = lambda inputs, *rest: self.backend.backward(inputs, *rest, backward)
            gradients = jax.eval_shape(run, inputs, (out, lse), cotangents(inputs))
        batch, length, heads, _ = inputs.query.shape
        assert (out.shape, out.dtype) == ((batch, length, heads, inputs.value.shape[3]), inputs.query.dtype)
        assert (lse.shape, lse.dtype) == ((batch, heads, length), jnp.float32)
        check_kinds(gradients, inputs)

    def abstract(self) -> AbstractContextManager[Any]:
        return type(self).machine()

    def test_nothing_to_compute(self):
        empty = [jnp.zeros((2, 8, 4, 16), jnp.bfloat16), *[jnp.zeros((2, 0, 2, 16), jnp.bfloat16)] * 2]
        inputs = FlashAttention().prepare(*empty)
        forward, backward = self.params_of(inputs)
        out, lse = self.backend.forward(inputs, forward)
        assert not np.any(np.asarray(out, np.float32))
        assert np.all(np.isneginf(np.asarray(lse)))
        gradients = self.backend.backward(inputs, (out, lse), (out, lse * 0), backward)
        assert gradients["key"].shape == (2, 0, 2, 16)
