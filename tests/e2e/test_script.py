"""Ten lines of a user's: in an interpreter of their own, under a running event loop, and in a notebook."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tiny_models import make_tiny_model

SCRIPT = """\
import rallypoint as rally


def reward(completion: str, answer: str) -> float:
    return float(completion.startswith(answer))


run = rally.train(
    "grpo",
    model="Qwen/Qwen3-0.6B",
    data=[{"prompt": str(n), "answer": str(n)} for n in range(10)],
    reward=reward,
    num_steps=1, lr=1e-6,{more}
)
run.curve(); run.metrics; run.best; model, tokenizer = run.load()
print(len(run.metrics), run.best.step, type(model).__name__)
"""
SMALL = 'num_prompts=4, group_size=4, max_response_tokens=8, config={"cluster.runtime": "inline"},'
TOLD = "2 1 Qwen3ForCausalLM"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where a tiny model has the name on the hub."""
    (tmp_path / "Qwen").mkdir()
    make_tiny_model(tmp_path / "Qwen" / "Qwen3-0.6B", architecture="qwen3", max_positions=1024)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_script_runs_as_it_stands_in_an_interpreter_of_its_own(here: Path):
    (here / "script.py").write_text(SCRIPT.replace("{more}", ""))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == TOLD


def test_the_script_runs_under_an_event_loop(here: Path, capsys: pytest.CaptureFixture[str]):
    async def cell() -> None:
        exec(compile(SCRIPT.replace("{more}", SMALL), "cell", "exec"), {"__name__": "__main__"})

    asyncio.run(cell())
    assert capsys.readouterr().out.splitlines()[-1] == TOLD


@pytest.mark.slow  # test_notebooks.py trains in a kernel
def test_the_script_runs_in_a_notebook(here: Path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT.replace("{more}", SMALL))])
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(here)}})
    client.execute(env={**os.environ, "IPYTHONDIR": str(here / "ipython"), "OMP_NUM_THREADS": "1"})
    told = [output["text"] for output in notebook.cells[0].outputs if output.get("name") == "stdout"]
    assert "".join(told).splitlines()[-1] == TOLD
