"""A config out of a cache that cannot run the call is a miss, whichever cache it was and whatever is wrong with it."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_portfolio import Double, Doubling, Plain
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.flash_attention.hopper.params import HopperForwardParams
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.op.choice import Choice, Platform
from tilewright.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    PersistentCache,
    from_json,
    overlay_cache,
)
from tilewright.ops.config import persistent
from tilewright.ops.config.persistent import rebuild_config
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.serialize import untagged


class Narrow(Plain):
    """Refuses blocks above 32 in the check, and fails with them."""

    def config_reasons(self, inputs: Any, device: Any, direction: Any, params: Any) -> list[str]:
        return [f"{params.q_blocksize=} is above 32"] if params.q_blocksize > 32 else []

    def forward(self, inputs: Any, params: FwdParams) -> Any:
        if params.q_blocksize > 32:
            raise ValueError(f"no room for {params.q_blocksize=}")
        return super().forward(inputs, params)


KERNEL = Double(f"{__name__}:Narrow", "Picky")
X = jnp.ones(5)
INV = Invocation(KERNEL, (Doubling(X),))
GOOD = Choice("xla", FwdParams(q_blocksize=16))
UNFIT = {
    "does not fit": Choice("xla", FwdParams(q_blocksize=64)),
    "cannot serve the call": Choice("triton", FwdParams(q_blocksize=8)),
    "is no longer there": Choice("gone", FwdParams(q_blocksize=8)),
    "has params of the other direction": Choice("xla", BwdParams(q_blocksize=8)),
    "has no params": Choice("xla"),
    "is no choice": FwdParams(q_blocksize=8),
}


def source_of(config: Any) -> str:
    return INV.kernel.source(config) if isinstance(config, Choice) else ""


def cached(step: str, config: Any, folder: Path) -> tuple[ConfigSelectorChain, ConfigCache]:
    """A chain with a config in one of its caches, and the overlay to ask it with."""
    memory, overlay, disk = ConfigCache(), ConfigCache(), PersistentCache(folder)
    if step == "memory":
        memory.put(INV.key, config)
    elif step == "overlay":
        overlay.put(INV.key, config)
    else:
        assert disk.put(INV.key, config, source=source_of(config))
    return ConfigSelectorChain(memory, disk), overlay


@pytest.mark.parametrize("step", ["overlay", "memory", "disk"])
def test_what_fits_is_a_hit(step: str, tmp_path: Path) -> None:
    chain, overlay = cached(step, GOOD, tmp_path)
    with overlay_cache(overlay):
        selection = chain.choose(INV)
    assert (selection.step, selection.config) == (step, GOOD)


@pytest.mark.parametrize("step", ["overlay", "memory", "disk"])
@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_is_a_miss(what: str, step: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain, overlay = cached(step, UNFIT[what], tmp_path)
    with overlay_cache(overlay), caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(Executor(chain)(KERNEL, X), 2 * X)
        assert chain.choose(INV).step == "heuristic"
    assert caplog.records


def test_the_reason_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain, _ = cached("disk", UNFIT["does not fit"], tmp_path)
    with caplog.at_level(logging.WARNING):
        chain.choose(INV)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "double (forward)" in said
    assert "by the step 'disk': params.q_blocksize=64 is above 32" in said


@pytest.mark.parametrize(
    ("platform", "algorithm", "backend"),
    [
        ("XLA", None, "xla"),
        ("XLA", "ragged_dot", "ragged_dot"),
        ("PALLAS", None, "hopper"),
        ("TRITON", None, "triton"),
        ("CUDA", None, "cuda"),
        ("CUDA", "cudnn", "cudnn"),
        ("CUDA", "fa4", "fa4"),
        ("MESH", "ring", "ring"),
    ],
)
def test_choices_of_a_platform_and_an_algorithm_are_read(platform: str, algorithm: str | None, backend: str) -> None:
    """Versions before 0.2 wrote these in place of a backend's name."""
    fields = {"platform": {"$enum": "tilewright/registry.Platform", "name": platform}, "algorithm": algorithm}
    choice = {"$dataclass": "tilewright/portfolio.Choice", "fields": fields | {"params": None}}
    assert rebuild_config(choice, Choice) == untagged(choice) == Choice(backend)
    typed = {"platform": platform.lower(), "algorithm": algorithm, "params": None}
    assert from_json(json.dumps(typed), Choice) == Choice(backend)


