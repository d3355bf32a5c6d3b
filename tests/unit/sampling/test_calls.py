"""The tree of a rollout's calls: what each continues, its random numbers, and which of them count."""

import dataclasses
import itertools
import random
import sys
import tracemalloc

import pytest

from rallypoint.sampling.calls import Calls
from rallypoint.types import ROOT, RolloutBatch, Trajectory, Turn, assemble

PROMPT = (5, 6)


def turn_of(response, truncated=False):
    logprobs = tuple(-float(token) for token in response)
    return Turn(
        prompt=(),
        response=tuple(response),
        logprobs=logprobs,
        sampled_logprobs=logprobs,
        version=0,
        truncated=truncated,
    )


def play(*asked):
    """Begin and end calls of (tokens, response) one after the other."""
    calls = Calls(PROMPT)
    for tokens, response in asked:
        calls.end(calls.begin(tuple(tokens)), turn_of(response))
    return calls


def tree_of(turns):
    return [(turn.prompt, turn.response, turn.parent) for turn in turns]


def whole(turns, number):
    parent = number - 1 if turns[number].parent is None else turns[number].parent
    before = () if parent == ROOT else whole(turns, parent)
    return before + turns[number].prompt + turns[number].response


@pytest.mark.parametrize("seed", range(30))
def test_every_call_continues_the_longest_beginning_and_every_sampled_token_is_trained_once(seed):
    draw = random.Random(seed)
    calls, wholes = Calls(PROMPT), []
    for _ in range(25):
        start = draw.choice([(), PROMPT, *wholes])
        cut = start[: draw.randint(0, len(start))] if draw.random() < 0.2 else start
        tokens = cut + tuple(draw.choices((1, 2), k=draw.randint(1, 3)))
        longest = max((len(one) for one in wholes if tokens[: len(one)] == one), default=0)
        response = tuple(draw.choices((1, 2), k=draw.randint(0, 2)))
        turn = calls.end(calls.begin(tokens), turn_of(response))
        assert turn.prompt == tokens[longest:]
        wholes.append(tokens + response)
    assert [whole(calls.turns, number) for number in range(25)] == wholes

    kept = Trajectory(turns=calls.kept())
    assert {whole(kept.turns, n) for n in range(len(kept.turns))} <= set(wholes)
    batch = assemble([kept], prompt_index=0, sample_index=[3], is_narrowed=False)
    assert batch.tokens.tolist() == [
        t for path in kept.sequences for n in path for t in (*kept.turns[n].prompt, *kept.turns[n].response)
    ]
    assert batch.num_loss_tokens == sum(len(turn.response) for turn in kept.turns)
    trained = [token for row in batch.by_sequence().responses() for token in row]
    assert trained == [token for number in kept.as_trained for token in kept.turns[number].response]
    assert batch.rollout_logprobs.tolist() == [
        -float(t) if m else 0.0 for t, m in zip(batch.tokens, batch.loss_mask, strict=True)
    ]
    assert set(batch.sample_index.tolist()) == {3}


def test_a_linear_rollout_has_no_parents_and_one_row():
    calls = play((PROMPT, [7]), ((5, 6, 7, 8), [4]), ((5, 6, 7, 8, 4), []), ((5, 6, 7, 8, 4), [9]))
    assert tree_of(calls.kept()) == [((5, 6), (7,), None), ((8,), (4,), None), ((), (), None), ((), (9,), None)]
    assert Trajectory(turns=calls.kept()).sequences == ((0, 1, 2, 3),)


def test_what_an_agent_has_compacted_is_a_row_of_its_own():
    calls = play((PROMPT, [7]), ((5, 6, 7, 8), [4]), ((5, 1), [3]), ((5, 1, 3, 8), [2]))
    found = Trajectory(turns=calls.kept())
    assert tree_of(found.turns)[2:] == [((5, 1), (3,), ROOT), ((8,), (2,), None)]
    assert found.sequences == ((0, 1), (2, 3))


@pytest.mark.parametrize("continued", [0, 1])
def test_a_call_that_was_asked_again_leaves_no_orphan(continued):
    answers = ([4], [3])
    after = (5, 6, 7, 8, *answers[continued], 9)
    calls = play((PROMPT, [7]), ((5, 6, 7, 8), [4]), ((5, 6, 7, 8), [3]), (after, [2]))
    assert tree_of(calls.kept()) == [(PROMPT, (7,), None), ((8,), tuple(answers[continued]), None), ((9,), (2,), None)]


def test_of_calls_asked_again_that_nothing_continues_the_one_asked_last_counts_also_if_it_ends_first():
    calls = Calls(PROMPT)
    first, again = calls.begin(PROMPT), calls.begin(PROMPT)
    calls.end(again, turn_of([2]))
    calls.end(first, turn_of([1]))
    assert tree_of(calls.kept()) == [(PROMPT, (2,), None)]


