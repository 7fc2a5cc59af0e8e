"""The runner of other libraries' programs: what is edited, and what is a failure. The libraries are not needed."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tools.model_programs.__main__ import judged, row
from tools.model_programs.edits import Edit, edited, edits
from tools.model_programs.programs import PROGRAMS

PAGE = Path(__file__).parents[2].joinpath("docs", "integrations", "jax_nn.md").read_text()

THEIRS = """import jax

def attention(query):
    if query.ndim:
        logits = query
    encoded = jax.nn.softmax(
        logits
    )
    return encoded
"""
EDIT = Edit("library/layers.py", "glu", "if query", "encoded =", "\nencoded = glu(\n    query)\n", also=2)


def test_a_passage_becomes_the_lines_of_an_edit(tmp_path: Path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/layers.py").write_text(THEIRS)
    edited(tmp_path, tmp_path / "into", [EDIT])
    text = (tmp_path / "into/library/layers.py").read_text()
    assert text.startswith("from tilewright.modules import (")
    assert text.endswith("def attention(query):\n    encoded = glu(\n        query)\n    return encoded\n")


def test_a_passage_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"library/layers\.py has no line that begins with 'if query'"):
        EDIT.apply(THEIRS.replace("if query", "if key"))
    with pytest.raises(ValueError, match="begins with 'encoded ='"):
        EDIT.apply(THEIRS.replace("encoded =", "out ="))


def test_edits_are_short_and_belong_to_a_program():
    ops = {op for program in PROGRAMS.values() for op in program.ops}
    for edit in edits():
        assert 1 <= len(edit.lines.strip().splitlines()) <= 13, edit.file
        assert edit.op in edit.lines
        assert edit.op in ops


def test_the_page_shows_edits_as_they_are():
    shown = ["\n".join(f"+ {line}" for line in edit.lines.strip().splitlines()) in PAGE for edit in edits()]
    assert sum(shown) == 3


WANT = {"logits": np.array([1.0, -2.0]), "loss": np.array(3.0), "decoding": np.ones(2), "gradient w": np.arange(1, 4.0)}
CALLS = {"glu forward": 2, "glu backward": 2, "glu forward decoding": 2}


def side(float32: float = 0.0, bfloat16: float = 0.01) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Results with a relative error in each dtype."""
    off = {"float32": float32, "bfloat16": bfloat16}
    return {dtype: {name: want * (1 + by) for name, want in WANT.items()} for dtype, by in off.items()}


def test_equal_programs_are_right_and_give_a_row():
    assert list(judged(side(), side(1e-6), CALLS, ("glu",))) == []
    assert (
        list(judged(side(bfloat16=0.3), side(8e-5, 0.2), CALLS, ("glu",))) == []
    )  # it amplifies its own roundings, too
    assert row("gemma", side(), side(2e-6), CALLS).startswith(
        "| gemma | `glu` 2 + 2 + 2 | 2e-06 | 2e-06 | 2e-06 | 1.0e-02 /"
    )


@pytest.mark.parametrize(
    ("ours", "calls", "said"),
    [
        (side(2e-5), CALLS, "gradient w differs by 2.0e-05 of its greatest value"),
        (side(float("nan")), CALLS, "logits differs by nan of its greatest value"),
        (side(bfloat16=0.02), CALLS, "in bfloat16 the error is 2.00e-02, the program's own 1.00e-02"),
        (side(bfloat16=float("nan")), CALLS, "in bfloat16 the error is nan, the program's own 1.00e-02"),
        (side(), {"glu forward": 2}, "no call of glu, backward"),
        (side(), {}, "no call of glu, forward and backward"),
    ],
)
def test_what_is_wrong_is_said(ours: Mapping[str, Mapping[str, np.ndarray]], calls: Mapping[str, int], said: str):
    assert said in list(judged(side(), ours, calls, ("glu",)))


def test_a_gradient_of_roundings_alone_is_not_compared():
    theirs, ours = side(), side()
    for found, values in ((theirs, (1e-9, 1e-3)), (ours, (-1e-9, 2e-3))):
        for results, value in zip(found.values(), values, strict=True):
            results["gradient scale"] = np.array(value)  # type: ignore[index]
    assert list(judged(theirs, ours, CALLS, ("glu",))) == []


def test_parameters_of_other_names_are_wrong():
    ours = side()
    ours["float32"]["gradient v"] = ours["float32"].pop("gradient w")  # type: ignore[attr-defined]
    assert list(judged(side(), ours, CALLS, ("glu",))) == ["other parameters: ['gradient v', 'gradient w']"]
