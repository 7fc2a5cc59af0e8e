"""Hashes of sources: a measured config and a lowered kernel are stale once what they depend on has another hash."""

import functools
import hashlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

# A source that changed after this time may differ from the one imported.
_STARTED = time.time()

# To parse the sources, 400 kB for attention on Hopper, would take ten times as long, in a process's first call.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]*(\([^)]*\)|.*)|import[ \t]+([\w.][\w., \t]*))", re.MULTILINE
)
_WORD = re.compile(r"[^\W\d][\w.]*")

# Lines of comments do not count; the space tells them from directives of C in strings. A pattern that begins with the
# end of the line before takes a sixth of the time of one that may begin anywhere.
_COMMENT = re.compile(rb"\n[ \t]*# [^\n]*(?=\n)")


def sources_fingerprint(sources: Mapping[str, Path]) -> str:
    """A hash of source files, without their lines of comments, and the names that they are given.

    Empty if it might not describe the imported code: there are none, or one cannot be read or has changed since this
    process began.
    """
    digest = hashlib.sha256()
    try:
        for name, path in sorted(sources.items()):
            if path.stat().st_mtime > _STARTED:
                return ""
            content = path.read_bytes()
            if path.suffix == ".py":
                content = _COMMENT.sub(b"", b"\n" + content)[1:]
            digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
    except OSError:
        return ""
    return digest.hexdigest() if sources else ""


@functools.cache
def packages_fingerprint(names: frozenset[str]) -> str:
    """A hash of all Python sources of packages or modules, given by top-level name; empty if one has none."""
    found = [_package(name) for name in names]
    return sources_fingerprint(dict(itertools.chain(*map(dict.items, found)))) if all(found) else ""


def _package(name: str) -> dict[str, Path]:
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if file.suffix != ".py" or name == "__main__":
        return {}
    if file.name != "__init__.py":
        return {file.name: file}
    root = str(file.parent)
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(root):
        place = f"{name}{folder[len(root) :].replace(os.sep, '/')}"
        found |= {f"{place}/{each}": Path(folder, each) for each in files if each.endswith(".py")}
    return found


def imported(modules: Iterable[str], counts: Callable[[str], bool]) -> dict[str, Path]:
    """The sources of modules and of the modules that they import, directly or not, wherever the statement stands.

    The headers in a package's folder, and in ``include`` below it, are among them. Nothing is imported.

    Args:
      modules: names of modules; their top-level packages are loaded.
      counts: true for the name of a module that counts; what another one imports does not.
    """
    found: dict[str, Path] = {}
    waiting = [name for name in modules if counts(name)]
    while waiting:
        name = waiting.pop()
        path = None if name in found else _file(name)
        if path is None:
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found |= {name: path, **_headers(package, path.parent)}
        waiting += filter(counts, _imports(path.read_text(encoding="utf-8", errors="replace"), package))
    return found


def _headers(package: str, folder: Path) -> dict[str, Path]:
    files = [*folder.glob("*.cu*"), *folder.glob("include/**/*.*")] if package else []
    return {f"{package}/{path.relative_to(folder).as_posix()}": path for path in files if path.is_file()}


def _imports(text: str, package: str) -> Iterator[str]:
    """Names of all modules that a source in a package may import; some of them need not exist."""
    for origin, names, modules in _IMPORT.findall(text):
        yield from _WORD.findall(modules)
        if origin:
            name = origin.lstrip(".")
            around = package.split(".")[: package.count(".") + 2 - len(origin) + len(name)] if name != origin else []
            module = ".".join(filter(None, [*around, name]))
            yield from (module, *(f"{module}.{each}" for each in _WORD.findall(names)))


def _file(module: str) -> Path | None:
    """The source of a module, without importing it."""
    top, *rest = module.split(".")
    loaded = sys.modules.get(top)
    if not rest and (file := getattr(loaded, "__file__", None)):
        return Path(file)
    paths = (Path(root, *rest) for root in getattr(loaded, "__path__", ()))
    files = (file for path in paths for file in (path / "__init__.py", path.with_name(f"{path.name}.py")))
    return next((file for file in files if file.is_file()), None)
