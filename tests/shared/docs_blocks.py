"""The code blocks of a docs page, for tests that run them."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The blocks of docs/PAGE.md in a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
