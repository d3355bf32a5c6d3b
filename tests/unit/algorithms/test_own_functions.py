"""Functions of a user's own: what is caught before a run begins, and what a good one looks like."""

import dataclasses
import math
import pickle
from collections.abc import Callable

import pytest
import torch

from rallypoint.algorithms import Advantage, OwnAdvantage, OwnObjective, PolicyObjective
from rallypoint.errors import OwnLossError
from rallypoint.testing import CASES, ConformanceError, check_advantage, check_objective
from rallypoint.types import Maximum, Mean, Sum


def good_loss(tokens):
    ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-20, 20).nan_to_num().exp()
    return -ratio * tokens.advantages, {"ratio_above_2": (ratio > 2).float()}


def good_advantage(rewards):
    return rewards.spread(rewards.scores - 1.0)


def test_good_functions_pass():
    check_objective(OwnObjective(function=good_loss))
    check_advantage(OwnAdvantage(function=good_advantage, whiten=True))


def test_a_ratio_without_bounds_is_finite_where_a_policy_excludes_tokens():
    check_objective(
        OwnObjective(function=lambda tokens: -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages)
    )


def test_metrics_of_any_kind_come_with_a_loss():
    def watched(tokens):
        ratio = tokens.ratio.detach()
        return -tokens.ratio * tokens.advantages, {
            "ratio": ratio,
            "ratio_max": Maximum(float(ratio.max()) if len(ratio) else 0.0),
            "num_far": Sum(int(((ratio - 1).abs() > 1)[tokens.loss_mask].sum())),
        }

    objective = OwnObjective(function=watched)
    check_objective(objective)
    found = objective(CASES["usual"].tokens()).metrics()
    assert isinstance(found["ratio"], Mean)
    assert isinstance(found["ratio_max"], Maximum)
    assert found["ratio"].scalar < found["ratio_max"].scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithADecay(PolicyObjective):
    """Pulls every token to where it was, whatever its advantage."""

    def by_token(self, tokens):
        return -tokens.ratio * tokens.advantages + 0.1 * tokens.log_ratio.square(), {}


def test_a_class_that_learns_from_tokens_without_an_advantage_has_to_say_so():
    with pytest.raises(ConformanceError, match="set needs_advantage to False"):
        check_objective(WithADecay())


def in_place(tokens):
    tokens.advantages.mul_(2.0)
    return -tokens.advantages * tokens.logprobs.clamp(min=-1000)


def over_the_micro_batch(tokens):
    advantages = tokens.advantages - tokens.advantages.sum() / tokens.loss_mask.sum().clamp(min=1)
    return -advantages * tokens.logprobs.clamp(min=-1000)


def by_position(tokens):
    return -torch.arange(len(tokens.logprobs)) * tokens.logprobs.clamp(min=-1000)


LOSSES = {
    "must be a tensor of shape": lambda tokens: (-tokens.advantages * tokens.logprobs).sum(),
    "found NoneType": lambda tokens: (None, {}),
    r"returned (nan|inf|-inf) for a token \(logprobs .* of row \d": lambda tokens: (
        -tokens.advantages * (tokens.logprobs - tokens.rollout_logprobs).exp()
    ),
    "modified its argument advantages": in_place,
    "they have no gradient": lambda tokens: -tokens.advantages,
    "cut into the micro-batches": over_the_micro_batch,
    "in the order": by_position,
    "the metric share is": lambda tokens: (-tokens.ratio * tokens.advantages, {"share": Sum(1.0)}),
    "the metric 'entropy' is one of every update": lambda tokens: (-tokens.ratio, {"entropy": tokens.ratio}),
    "dictionary of metrics.; the second value is list": lambda tokens: (-tokens.ratio, [tokens.ratio]),
    "the numbers 'share' of .* must be a tensor": lambda tokens: (-tokens.ratio, {"share": tokens.ratio.mean()}),
}


@pytest.mark.parametrize("complaint", LOSSES)
def test_a_loss_that_breaks_a_rule_is_named_with_the_rule(complaint):
    with pytest.raises((ValueError, TypeError, ArithmeticError), match=complaint):
        check_objective(OwnObjective(function=LOSSES[complaint]))


def scaled_in_place(rewards):
    return rewards.token_rewards.mul_(2.0)


def component_in_place(rewards):
    return rewards.spread(rewards.components["length"].sub_(1.0))


def component_replaced(rewards):
    rewards.components["score"] = rewards.components["score"] * 1.0
    return rewards.spread(rewards.components["score"])


def component_added(rewards):
    rewards.components["mine"] = rewards.scores
    return rewards.spread(rewards.scores)


def component_taken_away(rewards):
    return rewards.spread(rewards.components.pop("length"))


