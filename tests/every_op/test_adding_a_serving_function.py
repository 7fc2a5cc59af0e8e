"""What docs/adding-a-serving-function.md promises: the function of that page passes the generated suite."""

import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.every_op.test_adding_an_op import generated, registered_page, run_generated


@pytest.fixture(scope="module")
def page() -> Iterator[types.ModuleType]:
    with registered_page("adding-a-serving-function", "prefix_attention", "PrefixAttention") as module:
        yield module


@pytest.mark.usefixtures("page", "without_builds")
@pytest.mark.parametrize("test", list(generated()))
def test_the_generated_suite_takes_the_function_of_the_page(test: Any, request: pytest.FixtureRequest) -> None:
    run_generated(test, "prefix_attention", request)
