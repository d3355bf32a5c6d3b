"""Takes the picture of the page in README and docs/view.md: `python docs/screenshots.py RUN [OTHER]`.

RUN is the folder of the demo run (`make demo`). Needs Chromium: apt-get install chromium. Writes docs/view.png; with
`--all FOLDER` the whole page at both widths in both themes instead, to look at.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

from browser import Browser  # noqa: E402

from rallypoint.page import RunReader  # noqa: E402
from rallypoint.page.app import PageServer  # noqa: E402


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    runs = RunReader.several(asked.runs)
    with tempfile.TemporaryDirectory() as name, PageServer(runs) as server, Browser(Path(name)) as browser:
        if asked.all is None:
            browser.look(1280, 1240)
            browser.go(server.url)
            browser.evaluate("new Promise((done) => setTimeout(done, 1500))")
            browser.screenshot(ROOT / "docs" / "view.png")
            return
        asked.all.mkdir(parents=True, exist_ok=True)
        for width in (1280, 390):
            for dark in (False, True):
                browser.look(width, 900, dark=dark)
                browser.go(server.url)
                browser.evaluate("document.querySelector('.card')?.click()")
                browser.evaluate("new Promise((done) => setTimeout(done, 1500))")
                height = browser.evaluate("document.documentElement.scrollHeight")
                browser.look(width, height, dark=dark)
                browser.evaluate("new Promise((done) => setTimeout(done, 500))")
                browser.screenshot(asked.all / f"{width}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    main()
