"""The command line, in this process or in one of its own, and a tiny trained model."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tiny_model
from typer.main import get_command
from typer.testing import CliRunner, Result

from rallypoint import checkpoint
from rallypoint.cli.main import app
from rallypoint.config import load_config
from rallypoint.data import make_digits
from rallypoint.run.folder import create_run

SIZES = {"num_layers": 1, "num_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.02, "max_positions": 24}


@functools.cache
def whole_command():
    """Return what typer makes of `app`, which takes as long as most commands; `CliRunner.invoke` would each time."""
    return get_command(app)


def rally(*arguments: str, typed: str | bytes = "", columns: int = 80) -> Result:
    """Run a command in this process; an error is not turned into a message here."""
    runner, exception = CliRunner(), None
    with runner.isolation(input=typed, env={"COLUMNS": str(columns)}) as streams:
        try:
            whole_command().main(args=list(arguments), prog_name="rally")
        except SystemExit as ended:
            exception = ended if ended.code else None
        except Exception as error:  # noqa: BLE001  # as `CliRunner.invoke`
            exception = error
        printed = [stream.getvalue() for stream in streams]
    status = exception.code if isinstance(exception, SystemExit) else int(exception is not None)
    return Result(runner, *printed, return_value=None, exit_code=status, exception=exception)


def spawn(
    *arguments: str, cwd: Path | None = None, typed: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the real command, its output in pipes."""
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint.cli.main", *arguments],
        capture_output=True,
        input=typed,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment},
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run as training leaves it behind, without the training."""

    run: Path
    checkpoint: Path
    data: str


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    loaded = load_config("digits", [f"trainer.runs_dir={folder}", "trainer.name=run", "rollout.max_response_tokens=7"])
    run = create_run(loaded)
    with checkpoint.writing(run.checkpoints, 4) as written:
        make_tiny_model(written, **SIZES)
    sizes = {"num_digits": 6, "num_train_prompts": 4, "num_validation_prompts": 3, "seed": 0}
    _, validation = make_digits(folder / "data", task="sort", **sizes)
    return Trained(run.path, run.checkpoints / "step_000004", str(validation))


@pytest.fixture
def command():
    """`rally(...)` in this process."""
    return rally


@pytest.fixture
def process():
    """`rally ...` in a process of its own."""
    return spawn


@pytest.fixture
def sizes():
    """Of the tiny model, as `make_tiny_model` takes them."""
    return SIZES
