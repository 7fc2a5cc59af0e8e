"""The numerics policy: when a result agrees with the oracle."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What two summation orders of float32 may differ by, in units of the largest magnitude; for the dtypes whose oracle
# runs in the same precision, and so measures no error of its own.
FLOOR = {"float64": 1e-11, "complex128": 1e-11, "float32": 2e-5, "bfloat16": 1e-3, "float16": 2e-4}

# Where float32 products are rounded first, as they are on tensor cores by default (TensorFloat-32 keeps 11 bits), the
# error of the oracle itself says so. Which operand is rounded differs between two ways to compute the same, so that a
# few elements may have none of the oracle's error and all of the other's.
REDUCED_FROM = 1e-4
REDUCED_FLOOR = 2e-3

# Below this magnitude a result is what is left of terms that cancelled, and its relative error says nothing.
LEAST_SCALE = 1e-2

# Cosine distance between a vector and the same rounded once is about eps² / 12; sums of a few hundred terms stay well
# under this many eps².
COSINE_EPS = 64.0


def violations(out: Any, ref: Any, lowp: Any, factor: float = 2.0) -> list[str]:
    """How an array breaks the policy; empty if it agrees.

    The largest error may be ``factor`` times that of the oracle run in the input dtype, plus a floor; non-finite
    values must stand in the same places; and the direction must agree.

    Args:
      out: the result to judge.
      ref: the oracle's in float32 or float64.
      lowp: the oracle's in the input dtype.
    """
    if out.shape != ref.shape:
        return [f"shape {out.shape} instead of {ref.shape}"]
    got, want, low = (real_numbers(x) for x in (out, ref, lowp))
    if not np.array_equal(np.isnan(got), np.isnan(want)) or not np.array_equal(
        got[np.isinf(want)], want[np.isinf(want)]
    ):
        return ["non-finite values in other places than the oracle's"]
    finite = np.isfinite(want)
    if not np.all(np.isfinite(got[finite])):
        return ["non-finite values where the oracle's are finite"]
    got, want, low = got[finite], want[finite], low[finite]
    if got.size == 0:
        return []
    largest = float(np.max(np.abs(want)))
    scale = max(LEAST_SCALE, largest)
    error, inherent = float(np.max(np.abs(got - want))), float(np.max(np.abs(low - want)))
    relative = FLOOR.get(str(out.dtype), FLOOR["float32"])
    if out.dtype == jnp.float32 and inherent > REDUCED_FROM * scale:
        relative = REDUCED_FLOOR
    allowed = factor * inherent + relative * scale
    if not error <= allowed:
        return [f"largest error {error:.3g} where {allowed:.3g} is allowed"]
    if want.size < 2 or largest < LEAST_SCALE:
        return []
    epsilon = float(jnp.finfo(out.dtype).eps) if jnp.issubdtype(out.dtype, jnp.inexact) else 0.0
    near = factor**2 * cosine_distance(low, want) + COSINE_EPS * epsilon**2 + 1e-14
    distance = cosine_distance(got, want)
    return [] if distance <= near else [f"cosine distance {distance:.3g} where {near:.3g} is allowed"]


def real_numbers(array: Any) -> np.ndarray:
    """An array of any dtype as float64; complex numbers as pairs, random keys as their words."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    if np.iscomplexobj(values):
        values = np.stack([values.real, values.imag], axis=-1)
    return values.astype(np.float64)


def cosine_distance(a: np.ndarray, b: np.ndarray) -> float:
    """``1 − cos`` of two vectors, without the cancellation of that formula."""
    a, b = a / (np.linalg.norm(a) or 1.0), b / (np.linalg.norm(b) or 1.0)
    return float(np.sum((a - b) ** 2)) / 2


def tree_violations(out: Any, ref: Any, lowp: Any, *, factor: float = 2.0) -> list[str]:
    """The violations of a pytree of arrays, each with the place of its leaf."""
    flat, tree = jax.tree_util.tree_flatten_with_path(out)
    refs, lows = jax.tree.leaves(ref), jax.tree.leaves(lowp)
    if len(refs) != len(flat):
        return [f"{tree} has {len(flat)} arrays, the oracle returned {len(refs)}"]
    found = []
    for (path, x), r, low in zip(flat, refs, lows, strict=True):
        where = jax.tree_util.keystr(path)
        found += [f"{where}: {what}".lstrip(": ") for what in violations(x, r, low, factor=factor)]
    return found


def widened(arrays: Sequence[Any]) -> list[Any]:
    """Floating-point arrays narrower than float32 as float32; the rest as they are."""
    return [
        x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x for x in arrays
    ]
