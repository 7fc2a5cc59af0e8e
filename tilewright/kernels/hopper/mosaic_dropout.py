"""The dropout's random bits of a tile, in Mosaic GPU's own terms, below Pallas: registers of single threads.

The tile is 64 rows in the layout of the wgmma accumulator. In it thread ``4 g + t`` of warp w holds the rows 16 w + g
and 16 w + g + 8, and of each eight columns 2 t and 2 t + 1. So of each 16 columns it holds two sets of four elements,
{row, row + 8} × {column, column + 8}, each of which is a call of the generator, whether rows are queries or keys.

A word of bits has those of 64 columns, 1 where the element is kept. The results of its calls (two for each 16 columns,
each of two words) are shifted into both halves of it from above, one behind the other.
"""

from typing import Any

import numpy as np

from tilewright.kernels.numerics.dropout import LANES, PAIR, PHILOX_KEY_STEP, PHILOX_MULTIPLIER, PHILOX_ROUNDS

COLUMNS_PER_WORD = 64
CALLS_PER_WORD = COLUMNS_PER_WORD // PAIR


class _Words:
    """Arithmetic on 32-bit words of a thread, by operators' names."""

    def __init__(self) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        self.utils, self.arith, self.llvm = utils, arith, llvm
        self.i32, self.i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

    def constant(self, value: int) -> Any:
        # Signless: a number above the largest int32 is written as the negative one of the same bits.
        return self.utils.c(value - (1 << 32) if value >= 1 << 31 else value, self.i32)

    def add(self, x: Any, y: Any) -> Any:
        return self.arith.addi(x, y)

    def both(self, x: Any, y: Any) -> Any:
        return self.arith.andi(x, y)

    def either(self, x: Any, y: Any) -> Any:
        return self.arith.ori(x, y)

    def xor(self, x: Any, y: Any) -> Any:
        return self.arith.xori(x, y)

    def right(self, x: Any, places: int) -> Any:
        return self.arith.shrui(x, self.constant(places))

    def product(self, x: Any, factor: int) -> tuple[Any, Any]:
        """Upper and lower word: one instruction (mul.wide)."""
        wide = self.arith.muli(self.arith.extui(self.i64, x), self.utils.c(factor, self.i64))
        upper = self.arith.shrui(wide, self.utils.c(32, self.i64))
        return self.arith.trunci(self.i32, upper), self.arith.trunci(self.i32, wide)

    def thread(self) -> Any:
        """The index of the thread in its block; opaque, so that what follows from it is not kept over a loop."""
        return self.llvm.inline_asm(self.i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)

    def or_zero(self, bits: Any, place: int, value: Any) -> Any:
        """A float where a bit is 1, else 0.

        In PTX: LLVM would round both sides of a selection instead of its result, and select halves of registers.
        """
        code = (
            f"{{ .reg .pred is_kept; .reg .b32 bit; and.b32 bit, $1, {1 << place}; setp.ne.u32 is_kept, bit, 0;"
            " selp.f32 $0, $2, 0f00000000, is_kept; }"
        )
        return self.llvm.inline_asm(value.type, [bits, value], code, "=f,r,f")

    def changed_halves(self, bits: Any, places: list[int], value: Any, negates: bool) -> Any:
        """A word of two floats: each becomes 0, or its negative, where its bit is 0."""
        changes = ("xor.b32 $0, $0, 0x00008000", "xor.b32 $0, $0, 0x80000000")
        if not negates:
            changes = ("and.b32 $0, $0, 0xffff0000", "and.b32 $0, $0, 0x0000ffff")
        code = "".join(
            f" and.b32 bit, $1, {1 << place}; setp.ne.u32 is_kept, bit, 0; @!is_kept {change};"
            for place, change in zip(places, changes, strict=True)
        )
        code = f"{{ .reg .pred is_kept; .reg .b32 bit; mov.b32 $0, $2;{code} }}"
        return self.llvm.inline_asm(self.i32, [bits, value], code, "=&r,r,r")


type Pair = tuple[Any, Any]


def draw(key: Pair, starts: Pair, columns: int, transposed: bool, threshold: int) -> Any:
    """The bits of a tile, a word for each 64 columns and thread; 1 is kept.

    Args:
      key: of the head.
      starts: first row and column of the tile, multiples of 16.
      transposed: whether rows of the tile are keys, not queries.
      threshold: in [0, 65536).
    """
    w = _Words()
    # Scalars come as arrays of one register.
    key, starts = ((one.registers.item(), other.registers.item()) for one, other in (key, starts))
    return _array(words_of_bits(w, w.thread(), key, starts, columns, transposed, threshold))


