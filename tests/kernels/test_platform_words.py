"""The words by which a caller names what may run a call: platforms, and backends as explanations list them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.compat.base import KernelConfig, detect_platform
from tilewright.errors import UnsupportedError
from tilewright.kernels import OPS, kernel
from tilewright.kernels.op import backend as backends
from tilewright.kernels.op.backend import Backends
from tilewright.kernels.op.choice import Choice, Platform
from tilewright.modules import flash_attention, grouped_matmul, matmul, rms_norm
from tilewright.ops import FwdParams, from_json, to_json

ATTENTION, GROUPED = kernel("flash_attention"), kernel("grouped_matmul")
Q = jnp.ones((1, 8, 2, 16))
ROWS, MATRICES, SIZES = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([4, 2])
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        (None, None),
        ("auto", None),
        ("cuda", (Platform.CUDA,)),
        (Platform.XLA, (Platform.XLA,)),
        ("cudnn", ("cuda:cudnn",)),
        ("cuda:cudnn", ("cuda:cudnn",)),
        ("cuda:cuda", ("cuda:cuda",)),
        ("hopper", ("pallas:hopper",)),
        (["pallas:hopper", "xla"], ("pallas:hopper", Platform.XLA)),
        (("cuda:cudnn", "cuda:cudnn"), ("cuda:cudnn", "cuda:cudnn")),
    ],
)
def test_words_and_what_they_mean(given: Any, canonical: Any):
    found = ATTENTION.backends.allowed(given)
    assert found == canonical
    assert found is None or [type(x) for x in found] == [type(x) for x in canonical]  # "cuda" is equal to the platform
    assert ATTENTION.backends.allowed(found) == canonical


@pytest.mark.parametrize(
    "given",
    ["", "metal", "cudnnn", "xla:cudnn", "cuda:", ":cudnn", "mesh", "cuda:cudnn:cudnn", [], ["xla", "no"], 3, [3]],
)
def test_an_unknown_word_is_one_error_that_lists_what_there_is(given: Any):
    with pytest.raises(ValueError, match="platform=") as raised:
        flash_attention(Q, Q, Q, platform=given)
    message = str(raised.value)
    assert message.startswith(f"flash_attention: platform={given!r} must be None, 'auto', one of ['xla', 'pallas'")
    for word in ("pallas:hopper", "cuda:cuda", "cuda:cudnn", "cuda:fa4", "xla:xla", "triton:triton"):
        assert f"'{word}'" in message


def test_a_backend_of_another_op_is_unknown():
    with pytest.raises(ValueError, match=r"the backends of rms_norm, \['triton:triton', 'xla:xla'\]"):
        rms_norm(jnp.ones((2, 4)), platform="cudnn")


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_name_that_is_printed_is_a_word_for_its_op(op: str):
    found = kernel(op).backends
    for each in found:
        assert each.backend is not None
        for word in (each.name, each.word):
            (canonical,) = found.allowed(word) or ()
            assert each.is_meant_by(canonical)
        assert [other.name for other in found if other.is_meant_by(each.word)] == [each.name]


@pytest.mark.parametrize("word", ["xla:ragged_dot", "ragged_dot"])
def test_a_backend_runs_by_its_name(word: str):
    (found,) = tilewright.explain(lambda x: grouped_matmul(x, MATRICES, SIZES, platform=word), ROWS)
    assert found.choice.config.backend == "ragged_dot"
    assert found.choice.rejected["xla"] == ("supported, but excluded by platform=xla:ragged_dot of the call",)
    np.testing.assert_allclose(grouped_matmul(ROWS, MATRICES, SIZES, platform=word), jnp.full((6, 3), 4.0))
    gradient = jax.grad(lambda x: grouped_matmul(x, MATRICES, SIZES, platform=word).sum())(ROWS)
    np.testing.assert_allclose(gradient, jnp.full((6, 4), 3.0))


def test_the_callers_order_holds_for_backends_and_platforms():
    def first(*words: str) -> str:
        (found,) = tilewright.explain(lambda x: grouped_matmul(x, MATRICES, SIZES, platform=words), ROWS)
        return str(found.choice.config.backend)

    assert first("xla:ragged_dot", "xla") == "ragged_dot"
    assert first("xla", "xla:ragged_dot") == "xla"
    assert first("hopper", "triton", "xla:ragged_dot") == "ragged_dot"


def test_a_named_backend_is_strict_and_only_its_own_reasons_are_told():
    with pytest.raises(UnsupportedError) as raised:
        flash_attention(Q, Q, Q, platform=["cuda:cudnn", "hopper"])
    assert list(raised.value.reasons) == ["hopper", "cudnn"]
    with pytest.raises(UnsupportedError) as raised:
        flash_attention(Q, Q, Q, platform="cuda")
    assert list(raised.value.reasons) == ["cuda", "cudnn", "fa4"]
    with pytest.raises(UnsupportedError, match="matmul has no backend for it here") as raised:
        matmul(ROWS, ROWS.T, platform="triton")
    assert list(raised.value.reasons) == ["triton"]


def test_reasons_are_found_under_every_word():
    (found,) = tilewright.explain(lambda q: flash_attention(q, q, q), Q)
    rejected = found.choice.rejected
    assert rejected["cuda:cudnn"] == rejected["cudnn"]
    assert "pallas:hopper" in rejected
    assert "xla:cudnn" not in rejected
    assert rejected.get("xla:xla") is None  # it is the chosen one
    assert list(rejected) == ["hopper", "tpu", "cuda", "cudnn", "fa4", "triton"]
    assert rejected == dict(rejected)


@pytest.mark.parametrize("word", ["xla:ragged_dot", "ragged_dot"])
def test_a_config_names_its_backend_by_any_word(word: str):
    params = kernel("grouped_matmul").backends.of(Choice("ragged_dot")).forward_params()
    run = lambda x: grouped_matmul(x, MATRICES, SIZES, cfg=Choice(word, params))
    (found,) = tilewright.explain(run, ROWS)
    assert found.choice.config == Choice("ragged_dot", params)
    np.testing.assert_allclose(run(ROWS), jnp.full((6, 3), 4.0))


def test_a_config_of_an_unknown_backend_lists_what_there_is():
    with pytest.raises(ValueError, match=r"grouped_matmul has no backend 'metal' .*xla:ragged_dot"):
        grouped_matmul(ROWS, MATRICES, SIZES, cfg=Choice("metal", FwdParams()))
    with pytest.raises(UnsupportedError, match="cudnn: needs a CUDA GPU"):
        flash_attention(Q, Q, Q, cfg=Choice("cuda:cudnn", ATTENTION.backends.of(Choice("cudnn")).forward_params()))


@pytest.mark.parametrize("word", ["cuda:cudnn", "cudnn"])
def test_a_kernel_config_takes_the_same_words(word: str):
    config = KernelConfig(platform=word)
    assert config.algorithm == "cudnn"
    assert config.platform == ("cuda" if ":" in word else "auto")
    assert from_json(to_json(config), KernelConfig) == config
    with pytest.raises(UnsupportedError, match="no backend that takes the block sizes"):
        flash_attention(Q, Q, Q, cfg=config)
    xla = KernelConfig(platform="xla:xla", block_q=8, block_k=8)
    assert (xla.platform, xla.algorithm) == (Platform.XLA, "xla")
    np.testing.assert_allclose(flash_attention(Q, Q, Q, cfg=xla), Q, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"platform": "metal"}, {"platform": "gpu:cudnn"}, {"platform": "cuda:cudnn", "algorithm": "fa4"}]
)
def test_a_kernel_config_of_unknown_words_is_refused(options: dict[str, str]):
    with pytest.raises(ValueError, match=f"got platform='{options['platform']}'"):
        KernelConfig(**options)  # type: ignore[arg-type]


def test_the_platform_of_a_backend_is_detected():
    assert detect_platform("flash_attention", "cuda:cudnn") is Platform.CUDA
    assert detect_platform("grouped_matmul", "ragged_dot") is Platform.XLA
    with pytest.raises(ValueError, match=r"has no backend for platform='xla:cudnn'; available"):
        detect_platform("flash_attention", "xla:cudnn")


def test_a_backend_that_cannot_be_loaded_is_named_and_tells_why(monkeypatch: pytest.MonkeyPatch):
    found = Backends("op", ["tests.absent.cudnn.backend:Absent", "tilewright.kernels.norms.xla:XlaNorm"])
    backends.loaded.cache_clear()
    assert found.allowed("cudnn") == ("cudnn",)
    assert found.allowed(["cuda:cudnn", "xla"]) == ("cuda:cudnn", Platform.XLA)
    absent, xla = found
    assert "No module named 'tests.absent'" in absent.error
    assert [word for word in ("cuda:cudnn", "cudnn", "cuda") if absent.is_meant_by(word)] == ["cuda:cudnn", "cudnn"]
    assert not xla.is_meant_by("cuda:cudnn")


def test_a_word_is_in_the_key_only_where_it_says_more_than_its_platform():
    def key(platform: Any) -> str:
        (found,) = tilewright.explain(lambda x: rms_norm(x, platform=platform), jnp.ones((2, 4)))
        return found.choice.key

    assert key("xla") == key(Platform.XLA) == key(["xla"])
    assert key("xla:xla") != key("xla")
