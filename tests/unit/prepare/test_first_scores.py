"""A reward that gives every answer the same score is told of in words, once."""

import pytest
import torch

from rallypoint.config import load_config
from rallypoint.data.dataset import Example, JSONValue, Message
from rallypoint.environments.scored import Scored
from rallypoint.prepare.data_notes import NUM_STEPS, FirstScores
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.types import Metrics, Trajectory, Turn, assemble


def rollouts(scores, truth: JSONValue = "4", parts=None):
    turn = Turn(prompt=(5,), response=(7,), logprobs=(-1.0,), sampled_logprobs=(-1.0,), version=0, truncated=False)
    rows = assemble(
        [Trajectory(turns=(turn,)) for _ in scores], prompt_index=0, sample_index=range(len(scores)), is_narrowed=False
    )
    rewards = torch.zeros(2 * len(scores))
    rewards[1::2] = torch.tensor(scores)
    batch = rows.scored(rewards) if parts is None else rows.scored(rewards, torch.tensor(parts).double(), ("a", "b"))
    kept = tuple(range(len(scores)))
    scored = Scored(batch, kept, (), tuple({} for _ in kept), tuple(None for _ in kept), Metrics())
    examples = [Example("train.jsonl:1", "sums", (Message("user", "2+2"),), "", truth, {})] * len(scores)
    return StepRollouts(rows, scored, examples, ["4"] * len(scores))


def config_of(*keys, function="rewards.py:f"):
    return load_config("grpo", ["model.path=m", "data.train=d.jsonl", f"reward.function='{function}'", *keys]).config


def said(steps, config=None):
    """Return all that is said of these steps, and one more whose scores are 0."""
    first, config = FirstScores(), config or config_of()
    return [told for step in [*steps, rollouts([0.0, 0.0])] if (told := first.add(step, config, "runs/mine"))]


@pytest.mark.parametrize("truth", [4, 4.0, True])
def test_numbers_that_are_compared_with_texts_are_named(truth):
    (words,) = said([rollouts([0.0, 0.0], truth)] * NUM_STEPS)
    assert words.startswith(
        "all 6 scores of the first 3 steps are 0, which tells no answer from another. The ground truths are numbers"
    )
    assert f"({truth!r} in train.jsonl:1)" in words
    assert words.endswith("rally check-reward runs/mine")


@pytest.mark.parametrize(("score", "truth"), [(0.0, "4"), (0.0, ["4"]), (0.0, {"tests": 1}), (1.0, 4), (-0.5, "4")])
def test_one_constant_is_told_once_without_blaming_the_truths(score, truth):
    (words,) = said([rollouts([score, score], truth)] * NUM_STEPS)
    assert f"first 3 steps are {score:g}, which" in words
    assert "numbers" not in words


@pytest.mark.parametrize(
    "steps",
    [
        [rollouts([0.0, 0.0])] * (NUM_STEPS - 2),
        [rollouts([0.0, 1.0], 4), *[rollouts([0.0, 0.0], 4)] * (NUM_STEPS - 1)],
        [*[rollouts([0.0, 0.0], 4)] * (NUM_STEPS - 1), rollouts([1.0, 1.0], 4)],
        [rollouts([1.0, 1.0], parts=[[1.0, 0.0], [0.0, 1.0]])] * NUM_STEPS,
    ],
)
def test_nothing_is_said_too_early_or_where_scores_or_their_parts_differ(steps):
    assert said(steps) == []


def test_a_reward_that_never_applies_is_named_and_a_part_that_never_differs_is_none():
    functions = "reward.functions=[{name: a, function: 'r.py:a'}, {name: b, function: 'r.py:b'}]"
    config = config_of("reward.function=null", functions)
    nan = float("nan")
    (words,) = said([rollouts([1.0, 0.0], parts=[[1.0, nan], [0.0, nan]])] * NUM_STEPS, config)
    assert words.startswith("the reward b returned None for all 6 scored rollouts of the first 3 steps")
    (words,) = said([rollouts([1.0, 1.0], parts=[[1.0, nan], [1.0, nan]])] * NUM_STEPS, config)
    assert "the reward b returned None" in words
    assert "all 6 scores of the first 3 steps are 1, which" in words
    assert said([rollouts([1.0, 0.0], parts=[[1.0, nan], [nan, 0.0]])] * NUM_STEPS, config) == []


def test_dynamic_sampling_has_an_error_of_its_own():
    assert said([rollouts([0.0, 0.0])] * NUM_STEPS, config_of("rollout.dynamic_sampling=3")) == []


def test_a_function_that_python_gave_is_not_one_that_the_command_can_ask():
    (words,) = said([rollouts([0.0, 0.0])] * NUM_STEPS, config_of(function="@f"))
    assert "check-reward" not in words
    assert words.endswith("with a right and a wrong answer: their scores must differ")
