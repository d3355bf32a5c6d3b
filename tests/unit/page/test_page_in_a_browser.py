"""The page in a real browser: it draws, its filters and keys work, and nothing of a run becomes more than text."""

import pytest
from browser import NEEDS_CHROMIUM, Browser, find_chromium
from planted_runs import HOSTILE, planted_run

from rallypoint.page import RunReader, write_report
from rallypoint.page.app import PageServer

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason=NEEDS_CHROMIUM),
    pytest.mark.timeout(600),
]
PANELS = ("headline", "health", "rollouts", "time", "broke", "batch", "provenance")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planted_run(
        tmp_path_factory.mktemp("page"),
        "agent",
        num_steps=6,
        prompts=4,
        group=4,
        last="finished",
        texts=HOSTILE,
        name="hostile",
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(one => one.textContent)")


def check_panels(browser):
    for panel in PANELS:
        shown = browser.evaluate(f"document.querySelector('#{panel} .panel-body').textContent.length")
        assert shown > 20, panel
    assert texts(browser, ".message.error") == []
    assert browser.evaluate("document.querySelectorAll('canvas').length") > 4


def test_the_served_page_draws_filters_and_takes_text_as_text(browser, run):
    browser.leave()
    with PageServer([RunReader(run)]) as server:
        browser.look()
        browser.go(server.url)
        check_panels(browser)
        browser.press("k")
        browser.wait("document.querySelector('#step').textContent.startsWith('5')")
        browser.press("j")
        browser.wait("document.querySelector('#step').textContent.startsWith('6')")
        browser.press("/")
        assert browser.evaluate("document.activeElement.id") == "search"
        choice = "document.querySelector('#choose-only')"
        change = f"{choice}.value = 'failed'; {choice}.dispatchEvent(new Event('change'))"
        browser.evaluate(change)
        browser.wait("document.querySelector('#rollout-count').textContent.startsWith('0 of 16')")
        browser.evaluate(change.replace("failed", "all"))
        browser.wait("document.querySelectorAll('.rollout-row').length === 16")
        for place in range(16):
            browser.evaluate(f"document.querySelectorAll('.rollout-row')[{place}].click()")
            browser.wait(f"document.querySelectorAll('.rollout-row')[{place}].hasAttribute('aria-current')")
        browser.wait("document.querySelector('#tokens') !== null")
        browser.evaluate("document.querySelector('#pin').click()")
        browser.wait("document.querySelectorAll('.pin-step').length === 6")
        assert "conversation of 2 turns" in texts(browser, ".turns summary")
        browser.evaluate("document.querySelector('#side').click()")
        browser.wait("document.querySelectorAll('.side article').length === 4")
        browser.evaluate("document.querySelector('.card').click()")
        browser.wait("document.querySelector('.evidence') !== null")
        assert browser.evaluate("window.hostile") is None
        assert browser.evaluate("document.querySelectorAll('#main img, #main script, #main svg[onload]').length") == 0
        assert all(one.startswith((server.url, "data:", "about:")) for one in browser.asked), browser.asked
    # The stream of news has ended with the server; nothing else may have gone wrong.
    assert [one for one in browser.errors if "/live" not in one and "ERR_" not in one] == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_report_opens_from_a_file_and_loads_nothing(browser, run, tmp_path, width, dark):
    file = tmp_path / "report.html"
    write_report([RunReader(run)], file)
    browser.leave()
    browser.look(width, dark=dark)
    browser.go(f"file://{file}")
    check_panels(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.hostile") is None
    assert [one for one in browser.asked if not one.startswith(("file:", "data:"))] == []
    assert browser.errors == []


def test_the_page_follows_a_run_that_goes_on(browser, tmp_path):
    from rallypoint.journal import Journal, StepDone

    path = planted_run(tmp_path, num_steps=2, prompts=2, group=2)
    with PageServer([RunReader(path)]) as server:
        browser.look()
        browser.go(server.url)
        browser.wait("document.querySelector('.alive.on') !== null")
        with Journal(path / "journal.jsonl") as journal:
            journal.append(StepDone(step=3, metrics={"reward/mean": 0.5}, digests={}, seconds=1.0))
        browser.wait("document.querySelector('#step').textContent.startsWith('3')")
        # A step whose rollouts are not there costs that panel, and says so.
        browser.wait("document.querySelector('#rollouts .message.error') !== null")
