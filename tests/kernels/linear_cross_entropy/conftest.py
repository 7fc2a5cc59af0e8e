"""Fixtures of the vocabulary losses."""

import jax
import pytest


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch):
    """Calls as on a machine with one device, where XLA cannot split tokens."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
