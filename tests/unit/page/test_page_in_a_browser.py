"""The page in a real browser: it draws, its filters and keys work, and nothing of a run becomes more than text."""

import runpy
import shutil
import struct
import sys
from pathlib import Path

import pytest
from browser import NEEDS_CHROMIUM, Browser, find_chromium
from planted_runs import HOSTILE, planted_run

import rallypoint as rally
from rallypoint.config import load_config, values_of
from rallypoint.journal import Journal, RunBegan, RunEnded, StepDone, Validated
from rallypoint.page import RunReader, write_report
from rallypoint.page.app import PageServer
from rallypoint.run.folder import RunFolder, create_run

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


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r})?.textContent ?? ''")


def shows(browser, selector, words):
    """Wait until an element has some words."""
    browser.wait(f"document.querySelector({selector!r})?.textContent.includes({words!r})")


def titles(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(one => one.title)")


def click(browser, selector):
    browser.wait(f"document.querySelector({selector!r}) !== null")
    browser.evaluate(f"document.querySelector({selector!r}).click()")


def choose(browser, selector, value):
    place = f"document.querySelector({selector!r})"
    browser.evaluate(f"{place}.value = {value!r}; {place}.dispatchEvent(new Event('change'))")


def at_step(browser, step):
    browser.wait(f"document.querySelector('#step b')?.textContent === '{step}'")


def went_wrong(browser):
    """Return what did but for the stream of news, which ends with its server."""
    return [one for one in browser.errors if "/live" not in one and "ERR_" not in one]


def check_panels(browser):
    for panel in PANELS:
        assert text(browser, f"#{panel} > header p").endswith("."), "each says in one line what it shows"
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
        choose(browser, "#choose-only", "failed")
        browser.wait("document.querySelector('#rollout-count').textContent.startsWith('0 of 16')")
        choose(browser, "#choose-only", "all")
        browser.wait("document.querySelectorAll('.rollout-row').length === 16")
        shown = "".join(texts(browser, ".rollout-text"))
        assert "\u202e" not in shown
        assert "\u200d" in shown or "👩" not in shown  # emoji are made with joiners
        for place in range(16):
            browser.evaluate(f"document.querySelectorAll('.rollout-row')[{place}].click()")
            browser.wait(f"document.querySelectorAll('.rollout-row')[{place}].hasAttribute('aria-current')")
        browser.wait("document.querySelector('#tokens') !== null")
        browser.evaluate("document.querySelector('#pin').click()")
        browser.wait("document.querySelectorAll('.pin-step').length === 6")
        assert "conversation of 2 turns" in texts(browser, ".turns summary")
        choose(browser, "#choose-sort", "-length")
        browser.wait("document.querySelectorAll('#tokens .token').length > 1000")
        choose(browser, "#tint", "entropy")
        shows(browser, ".scale", " nats")
        shows(browser, "#rollouts .chart-title", "entropy by token")
        strengths = (
            "[...document.querySelectorAll('#tokens .token')].map((one) => one.style.getPropertyValue('--strength'))"
        )
        assert len(set(browser.evaluate(strengths))) > 3
        assert any("\nentropy 0" in one for one in titles(browser, "#tokens .token"))
        browser.evaluate("document.querySelector('#side').click()")
        browser.wait("document.querySelectorAll('.side article').length === 4")
        browser.evaluate("document.querySelector('.card').click()")
        browser.wait("document.querySelector('.evidence') !== null")
        assert browser.evaluate("window.hostile") is None
        assert browser.evaluate("document.querySelectorAll('#main img, #main script, #main svg[onload]').length") == 0
        assert all(one.startswith((server.url, "data:", "about:")) for one in browser.asked), browser.asked
    assert went_wrong(browser) == []


def test_every_key_does_what_the_list_of_keys_says(browser, tmp_path):
    with PageServer([RunReader(planted_run(tmp_path, num_steps=25, prompts=2, group=2, last="finished"))]) as server:
        browser.leave()
        browser.look(390, 800)
        browser.go(server.url)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        for key, step in (("Home", 1), ("j", 2), ("J", 12), ("k", 11), ("K", 1), ("End", 25)):
            browser.press(key)
            at_step(browser, step)
        shows(browser, "#rollout-count", "4 of 4")
        current = "Number(document.querySelector('.rollout-row[aria-current]').dataset.place)"
        browser.wait(f"{current} === 0")
        browser.press("ArrowRight")
        browser.wait(f"{current} === 1")
        browser.press("ArrowLeft")
        browser.wait(f"{current} === 0")
        browser.press("p")
        shows(browser, "#pinned", "in 25 steps")
        themes = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.press("t")
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != themes
        browser.press("m")
        assert browser.evaluate("document.activeElement.id") == "metric"
        choose(browser, "#metric", "actor/loss")
        click(browser, "[aria-label='remove actor/loss']")
        browser.wait("![...document.querySelectorAll('.chart-title')].some((one) => one.textContent === 'actor/loss')")
        choose(browser, "#metric", "reward/")
        for name in ("mean", "std", "num_scored"):
            browser.wait(f"document.querySelector('[aria-label=\"remove reward/{name}\"]') !== null")
        browser.evaluate("document.querySelector('#slider').focus()")
        browser.press("ArrowLeft")  # moves the slider, and no rollout
        at_step(browser, 24)
        browser.evaluate("document.activeElement.blur()")
        browser.press("?")
        assert browser.evaluate("document.querySelector('#help').open")
        browser.evaluate("document.querySelector('#help').close()")
    assert went_wrong(browser) == []


def test_two_runs_share_a_chart_and_either_can_be_looked_at(browser, tmp_path):
    kinds = ("hot", "sound")
    runs = [planted_run(tmp_path, kind, num_steps=62, prompts=2, group=2, last="finished") for kind in kinds]
    with PageServer(RunReader.several(runs)) as server:
        browser.leave()
        browser.look()
        browser.go(server.url)
        keys = texts(browser, "#headline .chart.wide .key")
        assert [one.split()[0] for one in keys[:3]] == ["p90", "p10", "hot"]
        assert any(one.startswith("sound ") for one in keys)
        shows(browser, "#first-difference", "step 60")
        shows(browser, "#answers", "the same prompts in step 62")
        click(browser, "#first-difference button")
        at_step(browser, 60)
        shows(browser, "#answers", "the same prompts in step 60")
        choose(browser, "#run", "sound")
        browser.wait("document.title.startsWith('sound')")
        at_step(browser, 60)
        shows(browser, "#health", "never a concern")
        assert "update kl high" not in text(browser, "#signals") + text(browser, "#troubles")
    assert went_wrong(browser) == []


def test_a_learning_rate_that_is_too_high_is_found_from_the_page_alone(browser, tmp_path):
    with PageServer(
        [RunReader(planted_run(tmp_path, "hot", num_steps=75, prompts=2, group=4, last="finished"))]
    ) as server:
        browser.leave()
        browser.go(server.url)
        shows(browser, "#troubles .trouble.bad", "update kl high")
        shows(browser, "#troubles", "lower actor.optimizer.lr")
        click(browser, ".card.bad[data-signal='actor/approx_kl']")
        shows(browser, ".evidence", "step 60")
        click(browser, ".evidence dd button")
        at_step(browser, 60)
        shows(browser, "#headline", "actor/lr")
        browser.wait("[...document.querySelectorAll('.chart')].some((one) => /^actor.lr1.00e-5/.test(one.textContent))")
        browser.press("k")
        browser.wait("[...document.querySelectorAll('.chart')].some((one) => /^actor.lr1.00e-6/.test(one.textContent))")
        browser.evaluate("document.querySelector('#smooth').value = 0.9")
        browser.evaluate("document.querySelector('#smooth').dispatchEvent(new Event('input'))")
        browser.wait("[...document.querySelectorAll('.chart')].some((one) => /^actor.lr1.00e-6/.test(one.textContent))")
    assert went_wrong(browser) == []


def test_a_finding_is_told_on_the_first_screen_and_opens_its_evidence(browser, tmp_path):
    path = planted_run(tmp_path, "hot", num_steps=75, prompts=2, group=4, last="finished")
    with PageServer([RunReader(path)]) as server:
        browser.leave()
        browser.look()
        browser.go(server.url)
        num = len(texts(browser, ".trouble"))
        assert texts(browser, ".badge.bad") == [str(num)] * 2
        assert len(texts(browser, ".verdict.small.plain")) == num
        names = "[...document.querySelectorAll('.card')].map((one) => one.dataset.signal + one.children[0].textContent)"
        at_end = sorted(one.strip("●▲■○") for one in browser.evaluate(names))
        for words in ("update kl high", "groups without signal"):
            browser.evaluate(
                f"[...document.querySelectorAll('.words')].find((one) => one.textContent === '{words}').click()"
            )
            browser.wait("document.querySelector('.card[aria-expanded=true]') !== null")
            shows(browser, ".card[aria-expanded=true] .verdict", words)
        shows(browser, ".card[data-signal='actor/without_signal'] .card-value", "100 %")
        browser.press("Home")
        at_step(browser, 1)
        browser.wait("document.querySelectorAll('.card.bad').length === 0")
        clean = [one.replace(mark, "") for one in at_end for mark in "●▲■○" if mark in one]
        now = [one.replace(mark, "") for one in browser.evaluate(names) for mark in "●▲■○" if mark in one]
        assert sorted(now) == sorted(clean)
    assert went_wrong(browser) == []


def test_a_list_shows_whole_groups_sums_up_what_is_shown_and_a_pin_moves_nothing(browser, tmp_path):
    path = planted_run(tmp_path, num_steps=5, prompts=6, group=6, last="finished")
    with PageServer([RunReader(path)]) as server:
        browser.leave()
        browser.look()
        browser.go(server.url)
        browser.wait("document.querySelectorAll('.rollout-row').length === 24")
        browser.evaluate("document.querySelectorAll('.rollout-row')[23].click()")
        current = "Number(document.querySelector('.rollout-row[aria-current]')?.dataset.place)"
        browser.wait(f"{current} === 23")
        browser.press("ArrowRight")
        browser.wait(f"{current} === 24")
        browser.press("ArrowLeft")
        browser.wait(f"{current} === 23")
        browser.evaluate("document.querySelector('#pin').scrollIntoView({block: 'center'})")
        place = "Math.round(document.querySelector('#pin').getBoundingClientRect().top)"
        before = browser.evaluate(place)
        click(browser, "#pin")
        shows(browser, "#pin", "unpin")
        shows(browser, ".pin-step[aria-current]", "step 5")
        browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert abs(browser.evaluate(place) - before) <= 1
        click(browser, "#pin")
        browser.wait("document.querySelector('#pin').textContent === 'pin'")
        assert browser.evaluate("document.querySelectorAll('.pin-step').length") == 0
        browser.evaluate("document.querySelector('.rollout-list').scrollTop = 200")
        choose(browser, "#choose-sort", "length")
        browser.wait(f"{current} !== 23")
        assert browser.evaluate("document.querySelector('.rollout-list').scrollTop") == 0
    assert went_wrong(browser) == []


def test_a_straggler_is_found_from_the_page_alone(browser, tmp_path):
    with PageServer([RunReader(planted_run(tmp_path, "straggler", num_steps=8, last="finished"))]) as server:
        browser.leave()
        browser.go(server.url)
        shows(browser, "#troubles", "rollout rank 2 is slow")
        shows(browser, ".verdicts", "rollout rank 2 is slow steps 1 to 8")
        click(browser, ".verdicts .verdict")
        shows(browser, "#time .message.warn", "rollout rank 2 (process 4702@node1) was a straggler in 8 of 8 steps")
        for words in ("memory of a process", "tokens per second", "actor/mfu", "rollout/idle"):
            shows(browser, "#time", words)
        shows(browser, "#batch", "64rollouts, a row each")
        widths = browser.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.lane')].map((lane) => "
            "[lane.querySelector('.lane-name').textContent, Math.max(0, ...[...lane.querySelectorAll('.bar')]"
            ".map((bar) => bar.getBoundingClientRect().width))]))"
        )
        assert widths["rollout rank 2, slow"] > 3 * widths["rollout rank 1"]
        assert widths["actor rank 2"] > 0


