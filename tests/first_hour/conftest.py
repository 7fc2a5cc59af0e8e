"""What the tests of a newcomer's first hour share."""

from tests.support.abstract_gpu import h100  # noqa: F401 - a fixture
