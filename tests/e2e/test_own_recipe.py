"""A recipe declared outside of the package: supervised, with an actor alone and a loss of its own."""

import dataclasses
import pickle
from typing import Self

import pytest
import torch
from metrics_file import read_metrics
from tiny_runs import Runs, weights_of
from torch import Tensor

from rallypoint.algorithms import LossInputs, TokenOutputs
from rallypoint.config import RECIPES, RecipeSpec, declare
from rallypoint.data import PromptStream
from rallypoint.display import Silent
from rallypoint.observability import span
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.recipes.recipe import Recipe, Setup
from rallypoint.roles.actor import Actor
from rallypoint.types import Mean, Metrics, Sequences, offsets_from_lengths


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Of the answer's tokens; its last one, which ends it, has a weight of its own."""

    end_weight: float

    def denominator(self, batch: Sequences, /) -> float:
        return batch.num_loss_tokens + (self.end_weight - 1) * len(batch)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs[Sequences], /) -> tuple[Tensor, Metrics]:
        is_last = torch.isin(inputs.positions, inputs.rows.offsets[1:] - 1)
        weights = inputs.send(torch.where(is_last, self.end_weight, 1.0))
        total = -(weights * outputs.logprobs).sum(dtype=torch.float64)
        return total, Metrics({"loss": Mean(float(total.detach()), float(weights.sum()))})


class Answers:
    """The prompts of the data with their right answers, in the order of the prompt stream."""

    def __init__(self, setup: Setup) -> None:
        config, material = setup.config, setup.material
        self.num_admitted = 0
        self._num_rows, self._material = config.rollout.num_prompts, material
        self._stream = PromptStream(len(material.train.examples), config.seed, config.data.shuffle)

    def next_batch(self) -> Sequences:
        first, self.num_admitted = self.num_admitted, self.num_admitted + self._num_rows
        rows = [self._stream.example_index(place) for place in range(first, self.num_admitted)]
        train, tokenizer = self._material.train, self._material.tokenizer
        prompts = [list(train.token_ids[row]) for row in rows]
        answers = [tokenizer.encode(train.examples[row].ground_truth, add_special_tokens=False) for row in rows]
        ends = [*self._material.stop_tokens[:1]]
        tokens = [prompt + answer + ends for prompt, answer in zip(prompts, answers, strict=True)]
        is_prompt = [
            place < len(prompt) for prompt, row in zip(prompts, tokens, strict=True) for place in range(len(row))
        ]
        return Sequences(
            offsets=offsets_from_lengths(torch.tensor([len(row) for row in tokens])),
            tokens=torch.tensor([token for row in tokens for token in row]),
            loss_mask=~torch.tensor(is_prompt),
            prompt_index=torch.arange(first, self.num_admitted),
            sample_index=torch.zeros(len(rows), dtype=torch.int64),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFT(Recipe):
    """One role and one step."""

    source: Answers

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        actor = await Actor.create(setup.placement, CrossEntropy(end_weight=2.0))
        return cls(config=setup.config, actor=actor, source=Answers(setup))

    async def train_step(self, step: int) -> Metrics:
        with span("learn"):
            return await self.actor.update(self.source.next_batch(), step)


SPEC = RecipeSpec(name="sft_of_a_test", page=f"{__name__}:SFT", roles=("actor",), sections=("rollout",))


@pytest.fixture
def runs(tmp_path):
    declare(SPEC)
    (tmp_path / "sft.yaml").write_text(f"base: digits\nrecipe: {SPEC.name}\nreward: {{function: null}}\n")
    yield Runs(tmp_path / "runs")
    del RECIPES[SPEC.name]  # other tests of this process list them


def start(runs, name):
    """Five steps with a checkpoint after each second, in this process."""
    more = ("cluster.runtime=inline", "checkpoint={every_steps: 2, keep: 9}", "trainer.num_steps=5")
    overrides = [one for one in runs.overrides(name, *more) if not one.startswith(("critic.", "kl="))]
    return runs.run_with(str(runs.folder.parent / "sft.yaml"), overrides)


@pytest.mark.timeout(120)
def test_a_recipe_with_an_actor_alone_and_a_loss_of_its_own_learns_and_resumes_to_the_same_bits(runs):
    whole = start(runs, "whole")
    losses = [record["actor/loss"] for record in read_metrics(whole.metrics) if "actor/loss" in record]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.1
    wanted = weights_of(whole)
    assert {name.partition("/")[0] for name in wanted} == {"model.safetensors", "training"}, "no critic"
    assert train(load_checked(str(whole.path)), whole, Silent(), resume=True, from_step=2)
    assert weights_of(whole) == wanted
    again = [record["actor/loss"] for record in read_metrics(whole.metrics) if "actor/loss" in record]
    assert again == losses


def test_what_a_recipe_without_rollouts_does_not_read_is_no_role_and_needs_no_reward(runs):
    name = str(runs.folder.parent / "sft.yaml")
    config = load_checked(name, []).config
    assert list(config.roles) == list(config.learners) == ["actor"]
    assert config.kl is not None, "the file that it builds on has one, and nothing reads it"
    assert pickle.loads(pickle.dumps(CrossEntropy(2.0))) == CrossEntropy(2.0)
    with pytest.raises(ValueError, match=r"critic.num_epochs=2 has no effect: with recipe=sft_of_a_test"):
        load_checked(name, ["critic.num_epochs=2"])


def test_a_name_belongs_to_one_recipe():
    with pytest.raises(ValueError, match=r"there is a recipe 'ppo' already"):
        declare(RecipeSpec(name="ppo", page="elsewhere:PPO", roles=("actor",)))
