import dataclasses
import math
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rallypoint.algorithms import ADVANTAGES
from rallypoint.data import Example, Message
from rallypoint.environments.failures import TooManyFailuresError, check_failures, describe_failures
from rallypoint.environments.grader import Inline, Several
from rallypoint.environments.outcome import NONE, Failure, Scores
from rallypoint.environments.reward import Wants, no_function
from rallypoint.environments.scored import ModelScores, SampledGroup, combine
from rallypoint.environments.scoring import Scoring
from rallypoint.types import Maximum, Mean, Minimum, RolloutBatch, Sum, offsets_from_lengths

PROMPT = 2


def make_batch(response_lengths, truncated=None):
    """Return rows of two prompt tokens and a response each."""
    num_rows = len(response_lengths)
    offsets = offsets_from_lengths(torch.tensor(response_lengths, dtype=torch.int64) + PROMPT)
    num_tokens = int(offsets[-1])
    mask = torch.ones(num_tokens, dtype=torch.bool)
    for start in offsets[:-1].tolist():
        mask[start : start + PROMPT] = False
    return RolloutBatch(
        offsets=offsets,
        tokens=torch.arange(num_tokens),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(num_tokens),
        prompt_index=torch.arange(num_rows) // 2,
        sample_index=torch.arange(num_rows) % 2,
        versions=torch.zeros(num_rows, dtype=torch.int64),
        truncated=torch.tensor(truncated if truncated is not None else [False] * num_rows, dtype=torch.bool),
    )


def make_examples(count):
    return [
        Example(f"train.parquet:{row}", "lab", (Message("user", "1"),), "", ["truth", row], {"row": row})
        for row in range(count)
    ]


def scoring_with(grader, num_rows, decode, max_failed=1.0, *, has_models=False):
    """Return the scoring of a batch; a token's text is its id in brackets."""
    return Scoring(
        grader,
        decode=decode,
        token_texts=lambda ids: [f"<{token}>" for token in ids],
        num_rows=num_rows,
        max_failed=max_failed,
        has_models=has_models,
        warn=pytest.fail,
    )


def run(batch, examples, texts, reward, max_failed=1.0, models=()):
    """Score with a function of this process."""
    scoring = scoring_with(Inline(reward), len(batch), lambda _: texts, max_failed)
    scoring.add(0, SampledGroup(batch, examples))
    scoring.finish()
    return combine(scoring.run(), models=models)


def score(results, response_lengths=None, truncated=None, **options):
    """Score one row for each result; an exception is raised instead of returned."""
    response_lengths = [3] * len(results) if response_lengths is None else response_lengths

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        result = results[extra_info["row"]]
        if isinstance(result, BaseException):
            raise result
        return result

    texts = [f"text {row}" for row in range(len(results))]
    batch = make_batch(response_lengths, truncated)
    return run(batch, make_examples(len(results)), texts, reward, **options)


def scored_groups(results):
    """The same, before rows are joined to a batch."""
    scoring = scoring_with(
        Inline(lambda extra_info, **row: results[extra_info["row"]]), len(results), lambda ids: [""] * len(ids), 1.0
    )
    scoring.add(0, SampledGroup(make_batch([3] * len(results), None), make_examples(len(results))))
    scoring.finish()
    return scoring.run()


def rewards(scored):
    """Return the rewards of the responses, row by row."""
    rows = [scored.batch.rows([row]) for row in range(len(scored.batch))]
    assert all(not row.token_rewards[~row.loss_mask].any() for row in rows)
    return [row.token_rewards[row.loss_mask].tolist() for row in rows]


def test_lists_of_one_total_have_one_score_whatever_float32_makes_of_their_numbers():
    scored = score([[0.1, 0.9, 76.3], [77.3, 0.0, 0.0], [0.7, 30.3, 46.3], 77.3])
    assert scored.batch.token_rewards.dtype == torch.float32
    assert scored.batch.scores.tolist() == pytest.approx([77.3] * 4, rel=1e-15)
    (group,) = scored_groups([[0.1, 0.9, 76.3], [77.3, 0.0, 0.0]])
    assert not group.has_signal(ADVANTAGES["rloo"](whiten=False))