def test_a_reward_that_pays_the_empty_answer_is_found_from_the_page_alone(browser, tmp_path):
    with PageServer([RunReader(planted_run(tmp_path, "empty", num_steps=48, last="finished"))]) as server:
        browser.leave()
        browser.go(server.url)
        shows(browser, "#troubles", "answers vanish, and earn more")
        shows(browser, "#choose-only", "empty (64)")
        choose(browser, "#choose-only", "empty")
        choose(browser, "#choose-sort", "-score")
        shows(browser, ".rollout-row .rollout-text", "(empty)")
        shows(browser, ".rollout-row .rollout-score", "1")
        shows(browser, ".reasons", "1 token ")


def test_prompts_that_nobody_solves_are_found_from_the_page_alone(browser, tmp_path):
    with PageServer([RunReader(planted_run(tmp_path, "impossible", num_steps=12, last="finished"))]) as server:
        browser.leave()
        browser.go(server.url)
        shows(browser, "#troubles", "prompts that nobody solves")
        shows(browser, "#troubles", "train:1")
        shows(browser, ".verdicts .verdict", "prompts that nobody solves train:1, train:3, train:5 and 1 more")
        click(browser, ".verdicts .verdict")
        shows(browser, "#rollout-count", "8 of 64 rollouts · their score p10 0, median 0, p90 0")
        shows(browser, "#pinned", "pinned: train:1")
        click(browser, "#pinned .detail-head button")
        browser.evaluate("document.querySelector('#search').value = ''")
        browser.evaluate("document.querySelector('#search').dispatchEvent(new Event('input'))")
        choose(browser, "#choose-only", "no signal")
        browser.wait(
            "[...document.querySelectorAll('.rollout-row')].every((row) => / 0|not trained/.test(row.textContent))"
        )
        browser.evaluate(
            "[...document.querySelectorAll('.rollout-row')].find((row) => /train:1 /.test(row.textContent)).click()"
        )
        shows(browser, ".reasons", "group without signal: its rollouts earned the same")
        choose(browser, "#tint", "entropy")
        shows(browser, ".rollout-detail .message", "entropy: not recorded here (group without signal")
        click(browser, "#pin")
        shows(browser, "#pinned", "in 12 steps")
        assert all("1" not in one.split() for one in texts(browser, ".pin-step span"))


