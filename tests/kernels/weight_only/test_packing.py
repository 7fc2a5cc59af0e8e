"""The storage of codes, what they mean, and the instructions that Triton's kernel makes of it."""

import re
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.weight_only import literal
from tilewright.kernels.weight_only.packing import FORMATS, dequantized, packed, unpacked, values_of


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [1, 100, 128])
def test_a_code_lies_where_the_order_says(format: str, k: int):
    random, bits = np.random.default_rng(k), FORMATS[format].bits
    codes = random.integers(0, 1 << bits, (2, k, 3))
    storage = packed(jnp.asarray(codes), format)
    assert storage.shape == (2, FORMATS[format].units(k), 3, 32)
    assert storage.dtype == jnp.uint8
    found = [
        [[literal.code_at(np.asarray(storage)[i], format, r, c) for c in range(3)] for r in range(k)] for i in (0, 1)
    ]
    np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(unpacked(storage, format, k).swapaxes(-1, -2), codes)


@pytest.mark.parametrize("format", FORMATS)
def test_padding_is_zeros(format: str):
    storage = packed(jnp.ones((1, 2), jnp.int32), format)
    unit = FORMATS[format].unit
    weight = dequantized(storage, jnp.ones((1, 2)), None, format, None, unit, jnp.float32)
    assert np.count_nonzero(weight) == 2
    assert np.all(np.asarray(weight)[:, 0] != 0)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_mean_what_the_format_says(format: str):
    codes = np.arange(1 << FORMATS[format].bits)
    want = [literal.code_value(code, format) for code in codes]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        got = np.asarray(values_of(jnp.asarray(codes), format, dtype), np.float64)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_every_exponent_of_e8m0():
    exponents = np.arange(256, dtype=np.uint8)
    codes = jnp.full((32, 256), 0x5)  # 3, which times 2^-127 is a normal float32
    storage = packed(codes, "mxfp4")
    got = dequantized(storage, jnp.asarray(exponents[None]), None, "mxfp4", 32, 32, jnp.float32)
    want = 3 * exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    want[254] = np.inf  # 3 · 2^127
    np.testing.assert_array_equal(np.asarray(got, np.float64)[:, 0], want)


def execute(text: str, *operands: np.ndarray) -> np.ndarray:
    """What a block of PTX leaves in $0: each instruction by its definition, on arrays of registers."""
    registers: dict[str, Any] = {f"${i + 1}": x.astype(np.uint64) for i, x in enumerate(operands)}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint64(int(name, 0))

    for line in re.findall(r"([a-z][\w.]*) ([^;{}]+);", text):
        if line[0] == "reg":
            continue
        (name, *kinds), (out, *given) = line[0].split("."), [each.strip() for each in line[1].split(",")]
        a, *rest = (value(each) for each in given)
        if name == "mov":
            found = a
        elif name in ("shr", "shl"):
            found = a >> rest[0] if name == "shr" else a << rest[0]
        elif name in ("and", "or", "xor"):
            found = {"and": a & rest[0], "or": a | rest[0], "xor": a ^ rest[0]}[name]
        elif name == "lop3":
            b, c, table = rest
            found = sum(
                (((table >> ((x << 2) | (y << 1) | z)) & 1) & (((a >> bit) & 1) == x) & (((b >> bit) & 1) == y)
                 & (((c >> bit) & 1) == z)).astype(np.uint64) << np.uint64(bit)
                for bit in range(32) for x in (0, 1) for y in (0, 1) for z in (0, 1)
            )  # fmt: skip
        elif name == "prmt":
            both = (rest[0] << np.uint64(32)) | a
            found = sum(
                ((both >> np.uint64(8 * ((int(rest[1]) >> (4 * byte)) & 7))) & np.uint64(255)) << np.uint64(8 * byte)
                for byte in range(4)
            )
        elif name == "fma" and kinds[-1] in ("f16x2", "bf16x2"):
            dtype = np.float16 if kinds[-1] == "f16x2" else ml_dtypes.bfloat16
            halves = []
            for shift in (0, 16):
                x, y, z = (
                    np.asarray((each >> np.uint64(shift)) & np.uint64(0xFFFF), np.uint16).view(dtype).astype(np.float64)
                    for each in (a, *rest)
                )
                halves.append((x * y + z).astype(dtype).view(np.uint16).astype(np.uint64))
            found = halves[0] | halves[1] << np.uint64(16)
        else:
            raise NotImplementedError(line)
        registers[out] = found & np.uint64(0xFFFFFFFF)
    return registers["$0"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_instructions_of_a_plane(format: str, dtype: str):
    """All words of 16 bits, each beside another: by the instructions, by what the interpreter takes, by the format."""
    pytest.importorskip("triton")
    from tilewright.kernels.weight_only.triton.elements import MEANINGS, assembly, zero_offset

    kind: Any = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    random, bits = np.random.default_rng(0), FORMATS[format].bits
    first = np.concatenate([np.arange(1 << 16), random.integers(0, 1 << 16, 64)]).astype(np.uint64)
    second = random.permutation(first)
    zeros = (-8, 0, 8) if format == "int4" else (-128, 0, 77, 128) if format == "int8" else (0,)
    for plane in range(FORMATS[format].planes):
        text = assembly(format, dtype, plane)
        for zero in zeros:
            offset = np.asarray(zero_offset(format, dtype) - zero, kind).view(np.uint16).astype(np.uint64)
            assert offset.astype(np.uint16).view(kind) == zero_offset(format, dtype) - zero
            pair = np.full_like(first, offset << np.uint64(16) | offset)
            given = () if format == "mxfp4" else (pair,)
            found = execute(text, first | second << np.uint64(16), *given)
            for words, shift in ((first, 0), (second, 16)):
                codes = (words >> np.uint64(bits * plane)).astype(np.int64) & ((1 << bits) - 1)
                want = np.array([literal.code_value(code, format) for code in range(1 << bits)])[codes] - zero
                got = ((found >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.uint16)
                np.testing.assert_array_equal(got.view(kind).astype(np.float64), want)
                meant = np.full(words.shape, offset, np.uint16)
                by_interpreter = MEANINGS[text](
                    words.astype(np.uint16).view(np.int16),
                    *([meant.view(np.float16) if dtype == "float16" else meant] * len(given)),
                )
                np.testing.assert_array_equal(np.asarray(by_interpreter).view(np.uint16), got)
