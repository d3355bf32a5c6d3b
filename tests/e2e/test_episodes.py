"""Rollouts of several turns: an environment of the user's answers between two responses."""

import asyncio
import functools
import inspect
import json
import re
from pathlib import Path

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from docs_blocks import blocks
from tiny_models import make_tiny_model
from tiny_runs import weights_of
from typer.testing import CliRunner

import rallypoint as rally
from rallypoint.cli.main import app
from rallypoint.data import load_tokenizer
from rallypoint.errors import ConfigError
from rallypoint.run.folder import RunFolder
from rallypoint.types import Trajectory

ROWS = [{"prompt": f"{i % 10}{i * 7 % 10}", "answer": str(i % 10)} for i in range(16)]
INLINE = {"cluster.runtime": "inline", "data.max_prompt_tokens": 16, "checkpoint.keep": 9, "rollout.exact": True}
INLINE |= {"reward.num_processes": 1}
AGAIN = "12"


def _sent_whole():
    """Return a function that reward processes get as it is, so that none has to import this file and torch."""

    def reward(completion: str, answer: str) -> float:
        return completion.count(answer) / 4

    return reward


def _of_turns():
    """Return a function of the turns, likewise."""

    def reward(completion, turns, metrics, prompt_index, sample_index):
        first, second = turns
        return {
            "score": float(completion == first["response"] + second["response"]),
            "says": float(second["prompt"] == "12" and second["prompt_ids"] == [6, 7]),
            "ids": float(len(second["response_ids"])),
            "is_cut": float((second["finish_reason"], second["limit"]) == ("length", "turn")),
            "asked": metrics["asked"],
            "place": float(10 * prompt_index + sample_index),
        }

    return reward


reward, reward_of_turns = _sent_whole(), _of_turns()


@pytest.fixture
def train(tmp_path):
    """Two small steps in this process; `episode` asks twice unless a test says otherwise."""
    make_tiny_model(tmp_path / "model")
    again = tuple(load_tokenizer(str(tmp_path / "model")).encode(AGAIN, add_special_tokens=False))

    async def ask_twice(prompt, client):
        first = await client.sample(prompt.tokens)
        return Trajectory(turns=(first, await client.sample(again)))

    def run(recipe="grpo", *, config=None, **more):
        usual = {"model": tmp_path / "model", "data": ROWS, "num_prompts": 2, "group_size": 2, "num_steps": 2}
        usual |= {"reward": reward, "episode": ask_twice, "lr": 1e-3, "max_response_tokens": 12}
        usual |= {"runs_dir": tmp_path / "runs", "name": "run", "display": False}
        return rally.train(recipe, config={**INLINE, **(config or {})}, **(usual | more))

    return functools.partial(run), again


def test_what_the_environment_says_is_context_and_is_not_trained(train):
    run_with, again = train
    run = run_with(num_steps=1)
    text = load_tokenizer(str(run.folder / "checkpoints" / "step_000001")).decode(again)
    assert text == AGAIN
    rows = run.rollouts(1)
    assert len(rows) == 4
    assert run.config.rollout.episode == "@ask_twice"
    for row in rows:
        ids, trained = list(row["response_ids"]), list(row["loss_mask"])
        places = [at for at in range(len(ids)) if ids[at : at + len(again)] == list(again)]
        assert any(at and trained[at - 1] and not any(trained[at : at + len(again)]) for at in places)
    assert run.metrics[-1]["actor/ratio_error"] < 1e-5


def test_what_stands_between_two_messages_is_context_and_answers_are_trained(train):
    run_with, _ = train

    async def chats(client, example):
        answer = await client.chat(max_tokens=4)
        assert answer["role"] == "assistant"
        await client.chat([{"role": "user", "content": AGAIN}], max_tokens=4)
        return 1.0

    run = run_with(num_steps=1, episode=chats, reward=None)
    tokenizer = load_tokenizer(str(run.folder / "checkpoints" / "step_000001"))
    for row in run.rollouts(1):
        context = [token for token, on in zip(row["response_ids"], row["loss_mask"], strict=True) if not on]
        # The end of an answer that was cut stands there, too.
        assert tokenizer.decode(context).replace(" ", "").removeprefix("<eos>") == f"<user>{AGAIN}<assistant>"
    assert run.metrics[-1]["actor/ratio_error"] < 1e-5
    assert run.metrics[-1]["rollout/logprob_gap_max"] < 1e-5


