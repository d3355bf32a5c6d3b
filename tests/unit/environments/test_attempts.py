"""pass@k, best@k and majority@n are expectations over all choices, not draws: they equal enumerating these."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from rallypoint.environments.attempts import Attempt, answer_in, best_at, majority, measure_attempts, pass_at


def choices(values, k):
    return list(itertools.combinations(values, k))


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_right_one(right, data):
    k = data.draw(st.integers(1, len(right)))
    slow = Fraction(sum(any(chosen) for chosen in choices(right, k)), len(choices(right, k)))
    assert pass_at(len(right), sum(right), k) == pytest.approx(float(slow), abs=1e-12)
    assert best_at([float(one) for one in right], k) == pytest.approx(float(slow), abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.data())
def test_best_at_k_is_the_mean_of_the_best_over_all_choices_of_k(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    every = choices(scores, k)
    assert best_at(scores, k) == pytest.approx(math.fsum(map(max, every)) / len(every), abs=1e-9)


def test_pass_at_k_stays_exact_for_many_attempts():
    product = 1.0
    for place in range(901, 1025):  # the way of the paper's program: 1 - prod(1 - k / i)
        product *= 1 - 100 / place
    assert pass_at(1024, 124, 100) == pytest.approx(1 - product, rel=1e-12)
    assert pass_at(1024, 1, 1024) == 1.0
    assert pass_at(1024, 0, 512) == 0.0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_the_majority_is_what_voting_gives_on_average_over_ties(answers):
    worth = {"a": 1.0, "b": 0.25, "c": 0.0}
    votes = {answer: answers.count(answer) for answer in answers}
    winners = [answer for answer in votes if votes[answer] == max(votes.values())]
    expected = sum(worth[answer] for answer in winners) / len(winners)
    assert majority([worth[answer] for answer in answers], answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, no: \boxed{\text{a{b}c}} it is", r"\text{a{b}c}"),
        ("it was \\boxed{never closed", "it was \\boxed{never closed"),
        ("#### 1\n#### 72\nso", "72"),
        ("<answer>a</answer> <answer> b\n</answer>", "b"),
        ("", ""),
    ],
)
def test_the_answer_is_the_last_one_that_is_marked_or_else_the_whole_text(text, answer):
    assert answer_in(text) == answer


def attempts(source, prompt, *found):
    return [Attempt(source, prompt, score, acc, answer) for score, acc, answer in found]


def test_each_source_has_its_own_numbers_with_its_prompts_alike():
    sampled = [
        *attempts("sums", 0, (1.0, None, "4"), (0.0, None, "5"), (0.0, None, "5"), (0.0, None, "6")),
        *attempts("sums", 1, (1.0, None, "2"), (1.0, None, "2"), (1.0, None, "2")),  # one has no score
        *attempts("words", 2, (0.3, 1.0, "a"), (-0.5, 0.0, "b"), (0.3, 1.0, "a"), (2.0, 0.0, "c")),
    ]
    found = measure_attempts(sampled, 4).scalars()
    assert found == pytest.approx(
        {
            "validation/mean@4/sums": (0.25 + 1.0) / 2,
            "validation/majority@4/sums": (0.0 + 1.0) / 2,
            "validation/pass@1/sums": (0.25 + 1.0) / 2,
            "validation/pass@2/sums": (0.5 + 1.0) / 2,
            "validation/pass@4/sums": 1.0,
            "validation/best@2/sums": (0.5 + 1.0) / 2,
            "validation/best@4/sums": 1.0,
            "validation/mean@4/words": (0.3 - 0.5 + 0.3 + 2.0) / 4,
            "validation/majority@4/words": 0.3,
            "validation/pass@1/words": 0.5,  # by what the reward returned as acc, whatever the score
            "validation/pass@2/words": 1 - 1 / 6,
            "validation/pass@4/words": 1.0,
            "validation/best@2/words": (2.0 * 3 + 0.3 * 3) / 6,
            "validation/best@4/words": 2.0,
        }
    )


def test_one_attempt_each_has_the_mean_of_each_source():
    sampled = [*attempts("sums", 0, (1.0, None, "4")), *attempts("words", 1, (0.5, None, "a"))]
    assert measure_attempts(sampled, 1).scalars() == {"validation/mean@1/sums": 1.0, "validation/mean@1/words": 0.5}


def test_without_acc_a_full_score_is_right_up_to_rounding_and_higher_ones_say_nothing():
    nearly = attempts("sums", 0, (0.99999998, None, "4"), (0.9, None, "5"))
    assert measure_attempts(nearly, 2).scalars()["validation/pass@1/sums"] == 0.5
    of_ten = [*nearly, *attempts("sums", 1, (3.0, None, "4"), (1.0, None, "5")), *attempts("said", 2, (3.0, 1.0, "a"))]
    found = measure_attempts(of_ten, 2).scalars()
    assert [name for name in found if "pass@" in name] == ["validation/pass@1/said"]
    assert {"validation/best@2/sums", "validation/mean@2/sums"} < found.keys()
