import dataclasses
import itertools

import pytest
import torch
from formulas import advantages as formulas
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

from rallypoint.algorithms._rows import normalized_in_groups
from rallypoint.algorithms.advantages import (
    gae_advantages,
    group_relative_token_advantages,
    group_relative_turn_advantages,
    whiten,
)
from rallypoint.testing.cases import make_case

numbers = st.integers(-64, 64).map(lambda n: n / 16)  # exact in float32
fractions = st.sampled_from([0.0, 0.25, 0.9, 0.95, 1.0])


@st.composite
def ragged(draw):
    """Rows of 0 to 9 tokens with holes in their masks: (rewards, values, mask, offsets, groups)."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    num_tokens = offsets[-1]
    tokens = lambda of: draw(st.lists(of, min_size=num_tokens, max_size=num_tokens))  # noqa: E731
    groups = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return tokens(numbers), tokens(numbers), tokens(st.booleans()), offsets, groups


def case_of(rewards, values, mask, offsets, groups):
    """The batch that formulas take."""
    lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
    fields = {"rewards": tuple(rewards), "values": tuple(values), "mask": tuple(mask)}
    return dataclasses.replace(make_case(lengths, groups, seed=0), **fields)


def floats(x):
    return torch.tensor(x, dtype=torch.float32)


def bools(x):
    return torch.tensor(x, dtype=torch.bool)


def assert_close(actual, expected, *, atol=2e-5):
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=atol)


@given(ragged(), fractions, fractions)
def test_gae_equals_the_recursion_of_the_paper_on_ragged_rows_with_holes(rows, discount, gae_lambda):
    rewards, values, mask, offsets, _ = rows
    actual = gae_advantages(
        floats(rewards),
        floats(values),
        bools(mask),
        torch.tensor(offsets),
        discount=discount,
        gae_lambda=gae_lambda,
    )
    expected = formulas.gae(case_of(*rows), discount, gae_lambda)
    for got, wanted in zip(actual, expected, strict=True):
        assert_close(got, wanted)


def test_gae_of_the_example_in_the_carriers_docstring():
    advantages, _ = gae_advantages(
        floats([0, 0, 0, 0, 1.0]),
        floats([0, 0, 0.4, 0.6, 0.9]),
        bools([False, False, True, True, True]),
        torch.tensor([0, 5]),
        discount=1.0,
        gae_lambda=1.0,
    )
    assert_close(advantages, [0, 0, 0.6, 0.4, 0.1], atol=1e-6)


def test_gae_reaches_through_a_row_of_a_thousand_tokens():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 1000, generator=generator)
    advantages, _ = gae_advantages(
        rewards, values, torch.ones(1000).bool(), torch.tensor([0, 1000]), discount=1.0, gae_lambda=1.0
    )
    row = case_of(rewards.tolist(), values.tolist(), [True] * 1000, [0, 1000], [0])
    expected, _ = formulas.gae(row, 1.0, 1.0)
    assert_close(advantages, expected, atol=1e-6)


def test_a_row_without_trained_tokens_gets_no_advantage_and_changes_no_other_row():
    rewards, values = floats([1, 2, 3, 4]), floats([5, 6, 7, 8])
    kwargs = {"discount": 0.9, "gae_lambda": 0.9}
    mask = bools([True, True, False, False])
    together = gae_advantages(rewards, values, mask, torch.tensor([0, 2, 4]), **kwargs)
    alone = gae_advantages(rewards[:2], values[:2], mask[:2], torch.tensor([0, 2]), **kwargs)
    for both, one in zip(together, alone, strict=True):
        assert both.tolist() == [*one.tolist(), 0.0, 0.0]


def test_a_batch_without_any_trained_token_gets_zeros():
    nothing = {
        "token_rewards": floats([1, 2]),
        "loss_mask": bools([False, False]),
        "offsets": torch.tensor([0, 1, 2]),
    }
    advantages, returns = gae_advantages(values=floats([1, 2]), discount=1.0, gae_lambda=1.0, **nothing)
    relative = group_relative_token_advantages(groups=torch.tensor([0, 0]), normalize_std=True, discount=1.0, **nothing)
    assert advantages.tolist() == returns.tolist() == relative.tolist() == [0.0, 0.0]


@given(ragged(), st.data())
def test_gae_of_a_row_is_bit_equal_wherever_the_rows_are_cut(rows, data):
    rewards, values, mask, offsets, _ = rows
    border = data.draw(st.integers(0, len(offsets) - 1))
    cut = offsets[border]

    def of(tokens, offsets_of_part):
        return gae_advantages(
            floats(rewards)[tokens],
            floats(values)[tokens],
            bools(mask)[tokens],
            torch.tensor(offsets_of_part),
            discount=0.97,
            gae_lambda=0.9,
        )

    whole = of(slice(None), offsets)
    first = of(slice(0, cut), offsets[: border + 1])
    second = of(slice(cut, None), [o - cut for o in offsets[border:]])
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([first[index], second[index]]))


def test_nan_outside_the_mask_never_leaks():
    mask, nan = bools([True, False, True]), float("nan")
    x = floats([1, nan, 3])
    offsets, groups = torch.tensor([0, 2, 3]), torch.tensor([0, 0])
    for result in (
        *gae_advantages(x, x, mask, offsets, discount=1.0, gae_lambda=1.0),
        whiten(x, mask),
        group_relative_token_advantages(x, mask, offsets, groups, normalize_std=True, discount=0.5),
    ):
        assert result.isfinite().all()
        assert result[1] == 0.0


def test_a_nan_score_stays_visible_in_its_own_group_only():
    scores = floats([float("nan"), 1, 0, 1])
    advantages = normalized_in_groups(scores, torch.tensor([0, 0, 1, 1]), normalize_std=True)
    assert advantages.isnan().tolist() == [True, True, False, False]


@given(ragged())
def test_whiten_equals_the_definition(rows):
    x, _, mask, _, _ = rows
    assert_close(whiten(floats(x), bools(mask)), formulas.whitened(case_of(*rows), x))


def test_whitening_equal_numbers_gives_zeros():
    assert whiten(floats([0.1, 0.1, 0.1]), bools([True] * 3)).abs().max() < 1e-6


@given(ragged(), st.booleans())
def test_group_relative_equals_the_definition_for_groups_in_any_order(rows, normalize_std):
    _, _, _, offsets, groups = rows
    scores = [float(stop - start) for start, stop in itertools.pairwise(offsets)]
    actual = normalized_in_groups(floats(scores), torch.tensor(groups), normalize_std=normalize_std)
    ones = [True] * len(scores)
    case = case_of(scores, scores, ones, list(range(len(scores) + 1)), groups)
    assert_close(actual, (formulas.grpo if normalize_std else formulas.dr_grpo)(case))


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_scores_and_single_members_get_exactly_zero(normalize_std):
    scores = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    groups = torch.tensor([4, 4, 4, 9, 1, 1, 1, 1, 1, 1])
    assert normalized_in_groups(scores, groups, normalize_std=normalize_std).tolist() == [0.0] * 10


def test_rounding_noise_between_scores_is_not_a_signal():
    scores = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    advantages = normalized_in_groups(scores, torch.tensor([0, 0]), normalize_std=True)
    assert scores[0] != scores[1]
    assert advantages.abs().max() < 1e-9


def test_one_success_in_four_by_hand():
    scores, groups = floats([1, 0, 0, 0]), torch.tensor([0, 0, 0, 0])
    plain = normalized_in_groups(scores, groups, normalize_std=False)
    scaled = normalized_in_groups(scores, groups, normalize_std=True)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert_close(scaled, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], atol=1e-6)


@given(ragged(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_token_advantages_equal_the_definition_of_process_supervision(rows, normalize_std, discount):
    rewards, _, mask, offsets, groups = rows
    actual = group_relative_token_advantages(
        floats(rewards),
        bools(mask),
        torch.tensor(offsets),
        torch.tensor(groups),
        normalize_std=normalize_std,
        discount=discount,
    )
    expected = formulas.grpo_by_token(case_of(*rows), discount, normalize_std=normalize_std)
    assert_close(actual, expected, atol=1e-4)


def test_a_rollout_that_is_alone_with_trained_tokens_gets_exactly_zero():
    advantages = group_relative_token_advantages(
        floats([1, 2, 3, 4]),
        bools([True, True, False, False]),
        torch.tensor([0, 2, 4]),
        torch.tensor([0, 0]),
        normalize_std=True,
        discount=1.0,
    )
    assert advantages.tolist() == [0.0] * 4


@settings(max_examples=20)
@given(ragged(), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(rows, random):
    _, _, _, offsets, groups = rows
    scores = floats([float(stop - start) for start, stop in itertools.pairwise(offsets)])
    order = list(range(len(groups)))
    random.shuffle(order)
    whole = normalized_in_groups(scores, torch.tensor(groups), normalize_std=True)
    shuffled = normalized_in_groups(scores[order], torch.tensor(groups)[order], normalize_std=True)
    torch.testing.assert_close(shuffled, whole[order])


def test_wrong_shapes_are_errors_while_tests_run():
    with pytest.raises(TypeError, match="loss_mask"):
        gae_advantages(
            floats([1, 2]), floats([1, 2]), bools([True]), torch.tensor([0, 2]), discount=1.0, gae_lambda=1.0
        )


def test_turns_climb_the_reward_of_all_turns_with_half_its_gradient_in_groups_of_two():
    """Two turns of one token with two choices each, of which the second knows the first; every group is enumerated."""
    logits = torch.tensor([[0.3, -0.2], [0.7, 0.1], [-0.4, 0.5]], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([[[1.0, 0.0], [1.0, 3.0]], [[0.5, 2.0], [0.5, -1.0]]], dtype=torch.float64)  # first, second
    choices = list(itertools.product((0, 1), repeat=2))

    def logprobs(first, second):
        table = logits.log_softmax(-1)
        return torch.stack([table[0, first], table[1 + first, second]])

    expected = sum(logprobs(*choice).sum().exp() * rewards[choice].sum() for choice in choices)
    (wanted,) = torch.autograd.grad(expected, logits)
    total = torch.zeros_like(logits)
    for group in itertools.product(choices, repeat=2):
        said = torch.cat([logprobs(*choice) for choice in group])
        advantages = group_relative_turn_advantages(
            torch.cat([torch.stack([x, torch.zeros(()), y]) for x, y in (rewards[choice] for choice in group)]),
            torch.tensor([True, False, True] * 2),
            torch.tensor([0, 3, 6]),
            torch.tensor([7, 7]),
            normalize_std=False,
            discount=1.0,
        )[torch.tensor([0, 2, 3, 5])]
        probability = said.detach().sum().exp()
        (gradient,) = torch.autograd.grad((said * advantages).sum() / 2, logits)
        total += probability * gradient
    torch.testing.assert_close(total, wanted / 2)


def test_in_these_tests_an_algorithm_refuses_shapes_that_it_does_not_declare():
    """So that they are checked here at all: see `CHECKED` in tests/conftest.py."""
    with pytest.raises(TypeCheckError):
        whiten(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool))