def test_turns_of_other_temperatures_are_trained_at_that_of_the_run(train):
    run_with, again = train

    async def greedy_or_hot(client, example):
        is_changed = example.ground_truth in "02468"
        first = await client.sample(client.prompt, temperature=0 if is_changed else None)
        assert first.sampled_logprobs == ((0.0,) * len(first.response) if is_changed else first.logprobs)
        await client.sample(again, temperature=2.5 if is_changed else None, max_tokens=3)

    run = run_with(episode=greedy_or_hot, num_prompts=8, num_steps=1, config={"rollout.temperature": 0.7})
    step = run.metrics[-1]
    assert step["rollout/logprob_gap_max"] < 1e-4
    assert step["actor/ratio_error"] < 1e-5
    assert step["rollout/narrowing"] != 0.0
    told = {row["ground_truth"]: row["sampled_logprobs"] == row["rollout_logprobs"] for row in run.rollouts(1)}
    assert set(told.values()) == {True, False}


def test_turns_are_measured_also_of_groups_that_were_replaced(train):
    run_with, again = train
    taken = []

    async def slowly_right(client, example):
        number = len(taken)
        is_alike = number < 4  # the first groups have nothing to learn from, and are replaced
        taken.append(example)
        await client.sample(client.prompt, max_tokens=2)
        for _ in range(1 if is_alike else 2):
            await client.sample(again, max_tokens=2)
        client.chats.num_calls += 2
        client.chats.num_malformed += is_alike
        return 0.0 if is_alike else float(number)

    config = {"rollout.dynamic_sampling": 4}
    step = run_with(episode=slowly_right, reward=None, num_steps=1, config=config).metrics[-1]
    assert step["rollout/num_replaced"] == 2
    assert step["rollout/num_turns"] == (2 * 4 + 3 * 4) / 8
    assert step["rollout/num_turns_max"] == 3
    assert step["rollout/added_tokens"] == (4 * 1 + 4 * 2) * len(again) / 8
    assert step["rollout/turn_length/3"] <= 2
    assert (step["rollout/tool_calls"], step["rollout/tool_errors"]) == (2, 0.25)
    assert step["rollout/environment_s_max"] >= step["rollout/environment_s"] >= 0


def test_a_reward_function_gets_the_turns_with_what_was_said_and_what_the_episode_counted(train):
    run_with, again = train

    async def asks_twice(client, example):
        await client.sample(client.prompt)
        last = await client.sample(again, max_tokens=2)
        return {"asked": 2, "cut": last.truncated}

    rows = run_with(episode=asks_twice, reward=reward_of_turns, num_steps=1).rollouts(1)
    assert len(rows) == 4
    for row in rows:
        assert row["score"] == 1.0
        sampled = row["loss_mask"]
        last = len(sampled) - max(at for at, mine in enumerate(sampled) if not mine) - 1
        said = row["reward_extras"]
        assert said == {
            "says": 1.0,
            "ids": last,
            "is_cut": float(row["finish_reason"] == "length"),
            "asked": 2.0,
            "place": 10 * row["prompt_index"] + row["sample_index"],
        }


def test_a_resumed_run_ends_with_the_same_weights_and_wants_the_episode_again(train, tmp_path):
    run_with, _ = train
    every = {"checkpoint.every_steps": 1}
    whole = run_with(num_steps=2, name="whole", config=every)
    stopped = run_with(num_steps=2, name="stopped", config=every, callbacks=lambda step: step.stop())
    assert not stopped.finished
    with pytest.raises(ConfigError, match=r"rollout.episode='@ask_twice'.*episode=@?ask_twice"):
        rally.train(stopped, resume=True, reward=reward, display=False)
    again = run_with(stopped, resume=True, num_steps=2, model=None, data=None, name=None, runs_dir=None, config={})
    assert weights_of(RunFolder(again.folder)) == weights_of(RunFolder(whole.folder))


