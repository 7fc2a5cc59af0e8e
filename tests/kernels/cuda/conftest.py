"""Fixtures of all tests of the CUDA build: a stand-in for nvcc, and a cache of the test's own."""

import pytest

from tests.support import fake_nvcc
from tests.support.fake_nvcc import nvcc as nvcc
from tilewright.kernels.cuda import BuildCache


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path):
    """No compiler anywhere."""
    fake_nvcc.take_away(monkeypatch, tmp_path)


@pytest.fixture
def cache(tmp_path):
    return BuildCache(tmp_path / "builds")


@pytest.fixture
def table(tmp_path):
    return fake_nvcc.sample_table(tmp_path)
