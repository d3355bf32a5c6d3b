"""A run whose reward is a judge: busy at first, once without a score."""

import pytest
from judge_server import judging
from metrics_file import read_metrics

from rallypoint.run.rollouts import read_rollouts

KEYS = (
    "cluster.runtime=inline",
    "cluster.pools={main: [1]}",
    "trainer.num_steps=2",
    "validation.every_steps=1000",
    "validation.max_prompts=1",
    "reward.function=judge",
)


def share(text):
    """Return how many tenths of the right answer's characters a response has in their places."""
    truth, _, response = text.partition("|")
    return f"{10 * sum(a == b for a, b in zip(truth, response, strict=False)) // len(truth)}"


def test_a_run_learns_from_a_judge_and_leaves_out_what_it_gave_no_score(runs, tmp_path):
    cache = tmp_path / "judge.sqlite"
    with judging(share) as server:
        server.refusals, server.replies = [(503, {})], ["5", "5", "hm"]  # the first two to the validation before step 1
        parameters = f"{{url: '{server.url}', model: m, template: '{{truth}}|{{response}}', cache: '{cache}'}}"
        run = runs.run("judged", *KEYS, f"reward.parameters={parameters}", "recipe=grpo")
        questions = {one["messages"][0]["content"] for _, _, one in server.asked}
    steps = [record for record in read_metrics(run.metrics) if "reward/mean" in record]
    assert [(one["reward/failed_raised"], one["reward/num_scored"]) for one in steps] == [(1, 31), (0, 32)]
    assert len({one["reward/mean"] for one in steps}) == 2
    assert len(questions) <= len(server.asked) <= 2 * 32 + 3
    rows = read_rollouts(run.path, 2)
    said = [int(share(f"{row['ground_truth']}|{row['response']}")) / 10 for row in rows]
    assert [row["score"] for row in rows] == pytest.approx(said)
