"""Rewards in processes of their own: whatever a function does to its process, it is one rollout's failure."""

import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

from rallypoint.config import RewardConfig, RolloutConfig
from rallypoint.environments.grader import Inline, Several, open_grader, probe_rewards
from rallypoint.environments.outcome import Failure, RewardCall, Scores
from rallypoint.environments.pool import Pool, Width
from rallypoint.environments.worker import Effort, Work
from rallypoint.errors import RewardError

REWARDS = """
import asyncio, ctypes, os, re, signal, subprocess, sys, time

PATTERN = "(a+)+$"


def fate(solution_str, ground_truth, extra_info, **row):
    return FATES[solution_str]()


def crash(depth):
    return crash(depth - 1) if depth else ctypes.string_at(0)


def fork_and_return():
    return 7.0 if os.fork() == 0 else 1.0


def fork_and_exit():
    if os.fork() == 0:
        sys.exit(3)
    return 1.0


def fork_a_sleeper():
    sleeper = os.fork()
    if sleeper == 0:
        time.sleep(600)
    return {"score": 1.0, "sleeper": sleeper}


def raise_it(error):
    raise error


def write_to_all():
    for number in range(3, 1000):
        try:
            os.write(number, b"\\0\\0\\0\\5hello")
        except OSError:
            pass
    return 1.0


def answer_itself():
    import json
    json.dumps = lambda *_, **__: '{"outcomes": [{"token_scores": [9, 9, 9]}], "effort": {}}'
    return 1.0


FATES = {
    "good": lambda: 1.0,
    "exits": lambda: os._exit(0),
    "crashes": lambda: crash(2),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: re.match(PATTERN, "a" * 40 + "b"),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sys.exit": lambda: sys.exit(0),
    "interrupt": lambda: raise_it(KeyboardInterrupt()),
    "cancelled": lambda: raise_it(asyncio.CancelledError()),
    "unfit": lambda: object(),
    "forks": fork_and_return,
    "fork ends": fork_and_exit,
    "sleeper": fork_a_sleeper,
    "prints": lambda: print("hello") or 1.0,
    "numpy": lambda: __import__("numpy").float32(0.5),
    "pid": lambda: {"score": 1.0, "pid": os.getpid()},
    "writes to all": write_to_all,
    "answers itself": answer_itself,
    "closes": lambda: os.closerange(3, 1000) or 1.0,
}


async def waits(solution_str, **row):
    if solution_str == "hangs":
        await asyncio.sleep(600)
    if solution_str == "blocks":
        time.sleep(600)
    if solution_str in FATES and solution_str not in ("good", "hangs"):
        return FATES[solution_str]()
    if solution_str == "late":
        raise TimeoutError("the judge")
    return {"score": 1.0, "loop": id(asyncio.get_running_loop()) % 1000}


def remembers(ground_truth, extra_info, **row):
    ground_truth.append(len(ground_truth))
    return {"score": float(len(ground_truth)), "sum": sum(extra_info.values())}


def of_group(data_sources, solution_strs, ground_truths, extra_infos, finish_reason, logprobs, messages):
    assert len(data_sources) == len(ground_truths) == len(extra_infos)
    if "hangs" in solution_strs:
        time.sleep(600)
    results = [{"score": 1.0, "size": len(solution_strs), "stops": why == "stop"} for why in finish_reason]
    return results[1:] if "fewer" in solution_strs else [None if text == "bad" else each
        for text, each in zip(solution_strs, results)]


def of_batch(data_sources, solution_strs, ground_truths, extra_infos, groups):
    return [{"score": float(group), "size": len(solution_strs)} for group in groups]


def with_parameters(solution_str, right, wrong=0.0, **row):
    return right if solution_str == "good" else wrong


LEAKED = []


def leaks(solution_str, **row):
    LEAKED.append(bytearray(2**28 if solution_str == "much" else 1))
    return {"score": 1.0, "calls": len(LEAKED)}


def by_more(solution_str, tokens, logprobs, messages, finish_reason, **row):
    extras = {"chars": len("".join(tokens)), "turns": len(messages), "stops": finish_reason == "stop"}
    return {"score": sum(logprobs), **extras}


def writes(solution_str, **row):
    with open(solution_str, "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)


def computes(solution_str, **row):
    until = time.process_time() + 0.03
    while time.process_time() < until:
        pass
    return 1.0


def runs_programs(solution_str, **row):
    import rallypoint.environments.sandbox
    time.sleep(0.03)
    return 1.0


def meets(solution_str, extra_info, **row):
    if solution_str == "waits":
        time.sleep(0.2)
        return 1.0
    open(f"{solution_str}/{extra_info['row']}", "w").close()
    while len(os.listdir(solution_str)) < 4:
        time.sleep(0.01)
    return 1.0
"""


