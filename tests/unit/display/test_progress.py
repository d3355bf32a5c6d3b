import dataclasses
import io
import math
import os
import re
from pathlib import Path

import pytest
from measured import Measured
from rich.cells import cell_len
from rich.console import Console

from rallypoint.config import RECIPES, load_config, values_of
from rallypoint.display import LivePanel, PlainLines, Progress, Silent, make_progress
from rallypoint.journal import Journal, RunBegan, Shown, StepDone, Validated
from rallypoint.run import Completion, RunInfo, StepReport, Summary
from rallypoint.run.agreement import Agreement

RUN = RunInfo(name="digits-0", algorithm="ppo", num_steps=300, run_dir=Path("runs/digits-0"), detail="llama 0.4M")
SCALARS = {"reward/mean": 0.412, "actor/loss": 0.0123, "actor/approx_kl": 0.001, "actor/entropy": 2.01}
EXAMPLE = Completion(prompt="493105", response="013459", ground_truth="013459", score=1.0)
SUMMARY = Summary(
    name="digits-0",
    run_dir=Path("runs/digits-0"),
    num_steps=300,
    seconds=100.0,
    validations=[(0, 0.1), (20, 0.95), (40, 0.9)],
    phases={"rollout": 60.0, "learn": 30.0},
    num_tokens_sampled=1_200_000,
    num_tokens_trained=1_100_000,
    curve=Path("runs/digits-0/curve.png"),
    checkpoints=[Path("runs/digits-0/checkpoints/step_000300")],
    commands={"chat": "rally chat " + "runs/" * 20 + "step_000300"},
    agreement=Agreement(mean=2e-7, largest=3e-6, step=4, prompt=17, sample=2, place=9, token=12, text="7\x1b[2J"),
    notes=["3 rewards failed"],
)
HOSTILE = Completion(
    prompt="[red]x[/red] [/] \x1b[2J\x1b]0;t\x07 什么是人工智能？" * 30,
    response="思考：\n\n\t" + "答案是四十二。" * 4000 + "\u202e[/bold]",
    ground_truth="四十二[link=http://x]\r\x07",
    score=math.nan,
)


