"""The numerics policy: the errors within which a result agrees with the oracle."""

import dataclasses
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array | np.ndarray[Any, Any]

# Allowed difference between two summation orders of float32, relative to the largest magnitude; for dtypes whose oracle
# runs in the same precision, and so measures no error of its own.
FLOOR = {"float64": 1e-11, "complex128": 1e-11, "float32": 2e-5, "bfloat16": 1e-3, "float16": 2e-4}

# If float32 operands of matmuls are rounded first, as on tensor cores by default (TensorFloat-32 keeps 11 bits), the
# oracle's own error shows it. Two ways to compute the same may round different operands, so a few elements may have no
# error in the oracle and a full one in the candidate.
REDUCED_FROM = 1e-4
REDUCED_FLOOR = 2e-3

# A result below this magnitude is the remainder of terms that cancelled, and its relative error means nothing.
MIN_SCALE = 1e-2

# The cosine distance between a vector and the same vector rounded once is about eps² / 12; sums of a few hundred terms
# stay well below this many eps².
COSINE_EPS = 64.0

# Number of squares summed in float32 before the host adds the partial sums in float64.
TERMS = 1024


def violations(out: Array, ref: Array, lowp: Array, factor: float = 2.0) -> list[str]:
    """Lists how an array violates the policy; empty if it agrees.

    The largest error may be ``factor`` times that of the oracle run in the input dtype, plus a floor; non-finite values
    must be at the same positions; and the direction must agree.

    Args:
      out: the result to judge.
      ref: the oracle's result in float32 or float64.
      lowp: the oracle's result in the input dtype.
    """
    if out.shape != ref.shape:
        return [f"shape {out.shape} instead of {ref.shape}"]
    comparison = _comparison(out, ref, lowp)
    if not comparison.same_nonfinite:
        return ["non-finite values in other places than the oracle's"]
    if not comparison.finite_where_ref_is:
        return ["non-finite values where the oracle's are finite"]
    if comparison.count == 0:
        return []
    scale = max(MIN_SCALE, comparison.largest)
    relative = FLOOR.get(str(out.dtype), FLOOR["float32"])
    if out.dtype == jnp.float32 and comparison.inherent > REDUCED_FROM * scale:
        relative = REDUCED_FLOOR
    allowed = factor * comparison.inherent + relative * scale
    if not comparison.error <= allowed:
        return [f"largest error {comparison.error:.3g} where {allowed:.3g} is allowed"]
    if comparison.count < 2 or comparison.largest < MIN_SCALE:
        return []
    epsilon = float(jnp.finfo(out.dtype).eps) if jnp.issubdtype(out.dtype, jnp.inexact) else 0.0
    near = factor**2 * comparison.cosine_of_lowp + COSINE_EPS * epsilon**2 + 1e-14
    if comparison.cosine <= near:
        return []
    return [f"cosine distance {comparison.cosine:.3g} where {near:.3g} is allowed"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Comparison:
    """The statistics of three arrays that the policy needs; the numbers cover elements where the oracle's are finite.

    Attributes:
      cosine: the cosine distance between the result and the oracle's; ``cosine_of_lowp`` is that between the oracle's
        results in the input dtype and in high precision.
    """

    same_nonfinite: bool
    finite_where_ref_is: bool
    count: int
    largest: float
    error: float
    inherent: float
    cosine: float
    cosine_of_lowp: float


def _comparison(*arrays: Array) -> _Comparison:
    """Compares on the accelerator that holds all three arrays, or else in float64 on the host."""
    if _compared_on_device(arrays):
        statistics = jax.device_get(_statistics_on_device(*arrays))
        if all(np.all(np.isfinite(each)) for each in statistics):  # a square may exceed float32's range
            return _of_statistics(statistics)
    with np.errstate(invalid="ignore", over="ignore"):  # non-finite values are masked out
        return _of_statistics(_statistics(np, *map(real_numbers, arrays)))


def _compared_on_device(arrays: Sequence[Array]) -> bool:
    """True if a comparison on the device is accurate: it avoids transfers, which take seconds for large results."""
    on_devices = [x for x in arrays if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]
    if len(on_devices) < len(arrays):
        return False
    devices = {device for x in on_devices for device in x.devices()}
    return len(devices) == 1 and devices.pop().platform != "cpu" and all(x.dtype.itemsize <= 4 for x in arrays)


@jax.jit
def _statistics_on_device(*arrays: jax.Array) -> tuple[Any, ...]:
    return _statistics(jnp, *(x.astype(jnp.float32) for x in arrays))


def _statistics(xp: ModuleType, got: Array, want: Array, low: Array) -> tuple[Any, ...]:
    """Flags, largest magnitudes, and partial sums of squares; ``xp`` is numpy or jax.numpy."""
    finite = xp.isfinite(want)
    same = (xp.isnan(got) == xp.isnan(want)) & (~xp.isinf(want) | (got == want))
    known = xp.all(xp.isfinite(got) | ~finite)
    want = xp.where(finite, want, 0.0)
    got = xp.where(finite & xp.isfinite(got), got, 0.0)
    low = xp.where(finite & xp.isfinite(low), low, want)  # no allowance beyond the input dtype's range
    largest = [xp.max(xp.abs(x), initial=0.0) for x in (want, got - want, low - want)]
    squares = [_sums(xp, x * x) for x in (got, want, low, got - want, low - want)]
    return xp.all(same), known, xp.sum(finite), *largest, *squares


def _sums(xp: ModuleType, terms: Array) -> Array:
    """Sums of so few terms that float32 rounds no more than the terms themselves; the host adds them up."""
    flat = terms.reshape(-1)
    sums: Array = xp.pad(flat, (0, -flat.size % TERMS)).reshape(-1, TERMS).sum(axis=1)
    return sums


def _of_statistics(statistics: Sequence[Any]) -> _Comparison:
    same, known, count, largest, error, inherent, *parts = statistics
    got, want, low, got_from_want, low_from_want = (float(np.sum(part, dtype=np.float64)) for part in parts)
    return _Comparison(
        bool(same), bool(known), int(count), float(largest), float(error), float(inherent),
        _cosine_distance(got, want, got_from_want), _cosine_distance(low, want, low_from_want),
    )  # fmt: skip


def _cosine_distance(a: float, b: float, between: float) -> float:
    """``1 − cos`` of two vectors from their squared lengths and that of their difference, to limit cancellation."""
    if not a or not b:
        return 0.0 if a == b else 1.0
    lengths = math.sqrt(a), math.sqrt(b)
    return max(0.0, between - (lengths[0] - lengths[1]) ** 2) / (2 * lengths[0] * lengths[1])


def real_numbers(array: Array) -> np.ndarray:
    """An array of any dtype as float64: complex numbers as pairs, random keys as their words."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    if np.iscomplexobj(values):
        values = np.stack([values.real, values.imag], axis=-1)
    return values.astype(np.float64)


def tree_violations(out: object, ref: object, lowp: object, *, factor: float = 2.0) -> list[str]:
    """The violations of a pytree of arrays, each with the path of its leaf."""
    flat, tree = jax.tree_util.tree_flatten_with_path(out)
    refs, lows = jax.tree.leaves(ref), jax.tree.leaves(lowp)
    if len(refs) != len(flat):
        return [f"{tree} has {len(flat)} arrays, the oracle returned {len(refs)}"]
    found = []
    for (path, x), r, low in zip(flat, refs, lows, strict=True):
        where = jax.tree_util.keystr(path)
        found += [f"{where}: {violation}".lstrip(": ") for violation in violations(x, r, low, factor=factor)]
    return found


def promoted(arrays: Sequence[Any]) -> list[Any]:
    """Promotes floating-point arrays narrower than float32 to float32; leaves the rest unchanged."""
    return [
        x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x for x in arrays
    ]
