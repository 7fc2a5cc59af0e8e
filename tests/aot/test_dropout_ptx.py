"""The PTX in which Hopper kernels draw and test the dropout's bits, run by NumPy for all threads of a warpgroup."""

import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.aot import compiler
from tests.aot.compiler import compile_for_h100, missing_packages
from tilewright.kernels.flash_attention.hopper.dropout import draw_kept, negate_dropped, zero_dropped
from tilewright.kernels.flash_attention.hopper.scores import ScoreArrays, TileCoord
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.tiles import store_unoptimised, tile_layout
from tilewright.kernels.numerics.dropout import LANES, keep_elements

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

KEY = np.array([0x9ABCDEF0, 0xF2345678], np.uint32)
ROW, COLUMN = 448, 208


def kernel(
    change: Callable[..., jax.Array], dtype: Any, columns: int, q_axis: int, threshold: int
) -> Callable[[Any], Any]:
    """A kernel that stores a tile of ones after ``change``."""

    def body(keys: Any, out: Any, _: Any) -> None:
        starts = (ROW, COLUMN) if q_axis == 0 else (COLUMN, ROW)
        coord = TileCoord(jnp.int32(0), jnp.int32(0), *map(jnp.int32, starts), (64, columns), q_axis)
        options: Any = types.SimpleNamespace(dropout_prob=threshold / LANES)
        bits = draw_kept(options, ScoreArrays(None, None, keys), coord)
        ones = plgpu.layout_cast(jnp.full((64, columns), 1.0, dtype), tile_layout())
        store_unoptimised(out, change(ones, bits, coord))

    result = jax.ShapeDtypeStruct((64, columns), dtype)
    return lambda keys: run_kernel(body, keys, result, None, role="draw", num_ctas=1)


def ptx_of(function: Callable[..., Any], *arguments: Any) -> str:
    texts = []
    parse = compiler.parse_reports
    with mock.patch.object(compiler, "parse_reports", lambda text: texts.append(text) or parse(text)):
        compile_for_h100(function, *arguments, ptx=True)
    found = re.search(r"^\.visible \.entry.*?^}", texts[-1], re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def statements(ptx: str) -> Iterator[str]:
    """The instructions of a straight program, those of inline assembly, too."""
    body = ptx.split("$L__func_begin0:", 1)[1]
    lines = (re.sub(r"//.*", "", line).strip() for line in body.splitlines())
    code = " ".join(line for line in lines if line and not line.startswith((".loc", "$L__")))
    for part in code.split(";"):
        statement = part.strip().lstrip("{} ").strip()
        if statement and not statement.startswith(".reg"):
            yield statement


class Machine:
    """Registers of 128 threads, which are in step, and two arrays in global memory."""

    IGNORED = ("elect.sync", "shfl.sync", "fence.", "bar.sync", "ret", "ld.param")

    def __init__(self, keys: np.ndarray, out_bytes: int) -> None:
        self.registers: dict[str, np.ndarray] = {}
        self.keys, self.out = keys.tobytes(), np.full(out_bytes, 0xAA, np.uint8)

    def value(self, name: str) -> np.ndarray:
        if name == "%tid.x":
            return np.arange(128, dtype=np.uint64)
        if name in self.registers:
            return self.registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(128, number % (1 << 64), np.uint64)

    def run(self, statement: str) -> None:
        enabled: np.ndarray | None = None
        if statement.startswith("@"):
            guard, statement = statement.split(maxsplit=1)
            enabled = ~self.registers[guard[2:]] if guard[1] == "!" else self.registers[guard[1:]]
        name, rest = statement.split(maxsplit=1) if " " in statement else (statement, "")
        if name.startswith(self.IGNORED):
            return
        if name.startswith("st.global"):
            self.store(name, rest)
            return
        target, *sources = [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", rest)]
        result = self.result(name, target, sources)
        if enabled is not None:
            result = np.where(enabled, result, self.registers[target])
        self.registers[target.strip("{} ").replace("_, ", "")] = result

    def result(self, name: str, target: str, sources: list[str]) -> np.ndarray:
        if name.startswith("cvta"):  # of the parameters, in their order; the addresses of both arrays begin at 0
            return np.zeros(128, np.uint64)
        if name.startswith("ld.global"):
            offset = int(sources[0].strip("[]").partition("+")[2] or 0)
            return np.full(128, int.from_bytes(self.keys[offset : offset + 4], "little"), np.uint64)
        values = [self.value(source) for source in sources]
        width = 64 if re.search(r"64$", name) else 32
        mask = np.uint64((1 << width) - 1)
        operation = name.split(".")[0]
        if operation == "setp":
            return (values[0] & mask) != (values[1] & mask)
        if operation == "selp":
            return np.where(values[2], values[0], values[1])
        if name == "mul.wide.u32":
            return (values[0] & mask) * (values[1] & mask)
        if name == "mov.b64" and target.startswith("{_"):
            return values[0] >> np.uint64(32)
        found = {
            "mov": lambda x: x,
            "cvt": lambda x: x,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "add": np.add,
            "mul": np.multiply,  # the lower half
            "mad": lambda x, y, z: x * y + z,
            "shl": np.left_shift,
            "shr": lambda x, y: (x & mask) >> y,
            "bfe": lambda x, y, z: (x & mask) >> y & ((np.uint64(1) << z) - np.uint64(1)),
        }[operation](*values)
        return found & np.uint64(0xFFFFFFFF if operation == "cvt" else int(mask))

    def store(self, name: str, rest: str) -> None:
        address, _, source = rest.partition("],")
        register, _, offset = address.strip("[] ").partition("+")
        parts = [part.strip() for part in source.strip(" {}").split(",")]
        assert name in ("st.global.b32", "st.global.v2.b32")
        for number, part in enumerate(parts):
            at = self.registers[register].astype(np.int64) + int(offset or 0) + 4 * number
            for byte in range(4):
                self.out[at + byte] = self.value(part) >> np.uint64(8 * byte) & np.uint64(0xFF)


@pytest.mark.parametrize("q_axis", [0, 1], ids=["queries", "keys"])
@pytest.mark.parametrize("columns", [16, 64, 80, 128])
@pytest.mark.parametrize(
    ("change", "dtype", "dropped"),
    [(zero_dropped, jnp.float32, 0.0), (zero_dropped, jnp.bfloat16, 0.0), (negate_dropped, jnp.float16, -1.0)],
    ids=["zero float32", "zero bfloat16", "negate float16"],
)
@pytest.mark.parametrize("threshold", [6554, 40000])
def test_what_is_dropped(
    threshold: int, change: Callable[..., jax.Array], dtype: Any, dropped: float, columns: int, q_axis: int
) -> None:
    keys = jax.ShapeDtypeStruct((1, 1, 2), jnp.uint32)
    ptx = ptx_of(kernel(change, dtype, columns, q_axis, threshold), keys)
    machine = Machine(KEY, 64 * columns * jnp.dtype(dtype).itemsize)
    for statement in statements(ptx):
        machine.run(statement)
    got = machine.out.view(jnp.dtype(dtype)).reshape(64, columns).astype(np.float64)
    rows, others = ROW + np.arange(64)[:, None], COLUMN + np.arange(columns)
    queries, keys_at = (rows, others) if q_axis == 0 else (others, rows)
    key = jnp.asarray(KEY[0]), jnp.asarray(KEY[1])
    want = np.asarray(keep_elements(key, jnp.asarray(queries), jnp.asarray(keys_at), threshold / LANES))
    np.testing.assert_array_equal(got, np.where(want, 1.0, dropped))
