"""Fixtures of all tests of the CUDA build: a stand-in for nvcc, and a cache of the test's own."""

import pytest

from tests.support import fake_nvcc
from tilewright.kernels.cuda import BuildCache


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """The stand-in, installed as the compiler that is found."""
    if fake_nvcc.HOST_COMPILER is None:
        pytest.skip(fake_nvcc.NEEDED)
    made = fake_nvcc.install(tmp_path / "cuda")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path):
    """No compiler anywhere."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def cache(tmp_path):
    return BuildCache(tmp_path / "builds")


@pytest.fixture
def table(tmp_path):
    return fake_nvcc.sample_table(tmp_path)
