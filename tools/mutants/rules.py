"""Defects by rule: what may go wrong at a place of a kernel or its glue, read from the syntax tree of its file.

A rule yields edits: a node's text is replaced by another, and a sentence says what goes wrong. An edit becomes a defect
with the lines around it, as many as make the text unique in its file.
"""

import ast
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from tools.mutants.defects import ROOT, Defect

SPEED = re.compile(r"heuristic|candidates|footprint|cost|deprioritized|builds|worth|prefer|splits$|bytes|_params$")
"""Functions and files with these in their names decide how fast a call is, not what it computes."""

FAST = re.compile(r"dtype$|stage|warps|evict|name|fast|debug")
"""Arguments that change no result if they are forgotten; of a dtype the rule says more that gives it."""

MESSAGES = re.compile(r"reasons|__str__|__repr__|message")
"""Functions of these names build texts."""

FENCES = re.compile(
    r"(^|_)(commit|wait|arrive|release|acquire|fence|barrier|sync|syncwarp|drain|ready)(_|$)|^commit_smem|^debug_barrier$"
)
BACKWARD = re.compile(r"backward|grad|(^|[._/])d_|delta|(^|[._/])dq|dkv|_bwd|cotangent|transposed?_product")
MASKS = re.compile(r"mask|visible|valid|causal|window|segment|inside|keep|kept|position|left|right")
WHERE, PRODUCTS, BOUNDED = {"where", "select"}, {"matmul", "dot", "einsum_pair"}, {"cdiv", "min", "minimum", "range"}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
LOST: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("operands", "is not added"),
    ast.Sub: ("operands", "is not subtracted"),
    ast.Mult: ("scale", "is not multiplied by"),
    ast.Div: ("scale", "is not divided by"),
    ast.BitAnd: ("masks", "is not asked for"),
}
LINES = 6
"""At most so many lines before an edit make its text unique."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """Text from ``start`` to ``end`` (characters of a file) replaced; ``kind`` is what a user would notice."""

    node: ast.AST
    rule: str
    kind: str
    start: int
    end: int
    replace: str
    says: str


class Source:
    """A file's text and syntax tree."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = text.splitlines(keepends=True)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def offset(self, line: int, column: int) -> int:
        """The character at a line, from 1, and a column in bytes of UTF-8, as `ast` counts."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The characters of a node: those of an operand include its parentheses only if the node does."""
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        return self.text[slice(*self.span(node))]

    def operand(self, node: ast.AST) -> str:
        """The text of a node as an operand of anything."""
        simple = isinstance(node, ast.Name | ast.Attribute | ast.Constant | ast.Call | ast.Subscript)
        return self.of(node) if simple else f"({self.of(node)})"

    def short(self, node: ast.AST) -> str:
        """The text of a node in one line, for a sentence."""
        line = " ".join(self.of(node).split())
        return line if len(line) <= 60 else line[:57] + "..."

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that hold a node, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: ast.AST) -> str:
        """The names of the functions and classes around a node, outermost first."""
        named = [each.name for each in self.above(node) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        return ".".join(reversed(named))

    def computes(self, node: ast.AST) -> bool:
        """True for code that decides a result: no annotation, decorator, text, error or choice of a fast config."""
        if SPEED.search(function := self.function(node)) or MESSAGES.search(function):
            return False
        child = node
        for parent in self.above(node):
            if isinstance(parent, ast.Raise | ast.JoinedStr | ast.Assert):
                return False
            if isinstance(parent, ast.ClassDef) and child in parent.bases:
                return False
            if isinstance(parent, ast.AnnAssign | ast.arg) and child is parent.annotation:
                return False
            if isinstance(parent, ast.FunctionDef) and (child is parent.returns or child in parent.decorator_list):
                return False
            child = parent
        return True

    def kind(self, node: ast.AST, otherwise: str) -> str:
        """The kind of a defect of a node: of a gradient by the names around it, of a mask by those within."""
        if BACKWARD.search(f"{PurePosixPath(self.file).stem}.{self.function(node)}"):
            return "gradient"
        return "masks" if MASKS.search(self.of(node)) and otherwise == "tail" else otherwise


def _tail(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in ast.walk(node)
    )


def bound(source: Source) -> Iterator[Edit]:
    """Shifts a bound by one, or rounds a number of blocks down."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            before, after = COMPARISONS[type(node.ops[0])]
            left, right = node.left, node.comparators[0]
            start, end = source.span(left)[1], source.span(right)[0]
            text = source.text[start:end]
            if text.count(before) == 1:
                says = f"`{source.short(node)}` is decided the other way where both sides are equal"
                yield Edit(node, "bound", source.kind(node, "tail"), start, end, text.replace(before, after), says)
        elif isinstance(node, ast.Call) and _tail(node) in BOUNDED and node.args and not node.keywords:
            last = node.args[min(len(node.args) - 1, 1)]
            if isinstance(last, ast.Starred | ast.GeneratorExp | ast.ListComp):
                continue
            step = source.operand(node.args[2]) if _tail(node) == "range" and len(node.args) == 3 else "1"
            says, shorter = f"`{source.short(node)}` ends a step early", f"{source.operand(last)} - {step}"
            yield Edit(node, "bound", source.kind(node, "tail"), *source.span(last), shorter, says)
        elif isinstance(node, ast.Slice) and node.upper is not None and not isinstance(node.upper, ast.Constant):
            says = f"The slice to `{source.short(node.upper)}` ends one early"
            shorter = f"{source.operand(node.upper)} - 1"
            yield Edit(node, "bound", source.kind(node, "tail"), *source.span(node.upper), shorter, says)
        elif (ceiled := _ceiled(node)) is not None:
            replace = f"({source.operand(ceiled.left.operand)} // {source.operand(ceiled.right)})"  # type: ignore[attr-defined]
            says = f"`{source.short(node)}` is rounded down, so that a last part that is not whole is left out"
            yield Edit(node, "bound", source.kind(node, "tail"), *source.span(node), replace, says)


def _ceiled(node: ast.AST) -> ast.BinOp | None:
    """``-a // b`` of ``-(-a // b)``."""
    if not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.BinOp)):
        return None
    inner = node.operand
    negated = isinstance(inner.left, ast.UnaryOp) and isinstance(inner.left.op, ast.USub)
    return inner if isinstance(inner.op, ast.FloorDiv) and negated else None


