"""From the names of a config to what computes: every name has its class, with the keys of its section."""

import dataclasses
import pickle
import re
from typing import Any, get_args

import pytest
import torch

from rallypoint.algorithms import ADVANTAGES, CORRECTIONS, OBJECTIVES, LossInputs, TokenOutputs, weigh
from rallypoint.algorithms.losses import kl_loss
from rallypoint.config import RunConfig, load_config, shipped_recipes
from rallypoint.config.fields import Section, named_sections
from rallypoint.config.recipes import COMPARES_GROUP, RECIPES
from rallypoint.config.sections import algorithms as sections
from rallypoint.errors import ConfigError
from rallypoint.recipes.recipe import actor_loss_of, advantage_of
from rallypoint.types import JudgedBatch

CLASSES = {"advantage": ADVANTAGES, "loss": OBJECTIVES}


@pytest.mark.parametrize("section", CLASSES)
def test_sections_have_the_fields_of_the_classes_that_they_name(section):
    named = named_sections(RunConfig.model_fields[section])
    assert {"function", "parameters"} <= set(named.pop("own").model_fields)
    for name, kind in named.items():
        fields = {field.name for field in dataclasses.fields(CLASSES[section][name])}
        from_rewards = {"weights"} if name == "gdpo" else set()
        assert set(kind.model_fields) - {"name"} == fields - from_rewards, name
    assert set(CLASSES[section]) == set(named)


def test_corrections_have_the_fields_of_the_classes_that_they_name():
    found = [kind for kind in vars(sections).values() if isinstance(kind, type) and issubclass(kind, Section)]
    kinds = [kind for kind in found if "name" in kind.model_fields]
    named = {get_args(kind.model_fields["name"].annotation)[0]: kind for kind in kinds}
    for name, kind in CORRECTIONS.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        assert set(named[name].model_fields) - {"name"} == fields, name


def test_what_compares_groups_is_what_its_class_says():
    assert {name for name, kind in ADVANTAGES.items() if kind.compares_group} == set(COMPARES_GROUP)


def batch():
    """Two prompts of two rollouts each."""
    mask = torch.tensor([False, True, True, False, True, False, True, True, True, False, True])
    logprobs = torch.where(mask, -torch.arange(1.0, 12.0) / 5, 0.0)
    return JudgedBatch(
        offsets=torch.tensor([0, 3, 5, 9, 11]),
        tokens=torch.arange(11),
        loss_mask=mask,
        rollout_logprobs=logprobs - 0.1,
        prompt_index=torch.tensor([4, 4, 7, 7]),
        sample_index=torch.tensor([0, 1, 0, 1]),
        versions=torch.zeros(4, dtype=torch.int64),
        truncated=torch.zeros(4, dtype=torch.bool),
        token_rewards=torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0, 0.5, 0, 2]),
        old_logprobs=logprobs,
        reference_logprobs=logprobs - 0.2,
    )


def loss_of(loss, rows, *, shift):
    """The loss of some rows, and its gradient."""
    at = rows.loss_mask.nonzero().squeeze(-1)
    logprobs = (rows.old_logprobs[at] + shift).requires_grad_()
    inputs = LossInputs(rows=rows, positions=at, send=lambda x: x, is_first_step=False)
    total, metrics = loss(TokenOutputs(logprobs=logprobs, entropy=logprobs.detach() ** 2), inputs)
    total.backward()
    assert logprobs.grad is not None
    return float(total.detach()), logprobs.grad, metrics


CORRECTED = 'correction=[{"name":"tis","level":"sequence","cap":2},{"name":"mask","level":"geometric","high":3}]'
COMPOSED = {
    **{name: [f"loss.name={name}", "actor.num_mini_batches=1"] for name in OBJECTIVES if name != "kl_cov"},
    "kl_cov": ["loss.name=kl_cov", "loss.fraction=0.5"],
    **{f"corrected {name}": [f"aggregation={name}", CORRECTED] for name in ("token", "sequence", "prompt")},
    "fixed length": ["aggregation=fixed_length"],
}


@pytest.mark.parametrize("which", COMPOSED)
def test_the_loss_of_a_config_is_the_same_for_every_cut(which):
    config = load_config("digits-grpo", COMPOSED[which]).config
    loss = pickle.loads(pickle.dumps(actor_loss_of(config)))
    whole = loss.with_selected(weigh(batch(), advantage_of(config), kl=loss.kl, aggregation=config.aggregation), seed=0)
    shift = torch.tensor([0.3, -0.2, 0.1, -0.4, 0.25, 0.0, 0.05])
    total, gradient, _ = loss_of(loss, whole, shift=shift)
    parts, at = [whole.rows([0, 1]), whole.rows([2]), whole.rows([3])], [slice(0, 3), slice(3, 6), slice(6, 7)]
    cut = [loss_of(loss, part, shift=shift[piece]) for part, piece in zip(parts, at, strict=True)]
    assert sum(part[0] for part in cut) == pytest.approx(total, rel=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in cut]), gradient)
    assert loss.denominator(whole) == {"sequence": 4.0, "prompt": 2.0, "fixed_length": 32.0}.get(
        config.aggregation, 7.0
    )


def test_corrections_are_watched():
    config = load_config("digits-grpo", [CORRECTED]).config
    whole = weigh(batch(), advantage_of(config), kl=None)
    _, _, metrics = loss_of(actor_loss_of(config), whole, shift=torch.zeros(7))
    assert {"correction", "correction_square", "correction_dropped"} <= metrics.scalars().keys()