NUMBERS = [
    0.5,
    1,
    True,
    False,
    -2,
    0,
    np.float32(0.25),
    np.int64(3),
    np.bool_(True),
    torch.tensor(0.5),
    Fraction(1, 4),
    Decimal("0.25"),
]


@pytest.mark.parametrize("value", [*NUMBERS, np.array(2.0)])
def test_a_number_of_any_kind_arrives_with_the_last_token(value):
    scored = score([value])
    assert rewards(scored) == [[0.0, 0.0, float(value)]]
    assert scored.failures == ()
    assert scored.batch.token_rewards.dtype == torch.float32


LISTS = [[0.5, 0.25, -1], (0.5, 0.25, -1), np.array([0.5, 0.25, -1.0]), torch.tensor([0.5, 0.25, -1.0])]


@pytest.mark.parametrize("value", [*LISTS, [np.float32(0.5), torch.tensor(0.25), -1]])
def test_a_list_of_any_kind_has_one_score_for_each_response_token(value):
    assert rewards(score([value], truncated=[True])) == [[0.5, 0.25, -1.0]]
    assert rewards(score([value], truncated=[False])) == [[0.5, 0.25, -1.0]]
    assert rewards(score([{"score": value}])) == [[0.5, 0.25, -1.0]]


def test_a_list_may_leave_out_the_end_of_sequence_token_where_the_row_ended_by_itself():
    assert rewards(score([[0.5, 0.25]])) == [[0.5, 0.25, 0.0]]
    assert rewards(score([[]], response_lengths=[1])) == [[0.0]]
    failed = score([[0.5, 0.25]], truncated=[True])
    assert failed.failures[0].reason.startswith("expected one score for each of 3 tokens, found 2; ")


def test_the_other_numbers_of_a_dict_become_metrics_averaged_over_the_rows_that_have_them():
    scored = score(
        [
            {"score": 1.0, "accuracy": True, "length": 4, "prediction": "12", "time": math.nan},
            {"score": 0.0, "accuracy": False, "time": 2.0},
            {"score": None, "accuracy": True},
            0.5,
        ]
    )
    averaged = {"reward/accuracy": Mean(1.0, 2), "reward/length": Mean(4.0, 1), "reward/time": Mean(2.0, 1)}
    assert {name: metric for name, metric in scored.metrics.items() if isinstance(metric, Mean)} == averaged
    assert scored.kept_rows == (0, 1, 3)


TOO_LARGE = "{}, expected at most 1e+15: float32 cannot hold the squares of more; scale rewards down"
WRONG_LENGTH = (
    "expected one score for each of 3 tokens (2 without the end-of-sequence token), found {}; the list covers every "
    "token of the response, also special ones, which solution_str does not show: name an argument token_ids (or "
    "tokens) in the function and it is given the ids (or the texts) of all of them"
)
BAD_RESULTS = [
    (None, NONE),
    ({"score": None, "seconds": 2.0}, NONE),
    ("0.5", "the score is '0.5', expected a number"),
    (object, "the score is type, expected a number"),
    (1j, "the score is complex, expected a number"),
    (math.nan, "the score is nan, expected a finite number"),
    (Decimal("sNaN"), "the score is nan, expected a finite number"),
    (-math.inf, "the score is -inf, expected a finite number"),
    (1e39, TOO_LARGE.format("the score is 1e+39")),
    (-1e19, TOO_LARGE.format("the score is -1e+19")),
    ([1e15, -1e15, 0], TOO_LARGE.format("the list adds up to 2e+15 in size")),
    (10**400, "the score is inf, expected a finite number"),
    (torch.tensor(math.nan), "the score is nan, expected a finite number"),
    ({}, "expected the key 'score', found no key"),
    ({"reward": 1.0}, "expected the key 'score', found 'reward'"),
    (
        {"score": 1.0, "mean": 1.0},
        "found the key 'mean', but reward/mean is a metric of every run; call it something else",
    ),
    ({"score": {"score": 1.0}}, "the score is dict, expected a number"),
    ({"score": "1"}, "the score is '1', expected a number"),
    ([0.1, 0.2, math.nan], "score 2 of the list is nan, expected a finite number"),
    ([0.1, None, 0.2], "score 1 of the list is None, expected a number"),
    ([[0.1], [0.2], [0.3]], "score 0 of the list is list, expected a number"),
    ([0.1], WRONG_LENGTH.format(1)),
    ([0.1] * 4, WRONG_LENGTH.format(4)),
    (ValueError("no number\nin it"), "the reward function raised ValueError: no number"),
    (KeyError("answer"), "the reward function raised KeyError: 'answer'"),
    (SyntaxError("bad", ("answer", 1, 1, "x(", 1, 2)), "the reward function raised SyntaxError: bad"),
]