def swap(source: Source) -> Iterator[Edit]:
    """Exchanges two operands whose order matters."""
    for node in ast.walk(source.tree):
        pair: tuple[ast.AST, ast.AST] | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv):
            if _ceiled(source.parents[node]) is None:
                pair, what = (node.left, node.right), "The operands"
        elif isinstance(node, ast.Call) and _tail(node) in WHERE and len(node.args) == 3:
            pair, what = (node.args[1], node.args[2]), "The branches"
        elif isinstance(node, ast.Call) and _tail(node) in PRODUCTS and len(node.args) >= 2:
            pair, what = (node.args[0], node.args[1]), "The factors"
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and not isinstance(node.ctx, ast.Store):
            pair, what = (node.elts[0], node.elts[1]), "The two parts"
        if pair is None or any(isinstance(each, ast.Starred | ast.Slice) for each in pair):
            continue
        first, second = pair
        if source.of(first) == source.of(second) or _is_text(node):
            continue
        (start, end_first), (second_start, end) = source.span(first), source.span(second)
        between = source.text[end_first:second_start]
        # Parentheses between the operands are the operands': the text is put together anew.
        if "(" in between or ")" in between:
            if not isinstance(node, ast.BinOp):
                continue
            symbol = {"Sub": "-", "Div": "/", "FloorDiv": "//"}[type(node.op).__name__]
            start, end = source.span(node)
            text = f"{source.operand(second)} {symbol} {source.operand(first)}"
        else:
            own = source.operand if isinstance(node, ast.BinOp) else source.of
            text = f"{own(second)}{between}{own(first)}"
        says = f"{what} of `{source.short(node)}` are exchanged"
        yield Edit(node, "swap", source.kind(node, "operands"), start, end, text, says)


def lose(source: Source) -> Iterator[Edit]:
    """Loses a term of a sum, a factor, or one condition of several."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BoolOp) and not _is_text(node):
            if any(isinstance(each, ast.Constant) for each in node.values):
                continue  # a default
            for gone in (node.values[0], node.values[-1]):
                rest = [source.operand(each) for each in node.values if each is not gone]
                text = f" {'and' if isinstance(node.op, ast.And) else 'or'} ".join(rest)
                says = f"`{source.short(node)}` lacks the condition `{source.short(gone)}`"
                yield Edit(node, "lose", source.kind(node, "masks"), *source.span(node), text, says)
        if not isinstance(node, ast.BinOp) or _is_text(node):
            continue
        if type(node.op) not in LOST:
            continue
        kind, says = LOST[type(node.op)]
        pairs = [(node.left, node.right)]
        if isinstance(node.op, ast.BitAnd | ast.Mult | ast.Add):
            pairs.append((node.right, node.left))
        for kept, gone in pairs:
            where = f"`{source.short(gone)}` {says} in `{source.short(node)}`"
            yield Edit(node, "lose", source.kind(node, kind), *source.span(node), source.operand(kept), where)


def fence(source: Source) -> Iterator[Edit]:
    """Drops a call that orders memory or threads."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and FENCES.search(_tail(node.value)):
            says = f"`{source.short(node)}` is missing: what it waits for, or makes visible, is used too early"
            yield Edit(node, "fence", "ordering", *source.span(node), "pass", says)


