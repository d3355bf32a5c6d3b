"""`rally train` on a Ray cluster that somebody else started: two nodes, a token, and no rallypoint on them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_forked

spec = importlib.util.spec_from_file_location("two_nodes", Path(__file__).parents[1] / "cluster" / "two_nodes.py")
assert spec is not None
assert spec.loader is not None
fixture = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fixture
spec.loader.exec_module(fixture)
two_nodes = fixture.two_nodes

SHARDED = ("cluster.pools={main: [1, 1]}", "rollout.placement.num_ranks=1", "model.create.num_key_value_heads=2")
SHARDED += tuple(f"{role}.mesh.tp=2" for role in ("actor", "critic", "reference"))
"""A process on each node, with half of each matrix; one of them samples with all of it."""
SPLIT = ("cluster.pools={main: [1, 1], sample: [1]}", "rollout.placement.pool=sample")
"""Two data-parallel ranks, one on each node, and a rollout worker in a process of its own."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(a == b for a, b in zip(solution_str, ground_truth)))
"""


def train(overrides: list[str], environment: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ("-c", "from rallypoint.cli.main import run; run()", "train", "digits", *overrides)
    return run_forked(*command, cwd=cwd, HOME=str(cwd), **environment)


@pytest.mark.parametrize(
    ("layout", "rendezvous", "weights"),
    [(SHARDED, "auto", "auto"), pytest.param(SPLIT, "tcp", "folder", marks=pytest.mark.slow)],
    ids=["sharded", "split"],
)
def test_a_run_over_two_nodes_gives_the_weights_of_one_in_this_process(
    two_nodes, runs, weights_of, tmp_path, layout, rendezvous, weights
):
    (tmp_path / "rewards.py").write_text(REWARD)
    own = (f"reward.function={tmp_path}/rewards.py:compute_score", "trainer.num_steps=2", *layout)
    here = runs.run("here", "cluster.runtime=inline", *own)
    joined = [f"cluster.address={two_nodes.address}", f"cluster.rendezvous={rendezvous}", f"rollout.weights={weights}"]
    # Relative to the driver's working directory, which is not that of the nodes.
    relative = type(runs)(Path("runs"))
    done = train(relative.overrides("there", *own, *joined), two_nodes.environment, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    there = type(here)(tmp_path / "runs" / "there")
    assert weights_of(there) == weights_of(here)


@pytest.mark.slow  # tests/cluster/test_ray_cluster.py has every token that is wrong
def test_a_run_without_the_token_says_so_and_where_it_looked(two_nodes, runs, tmp_path):
    done = train(runs.overrides("refused", f"cluster.address={two_nodes.address}", *SPLIT), {}, tmp_path)
    assert done.returncode != 0
    assert "wants another token than none: set RAY_AUTH_TOKEN" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
