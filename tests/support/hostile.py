"""A kernel whose candidates do what candidates may not do, importable by the processes that tuning starts."""

import dataclasses
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.ops import Kernel
from tilewright.ops.config.tuner import Timer
from tilewright.ops.tuning.workload import Workload

SIZE = 64
_HOARD: list[np.ndarray] = []


@dataclasses.dataclass(frozen=True)
class Way:
    """How a candidate computes: "right", or in some way that it should not."""

    name: str = "right"


def _abort(x: np.ndarray) -> np.ndarray:
    os.write(2, b"<b>dying</b> of a deliberate abort\n")
    os.abort()


def _sleep(x: np.ndarray) -> np.ndarray:
    time.sleep(3600)
    return x


def _leak(x: np.ndarray) -> np.ndarray:
    _HOARD.append(np.ones(40 << 20))  # 320 MB, touched
    return x


def _exit(x: np.ndarray) -> np.ndarray:
    os._exit(7)


def _lose(x: np.ndarray) -> np.ndarray:
    """From now on nothing computes in this process, as after an illegal address."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    main: Any = sys.modules["__main__"]
    main.is_healthy = lambda: False
    Workload.compile = Workload.check = broken  # type: ignore[method-assign]
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def _lose_later(x: np.ndarray) -> np.ndarray:
    _CALLS.append(0)
    return _lose(x) if len(_CALLS) > 4 else x  # not in the first run, nor in the first sample


_CALLS: list[int] = []
_CALLBACKS = {"lose": _lose, "lose later": _lose_later, "abort": _abort, "sleep": _sleep, "leak": _leak, "exit": _exit}


class Hostile(Kernel[Way, jax.Array]):
    """``2 * x``; the first of its ways is the heuristic."""

    op_name = "tests.hostile"

    def __init__(self, *ways: str) -> None:
        super().__init__(self.op_name)
        self.ways = ways or ("right",)

    def run(self, x: jax.Array, *, cfg: Way) -> jax.Array:
        right = 2 * x
        match cfg.name:
            case "raise":
                raise ValueError("<script>a deliberate error</script>")
            case "nan":
                return right.at[3, 5].set(jnp.nan)
            case "wrong in one tile":
                return right.at[32:48, 16:32].multiply(1.01)
        if cfg.name in _CALLBACKS:
            return jax.pure_callback(_CALLBACKS[cfg.name], jax.ShapeDtypeStruct(x.shape, x.dtype), right)
        return right

    def reference(self, x: jax.Array) -> jax.Array:
        return 2 * x

    def heuristic_cfg(self, inv: Any) -> Way:
        return Way(self.ways[0])

    def config_space(self, inv: Any) -> list[Way]:
        return [Way(name) for name in self.ways]


@dataclasses.dataclass(frozen=True)
class Halting(Timer):
    """Every call takes a millisecond; nothing is waited for."""

    said_ms: float = 1.0

    def calls(self, function: Any, args: Any) -> int:
        return 1

    def sample_ms(self, function: Any, args: Any, calls: int) -> float:
        jax.block_until_ready(function(*args))
        return self.said_ms
