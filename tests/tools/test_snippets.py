"""Examples of pages as modules, for type checkers."""

from tools import pages, snippets

PAGE = """A page.

```python
first = 1
```

```bash
not python
```

```python
second = first
```
"""


def test_lines_of_python_keep_their_numbers():
    lines = snippets.in_place(PAGE).split("\n")
    assert {number: line for number, line in enumerate(lines, 1) if line} == {4: "first = 1", 12: "second = first"}


def test_every_example_of_every_page_is_checked(tmp_path):
    snippets.write(tmp_path)
    checked = "".join(file.read_text() for file in (tmp_path / snippets.PACKAGE).glob("*.py"))
    found = [pages.ROOT / "README.md", *(pages.ROOT / "docs").rglob("*.md")]
    examples = [example for page in found for example in pages.python_examples(page.read_text())]
    assert len(examples) > 50
    assert [example for example in examples if example not in checked] == []


def test_what_a_checker_finds_fails_the_check(monkeypatch, capfd):
    monkeypatch.setattr(snippets, "modules", lambda: [("page.py", snippets.in_place(PAGE.replace("first = 1", "")))])
    assert snippets.main() == 1
    assert "page.py:12" in capfd.readouterr().out