def step_report(step: int = 12, **changes: object) -> StepReport:
    fields: dict[str, object] = {
        "step": step,
        "scalars": SCALARS,
        "spans": {"rollout": 0.1, "learn": 0.06},
        "seconds": 0.21,
        "num_tokens": 12_800,
        "completion": EXAMPLE,
    }
    return StepReport(**{**fields, **changes})  # type: ignore[arg-type]


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last_frame(panel: LivePanel, width: int) -> list[str]:
    """Draw a panel on a console of its own."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel)
    return written(console).splitlines()


def test_a_frame_shows_step_reward_validation_health_time_and_a_completion() -> None:
    now = [0.0]
    panel = LivePanel(terminal(), clock=lambda: now[0])
    panel.start(RUN)
    panel.validation(0, 0.1)
    now[0] = 62.0
    panel.step(step_report())
    panel.validation(12, 0.3)
    frame = "\n".join(last_frame(panel, 80))
    for words in (
        "ppo · digits-0", "12/300", "eta 0:01:00", "0:01:02 elapsed", "0.412", "0.100 → 0.300", "● healthy",
        "0.210 s a step", "61k tok/s", "rollout 48%", "learn 29%", "other 24%", "loss 0.0123", "entropy 2.01",
        "493105", "013459", "score 1.00", "runs/digits-0",
    ):  # fmt: skip
        assert words in frame, words


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("completion", [EXAMPLE, HOSTILE, None])
def test_every_line_of_a_frame_is_exactly_as_wide_as_the_terminal(width: int, completion: Completion | None) -> None:
    panel = LivePanel(terminal(width), clock=lambda: 0.0)
    assert {cell_len(line) for line in last_frame(panel, width)} == {width}
    panel.start(RUN)
    panel.waiting("starting Ray " * 30)
    assert {cell_len(line) for line in last_frame(panel, width)} == {width}
    bad = {
        **SCALARS,
        "actor/loss": math.nan,
        "rollout/truncated": 0.9,
        "actor/clip_fraction": 0.9,
        "reward/failed": 9,
    }
    panel.step(step_report(scalars=bad, completion=completion, spans={f"phase{n}": 0.02 for n in range(12)}))
    panel.validation(1, math.nan)
    panel.note("[red] \x1b[31m" + "x" * 500)
    lines = last_frame(panel, width)
    assert {cell_len(line) for line in lines} == {width}
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", "".join(lines))


def test_markup_in_a_completion_is_shown_and_not_obeyed() -> None:
    panel = LivePanel(terminal(), clock=lambda: 0.0)
    panel.start(RUN)
    panel.step(step_report(completion=Completion(prompt="[red]a[/]", response="[b", ground_truth="[/b]", score=0.0)))
    frame = "\n".join(last_frame(panel, 80))
    assert "[red]a[/]" in frame
    assert "[/b]" in frame


def test_a_step_without_any_scalar_or_span_or_time_can_be_drawn() -> None:
    panel = LivePanel(terminal(), clock=lambda: 0.0)
    panel.step(step_report(scalars={}, spans={}, seconds=0.0, num_tokens=0, completion=None))
    assert {cell_len(line) for line in last_frame(panel, 80)} == {80}


def test_the_panel_keeps_its_height_from_step_to_step() -> None:
    panel = LivePanel(terminal(), clock=lambda: 0.0)
    panel.start(RUN)
    panel.step(step_report(1))
    height = len(last_frame(panel, 80))
    panel.waiting("running validation")
    assert len(last_frame(panel, 80)) == height
    panel.step(step_report(2, scalars={**SCALARS, "actor/entropy": 0.0}, completion=HOSTILE))
    assert len(last_frame(panel, 80)) == height <= 22


def test_reports_that_come_fast_share_a_frame() -> None:
    now = [0.0]
    console = terminal()
    with LivePanel(console, clock=lambda: now[0]) as panel:
        panel.start(RUN)
        for step in range(1, 301):
            now[0] += 0.01
            panel.step(step_report(step))
    assert written(console).count("tok/s") <= 3 * 3 + 4  # 3 s at three a second; some more for the real clock


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_given_back_on_every_way_out_and_the_last_frame_stays(error: type[BaseException]) -> None:
    console = terminal()

    def crash() -> None:
        with LivePanel(console, clock=lambda: 0.0) as panel:
            panel.start(RUN)
            raise error

    with pytest.raises(error):
        crash()
    text = written(console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "digits-0" in text[text.rindex("╭") :]


def test_the_summary_takes_the_place_of_the_panel() -> None:
    console = terminal()
    with LivePanel(console, clock=lambda: 0.0) as panel:
        panel.start(RUN)
        panel.note("a warning")
        panel.finish(SUMMARY)
    end = written(console)[written(console).rindex("╰") :]
    assert "digits-0 finished" in end
    assert "a warning" in end


def test_a_display_shows_the_events_of_a_journal_and_a_resumed_run_its_course(tmp_path: Path) -> None:
    config = dict(values_of(load_config("digits").config))
    began = RunBegan(first=0, config=config, software={}, machine="", folder=str(tmp_path / "mine"))
    console, panel = Console(file=io.StringIO()), LivePanel(terminal(), clock=lambda: 0.0)
    plain = PlainLines(console, clock=lambda: 0.0)
    (tmp_path / "mine").mkdir()
    with Journal(tmp_path / "mine" / "journal.jsonl") as journal:
        journal.subscribe(plain.take)
        journal.say("reading model and data", level="wait")
        journal.append(began, Validated(step=0, metrics={"validation/score": 0.25, "time_s/validate": 1.0}))
        journal.say("the first\nand more")
        journal.say("for the log alone", level="log")
        row = {**dataclasses.asdict(EXAMPLE), "step": 1}
        journal.tell(Shown(step=1, rows=[row]))
        metrics = {**SCALARS, "rollout/num_tokens": 640, "time_s/rollout": 1.5, "time_s/rollout/load": 1.0}
        journal.append(StepDone(step=1, metrics=metrics, digests={}, seconds=2.0))
        journal.subscribe(panel.take)
        journal.append(dataclasses.replace(began, first=1))
        journal.say("the end comes", level="end")
    text = written(console)
    for words in (
        "reading model and data ...", "ppo mine  120 steps", "validation after step 0: 0.250", "tok/s  320", " 2.00 s",
        "note: the first (more in logs/train.log)", "resumed at step 2", "the end comes",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "for the log alone" not in text
    assert plain._state.completion == EXAMPLE
    assert (panel._state.course.points(), panel._state.validations.points()) == ([0.412], [0.25])


def test_a_plain_line_has_everything_in_columns_that_stay_where_they_are() -> None:
    now = [0.0]
    console = Console(file=io.StringIO())
    plain = PlainLines(console, clock=lambda: now[0])
    plain.start(RUN)
    plain.validation(0, 0.398)
    plain.step(step_report(12))
    bad = {"reward/mean": -1.0, "actor/loss": -0.0123, "actor/entropy": math.nan}
    plain.step(step_report(113, scalars=bad, num_tokens=0))
    first, second = (line for line in written(console).splitlines() if line.startswith("step"))
    assert first == (
        "step  12/300  reward 0.412  val 0.398  loss  0.0123  update kl 0.0010  entropy  2.01  tok/s  61k   0.21 s"
        "  eta 0:01:00  healthy"
    )
    for label in ("reward", "val", "loss", "update kl", "entropy", "tok/s", "eta"):
        assert first.index(label) == second.index(label)
    assert second.endswith("actor/entropy not finite")


def play(progress: Progress, recipe: str, scalars: dict[str, float]) -> None:
    spec = RECIPES[recipe]
    run = dataclasses.replace(RUN, algorithm=recipe, watched=spec.watched, validated=spec.validated, course=[2.5])
    progress.start(run)
    progress.validation(0, 2.6)
    progress.step(step_report(scalars={**scalars, "actor/grad_norm": 0.7}, completion=None))
    progress.validation(12, 0.41)


OF_PAIRS = {"actor/accuracy": 0.75, "actor/margin": 1.25, "actor/loss": 0.31}


@pytest.mark.parametrize(
    ("recipe", "scalars", "first", "validation"),
    [
        ("sft", {"actor/loss": 0.31, "data/epoch": 0.4}, "loss", "val loss"),
        ("dpo", OF_PAIRS, "accuracy", "validation"),
        ("reward_model", OF_PAIRS, "accuracy", "validation"),
        ("opd", {"actor/teacher_kl": 0.31, "actor/loss": 0.2}, "teacher kl", "validation"),
    ],
)
def test_a_recipe_without_rewards_shows_what_it_is_about(recipe, scalars, first, validation) -> None:
    panel = LivePanel(terminal())
    play(panel, recipe, scalars)
    rows = last_frame(panel, 80)
    shown = str(next(iter(scalars.values())))
    assert any(re.match(rf"│  {first} +{shown}", row) for row in rows), rows
    assert any(re.match(rf"│  {validation} +2.6\d* → 0.41", row) for row in rows), rows
    assert any("numbers" in row and "grad 0.7" in row for row in rows)
    assert not any("reward  " in row for row in rows)
    lines = terminal()
    play(PlainLines(lines), recipe, scalars)
    assert f"{first} " in written(lines)
    if recipe != "opd":  # which may have rewards beside the teacher
        assert "reward " not in written(lines)


def test_plain_output_has_no_control_codes_even_on_a_terminal_and_whatever_it_is_told() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with PlainLines(console, clock=lambda: 0.0) as plain:
        plain.start(RUN)
        plain.waiting("starting \x1b[31mRay\nnow")
        plain.note("\x1b[2J[red]x")
        plain.step(step_report(completion=HOSTILE))
        plain.finish(SUMMARY)
    assert "\x1b" not in written(console)
    assert "starting Ray now ...\n" in written(console)
    assert "note: [red]x\n" in written(console)


def test_plain_output_goes_to_a_file_that_knows_ascii_only() -> None:
    raw = io.BytesIO()
    with PlainLines(Console(file=io.TextIOWrapper(raw, encoding="ascii")), clock=lambda: 0.0) as plain:
        plain.note("数 → x")
        plain.finish(SUMMARY)
    text = raw.getvalue().decode("ascii")
    assert "note: ? -> x\n" in text
    assert "rollout       ####" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_summary_says_how_it_went_where_things_are_and_what_to_do_next(width: int) -> None:
    console = terminal(width)
    LivePanel(console, clock=lambda: 0.0).finish(SUMMARY)
    text = written(console)
    for words in (
        "0.100 → 0.900", "best 0.950 at step 20", "0:01:40", "300 steps", "1.2M sampled", "1.1M trained", "60.0%",
        "10.0%", "mean 2e-07, largest 3e-06 nats", "token 9 of prompt 17 sample 2, '7", "runs/digits-0/curve.png",
        "runs/digits-0/report.html",
        "step_000300", "3 rewards failed", SUMMARY.commands["chat"],
    ):  # fmt: skip
        assert words in text, words


def test_the_summary_says_what_a_step_took_and_what_start_up_did(tmp_path: Path) -> None:
    now = [0.0]
    with Measured(tmp_path / "journal.jsonl", clock=lambda: now[0]) as log:
        now[0] = 12.0
        log.write(0, {"time_s/start": 12.0})
        for step, seconds in enumerate((5.0, 1.4, 1.4, 1.4), start=1):  # the first one warms up
            now[0] += seconds
            log.write(step, {"reward/mean": 0.0, "time_s/rollout": seconds - 0.4, "time_s/learn": 0.4})
            log.write(step, {"time_s/checkpoint": 1.0})
    console = terminal()
    summary = Summary(name="x", run_dir=tmp_path).measured(tmp_path / "journal.jsonl")
    LivePanel(console, clock=lambda: 0.0).finish(summary)
    assert "4 steps of 1.40 s (median), start-up 12.0 s" in written(console)
    assert re.search(r"start +█+ +\d+\.\d% +12\.0 s", written(console))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (120, 40)])
def test_a_long_summary_fits_its_terminal_with_its_first_line_and_the_file_has_the_rest(
    width: int, height: int, tmp_path: Path
) -> None:
    summary = dataclasses.replace(
        SUMMARY,
        run_dir=tmp_path,
        phases={f"phase {name}": 10.0 for name in "abcdefgh"},
        memory_gib=dict.fromkeys(("actor", "critic", "rollout", "reference"), (2.0, 3.0)),
        commands={"chat": "rally chat runs/digits-0", "evaluate": "rally eval runs/digits-0 validation.parquet"},
        notes=[f"{name} warning: {'words ' * 30}" for name in ("first", "second", "third", "fourth")],
    )
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    LivePanel(console, clock=lambda: 0.0).finish(summary)
    lines = [line for line in written(console).split("\n") if not line.startswith("\x1b")]
    assert sum(max(math.ceil(cell_len(line) / width), 1) for line in lines) < height, "the prompt needs a line"
    text = "\n".join(lines)
    for words in (
        "digits-0 finished",
        "0.100 → 0.900",
        str(tmp_path),
        "step_000300",
        "rally chat",
        "rally eval",
        "first warning",
    ):
        assert words in text, words
    whole = (tmp_path / "summary.txt").read_text() if "summary.txt" in text else text
    for words in ("0.100 → 0.900", "phase h", "reference", "fourth warning"):
        assert words in whole, words


@pytest.mark.parametrize(("num_steps", "words"), [(1, "0.250 → 0.250   first and last step"), (40, "0.250 → 10.0")])
def test_a_summary_without_validation_begins_with_the_reward(num_steps: int, words: str, tmp_path: Path) -> None:
    with Measured(tmp_path / "journal.jsonl") as log:
        for step in range(1, num_steps + 1):
            log.write(step, {"reward/mean": 0.25 if step < 20 else 10.0})
    console = terminal()
    LivePanel(console, clock=lambda: 0.0).finish(
        Summary(name="x", run_dir=tmp_path).measured(tmp_path / "journal.jsonl")
    )
    assert f"reward        {words}" in written(console)


def test_a_curve_that_could_not_be_drawn_is_no_end_and_says_why() -> None:
    console = terminal()
    summary = dataclasses.replace(SUMMARY, curve=None, why_no_curve="DiskError: no space left")
    LivePanel(console, clock=lambda: 0.0).finish(summary)
    assert "not drawn: DiskError: no space left" in written(console)


def test_a_summary_without_a_curve_says_how_to_get_one_and_an_empty_one_is_still_a_summary() -> None:
    console, why = terminal(), "it needs the package matplotlib; pip install -e '.[plot]'"
    empty = Summary(name="x", run_dir=Path("x"), num_steps=0, seconds=0.0, validations=[], phases={}, why_no_curve=why)
    LivePanel(console, clock=lambda: 0.0).finish(empty)
    assert "pip install -e '.[plot]'" in written(console)


def test_many_notes_are_counted_and_cut() -> None:
    console = terminal()
    panel = LivePanel(console, clock=lambda: 0.0)
    for number in range(9):
        panel.note(f"note {number % 8}")
    panel.finish(SUMMARY)
    assert "and 4 more" in written(console)


class Teletype(io.StringIO):
    """A file that says it is a terminal, as that of the kernel behind `descriptor` is."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor

    def fileno(self) -> int:
        return self.descriptor


