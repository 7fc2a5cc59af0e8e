"""Compile-only TPUs: which slice is asked for, and which of its devices a target has."""

import math
import os
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import tilewright
from tilewright.errors import TargetDeviceError
from tilewright.ops.utils import topology
from tilewright.ops.utils.known_devices import find_device

BESIDE_OTHERS = "ALLOW_MULTIPLE_LIBTPU_LOAD"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The slices that libtpu is asked for; it describes v2, v3, v4 and v7x with two devices of one core a chip."""
    asked: list[str] = []

    def describe(name: str, platform: str) -> Any:
        assert platform == "tpu"
        assert os.environ[BESIDE_OTHERS] == "1"
        asked.append(name)
        version, _, shape = name.partition(":")
        chips = math.prod(map(int, shape.split("x")))
        count = chips * (2 if version in ("v2", "v3", "v4", "tpu7x") else 1)
        cores = 2 if version == "v5p" else 1
        return types.SimpleNamespace(devices=[types.SimpleNamespace(id=i, num_cores=cores) for i in range(count)])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(topology, "missing_compiler", lambda _: "")
    return asked


def compiled_for(name: str, count: int) -> list[int]:
    return [device.id for device in topology._tpus.__wrapped__(find_device(name), count)]


@pytest.mark.parametrize("name", ["TPU v2", "TPU v3", "TPU7x"])
def test_one_device_of_a_chip_with_two(asked: list[str], name: str):
    assert compiled_for(name, 1) == [0]
    assert compiled_for(name, 2) == [0, 1]
    assert len(set(asked)) == 1
    with pytest.raises(TargetDeviceError, match=r"have 1, 2, 8, 16, .* devices, got count=3"):
        compiled_for(name, 3)


def test_one_device_of_a_chip_with_one(asked: list[str]):
    assert compiled_for("TPU v5e", 1) == compiled_for("TPU v5p", 1) == [0]
    assert len(compiled_for("TPU v6e", 4)) == 4
    assert asked == ["v5e:1x1", "v5p:1x1x1", "v6e:2x2"]


@pytest.mark.parametrize("before", [None, "0"])
def test_libtpu_may_be_loaded_beside_another_process(asked: list[str], before: str | None, monkeypatch: Any):
    """Without it the second process that compiles for a TPU is refused; a program that uses one is not to notice."""
    monkeypatch.delenv(BESIDE_OTHERS, raising=False)
    if before is not None:
        monkeypatch.setenv(BESIDE_OTHERS, before)
    compiled_for("TPU v5e", 1)
    assert os.environ.get(BESIDE_OTHERS) == before
    assert asked


def test_cores_of_a_description_that_are_not_those_of_a_device(asked: list[str]):
    with pytest.raises(TargetDeviceError, match=r"TPU v4 with \{1\} cores.*lower and explain .* compile them there"):
        compiled_for("TPU v4", 1)


@pytest.mark.parametrize("name", ["TPU v2", "TPU v5e", "TPU7x"])
def test_libtpu_compiles_for_one_device(name: str):
    pytest.importorskip("libtpu")
    with tilewright.target_device(name) as target:
        lowered = jax.jit(lambda x: x @ x.T).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32))
        compiled = lowered.compile(device_assignment=target.devices)
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * 256 * 256
