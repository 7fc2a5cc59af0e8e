"""The numerics policy: when a result agrees with the oracle."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What two summation orders of float32 may differ by, in units of the largest magnitude; for the dtypes whose oracle
# runs in the same precision, and so measures no error of its own.
FLOOR = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 1e-3, "float16": 2e-4}


def violations(out: Any, ref: Any, lowp: Any, *, factor: float = 2.0) -> list[str]:
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
    got, want, low = (np.asarray(x, np.float64) for x in (out, ref, lowp))
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
    scale = max(1.0, float(np.max(np.abs(want))))
    floor = FLOOR.get(str(out.dtype), 2e-5) * scale
    error, allowed = float(np.max(np.abs(got - want))), factor * float(np.max(np.abs(low - want))) + floor
    found = []
    if not error <= allowed:
        found.append(f"largest error {error:.3g} where {allowed:.3g} is allowed")
    norms = float(np.linalg.norm(got) * np.linalg.norm(want))
    if norms > floor * floor * got.size:
        distance = 1 - float(np.dot(got.ravel(), want.ravel())) / norms
        if distance > 1e-2:
            found.append(f"cosine distance {distance:.3g}")
    return found


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
