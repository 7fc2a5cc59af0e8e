"""What the generated suite shares."""

from collections.abc import Iterator

import pytest

from tests.every_op import matrix


@pytest.fixture
def without_builds() -> Iterator[None]:
    """``matrix.without_builds`` for a test."""
    with matrix.without_builds():
        yield