def dtype(source: Source) -> Iterator[Edit]:
    """Computes in bfloat16 what has to be float32."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "float32" and isinstance(node.value, ast.Name):
            parent = source.parents[node]
            if isinstance(parent, ast.Compare | ast.Tuple | ast.Set | ast.Dict):
                continue
            # NumPy has no bfloat16.
            narrow = "float16" if node.value.id == "np" else "bfloat16"
            statement = next((each for each in source.above(node) if isinstance(each, ast.stmt)), node)
            says = f"`{source.short(statement)}` has {narrow} in place of float32"
            yield Edit(
                node, "dtype", source.kind(node, "accuracy"), *source.span(node), f"{node.value.id}.{narrow}", says
            )


def forget(source: Source) -> Iterator[Edit]:
    """Forgets one of several things by name: an option that is passed on, a part of a key, a reason against a call."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                plain = isinstance(keyword.value, ast.Name | ast.Attribute)
                if keyword.arg is not None and plain and not FAST.search(keyword.arg):
                    says = f"`{source.short(node.func)}` is called without `{keyword.arg}`, and takes its default"
                    yield _without(source, "forget", "key", keyword, says)
        elif isinstance(node, ast.Set | ast.Tuple) and len(node.elts) > 1 and (key := _key(source, node)):
            for part in node.elts:
                says = f"`{source.short(part).strip('"')}` is missing from `{key}`"
                yield _without(source, "forget", "key", part, says)
        elif isinstance(node, ast.If) and not node.orelse and _is_reason(node):
            says = f"A call with `{source.short(node.test)}` is not declined, though it cannot be served"
            yield Edit(node, "forget", "key", *source.span(node.test), "False", says)


def _key(source: Source, node: ast.AST) -> str:
    """The name of a key, or of what a backend serves or keeps, whose parts are in a node; empty for another node."""
    for parent in source.above(node):
        if isinstance(parent, ast.Assign | ast.AnnAssign):
            name = source.of(parent.target if isinstance(parent, ast.AnnAssign) else parent.targets[0])
            return name if re.search(r"serves|_keys?$|fingerprint|static", name) else ""
        if isinstance(parent, ast.Return):
            name = source.function(parent).rpartition(".")[2]
            return name if re.search(r"key|fingerprint|static|digest", name) else ""
        if not isinstance(parent, ast.Call | ast.Dict | ast.BinOp):
            break
    return ""


def _is_reason(node: ast.If) -> bool:
    """True if what is done is to give a reason, or to raise."""
    if len(node.body) != 1:
        return False
    done = node.body[0]
    gives = isinstance(done, ast.Expr) and (
        isinstance(done.value, ast.Yield) or (isinstance(done.value, ast.Call) and _tail(done.value) == "append")
    )
    return (gives or isinstance(done, ast.Raise | ast.Return)) and _is_text(done)


def _without(source: Source, rule: str, kind: str, part: ast.AST, says: str) -> Edit:
    """The edit that takes one of several things between commas out."""
    start, end = source.span(part)
    after = re.match(r"\s*,[ ]*", source.text[end:])
    if after is None:
        before = re.search(r",\s*$", source.text[:start])
        return Edit(part, rule, kind, before.start() if before else start, end, "", says)
    end += after.end()
    line = source.text.rfind("\n", 0, start) + 1
    if source.text[end] == "\n" and not source.text[line:start].strip():
        start, end = line, end + 1  # alone in its lines
    elif source.text[end] == "\n":
        start = len(source.text[:start].rstrip(" "))
    return Edit(part, rule, kind, start, end, "", says)


RULES: tuple[Callable[[Source], Iterator[Edit]], ...] = (bound, swap, lose, fence, dtype, forget)


def defects(file: str, op: str, backend: str) -> list[Defect]:
    """All defects of a file of Python by rule, as they stand in it."""
    text = (ROOT / file).read_text()
    source, found = Source(file, text), {}
    for rule in RULES:
        for edit in rule(source):
            if rule is forget or source.computes(edit.node):
                defect = _defect(source, edit, op, backend)
                if defect is not None:
                    found[defect.id] = defect
    return list(found.values())


def changes(defect: Defect) -> bool:
    """True if a file with the defect is Python, and another program than without."""
    text = (ROOT / defect.file).read_text()
    try:
        return ast.dump(ast.parse(defect.mutated(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def _defect(source: Source, edit: Edit, op: str, backend: str) -> Defect | None:
    """The edit with the lines around it, None if no few lines are unique."""
    text = source.text
    start, end = text.rfind("\n", 0, edit.start) + 1, text.find("\n", edit.end)
    end = len(text) if end < 0 else end
    for _ in range(LINES):
        find = text[start:end]
        if text.count(find) == 1:
            break
        start = text.rfind("\n", 0, max(start - 1, 0)) + 1
    else:
        return None
    replace = text[start : edit.start] + edit.replace + text[edit.end : end]
    if replace == find or max(find.count("\n"), replace.count("\n")) > 11 or "'''" in find:
        return None
    digest = hashlib.sha256("\0".join((find, replace)).encode()).hexdigest()[:6]
    function = source.function(edit.node)
    where = f" (`{function}`)" if function else ""
    says = f"{edit.says}{where}."
    return Defect(
        f"{op}-{backend}-{edit.rule}-{digest}", edit.kind, source.file, find, replace, says, op=op, backend=backend
    )
