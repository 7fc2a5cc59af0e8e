"""The shared configuration, and which platform an op is said to run on."""

import dataclasses
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.kernel.samples import Product, operands
from tilewright import modules
from tilewright.compat import base
from tilewright.errors import UnsupportedError
from tilewright.kernels.op.choice import Choice
from tilewright.modules import FlashAttention
from tilewright.ops import BwdParams, ConfigSelectorChain, Executor, FwdParams, Invocation, from_json, to_json
from tilewright.ops.types import Direction

OTHERS = {"kv_blocksize": 128, "num_warps": 4, "num_stages": 2}


def test_fields_and_defaults_are_the_documented_ones() -> None:
    documented = {
        "block_q": 128, "block_k": 128, "block_d": 64, "num_warps": 4, "num_stages": 2,
        "platform": "auto", "backend": "any", "algorithm": None, "priority": 0,
    }  # fmt: skip
    config = base.KernelConfig()
    assert dataclasses.asdict(config) == documented
    assert list(inspect.signature(base.KernelConfig).parameters) == list(documented)
    assert config.backend is base.Backend.ANY
    assert base.KernelConfig(platform="xla").platform is base.Platform.XLA


def test_modules_offers_them() -> None:
    for name in base.__all__:
        assert getattr(modules.base, name) is getattr(base, name)


def test_it_round_trips_hashes_and_is_frozen() -> None:
    config = base.KernelConfig(block_q=64, platform="cuda", algorithm="cutlass")
    assert from_json(to_json(config), base.KernelConfig) == config
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_q = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["tilewright/registry.KernelConfig", "tilewright.kernels.registry:KernelConfig"])
def test_a_file_may_name_it_before_it_is_imported(name: str) -> None:
    program = f"from tilewright.ops.utils.stable_ids import find_class; print(find_class({name!r}).__name__)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "KernelConfig"


@pytest.mark.parametrize(
    ("config", "direction", "chosen"),
    [
        (base.KernelConfig(block_q=32), "forward", Choice("cuda", FwdParams(q_blocksize=32, **OTHERS))),
        (base.KernelConfig(block_q=32), "backward", Choice("xla", BwdParams(q_blocksize=32, **OTHERS))),
        (base.KernelConfig(platform="xla"), "forward", Choice("other", FwdParams(q_blocksize=128, **OTHERS))),
        (base.KernelConfig(algorithm="other"), "forward", Choice("other", FwdParams(q_blocksize=128, **OTHERS))),
        (base.KernelConfig(platform="triton"), "forward", None),
        (base.KernelConfig(platform="xla", algorithm="none"), "backward", None),
    ],
)
def test_the_first_backend_that_takes_block_sizes_gets_them(
    config: base.KernelConfig, direction: Direction, chosen: Choice | None
) -> None:
    choices = [
        (Choice("triton"), base.Platform.TRITON, int),
        (Choice("cuda"), base.Platform.CUDA, FwdParams),
        (Choice("xla"), base.Platform.XLA, BwdParams),
        (Choice("other"), base.Platform.XLA, FwdParams),
    ]
    inv = Invocation(Product(), operands((2, 2), (2, 2)), direction=direction)
    if chosen is not None:
        assert config.chosen(choices, inv) == chosen
        return
    with pytest.raises(UnsupportedError, match=rf"tests.product \({direction}\)(.|\n)* {config.platform}: no backend"):
        config.chosen(choices, inv)


@pytest.mark.parametrize(
    ("field", "value"), [("block_q", 0), ("num_warps", -1), ("platform", "metal"), ("backend", "npu"), ("block_k", 1.5)]
)
def test_bad_values_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=str(value)):
        base.KernelConfig(**{field: value})  # type: ignore[arg-type]


class TestDetectPlatform:
    @pytest.mark.parametrize(
        ("device", "available", "maybe_pallas", "expected"),
        [
            ("gpu", {"triton", "pallas", "xla"}, False, "triton"),
            ("gpu", {"triton", "pallas", "xla"}, True, "pallas"),
            ("gpu", {"pallas", "xla"}, False, "xla"),
            ("gpu", {"triton", "xla"}, True, "triton"),
            ("gpu", {"xla"}, True, "xla"),
            ("tpu", {"triton", "pallas", "xla"}, False, "pallas"),
            ("tpu", {"triton", "xla"}, False, "xla"),
            ("cpu", {"triton", "pallas", "xla"}, True, "xla"),
        ],
    )
    def test_documented_order(
        self, monkeypatch: pytest.MonkeyPatch, device: str, available: set[str], maybe_pallas: bool, expected: str
    ) -> None:
        monkeypatch.setattr(base, "device_kind", lambda: device)
        monkeypatch.setattr(base, "_available", lambda op: {base.Platform(name) for name in available})
        assert base.detect_platform("flash_attention", maybe_pallas=maybe_pallas) == expected
        assert base.detect_platform("flash_attention", None, maybe_pallas) == expected

    def test_what_is_really_there(self) -> None:
        assert base.detect_platform("flash_attention", platform="xla") is base.Platform.XLA

    @pytest.mark.parametrize("algorithm", ["flash_atention", ""])
    def test_an_unknown_op_names_those_there_are(self, algorithm: str) -> None:
        with pytest.raises(ValueError, match="flash_attention"):
            base.detect_platform(algorithm)

    @pytest.mark.parametrize("platform", ["metal", base.Platform.CUDA])
    def test_an_absent_platform_names_what_is_available(
        self, monkeypatch: pytest.MonkeyPatch, platform: base.Platform
    ) -> None:
        monkeypatch.setattr(base, "_available", lambda op: {base.Platform.XLA})
        with pytest.raises(ValueError, match=r"available: \['xla'\]"):
            base.detect_platform("flash_attention", platform=platform)


def test_create_default_executor_warns_and_works(tmp_path: object) -> None:
    with pytest.warns(DeprecationWarning, match=r"Executor\(ConfigSelectorChain"):
        executor = base.create_default_executor(str(tmp_path), enable_autotuning=False, timing_iterations=1)
    query = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
    out = executor(FlashAttention(), query, query, query, causal=True)
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(query, query, query, is_causal=True), atol=1e-6)
    assert len(executor.chooser.persistent) == 0  # nothing was measured
    with pytest.warns(DeprecationWarning, match="Executor"):
        tuning = base.create_default_executor(str(tmp_path), timing_iterations=1)
    tuning(FlashAttention(), query, query, query, causal=True)
    assert len(executor.chooser.persistent) == 1


def test_block_sizes_in_common_terms_reach_the_backend() -> None:
    seen: list[object] = []
    executor = Executor(ConfigSelectorChain(on_event=seen.append))
    query = jnp.ones((1, 96, 2, 8))
    out = executor(FlashAttention(), query, query, query, cfg=base.KernelConfig(block_q=32, block_k=48))
    assert out.shape == query.shape
    (selection,) = seen
    params = selection.config.params  # type: ignore[attr-defined]
    assert (selection.step, params.q_blocksize, params.kv_blocksize) == ("explicit", 32, 48)  # type: ignore[attr-defined]