def test_calls_asked_again_with_the_same_response_stay_one_also_after_the_next_turn():
    calls = play((PROMPT, [7]), (PROMPT, [7]), ((5, 6, 7, 8), [4]))
    assert tree_of(calls.kept()) == [(PROMPT, (7,), None), ((8,), (4,), None)]


@pytest.mark.parametrize("ends", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("begins", list(itertools.permutations(range(3))))
def test_of_calls_at_the_same_time_numbers_and_order_do_not_depend_on_which_comes_or_ends_first(begins, ends):
    def played(begins, ends):
        calls = play((PROMPT, [7]))
        asked = [(5, 6, 7, 8), (5, 6, 7, 9), (1,)]
        running = {place: calls.begin(asked[place]) for place in begins}
        for place in ends:
            calls.end(running[place], turn_of([place]))
        calls.end(calls.begin((5, 6, 7, 3)), turn_of([4]))
        return [running[place].number for place in range(3)], tree_of(calls.kept())

    found = played(begins, ends)
    assert found == played((0, 1, 2), (0, 1, 2))
    assert len(set(found[0])) == 3
    assert found[1][-1][1] == (4,)


def test_the_prompt_has_the_random_numbers_of_a_single_turn_and_asked_again_others():
    calls = Calls(PROMPT)
    numbers = [calls.begin(PROMPT).number, calls.begin(PROMPT).number, calls.begin((5,)).number]
    assert numbers[0] == 0
    assert len(set(numbers)) == 3
    assert all(2**29 <= number < 2**30 for number in numbers[1:])


def test_calls_that_ran_at_the_same_time_are_known_also_at_other_depths_and_not_those_that_were_asked_again():
    calls = play((PROMPT, [7]), ((5, 6, 7, 8), [4]))
    assert calls.overlapping() == []
    deeper, apart = calls.begin((5, 6, 7, 8, 4, 9)), calls.begin((1,))
    calls.end(deeper, turn_of([3]))
    assert calls.overlapping() == [], "the other one may fail"
    calls.end(apart, turn_of([2]))
    assert calls.overlapping() == [[2, 3]]
    calls.end(calls.begin((1, 2)), turn_of([4]))
    assert [len(group) for group in calls.overlapping()] == [2], "the next one came after both"

    again = Calls(PROMPT)
    given_up, asked = again.begin(PROMPT), again.begin(PROMPT)
    again.end(asked, turn_of([1]))
    again.end(given_up, turn_of([2]))
    again.end(again.begin((*PROMPT, 1, 8)), turn_of([3]))
    assert again.overlapping() == []


def test_what_calls_keep_grows_with_their_tokens_and_not_with_their_square():
    def kept_bytes(num_turns):
        tracemalloc.start()
        calls, tokens = Calls(PROMPT), PROMPT
        for number in range(num_turns):
            calls.end(calls.begin(tokens), turn_of([number] * 50))
            tokens = (*tokens, *[number] * 50, 8)
        found = tracemalloc.get_traced_memory()[0] - sys.getsizeof(tokens)
        tracemalloc.stop()
        return found

    assert kept_bytes(200) < 2.5 * kept_bytes(100)


def test_every_token_of_a_tree_has_the_experts_that_chose_it_and_what_an_earlier_turn_has_sampled_keeps_its_own():
    """A prompt of an engine has those of all its tokens, of which a turn keeps those of its own."""
    calls = Calls(PROMPT)

    def ended(tokens, response, experts, prompt_experts):
        turn = dataclasses.replace(turn_of(response), experts=experts, prompt_experts=prompt_experts)
        return calls.end(calls.begin(tokens), turn)

    ended(PROMPT, (7, 8), b"AaBb", b"\0\0Cc")
    second = ended((5, 6, 7, 8, 9), (4,), b"Dd", b"\0\0xxyyzzEe")
    ended((5, 6, 1), (3,), b"", b"")
    assert (second.prompt, second.prompt_experts) == ((9,), b"Ee")
    batch = assemble([Trajectory(turns=calls.kept())], prompt_index=0, sample_index=[0], is_narrowed=False)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 4, 5, 6, 1, 3]
    assert batch.experts.numpy().tobytes() == b"\0\0CcAaBbEeDd" + bytes(8)
    assert batch.by_sequence().experts.shape == (10, 2)
    without = dataclasses.replace(batch, experts=None)
    assert RolloutBatch.join([without, batch]).experts.tolist() == [[0, 0]] * 10 + batch.experts.tolist()
    assert batch.padded(12).experts[10:].tolist() == [[0, 0]] * 2