@pytest.mark.parametrize(("result", "reason"), BAD_RESULTS)
def test_a_failure_is_named_with_its_sample_and_its_row_is_left_out(result, reason):
    scored = score([0.5, 0.25, 0.75, result, 1.0])
    assert rewards(scored) == [[0.0, 0.0, value] for value in (0.5, 0.25, 0.75, 1.0)]
    assert scored.kept_rows == (0, 1, 2, 4)
    assert scored.batch.prompt_index.tolist() == [0, 0, 1, 2]
    (failure,) = scored.failures
    assert (failure.name, failure.row, failure.sample_index) == ("train.parquet:3", 3, 1)
    assert failure.reason == reason
    assert str(failure) == f"train.parquet:3, sample 1: {reason}"
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_a_raise_shows_the_frames_of_the_reward_function_and_not_ours():
    def reward(data_source, solution_str, ground_truth, extra_info=None):
        return int(solution_str)

    scored = run(make_batch([1]), make_examples(1), ["x"], reward)
    shown = scored.failures[0].traceback
    assert "return int(solution_str)" in shown
    assert "ValueError: invalid literal" in shown
    assert "rallypoint/environments" not in shown


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError


def test_even_an_exception_that_cannot_be_printed_becomes_a_failure():
    assert "UnprintableError" in score([UnprintableError()]).failures[0].reason


def test_a_batch_of_failures_only_is_an_empty_batch():
    scored = score([None, math.nan])
    assert (len(scored.batch), scored.batch.num_tokens, scored.kept_rows) == (0, 0, ())
    assert len(scored.failures) == 2
    assert len(score([]).batch) == 0


def test_a_response_without_tokens_cannot_carry_a_score():
    scored = score([1.0, []], response_lengths=[0, 0], truncated=[True, True])
    assert scored.failures[0].reason == "the response has no token that a score could be placed on"
    assert scored.kept_rows == (1,)


def test_the_function_is_given_the_row_by_name_and_cannot_change_the_data_set():
    seen = []

    def reward(**row):
        seen.append((row["data_source"], row["solution_str"], list(row["ground_truth"]), dict(row["extra_info"])))
        row["ground_truth"].append("changed")
        row["extra_info"]["changed"] = True
        return 0.0

    example = make_examples(1)[0]
    run(make_batch([1, 1]), [example, example], ["a", "b"], reward)
    assert seen == [("lab", text, ["truth", 0], {"row": 0}) for text in ("a", "b")]


def test_one_example_is_needed_for_every_row():
    with pytest.raises(ValueError, match="2 rollouts and 1 examples"):
        run(make_batch([1, 1]), make_examples(1), ["a", "b"], lambda **row: 0.0)


class LateGrader:
    """Answers calls in the order that it is told, from another thread; a text of "bad" fails, "never" has no end."""

    wants = Wants()

    def __init__(self):
        self.calls, self.changed = {}, threading.Condition()

    def load(self):
        pass

    def submit(self, calls):
        with self.changed:
            futures = [Future() for _ in calls]
            self.calls |= {call.solution_str: future for call, future in zip(calls, futures, strict=True)}
            self.changed.notify_all()
        return futures

    def answer(self, text):
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.calls, 30)
            future = self.calls[text]
        if future.set_running_or_notify_cancel():
            future.set_result(Failure("raised", "bad") if "bad" in text else Scores((float(len(text)),), {}))

    def complain(self, warn, warn_after_s):
        return warn_after_s

    def close(self):
        pass


