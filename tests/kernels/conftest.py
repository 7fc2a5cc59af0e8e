"""Fixtures of all tests of kernels."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.support.unoptimised import unoptimised
from tilewright.kernels.cuda import BuildCache
from tilewright.kernels.flash_attention import cases
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.ops.types import Device
from tilewright.ops.utils import device as devices
from tilewright.ops.utils.known_devices import find_device

H100 = find_device("NVIDIA H100 80GB HBM3").device
A100 = find_device("NVIDIA A100-SXM4-80GB").device
B200 = find_device("NVIDIA B200").device
RTX5090 = find_device("NVIDIA GeForce RTX 5090").device


def nvcc_marks(missing: list[str]) -> list[pytest.MarkDecorator]:
    """The marks of tests of what nvcc compiles, in half a minute or more; ``missing`` is what this machine lacks."""
    reason = "; ".join(missing)
    return [pytest.mark.timeout(900), pytest.mark.skipif(bool(missing), reason=reason)]


def needs_nvcc(missing: list[str]) -> Callable[[Any], Any]:
    """The same as a decorator of one test."""
    return lambda test: functools.reduce(lambda marked, mark: mark(marked), nvcc_marks(missing), test)


def abstract_arguments(case: AttentionCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A case's arguments, of which the large ones are not drawn."""
    with mock.patch.object(cases, "normal", lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))):
        return case.arguments()


@pytest.fixture(name="unoptimised")
def _unoptimised() -> Iterator[None]:
    with unoptimised():
        yield


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> BuildCache:
    """One cache for all of pytest's processes, of which the second waits for what the first one builds."""
    base = tmp_path_factory.getbasetemp()
    return BuildCache((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "real_builds")


@pytest.fixture
def on_an_h100(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Selection takes every device for an H100."""
    for name in ("_device", "_device_of_mesh"):
        monkeypatch.setattr(devices, name, lambda *_: H100)
    return H100
