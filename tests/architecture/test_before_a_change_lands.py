"""What keeps a fault from landing: git's hook looks at what is staged, and a second run tells flaky from broken."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from skips import refuse_skip

ROOT = Path(__file__).parents[2]
GOOD, UNFORMATTED, AGAINST_RULES = "A = [1, 2]\n", "A = [1,2]\n", "import os\n"
AGAINST_LAYERS = "from demo import high\n\nA = [high]\n"
CONTRACT = """
[importlinter]
root_package = demo
[importlinter:contract:layers]
name = Imports point down
type = layers
layers =
    demo.high
    demo.low
"""


def git(folder, *words, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", f"core.hooksPath={ROOT / '.githooks'}")
    return subprocess.run(
        ["git", *who, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def repository(tmp_path):
    """A small project with the tools of ours, of which everything is staged."""
    for folder in ("src/demo", "tests", "benchmarks", "examples"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("__init__", "high", "low"):
        (tmp_path / "src" / "demo" / f"{name}.py").write_text(GOOD)
    for folder in ("tests", "benchmarks", "examples"):
        (tmp_path / folder / "one.py").write_text(GOOD)
    (tmp_path / ".importlinter").write_text(CONTRACT)
    (tmp_path / ".gitignore").write_text(".venv\n")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    assert git(tmp_path, "init", "--quiet").returncode == 0
    assert git(tmp_path, "add", "--all").returncode == 0
    return tmp_path


def commit(repository):
    done = git(repository, "commit", "--quiet", "--message=a change")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"), [(UNFORMATTED, "not formatted"), (AGAINST_RULES, "F401"), (AGAINST_LAYERS, "demo.low")]
)
def test_the_hook_refuses_what_is_staged_whatever_lies_in_the_folder_and_takes_it_mended(repository, wrong, said):
    low = repository / "src" / "demo" / "low.py"
    low.write_text(wrong)
    git(repository, "add", "--all")
    low.write_text(GOOD)  # mended, but not staged
    status, printed = commit(repository)
    assert status != 0
    assert said in printed
    git(repository, "add", "--all")
    low.write_text(wrong)  # not what is committed
    assert commit(repository) == (0, "")


TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({num_broken}))
def test_broken(number):
    assert False

def test_flaky():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("only at first")

def test_good():
    pass
"""


def run_twice(folder, num_broken):
    (folder / "test_it.py").write_text(TESTS.format(num_broken=num_broken))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    tests = [sys.executable, "-m", "pytest", "--quiet", "--rootdir", str(folder), "test_it.py"]
    output = folder / "output"
    with output.open("w") as file:
        subprocess.run(tests, cwd=folder, stdout=file, env=environment, check=False)
    command = [sys.executable, str(ROOT / ".ci" / "second_run.py"), str(output)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, output.read_text(), done.stdout


@pytest.mark.parametrize(
    ("reason", "in_ci", "outcome"),
    [("needs triton", "true", "failed"), ("etcd is not here", "true", "skipped"), ("needs triton", "", "skipped")],
)
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_skip_for_a_reason_that_is_not_on_the_list_fails_in_ci(monkeypatch, reason, in_ci, outcome, is_collected):
    monkeypatch.setenv("CI", in_ci)
    where = ("test_it.py", 1, f"Skipped: {reason}")
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=str(where) if is_collected else where)
    refuse_skip(report)
    assert report.outcome == outcome


def test_ci_says_that_it_is_ci_and_prints_the_reasons_of_skips():
    script = (ROOT / ".ci" / "run").read_text()
    assert "export CI=true" in script
    assert "-rs" in script
    assert "command -v" not in script, "it finds functions of the script's own, too: type -P"


def test_what_passes_alone_is_printed_as_flaky_and_the_last_line_counts_it_as_passed(tmp_path):
    status, first, second = run_twice(tmp_path, num_broken=0)
    assert status == 0
    assert "only at first" in first
    assert "flaky: test_it.py::test_flaky passes alone" in second
    assert second.splitlines()[-1].startswith("2 passed")


@pytest.mark.parametrize(("num_broken", "is_tried_again"), [(1, True), (3, False)])
def test_what_fails_again_fails_and_more_than_three_are_not_tried_again(tmp_path, num_broken, is_tried_again):
    status, _, second = run_twice(tmp_path, num_broken)
    assert status == 1
    assert "flaky" not in second
    assert ("once more, alone" in second) is is_tried_again


def test_a_first_run_that_did_not_come_to_its_end_fails(tmp_path):
    (tmp_path / "output").write_text("collecting ...\n")
    command = [sys.executable, str(ROOT / ".ci" / "second_run.py"), "output"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "pytest did not come to its end\n")
