"""Loads and sums along diagonals, on a warpgroup of NumPy's: each value of the program is one number per thread."""

import dataclasses
import importlib
import types
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.hopper import mosaic_diagonals

THREADS = np.arange(128)
LANES, WARPS, GROUPS, MEMBERS = THREADS % 32, THREADS // 32, THREADS % 32 // 4, THREADS % 4
ROW = {h: 16 * WARPS + GROUPS + 8 * h for h in range(2)}
"""Rows of a thread, by the PTX manual's figure of the accumulator of wgmma."""


def column(k: int, e: int) -> np.ndarray:
    """Columns of a thread, by the same figure."""
    return 8 * k + 2 * MEMBERS + e


@dataclasses.dataclass
class Pointer:
    """A pointer of each thread."""

    memory: np.ndarray
    index: np.ndarray
    type: Any = None


def in_thread(function: Any) -> Any:
    return lambda *values: function(*map(np.asarray, values))


class Machine:
    """Stands for the modules of MLIR and of Mosaic GPU that `mosaic_diagonals` calls."""

    def __init__(self) -> None:
        self.loads = self.reductions = 0
        integer = types.SimpleNamespace(get_signless=lambda bits: np.int32)
        self.ir = types.SimpleNamespace(
            IntegerType=integer,
            F32Type=types.SimpleNamespace(get=lambda: np.float32),
            VectorType=types.SimpleNamespace(get=lambda shape, kind: shape),
            Type=types.SimpleNamespace(parse=lambda text: text),
        )
        self.mgpu = types.SimpleNamespace(
            WGMMA_LAYOUT=types.SimpleNamespace(
                registers_shape=lambda shape: (shape[0] // 64, shape[1] // 8, 1, 1, 2, 1, 1, 1, 1)
            ),
            FragmentedArray=lambda **fields: types.SimpleNamespace(registers=fields["_registers"]),
        )
        self.utils = types.SimpleNamespace(
            c=lambda value, kind: np.asarray(np.int64(value) if kind is np.int32 else kind(value)),
            thread_idx=lambda: THREADS + 256,  # of a later warpgroup
            memref_ptr=lambda memory: Pointer(memory, np.zeros(128, int)),
            getelementptr=lambda pointer, indices, _: Pointer(pointer.memory, pointer.index + indices[0]),
        )
        self.arith = types.SimpleNamespace(
            addi=in_thread(np.add),
            muli=in_thread(np.multiply),
            andi=in_thread(np.bitwise_and),
            shrui=in_thread(np.right_shift),
            addf=in_thread(np.add),
            extui=lambda kind, value: np.asarray(value).astype(int),
            bitcast=lambda kind, value: value,
            select=lambda condition, yes, no: np.where(condition, yes, no),
            cmpi=lambda predicate, a, b: predicate(a, b),
            CmpIPredicate=types.SimpleNamespace(ult=np.less, eq=np.equal, ne=np.not_equal),
        )
        self.llvm = types.SimpleNamespace(
            PointerType=types.SimpleNamespace(get=lambda space: None),
            addrspacecast=lambda kind, pointer: pointer,
            load=self._load,
            mlir_undef=lambda shape: {},
            insertelement=lambda vector, value, position: vector | {int(position): value},
            extractelement=lambda vector, position: vector[int(position)],
            inline_asm=self._reduce,
        )
        self.nvvm = types.SimpleNamespace(shfl_sync=self._shuffle, ShflKind=types.SimpleNamespace(idx=None))

    def modules(self) -> dict[str, Any]:
        """By name, a module before its package."""
        mgpu, dialects = "jax.experimental.mosaic.gpu", "jaxlib.mlir.dialects"
        return {
            "jaxlib.mlir.ir": self.ir, f"{dialects}.arith": self.arith, f"{dialects}.llvm": self.llvm,
            f"{dialects}.nvvm": self.nvvm, f"{mgpu}.utils": self.utils, mgpu: self.mgpu,
        }  # fmt: skip

    def _load(self, kind: Any, pointer: Pointer) -> np.ndarray:
        del kind
        self.loads += 1
        assert pointer.index.min() >= 0
        return pointer.memory[pointer.index]

    def _shuffle(self, mask: Any, value: Any, source: Any, clamp: Any, kind: Any) -> np.ndarray:
        del kind
        assert (int(mask), int(clamp)) == (0xFFFFFFFF, 31)
        return np.broadcast_to(value, (128,))[32 * WARPS + source]

    def _reduce(self, kind: Any, operands: Any, text: str, constraints: str, **_: Any) -> None:
        del kind
        assert "@p red.relaxed.gpu.global.add.f32 [$0], $1" in text
        assert constraints == "l,f,r"
        pointer, value, predicate = operands
        active = np.broadcast_to(predicate, (128,)) != 0
        assert pointer.index[active].min() >= 0
        np.add.at(pointer.memory, pointer.index[active], np.broadcast_to(value, (128,))[active])
        self.reductions += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name, module in machine.modules().items():
        importlib.import_module(name)  # a package has its modules as attributes once they are imported
        monkeypatch.setattr(name, module)
    monkeypatch.setattr(mosaic_diagonals, "_opaque_zero", lambda memref: 0)
    return machine


@pytest.mark.parametrize("columns", [16, 64, 80, 128])
@pytest.mark.parametrize("ascending", [False, True])
def test_every_element_is_that_of_its_diagonal(machine: Machine, columns: int, ascending: bool) -> None:
    values = np.random.default_rng(0).standard_normal(64 + columns - 1)
    registers = mosaic_diagonals.toeplitz_tile(values, columns, ascending).registers
    for index in np.ndindex(registers.shape):
        k, h = index[1], index[4]
        for e in range(2):
            r, c = ROW[h], column(k, e)
            np.testing.assert_array_equal(registers[index][e], values[c - r + 63 if ascending else r - c + columns - 1])
    # Not one for each element.
    assert machine.loads == 2 * (columns // 8 + 1)


@pytest.mark.parametrize("stride", [0, 200])
def test_diagonals_are_summed(machine: Machine, stride: int) -> None:
    tile = np.random.default_rng(1).standard_normal((64, 64))
    registers = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for index in np.ndindex(registers.shape):
        k, h = index[1], index[4]
        registers[index] = {e: tile[ROW[h], column(k, e)] for e in range(2)}
    target = np.zeros(127 + 3 * stride)
    mosaic_diagonals.add_diagonal_sums(types.SimpleNamespace(registers=registers), target, stride)
    want = np.zeros_like(target)
    rows, columns = np.indices((64, 64))
    np.add.at(want, rows - columns + 63 + rows // 16 * stride, tile)
    np.testing.assert_allclose(target, want, atol=1e-12)
    assert machine.reductions == 10
