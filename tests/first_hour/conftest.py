"""What the tests of a newcomer's first hour share."""

import jax
import pytest


@pytest.fixture(scope="session")
def h100():
    """A context in which programs are lowered as for an H100 that is not here."""

    def context():
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))

    return context
