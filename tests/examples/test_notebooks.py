"""Every notebook runs from its first cell to its last, and holds no outputs."""

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
# What takes less time here than in a notebook that is read: how often a step is made.
FEWER = {
    "train_and_serve_nnx": {"range(100)": "range(40)", "generate(model, prompts, 40)": "generate(model, prompts, 8)"}
}
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(cell: str, module: types.ModuleType) -> Any:
    """Runs a cell; what its last line gives is what a notebook would show."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, module.__name__, "exec"), module.__dict__)
    return None if last is None else eval(compile(ast.Expression(last.value), module.__name__, "eval"), module.__dict__)


@notebooks
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    module = types.ModuleType(f"notebook_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = "\0".join(code_cells(path))
    for said, instead in FEWER[path.stem].items():
        assert text.count(said) == 1
        text = text.replace(said, instead)
    shown = [run(cell, module) for cell in text.split("\0")]
    rich = [value for value in shown if hasattr(value, "_repr_html_")]
    assert rich
    for value in rich:
        assert "flash_attention" in value._repr_html_()


@notebooks
def test_a_notebook_is_valid_and_without_outputs(path: Path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