def test_a_terminal_gets_the_panel_and_anything_else_plain_lines() -> None:
    outer, inner = os.openpty()
    real = Teletype(inner)
    try:
        assert isinstance(make_progress(Console(file=real, force_terminal=True), {}), LivePanel)
        dumb = Console(file=real, force_terminal=True, _environ={"TERM": "dumb"})
        assert isinstance(make_progress(dumb, {}), PlainLines)
        for notebook in (
            {"JPY_PARENT_PID": "1"},
            {"MPLBACKEND": "module://matplotlib_inline.backend_inline"},
            {"COLAB_RELEASE_TAG": "x"},
        ):
            assert isinstance(make_progress(Console(file=real, force_terminal=True), notebook), PlainLines)
    finally:
        os.close(outer)
        os.close(inner)
    assert isinstance(make_progress(Console(file=io.StringIO()), {}), PlainLines)
    # FORCE_COLOR, as notebooks and build servers set it, makes no terminal of a pipe.
    assert isinstance(make_progress(terminal(), {}), PlainLines)
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), force_terminal=True)
    assert isinstance(make_progress(ascii_only, {}), PlainLines)


def test_silence_has_the_same_face() -> None:
    progress: Progress = Silent()
    with progress as entered:
        entered.start(RUN)
        entered.waiting("x")
        entered.step(step_report())
        entered.validation(1, 0.5)
        entered.note("x")
        entered.ending("x")
        entered.finish(SUMMARY)
        entered.give_back()
