"""An H100 that is not here."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import pytest


@pytest.fixture(scope="session")
def h100() -> Callable[[], AbstractContextManager]:
    """A context in which programs are lowered as for an H100 that is not here."""

    def context() -> AbstractContextManager:
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))

    return context
