"""The panel in a notebook: one output of the cell, replaced as the run goes on."""

from __future__ import annotations

import html
import io
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType

from rallypoint.display.frame import render
from rallypoint.display.panel import DrawnPanel
from rallypoint.display.summary import print_summary
from rallypoint.run.reports import Summary

WIDTH, HEIGHT = 100, 30
REFRESH_S = 0.5
"""Reports closer together than this share a picture: each is sent to a browser."""

Show = Callable[[str], None]
"""Puts HTML in the place of what it put before."""


class NotebookPanel(DrawnPanel):
    """Shows a run in an output of the cell that started it."""

    def __init__(self, show: Show, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock, REFRESH_S)
        self._show, self._is_finished = show, False

    def finish(self, summary: Summary) -> None:
        """Put the summary in the place of the panel."""
        paper = _paper()
        print_summary(paper, summary, self._state.notes)
        self._is_finished = True
        self._show(_as_html(paper))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_finished:
            self._draw()

    def _draw(self) -> None:
        self._show(as_html(render(self._state, WIDTH, HEIGHT)))


def as_html(drawn: RenderableType) -> str:
    r"""Return what rich draws as HTML of its own colours.

    >>> as_html("a < b").partition(">")[2]
    'a &lt; b\n</pre>'
    """
    paper = _paper()
    paper.print(drawn)
    return _as_html(paper)


def _paper() -> Console:
    return Console(
        file=io.StringIO(), record=True, force_terminal=True, width=WIDTH, height=HEIGHT, force_jupyter=False
    )


def _as_html(paper: Console) -> str:
    style = "background:#111;color:#ddd;padding:8px;font-family:Menlo,DejaVu Sans Mono,monospace;line-height:1.2"
    body = f'<pre style="{html.escape(style)}">{{code}}</pre>'
    return paper.export_html(inline_styles=True, code_format=body)


def find_notebook() -> Show | None:
    """Return what shows HTML in the cell that is being run; None outside of a notebook, without importing IPython."""
    if not {"IPython", "ipykernel"} <= sys.modules.keys():
        return None
    from IPython import get_ipython
    from IPython.display import HTML, display

    if get_ipython() is None:
        return None
    output: Any = display(HTML(""), display_id=True)
    return lambda text: output.update(HTML(text))
