"""Hashes of all headers that a table's header includes, except the compiler's own."""

import functools
import hashlib
import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path

from tilewright.kernels.cuda.table import VariantTable
from tilewright.kernels.cuda.toolchain import own_folders, package_folders

# Includes count under any condition: one header too many causes a needless build, one too few a wrong one.
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)

# Index of an include folder, and the path of a header in it.
_Header = tuple[int, str]


@functools.lru_cache(maxsize=64)
def hash_headers(table: VariantTable) -> tuple[str, dict[str, str]]:
    """A hash of the table's own headers with those of XLA's FFI, and one for each installed package.

    Computed once per process, as shared objects are loaded once.

    Raises:
      OSError: the table's header cannot be read.
    """
    table_folders = (table.header.parent, *own_folders(), *table.include_folders)
    packages = {package.name: package_folders(package) for package in table.packages}
    owners = ["" for _ in table_folders] + [name for name, found in packages.items() for _ in found or ()]
    folders = [*table_folders, *(folder for found in packages.values() for folder in found or ())]
    hashes = {name: hashlib.sha256() for name in ("", *(name for name, found in packages.items() if found is not None))}
    for (folder, relative), digest in sorted(_closure([table.header.name, "tilewright/group.h"], folders).items()):
        hashes[owners[folder]].update(f"{relative}\0{digest}\0".encode())
    return hashes.pop("").hexdigest(), {name: digest.hexdigest() for name, digest in hashes.items()}


@functools.lru_cache(maxsize=64)
def hash_own_headers(table: VariantTable) -> str:
    """A hash of the headers that are neither XLA's nor a package's: equal wherever the table is equal.

    Raises:
      OSError: the table's header cannot be read.
    """
    folders = (table.header.parent, own_folders()[0], *table.include_folders)
    # Headers that only a package's headers include count too, although the package may not be installed.
    further = sorted(path.name for folder in table.include_folders for path in folder.iterdir())
    found = _closure([table.header.name, "tilewright/group.h", *further], folders)
    total = hashlib.sha256()
    for (folder, relative), digest in sorted(found.items()):
        total.update(f"{folder}\0{relative}\0{digest}\0".encode())
    return total.hexdigest()


def _closure(names: Sequence[str], folders: Sequence[Path]) -> dict[_Header, str]:
    """Hashes of the named headers and of everything they include from the folders."""
    found: dict[_Header, str] = {}
    waiting = [header for name in names if (header := _find(name, folders)) is not None]
    if not waiting or waiting[0] != (0, names[0]):
        raise FileNotFoundError(f"there is no header {folders[0] / names[0]}")
    while waiting:
        header = waiting.pop()
        if header in found:
            continue
        folder, relative = header
        data = (folders[folder] / relative).read_bytes()
        found[header] = hashlib.sha256(data).hexdigest()
        for mark, name in _INCLUDE.findall(data):
            included = _resolve_include(mark == b'"', name.decode(errors="replace"), header, folders)
            if included is not None and included not in found:
                waiting.append(included)
    return found


def _resolve_include(quoted: bool, name: str, header: _Header, folders: Sequence[Path]) -> _Header | None:
    folder, relative = header
    sibling = posixpath.normpath(posixpath.join(posixpath.dirname(relative), name))
    if quoted and _is_file(folders[folder], sibling):
        return folder, sibling
    return _find(name, folders)


def _find(name: str, folders: Sequence[Path]) -> _Header | None:
    name = posixpath.normpath(name)
    return next(((i, name) for i, folder in enumerate(folders) if _is_file(folder, name)), None)


def _is_file(folder: Path, relative: str) -> bool:
    # pathlib would take half of the time of thousands of such checks.
    return os.path.isfile(os.path.join(folder, relative))
