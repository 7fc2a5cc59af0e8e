"""Rows of fixed length from a long array of tokens, in an order that a number of the row alone decides."""

import functools
import math
from pathlib import Path

import numpy as np
from stdlib_text import load_text


class Corpus:
    """Tokens cut into rows of ``length + 1``, the last of which is the first of the next row: it is a label here.

    Documents lie end to end; one that is cut goes on in another row as a document of its own. Each epoch reads all rows
    in another order.

    Attributes:
      tokens: one dimension of integers, which may stay on disk.
      vocab: one more than the greatest token may be.
      seed: of the order; ``None`` is the order of the tokens.
      rows: how many there are.
    """

    def __init__(self, tokens: np.ndarray, length: int, vocab: int, seed: int | None, least: int) -> None:
        """Exits if there are fewer than ``least`` rows."""
        self.tokens, self.length, self.vocab, self.seed = tokens, length, vocab, seed
        self.rows = (len(tokens) - 1) // length
        if self.rows < least:
            raise SystemExit(f"{len(tokens)} tokens are too few for a step of {least} rows of {length}")
        self._order = functools.lru_cache(maxsize=2)(self._drawn)

    def _drawn(self, epoch: int) -> np.ndarray:
        rows = np.arange(self.rows)
        return rows if self.seed is None else np.random.default_rng((self.seed, epoch)).permutation(rows)

    def read(self, first: int, *shape: int) -> np.ndarray:
        """The rows from number ``first`` on, int32 ``[*shape, length + 1]``; numbers count on over epochs."""
        places = [self._order(n // self.rows)[n % self.rows] for n in range(first, first + math.prod(shape))]
        found = np.stack([self.tokens[self.length * i : self.length * (i + 1) + 1] for i in places])
        if found.min() < 0 or found.max() >= self.vocab:
            raise SystemExit(f"tokens from {found.min()} to {found.max()} are not all below {self.vocab=}")
        return found.astype(np.int32).reshape(*shape, -1)

    def entropy(self) -> float:
        """The loss of the best model that predicts every token from its frequency alone, of the first ten million."""
        tokens = self.tokens[:10_000_000]
        share = np.bincount(tokens) / len(tokens)
        return float(-np.sum(share[share > 0] * np.log(share[share > 0])))


def load_tokens(file: Path | None, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens for training and for validation: bytes of the standard library's source, or a file of tokens.

    Files stay on disk, and their last twentieth is for validation: a .npy, or a .bin of uint16, of uint32 for more than
    65536 classes. Exits if there is no such file.
    """
    if file is None:
        return load_text()
    if not file.is_file() or file.suffix not in (".npy", ".bin"):
        raise SystemExit(f"--data must be a .npy or .bin file, and there is none at {file}")
    if file.suffix == ".npy":
        tokens = np.load(file, mmap_mode="r")
    else:
        tokens = np.memmap(file, np.uint16 if vocab <= 1 << 16 else np.uint32, "r")
    if tokens.ndim != 1 or not np.can_cast(tokens.dtype, np.int64):
        raise SystemExit(f"{file} has {tokens.dtype} of {tokens.shape}, not one dimension of integers")
    cut = len(tokens) - len(tokens) // 20
    return tokens[:cut], tokens[cut:]
