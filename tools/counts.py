"""Counts that say how a tree of Python reads: cycles of imports, repetitions, `Any`, sizes, comments and docstrings.

For sources in CUDA C++ only the lines are counted.

python -m tools.counts               # a line for each count of tilewright/
python -m tools.counts --show cycles # what is behind one of them, by the name at the end of its line

A cycle is a set of modules, or of rooms, that all reach each other by imports. Imports in functions, for type checkers
and by strings count like any others. A string is an import if it is ``"package.module:Name"``, wherever it stands, or
an argument of ``import_module``, also by way of a constant or a table of the module. An f-string counts as far as it is
known without running the module. A string that only names a module is not an import: a logger, the module that a
process is started with, a class's former name (``formerly=``).

Rooms are compared in each folder: its folders and files import one another as the modules within them do. A file is a
room of its own, above the folders that it imports. So an op that names its backends in the folders beside it, or a
registry that names the ops, is not a cycle, as long as nothing in those folders imports that very file; and two folders
that name each other are one, even if no two modules do. Files of one folder count as modules only.
"""

import argparse
import ast
import collections
import dataclasses
import io
import itertools
import math
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPEATED_LINES = 6
MAX_MODULES = 20
MIN_FILE = 60
CUDA_SUFFIXES = frozenset({".cu", ".cuh", ".h"})
QUESTION_WORDS = frozenset({"What", "Whether", "Of", "Which", "How", "Where", "Who", "That", "Those", "Why", "When"})


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """One count.

    Attributes:
      value: as it is printed.
      behind: what was counted, a line each, the worst first.
    """

    name: str
    value: str
    behind: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A file of Python, by its dotted name."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def modules_of(package: Path) -> list[Module]:
    """The modules of a package, whose name is that of its folder."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return found


def cuda_files(package: Path) -> list[Path]:
    """The sources and headers in CUDA C++ in the folder of a package."""
    return sorted(path for path in package.rglob("*") if path.suffix in CUDA_SUFFIXES)


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of the names that a module assigns at its top level."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def _known_text(node: ast.AST | None, assigned: Mapping[str, ast.expr]) -> tuple[str, bool]:
    """The string that an expression is, as far as that is written in the module, and whether that is all of it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, True
    if isinstance(node, ast.FormattedValue):
        node = node.value
    if isinstance(node, ast.Name) and isinstance(assigned.get(node.id), ast.Constant):
        return _known_text(assigned[node.id], assigned)
    known = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else ():
        text, is_whole = _known_text(part, assigned)
        known += text
        if not is_whole:
            return known, False
    return known, isinstance(node, ast.JoinedStr)


