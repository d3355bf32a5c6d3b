"""Draws the house from the import contract, and counts the lines of the reading path: `python docs/house.py`.

The layers are those of `.importlinter`, which CI enforces, and the words in a box are the first words of that folder's
docstring, so the picture shows what is. Writes docs/house.svg, and the numbers in the table of CONTRIBUTING.md.
`tests/architecture/test_way_in.py` fails while either is out of date.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import re
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rallypoint"
PICTURE, GUIDE = ROOT / "docs" / "house.svg", ROOT / "CONTRIBUTING.md"
READING_PATH = re.compile(r"^\| *\d+ \| `(src/[\w/.]+)` \|", flags=re.MULTILINE)

_WIDTH, _MARGIN, _GAP = 1000, 16, 8
_LINE, _CHARACTER = 14, 5.6
"""Height of a line of words, and width of a character, in pixels."""


def layers() -> list[list[str]]:
    """Return the folders of each layer, the highest first."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    lines = contract["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def purpose(name: str) -> str:
    """Return the first sentence of the docstring of a folder or module, without its full stop."""
    folder = PACKAGE / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", " ".join(docstring.split("\n\n")[0].split()), maxsplit=1)[0]


def picture() -> str:
    """Return the picture as SVG: a row of boxes for each layer; imports point down."""
    y, parts = float(_MARGIN), list[str]()
    for names in layers():
        width = (_WIDTH - 2 * _MARGIN - _GAP * (len(names) - 1)) / len(names)
        texts = [textwrap.wrap(purpose(name), int((width - 16) / _CHARACTER)) for name in names]
        height = 26 + _LINE * max(map(len, texts))
        for place, (name, lines) in enumerate(zip(names, texts, strict=True)):
            x = _MARGIN + place * (width + _GAP)
            parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="4" class="room"/>')
            parts.append(f'<text x="{x + 8:.0f}" y="{y + 17:.0f}" class="name">{escape(name)}</text>')
            parts += [
                f'<text x="{x + 8:.0f}" y="{y + 17 + _LINE * (number + 1):.0f}" class="words">{escape(line)}</text>'
                for number, line in enumerate(lines)
            ]
        y += height + _GAP
    style = (
        "text{font-family:Helvetica,Arial,sans-serif;fill:#1f2328}.name{font-size:13px;font-weight:bold}"
        ".words{font-size:11px}.room{fill:#eef3f8;stroke:#7a8ea3}.paper{fill:#ffffff}"
    )
    size = f'width="{_WIDTH}" height="{y + _MARGIN - _GAP:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {y + _MARGIN - _GAP:.0f}">'
    return "\n".join([head, f"<style>{style}</style>", f'<rect {size} class="paper"/>', *parts, "</svg>\n"])


def num_lines(path: str) -> int:
    """Return the number of lines of a file."""
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def guide(text: str) -> str:
    """Return CONTRIBUTING.md with the true numbers in its reading path."""
    return READING_PATH.sub(lambda row: re.sub(r"^\| *\d+ ", f"| {num_lines(row.group(1))} ", row.group()), text)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description="Draw docs/house.svg and write the numbers of the reading path in CONTRIBUTING.md."
    ).parse_args()
    PICTURE.write_text(picture(), encoding="utf-8")
    GUIDE.write_text(guide(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
