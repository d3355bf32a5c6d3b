"""Reward functions that Python gives: by name, by column, in processes and beside the loop."""

import asyncio
import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest

from rallypoint.config import RewardConfig
from rallypoint.environments.given import GIVEN, Given, giving
from rallypoint.environments.grader import Waiting, open_grader
from rallypoint.environments.outcome import Failure, Outcome, RewardCall, Scores
from rallypoint.environments.pool import Pool
from rallypoint.environments.reward import check_reward_spec
from rallypoint.errors import RewardError

CALL = RewardCall(
    name="rows.jsonl:1, sample 0",
    data_source="rows",
    solution_str="12",
    ground_truth="12",
    extra_info={"answer": "12", "level": 3},
    token_ids=(1, 2),
    ended=True,
    messages=({"role": "user", "content": "3 * 4"},),
)


@contextlib.contextmanager
def asking(function: Callable[..., object]) -> Iterator[Callable[[RewardCall], Outcome]]:
    """Yield what asks a function that Python gives, as a run does."""
    with giving(function) as spec:
        grader = open_grader(RewardConfig(function=spec, num_processes=1, timeout_s=30.0))
        with contextlib.closing(grader):
            grader.load()
            yield lambda call: grader.submit([call])[0].result(60)


def called(function: Callable[..., object], call: RewardCall = CALL) -> object:
    """Call a function as a run does, but in this process."""
    with giving(function) as spec:
        given = GIVEN[spec].function
        grader = Waiting(given, 1, 30.0)
        with contextlib.closing(grader):
            grader.load()
            outcomes = grader.submit([call])
            wait(outcomes, 60)
            return outcomes[0].result()


@pytest.mark.parametrize(
    "function",
    [
        lambda completion, answer: float(completion == answer),
        lambda response, level: float(response == "12" and level == 3),
        lambda solution_str, prompt: float(prompt == "3 * 4" and solution_str == "12"),
        lambda completion, solution: float(completion == solution),
        lambda completions, answer: [float(text == right) for text, right in zip(completions, answer, strict=True)],
        lambda prompts, completions, **columns: [float(prompts == ["3 * 4"] and columns["level"] == [3])],
        lambda completion, completion_ids: float(completion == "12" and completion_ids == [1, 2]),
        lambda completions, completion_ids, **columns: [float(completion_ids == [[1, 2]] and columns["level"] == [3])],
        lambda completions, **kwargs: [
            float(
                sorted(kwargs) == ["answer", "completion_ids", "level", "prompts"]  # TRL's, but for `trainer_state`
                and kwargs["completion_ids"] == [[1, 2]]
            )
        ],
        lambda completion, token_ids, finish_reason: float(token_ids == [1, 2] and finish_reason == "stop"),
        lambda completion, answer="12", tolerance=0: float(completion == answer) - tolerance,
        lambda data_source, solution_str, ground_truth, extra_info: float(solution_str == ground_truth),
    ],
)
def test_a_function_is_called_with_the_columns_that_it_names(function: Callable[..., object]):
    assert called(function) == Scores((0.0, 1.0), {})


def test_a_column_that_no_row_has_is_named_in_the_failure():
    failed = called(lambda completion, hardness: 0.0)
    assert isinstance(failed, Failure)
    assert "names 'hardness'" in failed.reason
    assert "answer, level" in failed.reason


def test_a_closure_runs_in_a_process_of_its_own_and_in_that_alone():
    bonus = 0.25
    with asking(lambda completion: {"score": bonus, "pid": os.getpid()}) as ask:
        outcome = ask(CALL)
    assert isinstance(outcome, Scores)
    assert outcome.token_scores == (0.0, 0.25)
    assert outcome.extras["pid"] != os.getpid()


def test_a_closure_that_crashes_its_process_costs_one_rollout():
    def crash(completion: str) -> float:
        return os._exit(3) if completion == "12" else 1.0

    with asking(crash) as ask:
        failed = ask(CALL)
        assert isinstance(failed, Failure)
        assert failed.kind == "crashed"
        assert ask(dataclasses.replace(CALL, solution_str="7")) == Scores((0.0, 1.0), {})


def test_what_cannot_be_sent_runs_on_a_thread_of_this_process_and_says_why():
    lock = threading.Lock()  # as a client or a model would hold one

    def reward(completion: str) -> dict[str, float]:
        with lock:
            return {"score": 1.0, "pid": os.getpid()}

    with giving(reward) as spec:
        assert GIVEN[spec].code is None
        assert "lock" in GIVEN[spec].why_here
    with asking(reward) as ask:
        outcome = ask(CALL)
    assert isinstance(outcome, Scores)
    assert outcome.extras == {"pid": os.getpid()}