def _named_by_strings(tree: ast.Module) -> set[str]:
    """What strings would name as modules: those with a colon and a name behind, and those for ``import_module``.

    Of an f-string with unknown parts that is the folder before the first of them.
    """
    assigned, found = _assigned(tree), set()
    former = {id(part) for node in ast.walk(tree) if _is_former_name(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in former:
            continue
        text, is_whole = _known_text(node, assigned)
        module, colon, name = text.partition(":")
        if colon and name.isidentifier():
            found.add(module)
        elif not is_whole:
            found.add(module.rpartition(".")[0])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            parts = [part for argument in node.args for part in ast.walk(argument)]
            tables = [assigned[each.id] for each in parts if isinstance(each, ast.Name) and each.id in assigned]
            parts += [part for table in tables for part in ast.walk(table)]
            found |= {text for text, is_whole in (_known_text(part, assigned) for part in parts) if is_whole}
    return found


def _is_former_name(node: ast.AST) -> bool:
    """True for ``formerly=...``, with the names that classes had."""
    return isinstance(node, ast.keyword) and node.arg == "formerly"


def imports_of(module: Module, names: Iterable[str]) -> set[str]:
    """The modules among ``names`` that a module imports, also in functions, only for types, and by strings.

    A package is imported before its modules by Python itself; that is counted where the package is named.
    """
    known = set(names)
    found = _named_by_strings(module.tree)
    is_package = module.path.name == "__init__.py"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = module.name.split(".")[: None if is_package else -1]
                base = ".".join([*folder[: len(folder) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in known else base)
    return (found & known) - {module.name}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of nodes that all reach each other, the largest first (Tarjan's algorithm, without recursion)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for root in sorted(graph):
        work = [(root, iter(sorted(graph[root])))] if root not in order else []
        while work:
            node, rest = work[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            for other in rest:
                if other not in order:
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    part = [stack.pop()]
                    while part[-1] != node:
                        part.append(stack.pop())
                    on_stack.difference_update(part)
                    if len(part) > 1:
                        found.append(sorted(part))
    return sorted(found, key=len, reverse=True)


def room_cycles(graph: Mapping[str, set[str]], packages: Iterable[str]) -> list[list[str]]:
    """The cycles among the entries of each folder, at least one of them a folder; those of the outer folders first.

    Args:
      graph: the imports of each module.
      packages: the modules that are ``__init__.py`` of a folder.
    """
    inits = set(packages)

    def path(name: str) -> tuple[str, ...]:
        return (*name.split("."), "__init__") if name in inits else tuple(name.split("."))

    folders: dict[tuple[str, ...], dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for name, imported in graph.items():
        for other in imported:
            pairs = list(
                itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path(name), path(other), strict=False))
            )
            folder = tuple(part for part, _ in pairs)
            mine, theirs = (".".join(path(each)[: len(folder) + 1]) for each in (name, other))
            folders[folder][mine].add(theirs)
            folders[folder][theirs] |= set()
    found = [part for _, inside in sorted(folders.items()) for part in cycles(inside)]
    return [part for part in found if any(name in inits for name in part)]


def _code_lines(text: str, tree: ast.Module) -> list[tuple[int, str]]:
    """The lines of code by number, without imports, comments, docstrings, and lines of only brackets."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: dict[int, list[str]] = collections.defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE and token.start[0] not in skipped:
            lines[token.start[0]].append(token.string)
    return [(at, " ".join(parts)) for at, parts in sorted(lines.items()) if any(map(str.isalnum, "".join(parts)))]


_NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def repeated(modules: Iterable[Module], least: int = REPEATED_LINES) -> list[str]:
    """The pairs of files, or a file with itself, that share runs of this many lines, longest run first."""
    codes = [(module.path, _code_lines(module.text, module.tree)) for module in modules]
    places: dict[tuple[str, ...], list[tuple[int, int]]] = collections.defaultdict(list)
    for file, (_, lines) in enumerate(codes):
        for at in range(len(lines) - least + 1):
            places[tuple(code for _, code in lines[at : at + least])].append((file, at))
    starts = {pair for found in places.values() for pair in itertools.combinations(found, 2)}
    longest: dict[tuple[int, int], tuple[int, str]] = {}
    for one, other in starts:
        if one[0] == other[0] and other[1] - one[1] < least:
            continue  # a list of like lines, and itself
        length = next(n for n in itertools.count(1) if ((one[0], one[1] + n), (other[0], other[1] + n)) not in starts)
        said = " ".join(f"{codes[file][0]}:{codes[file][1][at][0]}" for file, at in (one, other))
        pair = (one[0], other[0])
        longest[pair] = max(longest.get(pair, (0, "")), (length + least - 1, said))
    return [f"{lines} lines: {said}" for lines, said in sorted(longest.values(), reverse=True)]


def _functions(modules: Iterable[Module]) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield module, node


def _annotations(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """The annotations of arguments, with the place of each."""
    for module, function in _functions(modules):
        given = function.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        for argument in named:
            if argument is not None and argument.annotation is not None:
                yield f"{module.path}:{argument.lineno} {argument.arg}", ast.unparse(argument.annotation).strip("'")


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _comment_lines(text: str) -> int:
    """The lines that hold a comment and no code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip() for token in tokens)


def _docstrings(module: Module) -> Iterator[ast.Expr]:
    """The docstrings of a module, its classes, functions and constants: strings that are statements."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def _docstring_lines(module: Module) -> int:
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in _docstrings(module))


def _share_of_lines(
    modules: Sequence[Module], lines_of: Callable[[Module], int]
) -> tuple[str, list[tuple[float, str]]]:
    """The share of all lines in per cent, and that of each file of `MIN_FILE` lines or more."""
    each = [(lines_of(module), len(module.text.splitlines()), str(module.path)) for module in modules]
    share = 100 * sum(lines for lines, _, _ in each) / max(1, sum(size for _, size, _ in each))
    return f"{share:.1f} %", [(100 * lines / size, path) for lines, size, path in each if size >= MIN_FILE]


def _by_question(modules: Iterable[Module]) -> list[str]:
    """The docstrings that begin with a question word or a pronoun instead of a verb or the thing itself."""
    found = []
    for module in modules:
        for node in _docstrings(module):
            first = ast.literal_eval(node.value).split(maxsplit=1)[:1]
            if first and first[0] in QUESTION_WORDS:
                found.append(f"{module.path}:{node.lineno} {first[0]}")
    return found


def _percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that so large a share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0


def counts_of(package: Path) -> dict[str, Count]:
    """All counts of a package, by the name that ``--show`` takes."""
    modules = modules_of(package)
    names = [module.name for module in modules]
    graph = {module.name: imports_of(module, names) for module in modules}
    found = cycles(graph)
    rooms = room_cycles(graph, [module.name for module in modules if module.path.name == "__init__.py"])
    pairs = repeated(modules)
    annotations = list(_annotations(modules))
    loose = [place for place, said in annotations if said in ("Any", "Any | None")]
    texts = [(module.text, module.path) for module in modules]
    texts += [(path.read_text(encoding="utf-8"), path) for path in cuda_files(package)]
    files = sorted(((len(text.splitlines()), str(path)) for text, path in texts), reverse=True)
    functions = sorted(
        ((_lines(node), f"{module.path}:{node.lineno} {node.name}") for module, node in _functions(modules)),
        reverse=True,
    )
    folders = collections.Counter(module.path.parent for module in modules if module.path.name != "__init__.py")
    crowded = [f"{number} modules in {folder}" for folder, number in folders.most_common() if number > MAX_MODULES]
    kernels = [module for module in modules if "kernels" in module.path.relative_to(package.parent).parts]
    commented, comments = _share_of_lines(kernels, lambda module: _comment_lines(module.text))
    documented, docstrings = _share_of_lines(modules, _docstring_lines)
    questions = _by_question(modules)
    share = 100 * len(loose) / max(1, len(annotations))
    return {
        "cycles": Count(
            "modules in cycles of imports",
            f"{sum(map(len, found))} ({len(found)} cycles, the largest of {max(map(len, found), default=0)})",
            [" ".join(part) for part in found],
        ),
        "rooms": Count(
            "rooms in cycles of imports",
            f"{sum(map(len, rooms))} ({len(rooms)} cycles, the largest of {max(map(len, rooms), default=0)})",
            [" ".join(part) for part in rooms],
        ),
        "repeated": Count(f"pairs of files that share {REPEATED_LINES} lines or more", str(len(pairs)), pairs),
        "any": Count("arguments annotated as Any", f"{share:.1f} % ({len(loose)} of {len(annotations)})", loose),
        "files": Count(
            "lines of a file, CUDA C++ included, 90 % and most",
            f"{_percentile([size for size, _ in files], 0.9)}, {files[0][0] if files else 0}",
            [f"{size} {path}" for size, path in files],
        ),
        "functions": Count(
            "lines of a function, 90 % and most",
            f"{_percentile([size for size, _ in functions], 0.9)}, {functions[0][0] if functions else 0}",
            [f"{size} {place}" for size, place in functions],
        ),
        "comments": Count(
            "lines of kernels that are comments", commented, [f"{part:.1f} % {path}" for part, path in sorted(comments)]
        ),
        "docstrings": Count(
            "lines that are docstrings",
            documented,
            [f"{part:.1f} % {path}" for part, path in sorted(docstrings, reverse=True)],
        ),
        "questions": Count("docstrings that begin with a question word", str(len(questions)), questions),
        "folders": Count(f"folders of more than {MAX_MODULES} modules", str(len(crowded)), crowded),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=ROOT / "tilewright")
    parser.add_argument("--show", metavar="NAME", help="a name at the end of a line")
    parser.add_argument("--most", type=int, default=30, help="lines that --show prints at most")
    args = parser.parse_args(arguments)
    counts = counts_of(args.package)
    for key, count in counts.items():
        print(f"{count.name:55} {count.value:32} {key}")
    if args.show is not None:
        if args.show not in counts:
            parser.error(f"--show takes {', '.join(counts)}, not {args.show}")
        print(*counts[args.show].behind[: args.most], sep="\n")


if __name__ == "__main__":
    main()
