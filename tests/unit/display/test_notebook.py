"""The panel in a notebook: one output, replaced."""

import re

from played_panel import report, summary

from rallypoint.display.notebook import REFRESH_S, NotebookPanel, as_html, find_notebook
from rallypoint.run.reports import RunInfo


def text_of(shown: str) -> str:
    return re.sub(r"<[^>]+>", "", shown)


def test_a_run_is_shown_in_one_place_step_by_step_and_then_its_summary(tmp_path):
    pages: list[str] = []
    now = 0.0
    panel = NotebookPanel(pages.append, clock=lambda: now)
    with panel:
        panel.start(RunInfo(name="run-7", algorithm="grpo", num_steps=20, run_dir=tmp_path))
        now += REFRESH_S
        panel.step(report(1, is_real=False))
        num_pages = len(pages)
        panel.step(report(2, is_real=False))
        assert len(pages) == num_pages, "reports at once share a picture"
        panel.note("a note")
        panel.finish(summary())
    assert "run-7" in text_of(pages[0])
    assert "a note" in text_of(pages[-2])
    assert pages[-1].startswith("<pre")


def test_what_a_model_writes_is_no_html():
    assert "<script>" not in as_html("<script>alert(1)</script>")


def test_outside_of_a_notebook_there_is_none():
    assert find_notebook() is None
