"""A judge behind a real HTTP server that speaks OpenAI's API, busy and broken in turn."""

import contextlib
import threading
from concurrent.futures import CancelledError

import pytest
from judge_server import judging

from rallypoint.config import RewardConfig
from rallypoint.environments.grader import open_grader
from rallypoint.environments.outcome import DeadlineError, Failure, RewardCall, Scores
from rallypoint.environments.reward import check_reward_spec
from rallypoint.environments.shipped.judge import Cache, JudgeError, ModelEndpoint, Rate, read_number, read_verdict
from rallypoint.errors import RewardError


@pytest.fixture
def server():
    with judging() as server:
        yield server


def call(text, question="2 + 2?"):
    return RewardCall(
        name="train.jsonl:1, sample 0",
        data_source="lab",
        solution_str=text,
        ground_truth="4",
        extra_info={},
        token_ids=(1,),
        ended=True,
        messages=({"role": "user", "content": question},),
    )


def score(server, texts, deadline_s=60.0, **parameters):
    """Score responses through the grader of a run."""
    parameters = {"url": server.url, "model": "m", "retries": 0, **parameters}
    settings = RewardConfig(function="judge", timeout_s=deadline_s, parameters=parameters)
    with contextlib.closing(open_grader(settings)) as grader:
        grader.load()
        return [future.result(60) for future in grader.submit([call(text) for text in texts])]


def test_a_judge_is_asked_by_its_template_and_its_number_becomes_the_score(server):
    found = score(server, ["reply 7", "reply I say 10."])
    assert found == [Scores((0.7,), {}), Scores((1.0,), {})]
    path, authorization, asked = server.asked[0]
    assert (path, authorization, asked["model"], asked["temperature"]) == ("/v1/chat/completions", None, "m", 0.0)
    assert "Question:\n2 + 2?\n\nRight answer:\n4\n\nAnswer to be graded:\nreply " in asked["messages"][0]["content"]


def test_a_reply_without_a_score_is_a_failure_and_not_a_zero(server):
    found = score(server, ["reply fine", "reply 70"])
    assert all(isinstance(one, Failure) and one.kind == "raised" for one in found)
    assert "the judge's reply has no number from 0 to 10: 'fine'" in found[0].reason


def test_verdicts_have_numbers(server):
    parameters = {"scores": {"yes": 1, "no": -1, "not sure": 0}, "template": "{response}"}
    texts = ["reply Yes!", "reply yes or no: no", "reply NOT SURE", "reply eyes"]
    found = score(server, texts, **parameters)
    assert [sum(one.token_scores) for one in found[:3]] == [1.0, -1.0, 0.0]
    assert "has none of yes, no, not sure" in found[3].reason


def test_a_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    score(server, ["reply 1"], key="JUDGE_KEY")
    assert server.asked[0][1] == "Bearer secret"
    (found,) = score(server, ["reply 1"], key="NO_SUCH_KEY")
    assert "the environment variable NO_SUCH_KEY is not set" in found.reason


def test_requests_are_made_at_once_up_to_the_concurrency(server):
    server.together = threading.Barrier(8)
    assert score(server, ["reply 5"] * 8, concurrency=8) == [Scores((0.5,), {})] * 8


def test_replies_are_kept_on_disk(server, tmp_path):
    cache = str(tmp_path / "new" / "judge.sqlite")
    for _ in range(2):
        assert score(server, ["reply 1", "reply 2"], cache=cache, concurrency=1)[1] == Scores((0.2,), {})
    again = ModelEndpoint(server.url, None, 0, 60.0, cache=Cache(cache))  # as after a restart
    assert again.ask(server.asked[0][2], str) == "1"
    assert len(server.asked) == 2


def test_a_reply_without_a_score_is_not_kept_and_asked_for_again(server, tmp_path):
    cache = str(tmp_path / "judge.sqlite")
    (failed,) = score(server, ["reply fine"], cache=cache)
    assert isinstance(failed, Failure)
    server.replies = ["", "8"]
    (failed,) = score(server, ["reply fine"], cache=cache)
    assert isinstance(failed, Failure)
    assert score(server, ["reply fine"], cache=cache) == [Scores((0.8,), {})]
    assert len(server.asked) == 3


def test_a_kept_reply_that_has_no_score_now_is_asked_for_again(server, tmp_path):
    cache = str(tmp_path / "judge.sqlite")
    assert score(server, ["reply 7"], cache=cache) == [Scores((0.7,), {})]
    server.replies = ["yes"]
    parameters = {"cache": cache, "scores": {"yes": 1}}
    assert score(server, ["reply 7"], **parameters) == score(server, ["reply 7"], **parameters) == [Scores((1.0,), {})]
    assert len(server.asked) == 2