def words_of_bits(
    w: Any, thread: Any, key: Pair, starts: Pair, columns: int, transposed: bool, threshold: int
) -> list[Any]:
    """`draw` for one thread, with arithmetic ``w``."""
    (first, second), (row_start, column_start) = key, starts
    # Numbers of rows and columns: positions without bit 3. Of a row 16 w + g it is 8 w + g.
    row = w.add(w.right(row_start, 1), w.both(w.right(thread, 2), w.constant(31)))
    column = w.add(w.right(column_start, 1), w.add(*[w.both(thread, w.constant(3))] * 2))
    # A wide multiplication a round, for four elements. Threefry-2x32, which kernels had before, took 75 instructions
    # for two of them; with 7 rounds instead of 10 a forward pass took 1.48 ms instead of 1.58
    # (docs/notes/hopper_attention.md).
    round_keys = [w.add(first, w.constant(PHILOX_KEY_STEP * i % (1 << 32))) for i in range(PHILOX_ROUNDS)]
    if transposed:
        # The key's second word goes with the keys' positions, which are the rows of the transposed tile.
        row = w.xor(row, second)
    words = []
    for word_start in range(0, columns, COLUMNS_PER_WORD):
        word = w.constant(0)
        for call in range(_calls(columns, word_start)):
            # Call 2 i + 1 is of the column to the right of that of call 2 i.
            other = w.add(column, w.constant(word_start // 2 + call // 2 * PAIR + call % 2))
            counter = (other, row) if transposed else (row, w.xor(other, second))
            # The first result is of query q, the second of q + 8; their halves are of keys c and c + 8. Each is shifted
            # in from the top of its half: 16 results, those of 64 columns, fill both halves, and no bit crosses from
            # one to the other.
            for result in _philox(w, round_keys, counter):
                word = w.add(w.right(word, 1), _at_least(w, result, threshold))
        words.append(word)
    return words


def select(bits: Any, first_word: int, tile: Any, transposed: bool, negates: bool) -> Any:
    """A tile with 0 where an element is dropped; or, only in 16 bits, with its negative.

    Args:
      bits: words of `draw`; those of the tile begin with ``first_word``.
      tile: in the accumulator's layout, of 16 or of 32 bits.
      transposed: as for `draw`.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    w = _Words()
    words = [vector.extract(each, [], [0]) for each in bits.registers.flat[first_word:]]
    columns = tile.shape[1]
    single = ir.VectorType.get((1,), w.i32)
    registers = np.empty(tile.registers.shape, dtype=object)
    source: Any = tile.registers.reshape(columns // PAIR, 2)
    target = registers.reshape(columns // PAIR, 2)
    for eight, half in np.ndindex(source.shape):
        number, places = places_of_pair(columns, transposed, eight, half)
        pair = source[eight, half]
        if utils.bitwidth(tile.mlir_dtype) == 16:
            word = vector.extract(vector.bitcast(single, pair), [], [0])
            word = vector.from_elements(single, [w.changed_halves(words[number], places, word, negates)])
            target[eight, half] = vector.bitcast(pair.type, word)
        else:
            assert not negates
            elements = [vector.extract(pair, [], [odd]) for odd in range(2)]
            chosen = [w.or_zero(words[number], *each) for each in zip(places, elements, strict=True)]
            target[eight, half] = vector.from_elements(pair.type, chosen)
    return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)


def places_of_pair(columns: int, transposed: bool, eight: int, half: int) -> tuple[int, list[int]]:
    """Finds the bits of two neighbouring elements of a thread: the number of their word, and their places in it.

    Args:
      columns: of the tile.
      eight: which eight columns the two are in.
      half: 0 or 1, the first or second row of the thread.
    """
    of_query, of_key = (eight % 2, half) if transposed else (half, eight % 2)
    number, call = divmod(eight // 2 * 2, CALLS_PER_WORD)
    # The last result of a word is at the top of each half.
    last = 2 * _calls(columns, number * COLUMNS_PER_WORD) - 1
    return number, [15 - (last - 2 * (call + odd) - of_query) + 16 * of_key for odd in range(2)]


def _calls(columns: int, word_start: int) -> int:
    """Number of calls of a word of bits whose first column is ``word_start``."""
    return min(COLUMNS_PER_WORD, columns - word_start) // PAIR


def _philox(w: Any, round_keys: list[Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    left, right = counter
    for key in round_keys:
        upper, lower = w.product(left, PHILOX_MULTIPLIER)
        left, right = w.xor(w.xor(upper, key), right), lower
    return left, right


def _at_least(w: Any, word: Any, threshold: int) -> Any:
    """Compares both halves of a word at once: bits 15 and 31 say if they are at least the threshold; others are 0.

    They are the carries of adding 65536 - threshold to each half, without its top bit at first, so that no sum leaves
    its half; the carry out of the top bit then follows from the one into it.
    """
    tops = w.constant(0x80008000)
    if threshold == 0:
        return tops
    addend = LANES - threshold
    low = w.add(w.both(word, w.constant(0x7FFF7FFF)), w.constant(addend % (1 << 15) * 0x10001))
    return w.both(w.either(word, low) if addend >= 1 << 15 else w.both(word, low), tops)


def _array(words: list[Any]) -> Any:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    single = ir.VectorType.get((1,), words[0].type)
    registers = np.empty((len(words),), dtype=object)
    registers[:] = [vector.from_elements(single, [word]) for word in words]
    layout = mgpu.WGStridedFragLayout(shape=(len(words) * 128,), vec_size=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