def test_the_example_of_the_docs_trains_from_the_command_line_and_validation_uses_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = [block for block in blocks("rollouts", "python") if "# episodes.py" in block]
    Path("episodes.py").write_text(example)
    Path("rewards.py").write_text("def reward(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    make_tiny_model(tmp_path / "model")
    keys = ["cluster.runtime=inline", "model.path=model", "data.train=rows.jsonl", "data.validation=rows.jsonl"]
    keys += ["reward.function=rewards.py:reward", "rollout.episode=episodes.py:second_chance", "trainer.name=run"]
    keys += [
        "data.columns.ground_truth=answer",
        "trainer.num_steps=1",
        "rollout.num_prompts=2",
        "rollout.group_size=2",
        "rollout.max_response_tokens=12",
    ]
    keys += ["data.max_prompt_tokens=16", "validation.max_prompts=4", "validation.every_steps=1"]
    done = CliRunner().invoke(app, ["train", "grpo", *keys])
    assert done.exit_code == 0, done.output
    run = rally.load_run("runs/run")
    appended = load_tokenizer("model").encode("0?", add_special_tokens=False)
    rows = run.rollouts(1) + run.rollouts(validation=True)
    assert len(rows) == 8
    for row in rows:
        context = [token for token, own in zip(row["response_ids"], row["loss_mask"], strict=True) if not own]
        assert context in ([], appended)
    assert any(not all(row["loss_mask"]) for row in run.rollouts(1))
    assert any(not all(row["loss_mask"]) for row in run.rollouts(validation=True))
    scored = CliRunner().invoke(app, ["eval", "runs/run", "rows.jsonl", "--max-prompts", "2", "--num-samples", "2"])
    assert re.search(r"score \d\.\d{4}  4 responses to 2 prompts", scored.output), scored.output
    assert re.search(r"rollout/num_turns +[12]", scored.output)
    assert "policy 2" in scored.output
    single = CliRunner().invoke(app, ["eval", "runs/run", "rows.jsonl", "--max-prompts", "2", "--episode", "null"])
    assert "policy 2" not in single.output
    assert re.search(r"score 1\.0000  2 responses to 2 prompts", single.output), single.output


async def branches(client, example):
    """Ask, go on from there twice at the same time, and once more from the first of these; then begin anew."""
    first = await client.call(client.prompt, max_tokens=3)
    history = (*client.prompt, *first.response)
    left, _ = await asyncio.gather(client.call((*history, 12), max_tokens=3), client.call((*history, 13), max_tokens=3))
    await client.call((*history, 12, *left.response, 14), max_tokens=3)
    compacted = await client.call((client.prompt[0], 15), max_tokens=3)
    rewards = [0.0] * 5
    rewards[-1] = compacted.response.count(compacted.response[0]) / 4
    rewards[0] = len(set(first.response)) / 4
    return rewards


@pytest.mark.parametrize("recipe", [pytest.param("grpo", marks=pytest.mark.slow), "ppo"])  # grpo: on two ranks, below
def test_a_rollout_of_several_sequences_is_trained_exactly_and_resumed_to_the_bit(train, recipe):
    run_with, _ = train
    settings = {"checkpoint.every_steps": 1, "actor.num_mini_batches": 2}
    options = {"num_steps": 2, "episode": branches, "reward": None, "config": settings}
    whole = run_with(recipe, name="whole", **options)
    steps = [line for line in whole.metrics if "rollout/num_tokens" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["actor/ratio_error"] < 1e-5
        assert step["rollout/sequences"] == 3.0
        assert step["rollout/logprob_gap_max"] < 1e-4
        assert step["actor/num_tokens"] == step["rollout/num_tokens"]
    rows = whole.rollouts(1)
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [sum(row["sequence_starts"]) for row in rows] == [2] * 4
    assert all(sum(row["loss_mask"]) <= 15 for row in rows)
    stopped = run_with(recipe, name="stopped", callbacks=lambda step: step.stop(), **options)
    again = run_with(
        stopped,
        resume=True,
        num_steps=2,
        episode=branches,
        reward=None,
        **dict.fromkeys(("model", "data", "name", "runs_dir")),
        config={},
    )
    assert weights_of(RunFolder(again.folder)) == weights_of(RunFolder(whole.folder))


def test_a_rollout_of_several_sequences_is_shown_and_leaves_as_a_training_trace(train, tmp_path):
    run_with, _ = train
    run = run_with(num_steps=1, episode=branches, reward=None)
    shown = CliRunner().invoke(app, ["show", str(run.folder), "--best", "1"])
    assert "3 sequences" in shown.output, shown.output
    assert "turn 5 begins anew:" in shown.output
    tokenizer = load_tokenizer(str(run.folder / "checkpoints" / "step_000001"))
    for row in run.rollouts(1):
        ids, left = [*row["prompt_ids"], *row["response_ids"]], [False] * len(row["prompt_ids"]) + row["loss_mask"]
        *first, continuing, last = [turn["parent"] for turn in row["turns"]]
        assert (first, last) == ([-1, 0, 0], -1)
        assert continuing in (1, 2), "one of the two that were asked at the same time"
        for turn in row["turns"]:
            part = slice(turn["start"], turn["start"] + turn["length"])
            assert tokenizer.decode(ids[part], skip_special_tokens=True) == turn["response"]
            assert all(left[part])
            left[part] = [False] * turn["length"]
        assert not any(left), "each sampled token is in one turn"
        assert row["turns"][0]["said"] == [{"role": "user", "text": row["prompt"]}]
    file = tmp_path / "traces.jsonl"
    said = CliRunner().invoke(app, ["show", str(run.folder), "--traces", str(file)])
    assert f"4 rollouts of step 1 in {file}" in said.output.replace("\n", "")
    traces = [json.loads(line) for line in file.read_text().splitlines()]
    assert traces == run.traces(1)
    assert [len(trace["turns"]) for trace in traces] == [5] * 4
    for trace, row in zip(traces, run.rollouts(1), strict=True):
        rewards = [turn["metadata"]["reward"] for turn in trace["turns"]]
        assert sum(rewards) == pytest.approx(row["score"])
        assert len([reward for reward in rewards if reward]) == 2


def test_two_ranks_sample_and_train_sequences_as_one_does(train):
    run_with, _ = train
    options = {"num_steps": 2, "episode": branches, "reward": None}
    one, two = (run_with(name=f"on {num}", config={"cluster.pools": {"main": [num]}}, **options) for num in (1, 2))
    for step in (1, 2):
        for row, other in zip(one.rollouts(step), two.rollouts(step), strict=True):
            for column in ("prompt_index", "sample_index", "response_ids", "loss_mask", "sequence_starts"):
                assert row[column] == other[column]
            assert other["advantages"] == pytest.approx(row["advantages"], abs=1e-5)
    assert two.metrics[-1]["actor/loss"] == pytest.approx(one.metrics[-1]["actor/loss"], abs=1e-5)
    assert two.metrics[-1]["actor/grad_norm"] == pytest.approx(one.metrics[-1]["actor/grad_norm"], rel=1e-3)


def test_a_run_that_samples_sequences_ahead_is_repeated_to_the_bit_by_its_schedule(train):
    run_with, _ = train
    ahead = {"cluster.pools": {"main": [1], "sampling": [1]}, "rollout.placement.pool": "sampling"}
    ahead |= {"rollout.max_staleness": 1}
    options = {"num_steps": 3, "episode": branches, "reward": None}
    first = run_with(name="first", config=ahead, **options)
    schedule = {"rollout.schedule": f"{first.folder}/journal.jsonl"}
    again = run_with(name="again", config={**ahead, **schedule}, **options)
    assert weights_of(RunFolder(again.folder)) == weights_of(RunFolder(first.folder))
    assert [row["response_ids"] for row in again.rollouts(3)] == [row["response_ids"] for row in first.rollouts(3)]


def test_the_class_of_the_docs_trains_in_messages_with_a_reward_for_each_turn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = [block for block in blocks("rollouts", "python") if "# game.py" in block]
    Path("game.py").write_text(example)
    make_tiny_model(tmp_path / "model", tokenizer=make_chat_tokenizer(QWEN3), max_positions=512)
    run = rally.train(
        "grpo",
        model=tmp_path / "model",
        data=[{"prompt": "Play.", "answer": str(number)} for number in range(4)],
        episode="game.py:Guess",
        num_prompts=2,
        group_size=2,
        num_steps=1,
        max_response_tokens=160,
        config={"cluster.runtime": "inline", "data.max_prompt_tokens": 64, "rollout.turn_timeout_s": 60},
        display=False,
    )
    step = run.metrics[-1]
    assert step["rollout/failed"] == 0
    assert step["rollout/logprob_gap_max"] < 1e-4
    rows = run.rollouts(1)
    assert len(rows) == 4
    for row in rows:
        assert any(row["loss_mask"])
        assert len(row["token_rewards"]) == len(row["response_ids"])


class Walk:
    """A walk on three places, which it names; a right digit is a step, and the third place is the goal."""

    max_tokens = 2

    def reset(self, example):
        self.state, self.digit = 0, str(example.ground_truth)
        return [{"role": "user", "content": str(self.state)}]

    def step(self, message):
        self.state += self.digit in message["content"]
        return [{"role": "user", "content": str(self.state)}], float(self.state == 2), self.state == 2


def test_turns_that_begin_in_the_same_state_are_compared_by_gigpo_and_computed_again_by_a_replay(train, tmp_path):
    run_with, _ = train
    config = {"advantage.name": "gigpo", "advantage.normalize_std": True, "checkpoint.every_steps": 1}
    (tmp_path / "walk.py").write_text(inspect.getsource(Walk))
    run = run_with(episode=f"{tmp_path / 'walk.py'}:Walk", reward=None, config=config | {"reward.function": None})
    rows = run.rollouts(2)
    assert any(sum(state is not None for state in row["turn_states"]) for row in rows)
    states = {state for row in rows for state, mine in zip(row["turn_states"], row["loss_mask"], strict=True) if mine}
    assert 1 <= len(states) <= 2
    said = CliRunner().invoke(app, ["replay", str(run.folder), "--step", "2"])
    assert said.exit_code == 0, said.output
