"""Processes for functions that make rollouts."""

from pathlib import Path

from rallypoint.config import load_config
from rallypoint.recipes.in_processes import num_processes_of

SMALL = ("rollout={num_prompts: 3, group_size: 4}",)


def test_a_run_that_is_repeated_has_a_process_for_each_rollout_under_way(tmp_path: Path):
    assert num_processes_of(load_config("digits-grpo", SMALL).config) is None, "as many as they make use of"
    ahead = ("rollout.max_staleness=1", "cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second")
    journal = tmp_path / "journal.jsonl"
    journal.touch()
    repeated = load_config("digits-grpo", [*SMALL, *ahead, f"rollout.schedule={journal}"]).config
    assert num_processes_of(repeated) == repeated.max_groups * 4 >= 24