@pytest.mark.parametrize("part", ["header", "body"])
def test_an_endpoint_that_sends_a_byte_now_and_then_is_waited_for_until_the_deadline(server, part):
    parameters = {"template": "{response}", "timeout_s": 0.2}
    (found,) = score(server, [f"drip a {part}"], deadline_s=0.2, **parameters)
    assert isinstance(found, Failure)
    assert (found.kind, found.traceback) == ("timeout", f"{server.url}: no whole answer within 0.2 s, 1 times")
    assert "longer than reward.timeout_s=0.2 s" in found.reason
    failed = score(server, [f"drip a {part}"], deadline_s=60.0, **parameters)[0]
    assert failed.reason.endswith(f"{server.url}: no whole answer within 0.2 s, 1 times")


def test_all_attempts_and_pauses_together_have_one_deadline(server):
    server.refusals, slept = [(503, {}), (429, {"Retry-After": "40"}), (429, {"Retry-After": "40"})], []
    bounded = ModelEndpoint(server.url, None, 9, 60.0, sleep=slept.append, deadline_s=60.0)
    with pytest.raises(DeadlineError) as error:
        bounded.ask({"messages": [{"content": "reply 1"}]}, str)
    assert (slept, error.value.timeout_s) == ([1.0, 40.0], 60.0)
    assert error.value.where.endswith('status 429: {"error": "busy"}, 3 times')


def test_an_attempt_may_not_take_longer_than_all_of_them():
    settings = RewardConfig(function="judge", parameters={"url": "u", "model": "m", "timeout_s": 90})
    with pytest.raises(RewardError, match=r"set reward\.timeout_s=90 or more"):
        open_grader(settings)


def endpoint(server, retries, slept):
    return ModelEndpoint(server.url, None, retries, 60.0, sleep=slept.append)


def test_a_busy_endpoint_is_asked_again_after_a_pause_and_as_long_as_it_says(server):
    server.refusals = [(503, {}), (429, {"Retry-After": "7"}), (500, {})]
    slept = []
    assert endpoint(server, 3, slept).ask({"messages": [{"content": "reply ok"}]}, str) == "ok"
    assert slept == [1.0, 7.0, 4.0]


def test_an_endpoint_that_stays_busy_or_refuses_is_an_error_with_its_words(server):
    server.refusals = [(503, {})] * 3
    with pytest.raises(JudgeError, match=r'status 503: {"error": "busy"}, 3 times'):
        endpoint(server, 2, []).ask({"messages": [{"content": "x"}]}, str)
    server.refusals, slept = [(401, {})], []
    with pytest.raises(JudgeError, match="status 401"):
        endpoint(server, 2, slept).ask({"messages": [{"content": "x"}]}, str)
    assert slept == []


def test_an_endpoint_that_is_not_there_is_an_error(server):
    gone = ModelEndpoint("http://127.0.0.1:9/v1", None, 1, 5.0, sleep=lambda _: None)
    with pytest.raises(JudgeError, match=r"http://127.0.0.1:9/v1: URLError: .*refused.*, 2 times"):
        gone.ask({"messages": [{"content": "x"}]}, str)


def test_requests_are_spaced_by_the_rate():
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    rate = Rate(30, lambda: now[0], sleep)
    for _ in range(3):
        rate.wait()
    now[0] += 60
    rate.wait()
    assert slept == [2.0, 2.0]


def test_calls_that_wait_are_cancelled_when_a_judge_is_closed(server):
    server.together = threading.Barrier(2)
    settings = RewardConfig(function="judge", parameters={"url": server.url, "model": "m", "concurrency": 1})
    grader = open_grader(settings)
    grader.load()
    first, second = grader.submit([call("reply 1"), call("reply 2")])
    grader.close()
    server.together.abort()
    with contextlib.suppress(CancelledError):  # it may not have begun
        first.exception(60)
    assert second.cancelled() or second.cancel()


def test_a_number_outside_of_its_range_is_no_score():
    for reply in ("11", "-1", "", "nan"):
        with pytest.raises(JudgeError):
            read_number(reply, 0, 10)
    with pytest.raises(JudgeError):
        read_verdict("", {"a": 1})


def test_what_a_judge_needs_is_said_before_anything_starts():
    assert "needs the parameter 'url'" in check_reward_spec("judge", {"model": "m"})
    assert "did you mean 'retries'?" in check_reward_spec("judge", {"url": "u", "model": "m", "retry": 1})