ADVANTAGES = {
    "must be a tensor of shape": lambda rewards: rewards.scores[:1] * 0.0 + rewards.scores.sum(),
    "is not finite": lambda rewards: rewards.spread(rewards.scores.log()),
    "modified its argument token_rewards": scaled_in_place,
    r"modified its argument components\['length'\]; write": component_in_place,
    r"modified its argument components\['score'\]": component_replaced,
    r"modified its argument components\['mine'\]": component_added,
    r"component_taken_away.* modified its argument components\['length'\]": component_taken_away,
    "NaN where no token is trained": lambda rewards: rewards.token_rewards - rewards.token_rewards.nanmean(),
    "have other advantages": lambda rewards: rewards.spread(torch.arange(len(rewards.groups)).double()),
}


@pytest.mark.parametrize("complaint", ADVANTAGES)
def test_an_advantage_that_breaks_a_rule_is_named_with_the_rule(complaint):
    with pytest.raises((ValueError, ArithmeticError), match=complaint):
        check_advantage(OwnAdvantage(function=ADVANTAGES[complaint], whiten=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Careless(Advantage):
    """Writes into the rewards without a function between, and so without the checks of every call."""

    write: Callable[[dict[str, torch.Tensor]], object]

    def estimate(self, rewards):
        self.write(rewards.components)
        return rewards.spread(rewards.scores)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("length", lambda components: components["length"].add_(1.0)),
        ("score", lambda components: components.pop("score")),
        ("mine", lambda components: components.update(mine=torch.zeros(1))),
    ],
)
def test_a_class_that_writes_into_components_breaks_a_rule(name, write):
    with pytest.raises(ConformanceError, match=rf"argument components\['{name}'\] was modified; .* \(batch: usual\)"):
        check_advantage(Careless(whiten=False, write=write))


def test_a_function_is_not_asked_about_a_step_without_rows():
    def above_the_worst(rewards):
        return rewards.spread(rewards.scores - rewards.scores.min())

    assert not CASES["no rows"].lengths
    check_advantage(OwnAdvantage(function=above_the_worst, whiten=False))


def test_components_have_the_names_of_the_runs_rewards():
    names = ("right", "brief", "polite")
    case = dataclasses.replace(CASES["usual"], component_names=names)
    components = case.earned().components
    assert tuple(components) == names
    assert components["right"].tolist() == case.scores
    assert components["brief"].tolist() == [len(row) for row in case.rows]
    backwards = case.picked([3, 2, 1, 0]).earned().components
    trained = case.trained().earned().components
    for name, numbers in components.items():
        assert backwards[name].tolist() == numbers.flip(0).tolist()
        assert trained[name].tolist() == numbers.tolist()
    assert dataclasses.replace(case, component_names=()).earned().components == {}


def test_an_error_of_any_kind_says_in_a_note_of_which_batch_it_is():
    def above_zero(rewards):
        if float(rewards.scores.min()) == 0.0:
            raise KeyError("score of 0")
        return rewards.spread(rewards.scores)

    with pytest.raises(KeyError) as raised:
        check_advantage(OwnAdvantage(function=above_zero, whiten=False))
    assert raised.value.__notes__ == ["(batch: empty responses)"]
    with pytest.raises(OwnLossError) as raised:
        check_objective(OwnObjective(function=lambda tokens: tokens.logprobs / (tokens.advantages + 1.5)))
    assert raised.value.__notes__ == ["(batch: usual)"]
    with pytest.raises(ConformanceError, match="batch: usual") as raised:
        check_objective(OwnObjective(function=by_position))
    assert not hasattr(raised.value, "__notes__"), "its message has the name"


def test_what_fails_later_names_the_function_and_the_sample():
    """Training has no batch of the suite: the checks of every call are all that stands between it and a bad number."""

    def late(tokens):
        x = -tokens.ratio * tokens.advantages
        return torch.where(torch.arange(len(x)) == 5, x * math.inf, x)

    case = CASES["usual"]
    with pytest.raises(OwnLossError, match=r"late.* returned inf for a token .* of row 1;") as raised:
        OwnObjective(function=late)(case.tokens())
    error = pickle.loads(pickle.dumps(raised.value.of_rollout(40, 3)))
    assert "of sample 3 of prompt 40; divide" in str(error)
    leaf = torch.tensor(case.logprobs, dtype=torch.float64, requires_grad=True)
    detached = OwnObjective(function=lambda tokens: -tokens.ratio.detach() * tokens.advantages)
    with pytest.raises(ValueError, match="they have no gradient; compute them from logprobs"):
        detached(dataclasses.replace(case.tokens(), logprobs=leaf))
    with torch.no_grad():  # a row is measured again without gradients, to be named
        detached(dataclasses.replace(case.tokens(), logprobs=leaf))
