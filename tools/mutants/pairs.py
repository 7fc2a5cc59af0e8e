"""The backends of every op, the files of each, and the defects drawn for one."""

import ast
import hashlib
import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from tilewright.kernels import OPS, kernel
from tools.mutants.defects import ROOT, Defect
from tools.mutants.rules import SPEED, changes, defects

FEWEST = 3
"""Defects that each backend of an op has at least."""

ENOUGH = 40
"""A backend with fewer candidates than that in its own files is what it imports from its op: those count, too."""

REJECTED = Path(__file__).parent / "rejected.toml"

type Pair = tuple[str, str]
"""An op, and the name of one of its backends."""


def pairs() -> dict[Pair, str]:
    """``"module:Class"`` of each backend of each op."""
    found = {}
    for op in OPS:
        backends = kernel(op).backends
        for loaded, where in zip(backends, backends.where, strict=True):
            found[op, loaded.name] = where
    return found


def files(where: str) -> tuple[list[str], list[str]]:
    """The files of Python of a backend ``"module:Class"``: its own, and those of its op that these import."""
    module = where.partition(":")[0]
    first = f"{module.replace('.', '/')}.py"
    family = "/".join(first.split("/")[:3])
    # A backend in a file of its own shares its folder with the op.
    folder = str(PurePosixPath(first).parent)
    alone = folder == family
    own, waiting, beside = [first], [first], set[str]()
    while waiting:
        for name in _imported(waiting.pop()):
            if name.startswith(f"{folder}/") and not alone:
                if name not in own:
                    own.append(name)
                    waiting.append(name)
            elif name.startswith(f"{family}/"):
                beside.add(name)
    return sorted(own), sorted(beside)


def _imported(file: str) -> list[str]:
    """The repository's files that a file imports, functions included."""
    found = []
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        names = [f"{module.replace('.', '/')}.py" for module in modules]
        found += [name for name in names if (ROOT / name).is_file()]
    return found


def of_pairs(known: Iterable[Defect]) -> dict[Pair, list[str]]:
    """The ids of the defects of each backend: those drawn for it, and those by hand in its files or its folder."""
    found: dict[Pair, list[str]] = {}
    known = list(known)
    for pair, where in pairs().items():
        found[pair] = []
        own, folder = set(files(where)[0]), str(PurePosixPath(where.partition(":")[0].replace(".", "/")).parent)
        for defect in known:
            # Sources of CUDA C++ are imported by nobody: all in its folder count.
            by_hand = not defect.op and (
                defect.file in own or (not defect.file.endswith(".py") and defect.file.startswith(f"{folder}/"))
            )
            if by_hand or (defect.op, defect.backend) == pair:
                found[pair].append(defect.id)
    return found


def rejected(file: Path = REJECTED) -> dict[str, str]:
    """Why candidates that were drawn are none: the id, and that nothing changes but speed, or nothing at all."""
    return tomllib.loads(file.read_text())["rejected"] if file.exists() else {}


def candidates(op: str, backend: str, seed: int = 0) -> list[Defect]:
    """Defects by rule of one backend of an op in a random order, which only a change of its files changes.

    Rules take turns, so that a rule with few places is drawn as often as one that fits everywhere.

    Raises:
      ValueError: There is no such backend.
    """
    if (op, backend) not in (known := pairs()):
        raise ValueError(f"there is no backend {backend!r} of {op!r}; there are {sorted(known)}")
    own, beside = files(known[op, backend])
    found = _of_files(own, op, backend)
    if len(found) < ENOUGH:
        found += _of_files(beside, op, backend)

    def place(text: str) -> str:
        return hashlib.sha256(f"{seed}/{op}/{backend}/{text}".encode()).hexdigest()

    by_rule = defaultdict(list)
    for defect in sorted(found, key=lambda each: place(each.id)):
        by_rule[_rule(defect)].append(defect)
    rules = sorted(by_rule, key=place)
    turns = itertools.zip_longest(*(by_rule[rule] for rule in rules))
    return [defect for turn in turns for defect in turn if defect is not None]


def _of_files(names: Iterable[str], op: str, backend: str) -> list[Defect]:
    return [
        defect for name in names if not SPEED.search(PurePosixPath(name).stem) for defect in defects(name, op, backend)
    ]


def _rule(defect: Defect) -> str:
    return defect.id.split("-")[-2]


def grown(op: str, backend: str, count: int, seed: int, known: Collection[Defect]) -> list[Defect]:
    """The next ``count`` candidates that neither are defects already nor were rejected."""
    stored = {(defect.file, defect.find, defect.replace) for defect in known}
    gone = rejected()
    new = (
        defect
        for defect in candidates(op, backend, seed)
        if defect.id not in gone and (defect.file, defect.find, defect.replace) not in stored and changes(defect)
    )
    return list(itertools.islice(new, count))


def as_toml(defect: Defect) -> str:
    """An entry of ``defects/*.toml``."""
    plain = "".join(f'{name} = "{getattr(defect, name)}"\n' for name in ("id", "op", "backend", "area", "file"))
    says = re.sub(r'([\\"])', r"\\\1", defect.says)
    return f"[[defect]]\n{plain}find = '''\n{defect.find}'''\nreplace = '''\n{defect.replace}'''\nsays = \"{says}\"\n"
