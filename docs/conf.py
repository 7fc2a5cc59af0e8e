"""Sphinx's configuration: `make docs` builds the site from the pages as they are, without the network.

The source folder is the repository's root, so that a relative link means the same in the site and on GitHub. The
table of contents are the lists of links in docs/index.md: each of its sections becomes one group of the sidebar.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

from tilewright import __version__
from tools.pages import contents

project = "Tilewright"
author = "Tilewright contributors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "*.egg-info", "benchmarks", "tests", "tilewright", "tools"]
root_doc = "docs/index"
nitpicky = False  # types of JAX and NumPy would have to be fetched from their sites

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub makes them

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "code"  # in docstrings `name` means code

html_theme = "furo"
html_title = f"Tilewright {version}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

CONTENTS = "docs/index"


def _add_toctrees(app: Sphinx, name: str, source: list[str]) -> None:
    if name != CONTENTS:
        return
    for heading, pages in contents(source[0]):
        entries = (page.removesuffix(".md") for page in pages)
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading}", "", *entries, "```", ""])


def _add_front_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>Tilewright</title>\n'
        (Path(app.outdir) / "index.html").write_text(page)


_MEMBERS = ("jax.Array", "numpy.ndarray", "numpy.bool", "numpy.number", "bool", "int", "float", "complex")
ARRAY_LIKE = re.compile(r" \| ".join(re.sub(r"^(\w+)\.", r"~?(?:\1\\.)?", member) for member in _MEMBERS))
"""``jax.typing.ArrayLike``, as autodoc writes it out."""
COLON = "\ue000"  # stands for a colon that napoleon shall not see


def _shorten_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Writes ``ArrayLike`` for its types; a default that is not an expression would end the parsing."""
    if signature is not None:
        signature = ARRAY_LIKE.sub("ArrayLike", signature).replace("<factory>", "...")
    return signature, returns


def _before_napoleon(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    if what == "property" and lines:  # napoleon would take what stands before a colon for the type
        lines[0] = lines[0].replace(":", COLON)
    for index, line in enumerate(lines):
        line = re.sub(r"(?<![`*\w])(\*{1,2})(?=\w)", lambda stars: stars[0].replace("*", "\\*"), line)
        # Several names before one description: as one word, for Sphinx takes all but the last for types.
        lines[index] = re.sub(r"^( +[a-z]\w*(?:, [a-z]\w*)+)(?=: )", lambda names: names[0].replace(", ", ","), line)


def _after_napoleon(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    app.connect("source-read", _add_toctrees)
    app.connect("build-finished", _add_front_page)
