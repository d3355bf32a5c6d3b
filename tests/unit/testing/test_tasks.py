"""The tasks of the learning suite: their values are exact, and what is sampled has them."""

import pytest
import torch
from learning.tasks import PARTS, TASKS, cut_off


def test_the_value_of_a_policy_is_that_of_the_sum_over_its_ways_by_hand():
    chain = TASKS["chain"]
    # From the last state back: (0.2 + 1) / 2 = 0.6, then (0.2 + 0.6) / 2 = 0.4, 0.3, 0.25, 0.225.
    assert float(chain.value(torch.zeros(chain.shape))) == pytest.approx(0.225)
    assert float(chain.value(torch.tensor([[-50.0, 50.0]] * 5))) == pytest.approx(1.0)
    half = chain.value(torch.zeros(chain.shape), pull=lambda logprobs: torch.full((5,), 0.1))
    # Each step costs 0.1: 0.5, 0.25, 0.125, 0.0625, 0.03125.
    assert float(half) == pytest.approx(0.03125)


@pytest.mark.parametrize(("name", "optimum"), [("bandit", 0.9), ("chain", 1.0), ("copy", 1.0), ("sort", 1.0)])
def test_optima_are_those_that_the_tasks_were_made_with(name, optimum):
    assert TASKS[name].optimum() == pytest.approx(optimum)


@pytest.mark.parametrize("name", TASKS)
def test_sampled_rows_earn_the_value_of_their_policy(name):
    task, generator = TASKS[name], torch.Generator().manual_seed(3)
    table = torch.randn(task.shape, generator=generator)
    batch = task.sample(table, 4000, generator)
    error = batch.scores.std() / len(batch) ** 0.5
    assert float(batch.scores.mean()) == pytest.approx(float(task.value(table)), abs=5 * float(error))
    assert int(batch.lengths.max()) == task.longest + 1
    assert not batch.loss_mask[batch.offsets[:-1]].any()
    ends = torch.zeros(batch.num_tokens, dtype=torch.bool)
    ends[batch.offsets[1:] - 1] = True
    assert task.rewarded_at_end == (name == "sort")
    assert not task.rewarded_at_end or not batch.token_rewards[~ends].any()


@pytest.mark.parametrize("name", ["copy", "sort"])
def test_two_rewards_of_other_ranges_add_up_to_the_score(name):
    batch = TASKS[name].sample(torch.zeros(TASKS[name].shape), 8, torch.Generator().manual_seed(0))
    assert batch.part_names == PARTS
    even, odd = batch.reward_parts.unbind(1)
    torch.testing.assert_close(even / 10 + odd * 10, batch.scores)
    assert float(even.max()) > 50 * float(odd.max())


def test_a_penalty_for_length_changes_what_is_best_on_the_chain():
    chain = TASKS["chain"].penalised(lambda lengths: (lengths - 1) / 4)
    assert chain.optimum() == pytest.approx(0.2), "one token earns 0.2; five earn 1 and lose 1"
    assert float(chain.value(torch.tensor([[-50.0, 50.0]] * 5))) == pytest.approx(0.0)
    two_tokens = torch.tensor([[-50.0, 50.0]] + [[50.0, -50.0]] * 4)
    assert float(chain.value(two_tokens)) == pytest.approx(0.2 - 0.25)


def test_rows_that_are_cut_off_are_the_beginning_of_whole_ones():
    task, generator = TASKS["sort"], torch.Generator().manual_seed(0)
    whole = task.sample(torch.zeros(task.shape), 50, generator)
    part = cut_off(whole, 0.5, generator)
    assert 0.4 < float(part.truncated.float().mean()) < 0.6
    assert part.lengths[~part.truncated].equal(whole.lengths[~part.truncated])
    assert set(part.lengths[part.truncated].tolist()) == {2, 3}, "of one token of prompt and three more"
    assert not part.scores[part.truncated].any()
    for row in (0, 1, 2, len(part) - 1):
        begin, length = int(whole.offsets[row]), int(part.lengths[row])
        assert part.rows([row]).tokens.equal(whole.tokens[begin : begin + length])
