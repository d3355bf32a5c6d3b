"""The learning suite: it has every algorithm, what works passes, and what is broken fails."""

import dataclasses
from typing import get_args

import pytest
from learning.cells import CELLS, own_advantage, own_loss
from learning.check import learn_check
from learning.picture import draw_learning, save_learning
from learning.tasks import TASKS
from learning.training import BOUND, Result, judge, learn
from matplotlib.text import Text

from rallypoint.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    OBJECTIVES,
    Advantage,
    OverlongPenalty,
    PolicyObjective,
    RowMask,
)
from rallypoint.algorithms.aggregation import AggregationName
from rallypoint.errors import ConfigError

QUICK = ("gae", "gspo", "kl: k3")
"""One with a critic, one with groups and by rows, one that is pulled; `make test-slow` has every cell."""


def trained(cell, task, num_seeds=3):
    return Result(cell=cell, task=task, curves=[learn(cell, TASKS[task], seed) for seed in range(num_seeds)])


def shortened(name):
    """A cell with fewer steps, which are enough to copy."""
    return dataclasses.replace(CELLS[name], num_steps=25)


def test_every_name_of_every_kind_is_in_the_suite():
    cells = CELLS.values()
    assert {type(cell.advantage) for cell in cells} >= set(ADVANTAGES.values())
    assert {type(cell.objective) for cell in cells} >= set(OBJECTIVES.values())
    assert {type(correction) for cell in cells for correction in cell.corrections} == set(CORRECTIONS.values())
    assert {cell.aggregation for cell in cells} == set(get_args(AggregationName))
    pulls = {(cell.kl.placement, cell.kl.estimator, cell.kl.importance_corrected) for cell in cells if cell.kl}
    in_loss = {("loss", name, False) for name in ("k2", "k3", "abs")} | {("loss", name, True) for name in ("k1", "k3")}
    assert pulls == {("reward", "k1", False)} | in_loss
    assert {cell.mask for cell in cells} == {RowMask(), RowMask(truncated=True), RowMask(zero_variance=True)}
    assert {cell.overlong is None for cell in cells} == {cell.value_clip is None for cell in cells} == {True, False}
    assert {cell.axis for cell in cells if cell.staleness} == {"loss", "correction"}


@pytest.mark.parametrize("name", QUICK)
def test_the_quickest_cells_learn(name):
    verdict = trained(shortened(name), "copy").verdict
    assert verdict.passes, verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_all_cells_learn(name):
    verdicts = {task: trained(CELLS[name], task, num_seeds=5).verdict for task in CELLS[name].tasks}
    assert all(verdict.passes for verdict in verdicts.values()), verdicts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flipped(PolicyObjective):
    """A loss with the sign of another one's flipped."""

    right: PolicyObjective

    def by_token(self, tokens):
        losses, watched = self.right.by_token(tokens)
        return -losses, watched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backwards(Advantage):
    """Advantages with their sign flipped."""

    compares_group = False
    right: Advantage

    def estimate(self, rewards):
        return -self.right.estimate(rewards)


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_a_loss_whose_sign_is_flipped_is_found(name):
    flipped = dataclasses.replace(shortened(name), objective=Flipped(right=CELLS[name].objective))
    assert learn(flipped, TASKS["copy"], 0)[-1] < 0, "it goes away from the optimum"


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_an_advantage_whose_sign_is_flipped_is_found(name):
    broken = Backwards(right=CELLS[name].advantage, whiten=False)
    assert learn(dataclasses.replace(shortened(name), advantage=broken), TASKS["copy"], 0)[-1] < 0


