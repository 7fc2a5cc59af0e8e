"""What ``cuda/attention.cuh`` does to a logit, compiled for the host: as masks, formulas and the dropout say."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.flash_attention.test_cuda_scores import COMBINED
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.flash_attention.mask_terms import MaskParts, visible_ranges
from tilewright.kernels.flash_attention.results import HIDING_BIAS
from tilewright.kernels.masks import CausalMask, ExplicitMask, Mask, WindowMask
from tilewright.kernels.numerics.dropout import drawn_probability, head_keys, keep_mask, keep_threshold

CUDA = Path(tilewright.__file__).parent / "kernels/flash_attention/cuda"
MISSING = toolchain.missing(90)
pytestmark = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))

BATCH, HEADS, LENGTH = 3, 2, 200


class Call(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_int32) for n in ("batch", "heads", "q_length", "kv_length", "lowest", "highest")]
        + [("scale", ctypes.c_float), ("soft_cap", ctypes.c_float), ("keep_threshold", ctypes.c_uint32)]
        + [(n, ctypes.c_int32) for n in ("q_rows_batch", "kv_rows_batch", "key_ranges_batch", "key_ranges_head")]
        + [(n, ctypes.c_int32) for n in ("query_ranges_batch", "query_ranges_head")]
        + [(n, ctypes.c_void_p) for n in ("q_rows", "kv_rows", "key_ranges", "query_ranges", "bias", "mask", "keys")]
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler, host = toolchain.find_compiler(), shutil.which("g++")
    assert compiler is not None
    if host is None:
        pytest.skip("there is no g++")
    found = tmp_path_factory.mktemp("scores") / "scores.so"
    folders = [CUDA, *toolchain.own_folders(), compiler.root / "include"]
    command = [host, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, Path(__file__).with_name("scores_on_host.cc"), "-o", found], check=True)
    return ctypes.CDLL(str(found))


def call_of(mask: Mask | None = None, **fields: Any) -> Call:
    """What a kernel is told of a call with a mask; keeps the arrays that it points to."""
    parts = MaskParts.of(mask)
    q_rows, kv_rows = parts.rows(LENGTH, LENGTH) if parts.has_rows else (None, None)
    matrix = None if parts.matrix is None else parts.matrix.materialise(LENGTH, LENGTH).astype(jnp.uint8)
    if matrix is not None:
        matrix = np.broadcast_to(matrix, (BATCH, HEADS, LENGTH, LENGTH))
    arrays = {"q_rows": q_rows, "kv_rows": kv_rows, "mask": matrix}
    strides = {}
    if mask is not None and (parts.has_rows or matrix is not None):
        for name, transposed in (("key_ranges", False), ("query_ranges", True)):
            ranges = np.asarray(visible_ranges(mask, LENGTH, LENGTH, transposed=transposed))
            arrays[name] = ranges
            strides[f"{name}_head"] = 0 if ranges.shape[1] == 1 else 2 * ranges.shape[2]
            strides[f"{name}_batch"] = 0 if ranges.shape[0] == 1 else 2 * ranges.shape[2] * ranges.shape[1]
    arrays |= {name: fields.pop(name) for name in ("bias", "keys") if name in fields}
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    numbers = {
        "batch": BATCH, "heads": HEADS, "q_length": LENGTH, "kv_length": LENGTH, "lowest": parts.band.lowest,
        "highest": parts.band.highest, "scale": 1.0,
        "q_rows_batch": 0 if q_rows is None or len(q_rows) == 1 else 2 * LENGTH,
        "kv_rows_batch": 0 if kv_rows is None or len(kv_rows) == 1 else 2 * LENGTH,
    }  # fmt: skip
    call = Call(**numbers | strides | fields, **{n: a.ctypes.data for n, a in kept.items()})
    call.kept = kept
    return call


def elements(library: ctypes.CDLL, products: np.ndarray, call: Call) -> tuple[np.ndarray, ...]:
    """visible, logits in units of log 2, slopes of the cap, kept, kept in the order of columns."""
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    results = [np.full(shape, 7, kind) for kind in (np.uint8, np.float32, np.float32, np.uint8, np.uint8)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (products, *results)]
    library.elements(ctypes.byref(call), *pointers)
    return tuple(results)


MASKS = {
    **{str(index): mask for index, mask in enumerate(COMBINED)},
    "causal": CausalMask(),
    "window": WindowMask(20, 3),
    "array": ExplicitMask(jnp.asarray(np.random.default_rng(1).random((BATCH, HEADS, LENGTH, LENGTH)) < 0.3)),
}


@pytest.mark.parametrize("name", MASKS)
def test_visible_elements_are_those_of_the_mask(library: ctypes.CDLL, name: str):
    call = call_of(MASKS[name])
    visible, *_ = elements(library, np.zeros((BATCH, HEADS, LENGTH, LENGTH), np.float32), call)
    want = np.broadcast_to(np.asarray(MASKS[name].materialise(LENGTH, LENGTH)), visible.shape)
    np.testing.assert_array_equal(visible != 0, want)
    for of_queries, tile, block in ((True, 64, 16), (True, 32, 1), (False, 64, 64), (False, 128, 32)):
        tiles = -(-LENGTH // tile)
        bounds = np.full((BATCH, HEADS, tiles, 2), -7, np.int32)
        pointer = ctypes.c_void_p(bounds.ctypes.data)
        library.bounds(ctypes.byref(call), tile, block, int(of_queries), pointer)
        rows = want if of_queries else want.swapaxes(2, 3)
        for i in range(tiles):
            seen = rows[:, :, i * tile : (i + 1) * tile].any(axis=2)
            first, last = bounds[:, :, i, :1], bounds[:, :, i, 1:]
            columns = np.arange(LENGTH)
            assert not np.any(seen & ((columns < first) | (columns >= last)))
            assert np.all(first % block == 0)
            assert np.all(last <= LENGTH)
            if name in ("causal", "window"):
                visited = np.flatnonzero(seen[0, 0])
                assert (first[0, 0, 0], last[0, 0, 0]) == (visited[0] // block * block, visited[-1] + 1)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_and_the_slope_of_the_cap(library: ctypes.CDLL, biased: bool, soft_cap: float):
    draw = np.random.default_rng(0)
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    products, bias = (draw.standard_normal(shape).astype(np.float32) * 4 for _ in range(2))
    fields: dict[str, Any] = {"bias": bias} if biased else {}
    call = call_of(scale=0.3, soft_cap=soft_cap, **fields)
    _, logits, slopes, *_ = elements(library, products, call)
    want = 0.3 * products.astype(np.float64) + (bias if biased else 0)
    slope = np.ones_like(want)
    if soft_cap:
        slope = 1 / np.cosh(want / soft_cap) ** 2
        want = soft_cap * np.tanh(want / soft_cap)
    np.testing.assert_allclose(logits * np.log(2), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slopes, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_a_bias_that_masks(library: ctypes.CDLL, soft_cap: float):
    """At the limit and below, whatever it is in units of log 2; and nothing above."""
    products = np.zeros((BATCH, HEADS, LENGTH, LENGTH), np.float32)
    bias = np.zeros_like(products)
    limit = np.float32(HIDING_BIAS)
    bias[..., 0], bias[..., 1], bias[..., 2] = limit, -np.inf, np.finfo(np.float32).min
    bias[..., 3], bias[..., 4] = np.nextafter(limit, np.float32(0)), -1e30
    _, logits, *_ = elements(library, products, call_of(scale=0.3, soft_cap=soft_cap, bias=bias))
    assert np.all(np.isneginf(logits[..., :3]))
    assert np.all(np.isfinite(logits[..., 4:]))
    assert soft_cap == 0 or np.all(np.isfinite(logits[..., 3]))


@pytest.mark.parametrize("probability", [0.2, 0.5])
def test_what_is_dropped_is_what_every_backend_drops(library: ctypes.CDLL, probability: float):
    probability = drawn_probability(probability)
    seed = jnp.asarray([3, 1 << 31], jnp.uint32)
    keys = jnp.stack(head_keys(seed, jnp.arange(BATCH)[:, None], jnp.arange(HEADS)[None, :]), axis=-1)
    call = call_of(keys=keys, keep_threshold=keep_threshold(probability))
    *_, kept, in_order = elements(library, np.zeros((BATCH, HEADS, LENGTH, LENGTH), np.float32), call)
    want = np.asarray(keep_mask(seed, BATCH, HEADS, LENGTH, LENGTH, probability))
    np.testing.assert_array_equal(kept != 0, want)
    np.testing.assert_array_equal(in_order != 0, want)
