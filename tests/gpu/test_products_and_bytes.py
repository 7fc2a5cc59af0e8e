"""The kernel that others are measured by does the products that it is said to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.products_and_bytes import COPY_BYTES, PRODUCT_FLOPS, THREADS, blocks, data_for, products_and_bytes
from tilewright.errors import UnsupportedError

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def as_products_see_it(values: np.ndarray) -> np.ndarray:
    """``[rows, 128]``: halves of 64 columns one after the other, whose chunks of eight are swizzled."""
    rows, columns = values.size // 128, np.arange(128)
    row = np.arange(rows)[:, None]
    chunk = columns % 64 // 8 ^ row % 8
    return values[columns // 64 * rows * 64 + row * 64 + chunk * 8 + columns % 8]


@pytest.mark.parametrize(("products", "copies"), [(0, 3), (1, 0), (5, 40)])
def test_sums(products: int, copies: int) -> None:
    try:
        count = blocks()
    except UnsupportedError as error:
        pytest.skip(str(error))
    data = data_for(max(copies, 1) * count * COPY_BYTES, jax.random.key(0))
    call = jax.jit(lambda data: products_and_bytes(data, products * count * PRODUCT_FLOPS, copies * count * COPY_BYTES))
    found = np.asarray(call(data), np.float64)
    assert found.shape == (count, THREADS)
    values = np.asarray(data.reshape(-1)[: (128 + 256) * 128].astype(jnp.float32), np.float64)
    a, b = as_products_see_it(values[: 128 * 128]), as_products_see_it(values[128 * 128 :])
    expected = products * (a @ b.T).sum()
    np.testing.assert_allclose(found.sum(axis=1), expected, rtol=1e-4, atol=1e-2)