def test_an_entry_of_a_platform_is_a_hit(tmp_path: Path) -> None:
    chain, _ = cached("disk", GOOD, tmp_path)
    (file,) = tmp_path.iterdir()
    document = json.loads(file.read_text())
    fields = document["config"]["fields"]
    assert fields.pop("backend") == "xla"
    fields |= {"platform": {"$enum": "tilewright/registry.Platform", "name": "XLA"}, "algorithm": None}
    document["checksum"] = persistent._checksum(document)
    file.write_text(json.dumps(document))
    selection = chain.choose(INV)
    assert (selection.step, selection.config) == ("disk", GOOD)


def test_the_platforms_that_the_caller_allows_count(tmp_path: Path) -> None:
    inv = Invocation(Double("Plain", "Picky"), (Doubling(jnp.ones(4), platform=(Platform.TRITON,)),))
    chain = ConfigSelectorChain()
    chain.cache.put(inv.key, GOOD)
    assert chain.choose(inv).config.backend == "triton"


def test_it_is_measured_anew(tmp_path: Path) -> None:
    chain, _ = cached("disk", UNFIT["does not fit"], tmp_path)
    assert chain.measurements(INV) is None
    tuned = dataclasses.replace(GOOD, params=FwdParams(q_blocksize=8))
    chain.store(INV, tuned, (), 1.0, True)
    assert ConfigSelectorChain(persistent=PersistentCache(tmp_path)).choose(INV).config == tuned


def test_one_that_the_caller_gives_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"no room for params\.q_blocksize=64"):
        Executor(ConfigSelectorChain())(KERNEL, X, cfg=UNFIT["does not fit"])


def attention_call() -> Invocation[Any, Any]:
    like = jax.ShapeDtypeStruct((1, 256, 1, 256), jnp.bfloat16)
    inv, _ = prepared(FlashAttention(), (like, like, like), {}, concrete=False)
    return inv


@pytest.mark.parametrize(
    ("params", "hit"),
    [(HopperForwardParams(128, 64, 2, False), True), (HopperForwardParams(128, 128, 4), False)],
)
def test_hopper_configs(params: HopperForwardParams, hit: bool, tmp_path: Path) -> None:
    """What needs more shared memory than there is at head dim 256."""
    with interpret_mosaic():
        inv, disk = attention_call(), PersistentCache(tmp_path)
        config = Choice("hopper", params)
        assert disk.put(inv.key, config, source=inv.kernel.source(config))
        selection = ConfigSelectorChain(persistent=disk).choose(inv)
    assert selection.step == ("disk" if hit else "heuristic")
    assert (selection.config.params == params) == hit


def test_hopper_configs_of_other_fields(tmp_path: Path) -> None:
    """What an older version wrote, whose params had another field."""
    with interpret_mosaic():
        inv, disk = attention_call(), PersistentCache(tmp_path)
        config = Choice("hopper", HopperForwardParams(128, 64, 2, False))
        assert disk.put(inv.key, config, source=inv.kernel.source(config))
        (file,) = tmp_path.iterdir()
        document = json.loads(file.read_text())
        fields = document["config"]["fields"]["params"]["fields"]
        fields["stages"] = fields.pop("num_stages")
        document["checksum"] = persistent._checksum(document)
        file.write_text(json.dumps(document))
        assert ConfigSelectorChain(persistent=disk).choose(inv).step == "heuristic"
