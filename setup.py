"""The computed part of the metadata: the README, with links that lead somewhere outside of the repository too."""

import re
import tomllib
from pathlib import Path


def with_absolute_links(text: str, repository: str) -> str:
    """The page with absolute links in place of relative ones, for pictures to the raw files; links within it stay."""
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{repository}/raw/main/", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({repository}/blob/main/", text)


if __name__ == "__main__":
    from setuptools import setup

    root = Path(__file__).parent
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    readme = (root / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=with_absolute_links(readme, urls["Repository"]),
        long_description_content_type="text/markdown",
    )
