import json
import math
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rallypoint.display import save_curve
from rallypoint.run import MetricsLog, Summary


def write_run(path: Path, num_steps: int, scale: float = 1.0) -> Path:
    with MetricsLog(path, clock=lambda: 0.0) as log:
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
    metrics = write_run(tmp_path / "metrics.jsonl", num_steps, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        picture = save_curve(metrics, tmp_path / "curve.png", "digits $x · ppo")
    assert picture is not None
    assert picture == tmp_path / "curve.png"
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 500
    assert not list(tmp_path.glob("*.part"))


def test_an_empty_file_gives_a_picture_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert save_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "x") is not None


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from rallypoint.display import save_curve\n"
        "from rallypoint.run import why_no_plot\n"
        "print(save_curve(Path('metrics.jsonl'), Path('curve.png'), 'x'), why_no_plot())"
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


def test_a_summary_is_read_from_the_metrics_file(tmp_path: Path) -> None:
    metrics = write_run(tmp_path / "metrics.jsonl", 20)
    summary = Summary(name="x", run_dir=tmp_path, notes=["slow disk"]).measured(metrics)
    assert summary.num_steps == 20
    assert summary.validations == [(0, 0.1), (10, 0.5), (20, 1.0)]
    assert summary.phases == pytest.approx({"rollout": 4.0, "learn": 2.0})
    assert summary.num_tokens_sampled == 200
    left_out = "left out: reward/mean is that of the others; logs/train.log names them"
    assert summary.notes == ("slow disk", f"4 rollouts have no score and were {left_out}")


def test_a_summary_says_of_how_many_rollouts_the_rewards_are_the_mean(tmp_path: Path) -> None:
    steps = [{"reward/num_scored": 500, "reward/failed": failed, "reward/failed_raised": failed} for failed in (12, 0)]
    lines = [json.dumps({"step": step, "time_s": 1.0, **record}) for step, record in enumerate(steps, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (note,) = Summary(name="x", run_dir=tmp_path).measured(tmp_path / "metrics.jsonl").notes
    assert note.startswith("12 of 1,012 rollouts have no score (12 raised) and were left out")
