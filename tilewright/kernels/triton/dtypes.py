"""Names of dtypes in Triton."""

import numpy as np
from jax.typing import DTypeLike

_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bool": "i1",
    **{f"{sign}int{bits}": f"{sign[:1] or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def type_name(dtype: DTypeLike) -> str:
    """Triton's name of an array's dtype.

    Raises:
      TypeError: it has none.
    """
    name = np.dtype(dtype).name
    if name not in _NAMES:
        raise TypeError(f"Triton has no {name}; it has {', '.join(_NAMES)}")
    return _NAMES[name]