def test_what_broke_is_on_the_page(browser, tmp_path):
    with PageServer([RunReader(planted_run(tmp_path, "broken", num_steps=4, last="finished"))]) as server:
        browser.leave()
        browser.go(server.url)
        for words in (
            "killed",
            "after step 1",
            "lost rollout, rank 1",
            "set aside in checkpoints/: step_000002.damaged",
        ):
            shows(browser, "#broke", words)
        assert "File rewards.py, line 7" in text(browser, "#broke details pre")
        shows(browser, "#time", "replaced (4 groups)")
        shows(browser, "#time", "done again (1 step)")
        for only, words in (
            ("failed", "left out: raised: boom"),
            ("truncated", "truncated, and rollout.mask_truncated is set"),
            ("replaced", "its group had no signal, and was replaced"),
        ):
            choose(browser, "#choose-only", only)
            shows(browser, ".reasons", words)
        choose(browser, "#choose-only", "all")
        shows(browser, "#rollout-count", "64 of 64")
        click(browser, "#side")
        shows(browser, ".side", "tokens · stop · version 3")
    assert went_wrong(browser) == []


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


@pytest.mark.slow  # it starts a Chromium of its own; the page in these widths and themes is tested above, in a report
def test_the_pictures_of_the_documentation_are_taken_by_a_command(tmp_path, monkeypatch):
    """In this process: a new one would import torch once more."""
    run = planted_run(tmp_path, num_steps=2, prompts=1, group=2, last="finished")
    program = Path(__file__).parents[3] / "docs" / "screenshots.py"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [str(program), str(run), "--all", str(tmp_path / "pictures")])
    runpy.run_path(str(program), run_name="__main__")
    sizes = {file.name: struct.unpack(">I", file.read_bytes()[16:20]) for file in (tmp_path / "pictures").iterdir()}
    assert sizes == {f"{width}-{theme}.png": (width,) for width in (390, 1280) for theme in ("light", "dark")}