def scored_late(texts, order, answers, **options):
    """Score groups of two rows that complete in an order, and whose calls end in another; return run's future."""
    grader = LateGrader()

    def decode(responses):
        return [texts[ids[0] // (PROMPT + 1)] for ids in responses]

    scoring = scoring_with(grader, len(texts), decode, **options)
    batch, examples = make_batch([1] * len(texts)), make_examples(len(texts))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(scoring.run)
        for group in order:
            rows = [2 * group, 2 * group + 1]
            scoring.add(group, SampledGroup(batch.rows(rows), [examples[row] for row in rows]))
        for answer in answers:
            grader.answer(texts[answer])
        (scoring.stop if "never" in texts else scoring.finish)()
        running.exception(60)
    return running, grader


@given(st.permutations(range(3)), st.permutations(range(6)))
@settings(deadline=None)
def test_scores_do_not_depend_on_the_order_in_which_groups_and_calls_complete(order, answers):
    texts = ["1", "22", "bad 3", "4444", "55555", "666666"]
    running, _ = scored_late(texts, order, answers)
    scored = combine(running.result())
    assert rewards(scored) == [[1.0], [2.0], [4.0], [5.0], [6.0]]
    assert scored.kept_rows == (0, 1, 3, 4, 5)
    assert [failure.row for failure in scored.failures] == [2]
    assert scored.batch.prompt_index.tolist() == [0, 0, 1, 2, 2]


def test_no_further_call_is_waited_for_when_more_have_failed_than_may():
    running, grader = scored_late(["bad 1", "bad 2", "good", "never"], [1, 0], [0, 1], max_failed=0.25)
    with pytest.raises(TooManyFailuresError, match="of 4 rollouts more failed than"):
        running.result()
    assert all(grader.calls[text].cancelled() for text in ("good", "never"))


def test_scoring_that_is_stopped_waits_for_nothing():
    running, grader = scored_late(["good", "never"], [0], [])
    assert running.done()
    assert grader.calls["never"].cancelled()


def test_a_step_in_which_more_fail_than_may_is_refused_with_advice_and_the_whole_traceback():
    results = [KeyError("answer"), 0.5, KeyError("answer"), 1.0]
    assert len(score(results, max_failed=0.5).batch) == 2
    with pytest.raises(TooManyFailuresError) as raised:
        score(results, max_failed=0.49)
    advice, first, second, whose, *trace = str(raised.value).splitlines()
    assert advice.startswith("of 4 rollouts more failed than rollout.max_failed=0.49 allows")
    assert "return 0 for it instead of raising" in advice
    assert first.startswith("2 rollouts have no score (2 raised), the first is train.parquet:0, sample 0: the reward")
    assert second.startswith("  - train.parquet:2, sample 0")
    assert whose == "the reward function's traceback for train.parquet:0:"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == "KeyError: 'answer'"


def test_the_kinds_of_failures_and_the_rows_with_a_score_are_counted():
    scored = score([None, math.nan, ValueError("x"), 1.0, [0.5], 1e19])
    counts = {"num_scored": 1, "failed": 5, "failed_malformed": 2, "failed_nonfinite": 1, "failed_raised": 1}
    counts |= {"failed_not_applicable": 1, "failed_timeout": 0, "failed_crashed": 0}
    assert scored.metrics.scalars() == {f"reward/{name}": count for name, count in counts.items()}
    kinds = ["not_applicable", "nonfinite", "raised", "malformed", "malformed"]
    assert [failure.kind for failure in scored.failures] == kinds


def test_a_function_that_names_them_is_given_ids_and_texts_of_all_tokens():
    def by_token(token_ids, tokens, extra_info, **row):
        assert row.keys() == {"data_source", "solution_str", "ground_truth"}
        assert tokens == [f"<{token}>" for token in token_ids]
        return [float(token) for token in token_ids]

    scored = run(make_batch([3, 1]), make_examples(2), ["", ""], by_token)
    assert rewards(scored) == [[2.0, 3.0, 4.0], [7.0]]


def test_the_largest_rewards_that_are_taken_have_finite_squares_however_many_are_added_up():
    largest = score([1e15]).batch.scores
    assert torch.isfinite(largest.square() * 2**20)


def test_failures_are_described_with_the_first_few_and_one_traceback():
    text = describe_failures(score(["", ValueError("x"), "", "", ""]).failures)
    assert text.splitlines()[:4] == [
        "5 rollouts have no score (4 malformed, 1 raised), the first is train.parquet:0, sample 0: the score is '', "
        "expected a number",
        "  - train.parquet:1, sample 1: the reward function raised ValueError: x",
        "  - train.parquet:2, sample 0: the score is '', expected a number",
        "  - and 2 more",
    ]
    assert "the reward function's traceback for train.parquet:1:" in text
    assert text.endswith("ValueError: x")
    one = score([""]).failures
    assert describe_failures(one) == f"1 rollout has no score (1 malformed), the first is {one[0]}"


FINITE = st.floats(-100, 100, width=32)


@given(st.lists(st.tuples(st.lists(FINITE, min_size=1, max_size=5), st.sampled_from(["list", "number", "bad"]))))
def test_the_sum_of_a_rows_rewards_is_what_the_function_said_and_nothing_moves_between_rows(rows):
    given_results = {"list": lambda scores: scores, "number": sum, "bad": lambda scores: "none"}
    results = [given_results[kind](scores) for scores, kind in rows]
    scored = score(results, response_lengths=[len(scores) for scores, _ in rows])
    kept = [row for row, (_, kind) in enumerate(rows) if kind != "bad"]
    assert list(scored.kept_rows) == kept
    assert [failure.row for failure in scored.failures] == [row for row in range(len(rows)) if row not in kept]
    assert scored.batch.scores.tolist() == pytest.approx([sum(rows[row][0]) for row in kept], rel=1e-5, abs=1e-4)
    assert scored.batch.lengths.tolist() == [len(rows[row][0]) + PROMPT for row in kept]


def score_with_model(results, scores, **rows):
    return score(results, **rows, models=[ModelScores(torch.tensor(scores))])


def test_a_reward_models_score_is_added_on_the_last_token():
    scored = score_with_model([0.5, [0.1, 0.2, 0.25]], [2.0, -1.0])
    assert rewards(scored) == [[0.0, 0.0, 2.5], pytest.approx([0.1, 0.2, -0.75])]
    said = {"reward/model_mean": Mean(1.0, 2), "reward/model_min": Minimum(-1.0), "reward/model_max": Maximum(2.0)}
    assert {name: scored.metrics[name] for name in said} == said


def test_without_a_reward_function_the_models_score_is_the_reward():
    batch = make_batch([3, 2])
    model = ModelScores(torch.tensor([0.75, -3.0]))
    scored = run(batch, make_examples(2), ["a", "b"], no_function, models=[model])
    assert rewards(scored) == [[0.0, 0.0, 0.75], [0.0, -3.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_models_score_that_is_not_finite_is_a_failure_and_never_a_reward_of_0(bad):
    scored = score_with_model([1.0, 1.0, "none"], [bad, 3.0, 5.0])
    assert rewards(scored) == [[0.0, 0.0, 4.0]]
    assert [failure.row for failure in scored.failures] == [0, 2]
    assert scored.failures[0].reason == f"the reward model gives {bad}, expected a finite number"
    said = {"reward/model_mean": 4.0, "reward/model_min": 3.0, "reward/model_max": 5.0}
    assert said.items() <= scored.metrics.scalars().items()
    assert "reward/model_mean" not in score_with_model([1.0], [bad]).metrics


def test_several_models_are_weighed_and_have_metrics_of_their_own_beside_functions_or_alone():
    helpful = ModelScores(torch.tensor([1.0, 2.0, 4.0]), "helpful", 0.5)
    safe = ModelScores(torch.tensor([-1.0, math.nan, 3.0]), "safe", 2.0)
    scored = score([0.25, 0.25, 0.5], models=[helpful, safe])
    assert rewards(scored) == [[0.0, 0.0, 0.25 + 0.5 - 2.0], [0.0, 0.0, 0.5 + 2.0 + 6.0]]
    assert scored.failures[0].reason == "the reward model safe gives nan, expected a finite number"
    assert scored.batch.part_names == ("function", "helpful", "safe")
    assert scored.batch.reward_parts.tolist() == [[0.25, 1.0, -1.0], [0.5, 4.0, 3.0]]
    found = scored.metrics.scalars()
    assert (found["reward/helpful/mean"], found["reward/helpful/min"], found["reward/helpful/max"]) == (7 / 3, 1.0, 4.0)
    assert (found["reward/safe/mean"], found["reward/safe/std"], found["reward/function/mean"]) == (1.0, 2.0, 0.375)
    alone = [dataclasses.replace(model, functions=()) for model in (helpful, safe)]
    assert score([0.0] * 3, models=alone).batch.part_names == ("helpful", "safe")


def test_a_sum_that_is_too_large_and_a_response_without_tokens_are_failures():
    failed = score_with_model([6e14], [6e14]).failures[0].reason
    assert failed.startswith("the score with that of the reward model adds up to 1.2e+15 in size, expected at most")
    failed = score_with_model([[]], [1.0], response_lengths=[0]).failures[0].reason
    assert failed == "the response has no token that a score could be placed on"


def test_several_rewards_have_a_mean_each_and_their_scores_stay_with_the_rows():
    graders = {
        "right": Inline(lambda extra_info, **row: extra_info["row"]),
        "short": Inline(lambda solution_str, **row: [0.5, 0.0, 0.5] if "2" not in solution_str else "none"),
    }
    scoring = scoring_with(Several(graders, {"right": 1.0, "short": 10.0}), 4, lambda _: ["0", "1", "2", "3"])
    scoring.add(0, SampledGroup(make_batch([3] * 4), make_examples(4)))
    scoring.finish()
    scored = combine(scoring.run(), models=[ModelScores(torch.tensor([1.0, 2.0, 3.0, 4.0]), weight=0.5)])
    assert rewards(scored) == [[5.0, 0.0, 5.5], [5.0, 0.0, 7.0], [5.0, 0.0, 10.0]]
    assert scored.batch.part_names == ("right", "short", "model")
    assert scored.batch.reward_parts.tolist() == [[0, 1, 1], [1, 1, 2], [3, 1, 4]]
    assert scored.batch.rows([2, 0]).reward_parts.tolist() == [[3, 1, 4], [0, 1, 1]]
    assert scored.metrics["reward/right/mean"] == Mean(4.0, 3)
    assert scored.metrics["reward/short/std"] == Mean(0.0, 3)
    assert scored.failures[0].reason.startswith("short: the score is 'none'")


def score_by(parts, models=(), max_failed=1.0):
    """Score one row for each list of what several functions return, a dict by their names."""
    graders = {name: Inline(lambda extra_info, name=name, **row: parts[name][extra_info["row"]]) for name in parts}
    num_rows = len(next(iter(parts.values())))
    several = Several(graders, {"right": 1.0, "short": 10.0})
    scoring = scoring_with(several, num_rows, lambda ids: [""] * len(ids), max_failed, has_models=bool(models))
    scoring.add(0, SampledGroup(make_batch([3] * num_rows), make_examples(num_rows)))
    scoring.finish()
    scored = combine(scoring.run(), models=models)
    check_failures(scored.failures, num_rows, max_failed)
    return scored


def test_a_function_that_returns_none_has_no_part_in_the_score_and_no_number_in_any_mean():
    scored = score_by({"right": [1.0, None, None, {"score": None}], "short": [0.5, 0.25, None, [0.0, 0.0, 2.0]]})
    assert rewards(scored) == [[0.0, 0.0, 6.0], [0.0, 0.0, 2.5], [0.0, 0.0, 20.0]]
    assert scored.kept_rows == (0, 1, 3)
    assert scored.failures[0].reason == "no reward function applies: right, short returned None"
    assert str(scored.batch.reward_parts.tolist()) == "[[1.0, 0.5], [nan, 0.25], [nan, 2.0]]"
    said = {"reward/right/mean": Mean(1.0, 1), "reward/right/num_scored": Sum(1), "reward/short/mean": Mean(2.75, 3)}
    said |= {"reward/short/num_scored": Sum(3), "reward/failed_not_applicable": Sum(1), "reward/num_scored": Sum(3)}
    assert {name: scored.metrics[name] for name in said} == said


def test_a_function_that_never_applies_has_no_mean():
    scored = score_by({"right": [None, None], "short": [0.5, 0.25]})
    assert scored.metrics["reward/right/num_scored"] == Sum(0)
    assert not {"reward/right/mean", "reward/right/std"} & scored.metrics.keys()


def test_too_many_rows_that_no_function_applies_to_end_the_run_with_a_word_on_none():
    with pytest.raises(TooManyFailuresError, match=r"3 rollouts have no score \(3 not_applicable\).*returned None"):
        score_by({"right": [None] * 3 + [1.0], "short": [None] * 4}, max_failed=0.5)
    with pytest.raises(TooManyFailuresError, match="without `return` a function returns None, too"):
        score([None, None], max_failed=0.5)


def test_a_row_that_no_function_applies_to_has_the_score_of_a_reward_model():
    models = [ModelScores(torch.tensor([1.0, 2.0, 4.0]), weight=0.5, functions=("right", "short"))]
    scored = score_by({"right": [None, None, 3.0], "short": [None] * 3}, models, max_failed=0.0)
    assert rewards(scored) == [[0.0, 0.0, 0.5], [0.0, 0.0, 1.0], [0.0, 0.0, 5.0]]
    assert scored.batch.part_names == ("right", "short", "model")
    assert str(scored.batch.reward_parts.tolist()) == "[[nan, nan, 1.0], [nan, nan, 2.0], [3.0, nan, 4.0]]"
    alone = score([None, 1.0], models=[ModelScores(torch.tensor([2.0, 3.0]))])
    assert rewards(alone) == [[0.0, 0.0, 2.0], [0.0, 0.0, 4.0]]
    assert str(alone.batch.reward_parts.tolist()) == "[[nan, 2.0], [1.0, 3.0]]"


def test_a_function_beside_a_reward_model_is_a_part_too_and_a_reward_model_alone_is_not():
    model = ModelScores(torch.tensor([1.0]))
    assert score([0.5], models=[model]).batch.part_names == ("function", "model")
    alone = ModelScores(torch.tensor([1.0]), functions=())
    assert score([0.0], models=[alone]).batch.part_names == ("model",)
    assert score([0.5]).batch.reward_parts is None


def test_a_function_of_a_batch_waits_until_all_groups_are_there():
    seen = []

    def of_batch(data_sources, solution_strs, ground_truths, extra_infos, groups, logprobs, tokens):
        seen.append((solution_strs, groups, logprobs, tokens))
        return [float(group) for group in groups]

    scoring = scoring_with(Inline(of_batch), 4, lambda ids: [str(each[0]) for each in ids])
    batch, examples = make_batch([1] * 4), make_examples(4)
    for group in (1, 0):
        rows = [2 * group, 2 * group + 1]
        scoring.add(group, SampledGroup(batch.rows(rows), [examples[row] for row in rows]))
    scoring.finish()
    assert rewards(combine(scoring.run())) == [[0.0], [0.0], [1.0], [1.0]]
    assert seen == [(["8", "11", "2", "5"], [1, 1, 0, 0], [[0.0]] * 4, [["<8>"], ["<11>"], ["<2>"], ["<5>"]])]