def test_a_mask_by_the_mean_of_a_row_has_bounds_of_its_own():
    def bounds(mask):
        item: Any = load_config("digits-grpo", [f"correction=[{{name: mask, {mask}}}]"]).config.correction[0]
        return item.low, item.high

    assert bounds("level: token") == bounds("level: product") == (0.5, 2.0)
    assert bounds("level: geometric") == (0.999, 1.001)
    assert bounds("level: geometric, high: 1.01") == (0.999, 1.01)


TWO_REWARDS = "reward.functions=[{name: right, function: digits, weight: 2}, {name: other, function: digits}]"


@pytest.mark.parametrize("name", sorted(set(COMPARES_GROUP) - {"gdpo"}))
def test_every_advantage_of_groups_can_be_named(name):
    config = load_config("digits-grpo", [f"advantage.name={name}", "advantage.whiten=false"]).config
    rows = batch()
    if name == "gigpo":
        rows = dataclasses.replace(rows, turn_states=rows.row_of_token)
    assert weigh(rows, advantage_of(config), kl=None).advantages.isfinite().all()


def test_gdpo_takes_names_and_weights_of_the_rewards():
    overrides = ["advantage.name=gdpo", "reward.function=null", TWO_REWARDS]
    gdpo: Any = advantage_of(load_config("digits-grpo", overrides).config)
    assert gdpo.weights == {"right": 2.0, "other": 1.0}
    parts = torch.tensor([[1.0, 50.0], [0.0, 70.0], [2.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    rows = dataclasses.replace(batch(), reward_parts=parts, part_names=("right", "other"))
    found = weigh(rows, gdpo, kl=None).advantages
    # Group 4: 2 * [1, -1] + [-1, 1]; group 7: 2 * [-1, 1] + [0, 0]; then to mean 0 and deviation 1.
    by_row = torch.tensor([1.0, -1.0, -2.0, 2.0]) / 2.5**0.5
    torch.testing.assert_close(found, torch.where(rows.loss_mask, by_row[rows.row_of_token], 0.0))


REFUSED = [
    (["advantage.name=gdpo"], "advantage.name=gdpo normalises several rewards apart, and the run has 1"),
    (
        ["advantage.name=gdpo", "reward.function=null", TWO_REWARDS, "kl.placement=reward"],
        "normalises each reward by itself",
    ),
    (
        ["advantage.name=gdpo", "reward.function=null", TWO_REWARDS, "reward.overlong={}"],
        "reward.overlong has no effect",
    ),
    ([TWO_REWARDS], "reward.function='digits' beside reward.functions"),
    (["reward.functions=[{name: a b, function: digits}]", "reward.function=null"], "expected letters, digits and _"),
    (["reward.functions=[{name: model, function: digits}]", "reward.function=null"], "which is that of reward.path"),
    (
        ["reward.functions=[{name: a, function: digits}, {name: a, function: digits}]", "reward.function=null"],
        "another",
    ),
]


@pytest.mark.parametrize(("overrides", "problem"), REFUSED)
def test_rewards_that_do_not_fit_together_are_refused(overrides, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config("digits-grpo", overrides)


def test_keys_of_another_name_may_wait_in_a_file():
    config = load_config("digits", ["recipe=grpo"]).config
    assert config.advantage.model_dump() == {
        "name": "grpo",
        "token_discount": 0.0,
        "whiten": False,
    }
    again = load_config("digits", ["recipe=grpo", "advantage.name=rloo"]).config
    assert again.advantage.model_dump() == {"name": "rloo", "whiten": False}


@pytest.mark.parametrize("name", sorted(set(shipped_recipes()) - {"digits", "digits-grpo"}))
def test_every_shipped_recipe_composes_what_it_is_named_after(name):
    config = load_config(name, draft=True).config
    adapters = {"lora"} if config.model.lora else set()
    tools = {tool.function for tool in getattr(config.rollout.episode, "tools", ())}
    named = {config.recipe, config.advantage.name, config.loss.name, config.reward.function, "dapo"}
    composed = named | adapters | tools | {data.path.partition(":")[0] for data in config.data.train}
    assert name.rpartition("-")[2] in composed
    if not RECIPES[config.recipe].advantages:  # it learns from examples
        return
    advantage_of(config)
    actor_loss_of(config)
    assert config.advantage.name in RECIPES[config.recipe].advantages


KLS = {
    "k2": "{estimator: k2}",
    "k3": "{estimator: k3}",
    "abs": "{estimator: abs}",
    "corrected k1": "{estimator: k1, importance_corrected: true}",
    "corrected k3": "{importance_corrected: true}",
}


@pytest.mark.parametrize("which", KLS)
def test_every_kl_of_a_config_is_in_the_loss_with_the_coefficient_of_the_step(which):
    loss = actor_loss_of(load_config("digits-grpo", [f"kl={KLS[which]}", "kl.coef=0.5"]).config)
    weighed = weigh(batch(), advantage_of(load_config("digits-grpo").config), kl=loss.kl)
    shift = torch.linspace(-0.3, 0.3, 7)
    without, at_half, at_one = (
        loss_of(loss, dataclasses.replace(weighed, kl_coef=coef), shift=shift) for coef in (0.0, 0.5, 1.0)
    )
    assert loss_of(loss, weighed, shift=shift)[0] == at_half[0]
    assert weighed.reference_logprobs is not None
    assert weighed.old_logprobs is not None
    assert loss.kl is not None
    old, reference = (x[weighed.loss_mask] for x in (weighed.old_logprobs, weighed.reference_logprobs))
    corrected_from = old if "corrected" in which else None
    trained = torch.ones(7, dtype=torch.bool)
    kl = kl_loss(old + shift, reference, trained, estimator=loss.kl.estimator, corrected_from=corrected_from)
    assert at_one[0] - without[0] == pytest.approx(float(kl.sum), rel=1e-5)
    torch.testing.assert_close(at_one[1] - at_half[1], at_half[1] - without[1])