class Gone:
    """What only the driver can unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return (__import__, ("a_module_that_is_nowhere",))

    def __call__(self, completion: str) -> float:
        return 1.0


def test_a_function_that_refers_to_what_a_process_does_not_have_says_so():
    nowhere = pytest.raises(RewardError, match=r"No module named 'a_module_that_is_nowhere'; define it in the script")
    with nowhere, asking(Gone()):
        pytest.fail("it was loaded")


def test_an_async_function_beside_the_loop_is_awaited():
    lock = threading.Lock()

    async def reward(completion: str) -> float:
        return float(lock.acquire(blocking=False))

    assert called(reward) == Scores((0.0, 1.0), {})


async def sleeps(hanging: threading.Event) -> None:
    while not hanging.is_set():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_beside_the_loop_that_hangs_is_left_behind_at_its_deadline(is_async: bool):
    hanging = threading.Event()  # no process can be sent it

    def reward(completion: str) -> float:
        if completion == "12":
            hanging.wait(600)
        return 1.0

    async def also(completion: str) -> float:
        if completion == "blocks":
            hanging.wait(600)
        if completion == "12":
            await sleeps(hanging)
        return 1.0

    calls = [dataclasses.replace(CALL, solution_str=text) for text in ("12", "7", "blocks", "7")]
    with giving(also if is_async else reward) as spec:
        grader = open_grader(RewardConfig(function=spec, timeout_s=1.0))
        with contextlib.closing(grader):
            grader.load()
            outcomes = [future.result(60) for future in grader.submit(calls)]
    hanging.set()
    right = Scores((0.0, 1.0), {})
    assert [one if isinstance(one, Scores) else one.kind for one in outcomes] == [
        "timeout",
        right,
        "timeout" if is_async else right,
        right,
    ]
    assert isinstance(outcomes[0], Failure)
    assert "longer than reward.timeout_s=1 s" in outcomes[0].reason
    assert (", in sleeps" if is_async else ", in reward") in outcomes[0].traceback


def test_a_function_beside_the_loop_that_exits_costs_one_rollout():
    lock = threading.Lock()

    def reward(completion: str) -> float:
        return sys.exit(3) if lock.acquire(blocking=False) else 1.0

    with asking(reward) as ask:
        failed = ask(CALL)
        assert isinstance(failed, Failure)
        assert (failed.kind, failed.reason) == ("raised", "the reward function raised SystemExit: 3")
        assert ask(CALL) == Scores((0.0, 1.0), {})


def test_the_data_that_a_function_beside_the_loop_is_given_are_copies():
    assert called(lambda completion, extra_info: extra_info.clear() or 1.0) == Scores((0.0, 1.0), {})
    assert CALL.extra_info


def test_two_functions_of_a_name_have_names_of_their_own_as_long_as_they_are_given():
    with giving(lambda completion: 0.0) as first, giving(lambda completion: 1.0) as second:
        assert (first, second) == ("@lambda", "@lambda-2")
        assert check_reward_spec(first) is None
    assert GIVEN == {}


def test_a_name_that_stands_for_nothing_says_how_to_give_the_function_again():
    problem = check_reward_spec("@reward")
    assert problem is not None
    assert "rally.train(RUN_FOLDER, resume=True, reward=reward)" in problem
    with pytest.raises(RewardError, match="is not kept"):
        open_grader(RewardConfig(function="@reward"))


def test_the_record_of_a_function_follows_from_its_text():
    def one(completion: str) -> float:
        return 1.0

    def other(completion: str) -> float:
        return 2.0

    def entry(function: Callable[..., object]) -> Given:
        with giving(function) as spec:
            return GIVEN[spec]

    assert entry(one).digest == entry(one).digest != entry(other).digest
    assert "return 1.0" in entry(one).text


def test_a_pool_is_what_asks_a_function_that_can_be_sent():
    with giving(lambda completion: 0.0) as spec:
        grader = open_grader(RewardConfig(function=spec, num_processes=1))
        assert isinstance(grader, Pool)
        grader.close()


def test_functions_of_trl_read_conversations_and_take_what_else_there_is():
    def of_lists(completions, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        assert (completions[0][-1]["role"], kwargs["prompts"][0][-1]["content"]) == ("assistant", "3 * 4")
        assert kwargs["answer"] == [row["answer"] for row in [CALL.extra_info]]
        return [float(text == answer) for text, answer in zip(texts, kwargs["answer"], strict=True)]

    assert called(of_lists) == Scores((0.0, 1.0), {})
    assert called(lambda completion, answer: float(completion[0]["content"] == answer)) == Scores((0.0, 1.0), {})
    assert called(lambda completion: float(completion == "12" and completion[0] == "1")) == Scores((0.0, 1.0), {})


def test_an_empty_answer_is_a_message_too():
    empty = dataclasses.replace(CALL, solution_str="")
    assert called(lambda completion: float(completion[0]["content"] == ""), empty) == Scores((0.0, 1.0), {})