def test_a_pull_of_the_wrong_strength_is_found():
    """On the bandit the optimum is that of score and pull: a policy that ignores the pull is not there."""
    cell, bandit = dataclasses.replace(CELLS["kl: k2"], num_steps=40), TASKS["bandit"]
    assert cell.goal(bandit) == "score and pull"
    assert learn(cell, bandit, 0)[-1] > BOUND
    an_eighth = Scaled(right=cell.advantage, factor=8.0, whiten=False)
    assert learn(dataclasses.replace(cell, advantage=an_eighth), bandit, 0)[-1] < BOUND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Advantage):
    """Advantages that are too large, so that the pull beside them is too weak."""

    compares_group = False
    right: Advantage
    factor: float

    def estimate(self, rewards):
        return self.factor * self.right.estimate(rewards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inverted(RowMask):
    """A mask that lets the rows train that it should leave out."""

    def for_critic(self, batch):
        return ~super().for_critic(batch)


def test_a_mask_that_is_inverted_is_found():
    """Sorting is rewarded at the end, which truncated rows do not have."""
    cell = CELLS["mask: truncated"]
    inverted = dataclasses.replace(cell, mask=Inverted(truncated=True))
    assert learn(cell, TASKS["sort"], 0)[-1] > BOUND
    assert learn(inverted, TASKS["sort"], 0)[-1] < 0.2


def test_a_step_of_masked_rows_alone_trains_nothing():
    everything = dataclasses.replace(shortened("mask: truncated"), mask=RowMask(truncated=True), cut_share=1.0)
    assert learn(everything, TASKS["copy"], 0) == pytest.approx([0.0] * 26)


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_penalty_that_is_forgotten_or_flipped_is_found(factor):
    """With the right one, one token is best on the chain; the policy of the others goes on for five."""
    cell = dataclasses.replace(CELLS["overlong penalty"], num_steps=25)
    assert learn(cell, TASKS["chain"], 0)[-1] > BOUND
    broken = Miscounted(**dataclasses.asdict(cell.overlong), by=factor)
    assert learn(dataclasses.replace(cell, overlong=broken), TASKS["chain"], 0)[-1] < 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miscounted(OverlongPenalty):
    """A penalty that a batch gets with another factor than the optimum has."""

    by: float

    def __call__(self, batch):
        return dataclasses.replace(OverlongPenalty(**_limits(self)), factor=self.by * self.factor)(batch)


def _limits(penalty):
    return {"max_tokens": penalty.max_tokens, "buffer": penalty.buffer, "factor": penalty.factor}


def test_a_reference_that_is_refreshed_lets_the_policy_go_where_the_fixed_one_would_not():
    refreshed = dataclasses.replace(CELLS["kl: refreshed"], num_steps=50)
    never = dataclasses.replace(refreshed, refresh_every_steps=10**6)
    assert learn(refreshed, TASKS["bandit"], 0)[-1] > BOUND
    assert learn(never, TASKS["bandit"], 0)[-1] < 0.6


def test_baselines_by_token_reward_a_rate_so_long_responses_are_not_learned():
    """Why `grpo by token` is left out of the chain, and what docs/algorithms.md says of token_discount."""
    assert "chain" not in CELLS["grpo by token"].tasks
    assert abs(learn(CELLS["grpo by token"], TASKS["chain"], 0)[-1]) < 0.1


def test_an_interval_that_reaches_below_the_bound_fails():
    assert judge([[BOUND + 0.01] * 20, [BOUND + 0.02] * 20, [BOUND + 0.03] * 20]).passes is False
    assert judge([[BOUND + 0.01] * 20] * 3).passes


def usual(tokens):
    return -(tokens.logprobs - tokens.old_logprobs).exp() * tokens.advantages, {}


def test_functions_of_ones_own_train_as_the_names_do():
    assert learn(own_loss("mine", usual), TASKS["copy"], 0)[-1] > BOUND
    mine = own_advantage("mine", lambda rewards: rewards.spread(rewards.scores - rewards.scores.mean()))
    assert learn(mine, TASKS["copy"], 0)[-1] > BOUND


def test_the_picture_has_a_panel_for_each_algorithm(tmp_path):
    curves = [[step / 40 + seed / 100 for step in range(41)] for seed in range(3)]
    results = [Result(cell=cell, task=task, curves=curves) for cell in CELLS.values() for task in cell.tasks]
    picture = save_learning(results, tmp_path / "learning.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["learning.png"]


def test_the_words_of_a_picture_of_one_cell_do_not_cover_each_other():
    cell = CELLS[QUICK[0]]
    results = [Result(cell=cell, task=task, curves=[[step / 40 for step in range(41)]] * 3) for task in cell.tasks]
    figure = draw_learning(results[:1])
    figure.canvas.draw()
    words = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [text.get_window_extent() for text in words]
    covered = [
        (one.get_text(), other.get_text())
        for place, (one, box) in enumerate(zip(words, boxes, strict=True))
        for other, above in zip(words[:place], boxes, strict=False)
        if box.overlaps(above)
    ]
    assert covered == []


def test_an_unknown_name_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"knows no gpso; expected some of: gae, grpo, .*gspo"):
        learn_check(["gpso"], losses=[], advantages=[], num_seeds=3, folder=str(tmp_path))


@pytest.mark.slow
def test_the_command_fails_when_something_does_not_learn(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def up(tokens):\n    return tokens.logprobs * tokens.advantages, {}\n")
    spec, out = f"{tmp_path}/mine.py:up", tmp_path / "out"
    assert learn_check(["pass_at_k"], losses=[spec], advantages=[], num_seeds=3, folder=str(out)) == 1
    assert f"{spec}: learned too little" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"learning.json", "learning.png"}
    assert learn_check(["pass_at_k"], losses=[], advantages=[], num_seeds=3, folder=str(out)) == 0