def call(text, row=0, **changes):
    fields = {
        "name": f"train.parquet:{row}, sample 0",
        "data_source": "lab",
        "solution_str": text,
        "ground_truth": ["truth"],
        "extra_info": {"row": row},
        "token_ids": (5, 6, 7),
        "ended": True,
    }
    return RewardCall(**(fields | changes))


@pytest.fixture
def rewards(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def opened(rewards):
    """Open pools of functions in that file, and close them at the end."""
    with contextlib.ExitStack() as stack:

        def open_pool(function="fate", timeout_s=30.0, num_processes=1, log=None, parameters=None, **limits):
            work = Work(f"{rewards}:{function}", parameters or {}, timeout_s, **limits)
            pool = Pool(work, num_processes=num_processes, log=log)
            stack.enter_context(contextlib.closing(pool)).load()
            return pool

        yield open_pool


def grade(pool, texts):
    """Return what became of a call for each text; None for one that was not made any more."""
    futures = pool.submit([call(text, row) for row, text in enumerate(texts)])
    return [outcome_of(future) for future in futures]


def outcome_of(future):
    # `concurrent.futures.wait` is not told of a call that is cancelled before it began; `result` is.
    try:
        return future.result(60)
    except CancelledError:
        return None


def score(number, **extras):
    return Scores((0.0, 0.0, number), extras)


def is_alive(pid):
    """Whether there is such a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid:.0f}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


FATES = [
    ("exits", "crashed", "the process of the reward function ended with status 0, as by os._exit", ""),
    ("crashes", "crashed", "signal 11, Segmentation fault", "in crash\n"),
    ("killed", "crashed", "was ended by signal 9, Killed, perhaps because memory ran out", ""),
    ("sys.exit", "raised", "the reward function raised SystemExit: 0", "in <lambda>"),
    ("interrupt", "raised", "the reward function raised KeyboardInterrupt", "in raise_it"),
    ("cancelled", "raised", "raised asyncio.exceptions.CancelledError", "in raise_it"),
    ("writes to all", "crashed", "the process of the reward function ", ""),
    ("answers itself", "crashed", "the process of the reward function gave no answer", ""),
    ("unfit", "malformed", "the score is object, expected a number", ""),
]


def test_whatever_a_function_does_is_a_failure_of_its_rollout_and_of_no_other(opened):
    texts = [text for fate in FATES for text in (fate[0], "good")]
    outcomes = grade(opened(), texts)
    assert outcomes[1::2] == [score(1.0)] * len(FATES)
    for (text, kind, reason, frame), failure in zip(FATES, outcomes[::2], strict=True):
        assert failure.kind == kind, text
        assert reason in failure.reason
        assert frame in failure.traceback
        assert bool(frame) == bool(failure.traceback)
        assert "rallypoint/environments" not in failure.traceback


@pytest.mark.parametrize(("text", "frame"), [("hangs", 're.match(PATTERN, "a" * 40 + "b")'), ("stops", "")])
def test_a_call_that_hangs_is_ended_at_its_deadline_and_says_where_it_was(opened, text, frame):
    first, failure, last = grade(opened(timeout_s=1), ["good", text, "good"])
    assert (first, last) == (score(1.0), score(1.0))
    assert (failure.kind, failure.reason) == ("timeout", "the reward function took longer than reward.timeout_s=1 s")
    assert frame in failure.traceback


def test_an_async_function_is_awaited_on_one_loop_and_cancelled_at_its_deadline(opened):
    pool = opened("waits", timeout_s=1)
    first, late, raised, second, blocked = grade(pool, ["good", "hangs", "late", "good", "blocks"])
    assert first == second
    assert first.token_scores == (0.0, 0.0, 1.0)
    assert (late.kind, raised.kind, blocked.kind) == ("timeout", "raised", "timeout")
    assert "await asyncio.sleep(600)" in late.traceback
    assert "time.sleep(600)" in blocked.traceback


def test_an_async_function_may_raise_anything_and_is_asked_again(opened):
    *failures, good = grade(opened("waits"), ["interrupt", "sys.exit", "cancelled", "good"])
    assert [failure.kind for failure in failures] == ["raised"] * 3
    assert good.token_scores == (0.0, 0.0, 1.0)


def test_of_thirty_calls_three_that_hang_three_that_exit_and_three_that_raise_leave_the_others_right(opened):
    texts = [{0: "hangs", 1: "exits", 2: "sys.exit"}.get(row % 10, "good") for row in range(30)]
    outcomes = grade(opened(num_processes=4, timeout_s=2.0), texts)
    kinds = [each.kind if isinstance(each, Failure) else each for each in outcomes]
    expected = {"hangs": "timeout", "exits": "crashed", "sys.exit": "raised", "good": score(1.0)}
    assert kinds == [expected[text] for text in texts]


def test_the_processes_share_the_work_and_outcomes_keep_the_order_of_the_calls(opened):
    texts = ["numpy", "good", "unfit", "pid"] * 16
    outcomes = grade(opened(num_processes=3), texts)
    assert outcomes[0::4] == [score(0.5)] * 16
    assert outcomes[1::4] == [score(1.0)] * 16
    assert all(isinstance(outcome, Failure) for outcome in outcomes[2::4])
    assert 1 <= len({outcome.extras["pid"] for outcome in outcomes[3::4]}) <= 3


def test_a_function_cannot_change_the_data_set(opened):
    pool, truth = opened("remembers"), [5]
    for _ in range(2):
        assert pool.submit([call("", ground_truth=truth, extra_info={"a": 2})])[0].result(60) == score(2.0, sum=2.0)
    assert truth == [5]


def test_a_fork_that_comes_back_from_the_function_does_not_answer_in_its_place(opened):
    texts = ["forks", "good", "fork ends", "good", "forks", "pid"]
    assert [outcome.token_scores[-1] for outcome in grade(opened(), texts)] == [1.0] * 6


def test_what_a_function_forked_ends_with_its_process(opened):
    pool = opened(timeout_s=1)
    (outcome,) = grade(pool, ["sleeper"])
    assert is_alive(outcome.extras["sleeper"])
    grade(pool, ["hangs"])
    wait_until(lambda: not is_alive(outcome.extras["sleeper"]))
    (outcome,) = grade(pool, ["sleeper"])
    pool.close()
    wait_until(lambda: not is_alive(outcome.extras["sleeper"]))


def test_a_function_that_closes_its_connection_costs_its_own_rollout_only(opened):
    failure, good = grade(opened(), ["closes", "good"])
    assert (failure.kind, good) == ("crashed", score(1.0))


def test_closing_from_another_thread_ends_the_calls_under_way(opened, tmp_path):
    pool, outcomes = opened("writes"), []
    waiting = threading.Thread(target=lambda: outcomes.extend(grade(pool, [str(tmp_path / "begun"), "never"])))
    waiting.start()
    wait_until((tmp_path / "begun").exists)
    pool.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert outcomes[1] is None


def test_a_call_that_takes_long_is_named_again_and_again(opened):
    pool, warnings = opened(timeout_s=0.3), []
    futures = pool.submit([call(text, row) for row, text in enumerate(["good", "hangs"])])
    while wait(futures, pool.complain(warnings.append, 0.02)).not_done:
        pass
    assert len(warnings) >= 3
    assert set(warnings) <= {
        f"the reward function has been busy with train.parquet:1, sample 0 for {seconds} s" for seconds in range(60)
    } | {"the reward function has been busy with train.parquet:0, sample 0 for 0 s"}


def test_what_a_function_prints_is_kept_in_the_log(opened, tmp_path):
    grade(opened(log=tmp_path / "reward.log"), ["prints", "prints"])
    assert (tmp_path / "reward.log").read_text() == "hello\nhello\n"


def test_a_process_holds_no_descriptor_of_the_driver(opened, tmp_path):
    with (tmp_path / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        (outcome,) = grade(opened(), ["pid"])
        opened_files = {os.readlink(path) for path in Path(f"/proc/{outcome.extras['pid']:.0f}/fd").iterdir()}
    assert str(tmp_path / ".lock") not in opened_files
    others = [name for name in opened_files if not re.match(r"/dev/null|socket:|pipe:|/dev/pts|.*deleted\)", name)]
    assert len([name for name in opened_files if name.startswith("socket:")]) <= 2  # its own, and perhaps stderr
    assert len(others) <= 1  # standard error, where a test's goes to a file


DRIVER = """
import sys
from concurrent.futures import wait
from test_pool import call
from rallypoint.environments.pool import Pool
from rallypoint.environments.worker import Work
pool = Pool(Work(sys.argv[1], {}, 600), num_processes=2)
pool.load()
wait(pool.submit([call(sys.argv[2]), call(sys.argv[3])]))
"""


def test_busy_and_idle_processes_end_with_a_driver_that_is_killed(rewards, tmp_path):
    begun = [tmp_path / "first", tmp_path / "second"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, f"{rewards}:writes", *map(str, begun)], env=environment)
    wait_until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in begun))
    pids = [int(path.read_text()) for path in begun]
    assert all(map(is_alive, pids))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not any(map(is_alive, pids)))


IMPORTS = [
    ("import no_such_module", "raised while it was imported"),
    ("import sys; sys.exit(0)", "SystemExit: 0"),
    ("raise KeyboardInterrupt", "raised while it was imported"),
    ("import os; os._exit(0)", "was not imported: its process ended with status 0, as by os._exit"),
    ("x = 1", "has no function 'f'"),
]


@pytest.mark.parametrize(("text", "problem"), IMPORTS)
def test_a_file_that_cannot_be_imported_is_a_problem_and_harms_nobody(tmp_path, text, problem):
    (tmp_path / "rewards.py").write_text(text)
    assert problem in probe_rewards(RewardConfig(function=f"{tmp_path}/rewards.py:f"), RolloutConfig())


def test_probing_finds_nothing_wrong_with_what_can_be_used(rewards):
    assert probe_rewards(RewardConfig(function="digits"), RolloutConfig()) is None
    assert probe_rewards(RewardConfig(function=f"{rewards}:waits"), RolloutConfig()) is None
    assert "did you mean 'digits'?" in probe_rewards(RewardConfig(function="digit"), RolloutConfig())


PARTED = [
    ({"window": 3}, "with rollout.window=3 the prompts .*; set rollout.window=1, or"),
    ({"over_sampling": 8}, "with rollout.over_sampling=8 the prompts .*; leave out rollout.over_sampling, or"),
    ({"dynamic_sampling": 2}, "with rollout.dynamic_sampling=2 the prompts .*; leave out rollout.dynamic_sampling,"),
]


@pytest.mark.parametrize(("keys", "problem"), PARTED)
def test_a_function_of_a_whole_step_is_refused_where_what_is_scored_at_once_is_no_step(rewards, keys, problem):
    whole, group = (RewardConfig(function=f"{rewards}:{name}") for name in ("of_batch", "of_group"))
    rollout = RolloutConfig(max_staleness=1, **keys)
    assert re.search(problem, probe_rewards(whole, rollout))
    assert probe_rewards(whole, RolloutConfig(max_staleness=1, dynamic_sampling=0)) is None
    assert probe_rewards(group, rollout) is None


def test_a_file_that_changed_for_the_worse_stops_the_scoring_when_it_is_needed_again(opened, rewards):
    pool = opened()
    rewards.write_text("import no_such_module")
    with pytest.raises(RewardError, match="no_such_module"):
        grade(pool, ["good", "exits", "good"])


def test_shipped_functions_stay_in_this_process():
    grader = open_grader(RewardConfig(function="digits"))
    assert isinstance(grader, Inline)
    outcome = grader.submit([call("01", ground_truth="01")])[0].result(0)
    assert outcome == Scores((0.5, 0.5, 0.0), {})


@pytest.mark.parametrize("outcome", [Scores((0.1, 1 / 3, -1e-300), {"a": 0.1}), Failure("raised", "x\ud800", "\n")])
def test_an_outcome_crosses_the_connection_as_it_is(outcome):
    assert Work("rewards.py:reward").read(dataclasses.asdict(outcome)) == outcome


def groups_of(*sizes):
    return [group for group, size in enumerate(sizes) for _ in range(size)]


def test_a_function_of_groups_is_called_once_a_group_and_fails_for_one_response_or_all_of_its_group(opened):
    texts = ["a", "bad", "b", "fewer", "c", "hangs", "d"]
    pool = opened("of_group", timeout_s=1.0)
    calls = [call(text, group=group) for text, group in zip(texts, groups_of(3, 2, 2), strict=True)]
    calls[2] = call("b", group=0, ended=False)
    found = [outcome_of(future) for future in pool.submit(calls)]
    assert found[0] == score(1.0, size=3.0, stops=1.0)
    assert found[2] == score(1.0, size=3.0, stops=0.0)
    kinds = ["not_applicable", "malformed", "malformed", "timeout", "timeout"]
    assert [failure.kind for failure in (found[1], *found[3:])] == kinds
    assert found[3].reason == "expected a list of 2 results, one for each response, found 1"


def test_a_function_of_a_batch_is_given_all_of_it_with_the_group_of_each(opened):
    pool = opened("of_batch")
    assert pool.wants.scope == "batch"
    calls = [call("a", group=group) for group in (7, 7, 9)]
    assert [outcome_of(future) for future in pool.submit(calls)] == [score(float(g), size=3.0) for g in (7, 7, 9)]


def test_a_function_is_given_what_it_names(opened):
    pool = opened("by_more")
    assert pool.wants.more == ("tokens", "logprobs", "messages", "finish_reason")
    more = {"tokens": ("a", "bc", ""), "logprobs": (-0.5, -0.25, 0.0), "messages": ({"role": "user", "content": "1"},)}
    (future,) = pool.submit([call("x", **more)])
    assert outcome_of(future) == score(-0.75, chars=3.0, turns=1.0, stops=1.0)


def test_options_are_arguments_by_name(opened):
    assert grade(opened("with_parameters", parameters={"right": 2.0, "wrong": -1}), ["good", "x"]) == [
        score(2.0),
        score(-1),
    ]


def test_a_process_is_replaced_after_so_many_calls_and_has_so_much_memory(opened):
    outcomes = grade(opened("leaks", max_calls=2, max_memory_gib=0.2), ["a", "b", "c", "d", "much", "e"])
    assert [one.extras["calls"] for one in outcomes[:4]] == [1, 2, 1, 2]
    assert (outcomes[4].kind, "MemoryError" in outcomes[4].reason) == ("raised", True)
    assert outcomes[5] == score(1.0, calls=1.0)


def several(rewards, **functions):
    """Open several functions by their names, each with a weight."""
    items = [{"name": name, "function": f"{rewards}:{f}", "weight": w} for name, (f, w) in functions.items()]
    return contextlib.closing(open_grader(RewardConfig(functions=items, num_processes=1)))


def test_several_functions_make_one_score_each_with_its_own_part(rewards):
    with several(rewards, first=("fate", 0.5), second=("leaks", -2)) as grader:
        grader.load()
        assert isinstance(grader, Several)
        (future,) = grader.submit([call("good")])
        assert outcome_of(future) == Scores((0.0, 0.0, -1.5), {"second/calls": 1.0}, {"first": 1.0, "second": 1.0})


def test_a_response_that_one_of_several_functions_fails_on_has_no_score(rewards):
    with several(rewards, first=("fate", 1), second=("leaks", 1)) as grader:
        grader.load()
        good, bad = (outcome_of(future) for future in grader.submit([call("good"), call("exits")]))
        assert good.parts == {"first": 1.0, "second": 1.0}
        assert (bad.kind, bad.reason.startswith("first: the process")) == ("crashed", True)


def test_with_a_function_of_a_batch_among_several_all_wait_for_the_step(rewards):
    with several(rewards, one=("fate", 1), group=("of_group", 1), batch=("of_batch", 1)) as grader:
        grader.load()
        assert grader.wants.scope == "batch"
        calls = [call("good", group=group) for group in groups_of(2, 1)]
        found = [outcome_of(future) for future in grader.submit(calls)]
        assert [one.parts for one in found] == [{"one": 1.0, "group": 1.0, "batch": g} for g in (0.0, 0.0, 1.0)]
        assert [one.extras["group/size"] for one in found] == [2, 2, 1]


def test_what_waits_for_several_functions_is_cancelled_with_them(rewards):
    with several(rewards, first=("waits", 1), second=("fate", 1)) as grader:
        grader.load()
        _, waiting = grader.submit([call("hangs"), call("good")])
        assert waiting.cancel()
        assert outcome_of(waiting) is None


def widths(efforts, least=2, most=128, **limits):
    """Return how many processes there may be after each call, of so many seconds and so many computed."""
    width, found = Width(least, most, **limits), []
    for took_s, computed_s, *num_bytes in efforts:
        width.note(Effort(took_s, computed_s, *num_bytes))
        found.append(width.now)
    return found


WAITS, COMPUTES = (0.2, 0.002), (0.2, 0.19)


def test_processes_double_whenever_as_many_calls_mostly_waited():
    assert widths([WAITS] * 14) == [2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16]
    assert widths([WAITS] * 300)[-1] == 128
    assert widths([WAITS] * 300, least=5, most=5)[-1] == 5  # reward.num_processes


@pytest.mark.parametrize("efforts", [[COMPUTES], [(0.2, 0.06)], [(0.002, 0.0)], [WAITS, COMPUTES]])
def test_processes_stay_one_a_core_for_calls_that_compute_or_take_no_time(efforts):
    assert set(widths(efforts * 100)) == {2}


def test_processes_are_one_a_core_again_once_calls_compute():
    assert widths([WAITS] * 6 + [COMPUTES] * 8)[-2:] == [8, 2]


def test_processes_that_wait_are_no_more_than_cores_and_memory_bear():
    assert widths([(0.2, 0.02)] * 300)[-1] == 20  # 2 cores, a tenth of which each call computes
    assert widths([(*WAITS, 10)] * 300, num_bytes=330)[-1] == 33


@pytest.fixture
def on_one_core(monkeypatch):
    monkeypatch.setattr("rallypoint.cluster.capacity.num_cores", lambda: 1)


def test_calls_that_wait_are_given_more_processes_than_cores(opened, on_one_core, tmp_path):
    pool = opened("meets", num_processes=None)
    wait_until(lambda: grade(pool, ["waits"] * 8) == [score(1.0)] * 8 and pool._width.now >= 4)
    (tmp_path / "met").mkdir()
    assert grade(pool, [str(tmp_path / "met")] * 4) == [score(1.0)] * 4  # each returns once all four have begun


@pytest.mark.parametrize("function", ["computes", "runs_programs"])
def test_calls_that_compute_here_or_in_a_sandbox_stay_one_a_core(opened, on_one_core, function):
    pool = opened(function, num_processes=None)
    assert grade(pool, ["a"] * 5) == [score(1.0)] * 5
    assert pool._width.now == 1