def test_a_notebook_shows_the_page_in_a_frame_that_may_touch_nothing(browser, run, tmp_path):
    """The frame has an origin of its own, so that the page is asked by messages of the protocol alone."""
    notebook = tmp_path / "notebook.html"
    text = f"<!doctype html><meta charset=utf-8><body>{rally.load_run(run).view()._repr_html_()}"
    notebook.write_text(text, encoding="utf-8")  # Chromium guesses where nothing names the encoding
    browser.leave()
    browser.look()
    browser.call("Page.navigate", url=f"file://{notebook}")
    browser.wait("frames.length === 1")
    browser.wait("document.documentElement?.dataset.ready === 'true'", browser.in_frame)
    assert browser.in_frame("document.querySelectorAll('canvas').length") > 4
    assert browser.in_frame("document.querySelectorAll('.message.error').length") == 0
    assert browser.errors == []


def test_a_report_says_how_many_of_the_rollouts_it_has(browser, tmp_path):
    path = planted_run(tmp_path, "broken", num_steps=2, prompts=20, group=8, last="finished")
    write_report([RunReader(path)], tmp_path / "report.html")
    browser.leave()
    browser.go(f"file://{tmp_path}/report.html")
    shows(browser, "#rollout-count", "48 of the 48 in this report, of 160 rollouts")
    choose(browser, "#choose-only", "replaced")
    shows(browser, "#rollout-count", "8 of the 48")
    browser.evaluate("document.querySelectorAll('.rollout-row')[7].click()")
    shows(browser, ".rollout-detail .message", "the tokens of this rollout are not in the report")
    assert len(texts(browser, ".sample")) == 8
    choose(browser, "#choose-kind", "validation")
    shows(browser, "#rollouts .message.error", "and of no validation")
    assert browser.errors == []


