"""Skips what needs libtpu where it is not installed."""

import os

import pytest

from tests.aot_tpu.compiler import missing_packages

# The processes of pytest-xdist load libtpu beside each other, for no TPU that they could share.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = os.environ["TPU_SKIP_MDS_QUERY"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if missing := missing_packages():
        for item in items:
            if item.path.is_relative_to(os.path.dirname(__file__)):
                item.add_marker(pytest.mark.skip(reason=missing))
