import math
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from measured import Measured

from rallypoint.checkpoint import MANIFEST, checkpoint_name
from rallypoint.display import save_curve
from rallypoint.display.curve import draw_curve
from rallypoint.journal import Journal, RunBegan, StepDone, Validated
from rallypoint.run import Summary
from rallypoint.run.folder import RunFolder


def write_run(path: Path, num_steps: int, scale: float = 1.0) -> Path:
    with Measured(path) as log:
        log.write(0, {"validation/score": 0.1 * scale})
        for step in range(1, num_steps + 1):
            log.write(
                step,
                {
                    "reward/mean": math.nan if step % 7 == 0 else scale * step / num_steps,
                    "reward/failed": 1 if step % 5 == 0 else 0,
                    "actor/entropy": 2.0 / step,
                    "actor/approx_kl": 0.01,
                    "rollout/num_tokens": 10,
                    "time_s/rollout": 0.2,
                    "time_s/learn": 0.1,
                    "time_s/learn/critic": 0.05,
                },
            )
            if step % 10 == 0:
                log.write(step, {"validation/score": scale * step / num_steps})
    return path


@pytest.mark.parametrize(("num_steps", "scale"), [(0, 1.0), (1, 1.0), (2, -50.0), (100, 1.0)])
def test_a_curve_is_a_picture_for_a_run_of_any_length(tmp_path: Path, num_steps: int, scale: float) -> None:
    run = RunFolder(tmp_path / "digits $x · ppo")
    run.path.mkdir()
    write_run(run.journal, num_steps, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        picture = save_curve(run)
    assert picture == run.curve
    data = run.curve.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 500
    assert not list(run.path.glob("*.part"))


def test_an_empty_file_gives_a_picture_that_says_so(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.journal.touch()
    assert [text.get_text() for text in draw_curve(run).axes[0].texts] == ["no steps yet"]


def write_resumed_run(run: RunFolder, phases: tuple[str, ...] = ("rollout", "learn")) -> None:
    """Twelve steps: resumed after 4 with another lr, after 8 as it was; and a start after 6 that 4 has superseded."""
    times = {f"time_s/{phase}": 1.0 for phase in phases}
    with Journal(run.journal, clock=lambda: 0.0) as journal:
        for first, last, rate in ((0, 6, 1e-3), (6, 6, 1e-2), (4, 8, 1e-4), (8, 12, 1e-4)):
            config = {"actor.optimizer.lr": rate, "trainer.runs_dir": f"runs{first}"}
            journal.append(RunBegan(first=first, config=config, software={}, machine=""))
            for step in range(first + 1, last + 1):
                journal.append(StepDone(step=step, metrics={"reward/mean": 0.1 * step, **times}, digests={}))
                if step % 2 == 0:
                    score = math.nan if step == 6 else 0.9 - abs(step - 9) / 10
                    journal.append(Validated(step=step, metrics={"validation/score": score}))
    for step in (4, 6, 8, 12):
        saved = run.checkpoints / checkpoint_name(step)
        saved.mkdir(parents=True)
        (saved / MANIFEST).touch()


def test_resumes_changes_of_the_config_and_the_best_checkpoint_are_marked(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_resumed_run(run)
    figure = draw_curve(run)
    lines = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert lines["best checkpoint"] == [8]
    assert lines["config changed"] == [4.5, 4.5]
    assert lines["resumed"] == [8.5, 8.5]
    words = [text.get_text() for text in figure.texts]
    assert "resumed after step 4 with actor.optimizer.lr 0.001 → 0.0001" in words
    assert any("1 validation without a number" in text for text in words)


def test_all_words_of_a_picture_are_inside_of_it_and_do_not_cover_the_axes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_resumed_run(run, (*"abcdefg", "a phase of a recipe with a very long name"))
    figure = draw_curve(run)
    FigureCanvasAgg(figure).draw()
    paper = figure.bbox
    main, *_, times = figure.axes
    legends = [axes.get_legend().get_window_extent() for axes in (main, times)]
    for box in (*(text.get_window_extent() for text in figure.texts), *legends):
        assert paper.x0 <= box.x0 <= box.x1 <= paper.x1
        assert paper.y0 <= box.y0 <= box.y1 <= paper.y1
    assert not any(legend.overlaps(axes.bbox) for legend, axes in zip(legends, (main, times), strict=True))
    assert len(times.get_legend().get_texts()) == 8
    assert main.bbox.width > 0.9 * paper.width


@pytest.mark.parametrize(
    ("rewards", "bottom", "top"), [((0.40, 0.50), (0.3, 0.4), (0.5, 0.6)), ((0.1, 0.9), (0.0, 0.0), (0.9, 1.0))]
)
def test_the_axis_of_rewards_shows_a_narrow_band_wide_and_a_wide_one_from_zero(tmp_path, rewards, bottom, top):
    run = RunFolder(tmp_path)
    with Journal(run.journal, clock=lambda: 0.0) as journal:
        journal.append(RunBegan(first=0, config={}, software={}, machine=""))
        for step in range(1, 13):
            journal.append(StepDone(step=step, metrics={"reward/mean": rewards[step % 2]}, digests={}))
    low, high = draw_curve(run).axes[0].get_ylim()
    assert bottom[0] <= low <= bottom[1]
    assert top[0] <= high <= top[1]


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from rallypoint.display import save_curve\n"
        "from rallypoint.run import why_no_plot\n"
        "from rallypoint.run.folder import RunFolder\n"
        "print(save_curve(RunFolder(Path())), why_no_plot())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None it needs the package matplotlib, which is not installed")
    assert ".[plot]" in done.stdout


def test_the_package_imports_neither_torch_nor_ray_nor_matplotlib() -> None:
    program = (
        "import sys, rallypoint.observability\n"
        "print([name for name in ('torch', 'ray', 'matplotlib', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_summary_is_read_from_the_journal(tmp_path: Path) -> None:
    journal = write_run(tmp_path / "journal.jsonl", 20)
    summary = Summary(name="x", run_dir=tmp_path, notes=["slow disk"]).measured(journal)
    assert summary.num_steps == 20
    assert summary.validations == [(0, 0.1), (10, 0.5), (20, 1.0)]
    assert summary.phases == pytest.approx({"rollout": 4.0, "learn": 2.0})
    assert summary.num_tokens_sampled == 200
    left_out = "left out: reward/mean is that of the others; logs/train.log names them"
    assert summary.notes == ("slow disk", f"4 rollouts have no score and were {left_out}")


def test_a_summary_says_of_how_many_rollouts_the_rewards_are_the_mean(tmp_path: Path) -> None:
    steps = [{"reward/num_scored": 500, "reward/failed": failed, "reward/failed_raised": failed} for failed in (12, 0)]
    with Measured(tmp_path / "journal.jsonl") as log:
        for step, record in enumerate(steps, 1):
            log.write(step, record)
    (note,) = Summary(name="x", run_dir=tmp_path).measured(log.path).notes
    assert note.startswith("12 of 1,012 rollouts have no score (12 raised) and were left out")
