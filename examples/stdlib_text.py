"""Text that every machine has: the source of Python's own standard library, as bytes."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

# Not the language as people write it: tests, generated tables, and what others installed.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_VALIDATION_SHARE = 0.05


def source_files(root: Path | None = None) -> list[Path]:
    """The library's Python files in a fixed order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(files) if not _LEFT_OUT.intersection(file.parts)]


def in_validation(name: str) -> bool:
    """Whether a file is held out: decided only by its name, so a new Python keeps the split."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < _VALIDATION_SHARE * 2**32


def load_text(root: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation text as uint8, split by file; a zero byte ends each file."""
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in source_files(root):
        parts[in_validation(file.relative_to(root).as_posix())].append(file.read_bytes() + b"\0")
    if not parts[0] or not parts[1]:
        raise FileNotFoundError(f"too few Python files to split under {root}: {len(parts[0])=}, {len(parts[1])=}")
    train, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, validation


def batches(text: np.ndarray, batch: int, length: int, seed: int):
    """Endless int32 arrays [batch, length + 1] of contiguous text from random places."""
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, len(text) - length - 1, size=batch)
        yield np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