def test_a_page_that_was_opened_before_the_first_step_becomes_whole(browser, tmp_path):
    """All that the run then does is drawn, down to its end, although nobody loads the page again."""
    done, path = planted_run(tmp_path / "done", num_steps=3, prompts=2, group=2), tmp_path / "young"
    lines = (done / "journal.jsonl").read_bytes().splitlines(keepends=True)
    began = next(at for at, line in enumerate(lines) if b'"RolesStarted"' in line) + 1
    shutil.copytree(done, path)
    shutil.rmtree(path / "rollouts")
    (path / "journal.jsonl").write_bytes(b"".join(lines[:began]))
    with PageServer([RunReader(path)]) as server:
        browser.leave()
        browser.look(1280, 9000)
        browser.go(server.url)
        shows(browser, "#headline", "no step is done yet")
        shows(browser, "#rollouts", "no step is done yet")
        assert texts(browser, ".message.error") == []
        browser.wait("document.querySelector('.alive.on') !== null")
        with RunFolder(path).locked():
            shutil.copytree(done / "rollouts", path / "rollouts")
            with (path / "journal.jsonl").open("ab") as file:
                file.write(b"".join(lines[began:]))
            at_step(browser, 3)
            shows(browser, ".pill", "running")
            shows(browser, "#lanes", "step 3")
            shows(browser, "#rollout-count", "4 of 4")
            check_panels(browser)
            with Journal(path / "journal.jsonl") as journal:
                journal.append(RunEnded(how="finished"))
        shows(browser, ".pill", "finished")
        shows(browser, "#broke", "finished")
    assert went_wrong(browser) == []


def test_a_lock_that_cannot_be_read_costs_nothing(browser, tmp_path):
    path = planted_run(tmp_path, num_steps=1, prompts=2, group=2)
    (path / ".lock").mkdir()
    with PageServer([RunReader(path)]) as server:
        browser.leave()
        browser.go(server.url)
        check_panels(browser)


def test_a_run_without_rewards_shows_its_loss(browser, tmp_path):
    run = create_run(load_config("sft", [f"trainer.runs_dir={tmp_path}", "model.path=m", "data.train=[d.jsonl]"]))
    with Journal(run.journal) as journal:
        config = dict(values_of(load_config(str(run.path)).config))
        journal.append(RunBegan(first=0, config=config, software={}, machine=""))
        for step, loss in enumerate((3.0, 1.25, 2.0), 1):
            journal.append(StepDone(step=step, metrics={"actor/loss": loss}, digests={}, seconds=1.0))
            journal.append(Validated(step=step, metrics={"validation/loss": loss}))
    with PageServer([RunReader(run.path)]) as server:
        browser.leave()
        browser.go(server.url)
        shows(browser, ".tiles", "best of the run1.25step 2")
        keys = texts(browser, "#headline .chart.wide .key")
        assert keys == ["loss 2", "validation 2"]


def test_the_page_follows_a_run_that_goes_on(browser, tmp_path):
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
