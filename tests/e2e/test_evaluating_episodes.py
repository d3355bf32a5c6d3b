"""The model of a run is scored by episodes, in one process, as the run's own validation does it."""

import re

import pytest
from tiny_models import make_tiny_model
from typer.testing import CliRunner

import rallypoint as rally
from rallypoint.cli.main import app
from rallypoint.errors import ConfigError, DataError, RewardError

ROWS = [{"prompt": f"{i % 10}{i * 7 % 10}", "answer": str(i % 10)} for i in range(6)]
VALIDATION_SEED = 2**32

EPISODES = """
async def twice(client, example):
    await client.chat(max_tokens=5)
    said = await client.chat([{"role": "user", "content": "12"}], max_tokens=5)
    return {"reward": [0.0, said["content"].count(str(example.ground_truth)) / 4], "asked": 2}


class Twice:
    max_tokens = 5

    def reset(self, example):
        self.truth, self.turns = str(example.ground_truth), 0

    def step(self, message):
        self.turns += 1
        if self.turns == 1:
            return [{"role": "user", "content": "12"}], 0.0, False
        return [], message["content"].count(self.truth) / 4, True, {"asked": self.turns}


async def fails_for_some(client, example):
    if example.ground_truth in "01":
        raise LookupError("no such move")
    await client.chat(max_tokens=2)
    return 0.5


def over_http(base_url, api_key, example):
    import json
    from urllib.request import Request, urlopen

    messages = [{"role": one.role, "content": one.content} for one in example.prompt]
    for _ in range(2):
        asked = json.dumps({"model": "policy", "messages": messages, "max_tokens": 5}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{base_url}/chat/completions", asked, headers)) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "12"}]
    return {"reward": [0.0, said["content"].count(str(example.ground_truth)) / 4], "asked": 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A step of training, and a validation with two episodes of each prompt."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "episodes.py").write_text(EPISODES)
    make_tiny_model(folder / "model")
    config = {"cluster.runtime": "inline", "data.max_prompt_tokens": 16, "rollout.exact": True}
    config |= {"validation.num_samples": 2, "validation.temperature": 0.8}
    return rally.train(
        "grpo",
        model=folder / "model",
        data=ROWS,
        validation=ROWS,
        episode=f"{folder / 'episodes.py'}:twice",
        num_prompts=2,
        group_size=2,
        num_steps=1,
        lr=1e-3,
        max_response_tokens=24,
        runs_dir=folder / "runs",
        name="run",
        display=False,
        config=config,
    )


def compared(rows):
    names = ("prompt_index", "sample_index", "prompt_ids", "response_ids", "loss_mask", "rollout_logprobs")
    names += ("sampled_logprobs", "turns", "metrics", "score", "token_rewards", "finish_reason")
    return [{name: row[name] for name in names} for row in rows]


@pytest.mark.parametrize("name", [None, "Twice", "over_http"])
def test_the_numbers_are_those_of_the_runs_validation_with_the_same_weights(run, name):
    episode = name and f"{run.folder.parents[1] / 'episodes.py'}:{name}"
    seed = run.config.seed + VALIDATION_SEED
    found = rally.evaluate(run, ROWS, episode=episode, num_samples=2, temperature=0.8, seed=seed, say=pytest.fail)
    assert compared(found.rollouts()) == compared(run.rollouts(1, validation=True))
    assert len(found.scores) == 12
    last = run.metrics[-1]
    assert found.mean == last["validation/score"]
    attempts = {name: value for name, value in last.items() if re.search(r"(pass|best|mean|majority)@\d", name)}
    assert len(attempts) == 5
    assert {name: found.metrics[name] for name in attempts} == attempts
    assert (found.metrics["episode/asked"], found.metrics["rollout/num_turns"]) == (2, 2)


def test_episodes_that_fail_are_counted_and_left_out(run):
    episode = f"{run.folder.parents[1] / 'episodes.py'}:fails_for_some"
    said = []
    found = rally.evaluate(run, ROWS, episode=episode, say=said.append)
    assert (found.mean, len(found.scores), len(found.failed)) == (0.5, 4, 2)
    assert found.metrics["rollout/failed_raised"] == 2
    assert [(one.kind, one.prompt) for one in found.failed] == [("raised", 0), ("raised", 1)]
    assert 'raise LookupError("no such move")' in found.failed[0].traceback


def test_the_episode_of_somebody_elses_run_is_not_played_before_it_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"you did not start that run.*--episode .*episodes.py:twice"):
        rally.evaluate(run, ROWS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12", "ground_truth": "1"}\n')
    named = ["--episode", f"{run.config.rollout.episode}"]
    done = CliRunner().invoke(app, ["eval", str(run.folder), "rows.jsonl", *named])
    assert re.search(r"score \d\.\d{4}  1 responses to 1 prompts", done.output), done.output


def test_an_episode_is_watched_turn_by_turn_on_an_example_of_the_run(run):
    done = CliRunner().invoke(app, ["chat", str(run.folder), "--example", "3", "--max-response-tokens", "24"])
    assert done.exit_code == 0, done.output
    labels = [line.split("  ")[0] for line in done.output.splitlines() if line[:1].strip()]
    assert labels == [
        *("user", "policy 1", "user", "policy 2"),
        *("end", "turn 1", "turn 2", "truth", "metrics", "tokens"),
    ]
    assert "user         31\n" in done.output
    assert "truth        3\n" in done.output
    any_one = [CliRunner().invoke(app, ["chat", str(run.folder), "--example", "any", "--seed", "4"]) for _ in range(2)]
    assert len({tuple(each.output.splitlines()[:4]) for each in any_one}) == 1


def test_a_watched_episode_that_fails_says_why(run):
    named = ["--episode", f"{run.folder.parents[1] / 'episodes.py'}:fails_for_some"]
    done = CliRunner().invoke(app, ["chat", str(run.folder), "--example", "1", *named])
    assert 'raise LookupError("no such move")' in done.output
    with pytest.raises(DataError, match="there are 6 examples, so no example 6"):
        CliRunner().invoke(app, ["chat", str(run.folder), "--example", "6"], catch_exceptions=False)


def test_an_evaluation_of_which_all_episodes_failed_says_why(run):
    episode = f"{run.folder.parents[1] / 'episodes.py'}:fails_for_some"
    with pytest.raises(RewardError, match="no rollout could be scored: 2 rollouts failed"):
        rally.evaluate(run, ROWS[:2], episode=episode)
