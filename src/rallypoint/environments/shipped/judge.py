"""A reward by a language model behind an endpoint that speaks OpenAI's API: a template, a reply, a number.

Owns: what is asked, how often, and what a reply means. It runs in threads of one process, which share the limit of the
rate and the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import json
import math
import os
import re
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rallypoint.environments.deadline import within
from rallypoint.environments.exchange import MOST_MIB, UnusableAnswerError, ask
from rallypoint.environments.outcome import DeadlineError

AnswerT = TypeVar("AnswerT")

TEMPLATE = """Grade the answer to a question.

Question:
{question}

Right answer:
{truth}

Answer to be graded:
{response}

Reply with one whole number from 0 (wrong) to 10 (entirely right), and nothing else."""


class JudgeError(ValueError):
    """The endpoint gave no reply, or one without a score."""


def judge(
    data_source: str,  # noqa: ARG001 - every reward is given the same four
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    messages: Sequence[Mapping[str, str]],
    url: str,
    model: str,
    template: str = TEMPLATE,
    scores: Mapping[str, float] | None = None,
    least: float = 0.0,
    most: float = 10.0,
    temperature: float = 0.0,
    max_tokens: int = 512,
    key: str | None = None,
    concurrency: int = 16,  # noqa: ARG001 - read by the pool, which has so many threads
    per_minute: float | None = None,
    retries: int = 4,
    timeout_s: float = 60.0,
    deadline_s: float = math.inf,
    cache: str | None = None,
) -> float:
    """Return the score that a model gives a response.

    Args:
        data_source: ignored.
        solution_str: the response.
        ground_truth: the right answer.
        extra_info: ignored.
        messages: the prompt.
        url: up to and with `/v1`.
        model: as the endpoint calls it.
        template: what the judge is asked, with `{question}` (the prompt's last message), `{truth}` and `{response}`.
        scores: number of each verdict, such as {yes: 1, no: 0}; the last one in the reply counts. None: the reply has a
            number from `least` to `most`, the last one or that of `"score"` in an object, and becomes 0 to 1.
        least: number of the worst response.
        most: number of the best one.
        temperature: of the judge.
        max_tokens: of its reply.
        key: environment variable that holds the API key.
        concurrency: requests at once.
        per_minute: the most requests a minute.
        retries: after the first attempt, where the endpoint is busy or gone.
        timeout_s: of one attempt.
        deadline_s: of all attempts and pauses, without the waits of `per_minute`; a run gives `reward.timeout_s`.
        cache: SQLite file that keeps replies which have a score, for equal questions.

    Raises:
        JudgeError, DeadlineError: there is no reply after all attempts, or it has no score; or there is none in time.
    """
    endpoint = opened(url, key, per_minute, retries, timeout_s, deadline_s, cache)
    question = messages[-1]["content"] if messages else ""
    asked = fill(template, {"question": question, "truth": str(ground_truth), "response": solution_str})
    request = {"model": model, "messages": [{"role": "user", "content": asked}], "temperature": temperature}

    def read(reply: str) -> float:
        return read_verdict(reply, scores) if scores else (read_number(reply, least, most) - least) / (most - least)

    return endpoint.ask(request | {"max_tokens": max_tokens}, read)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Put texts in their places, in one pass: a response that contains a place's name changes nothing.

    >>> fill("{response}: {truth}", {"response": "{truth}", "truth": "7"})
    '{truth}: 7'
    """
    return re.sub(r"\{(question|truth|response)\}", lambda place: parts[place[1]], template)


def read_number(reply: str, least: float, most: float) -> float:
    """Return the last number of a reply, or that of `"score"` in an object.

    >>> read_number("I count 3 errors, so 4/10? No: 7.", 0, 10), read_number('{"score": 2.5, "of": 10}', 0, 10)
    (7.0, 2.5)
    """
    named = re.findall(r'"score"\s*:\s*(-?\d+(?:\.\d+)?)', reply)
    numbers = named or re.findall(r"-?\d+(?:\.\d+)?", reply[-2000:])
    if not numbers or not least <= float(numbers[-1]) <= most:
        raise JudgeError(f"the judge's reply has no number from {least:g} to {most:g}: {reply[-200:]!r}")
    return float(numbers[-1])


def read_verdict(reply: str, scores: Mapping[str, float]) -> float:
    """Return the number of the last verdict in a reply.

    >>> read_verdict("Is it right? Yes. No, wait: no.", {"yes": 1, "no": 0})
    0.0
    """
    words = {word.casefold(): number for word, number in scores.items()}
    longest_first = sorted(map(re.escape, words), key=len, reverse=True)
    found = re.findall(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", reply[-2000:].casefold())
    if not found:
        raise JudgeError(f"the judge's reply has none of {', '.join(scores)}: {reply[-200:]!r}")
    return float(words[found[-1]])


class Rate:
    """Spaces requests evenly."""

    def __init__(self, per_minute: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._gap, self._clock, self._sleep = 60.0 / per_minute, clock, sleep
        self._lock, self._next = threading.Lock(), 0.0

    def wait(self) -> None:
        """Return when the next request may be made."""
        with self._lock:
            now = self._clock()
            mine = max(now, self._next)
            self._next = mine + self._gap
        if mine > now:
            self._sleep(mine - now)


class Cache:
    """Replies by the digest of what was asked, in a file that outlives the run."""

    def __init__(self, path: str) -> None:
        Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = sqlite3.connect(Path(path).expanduser(), timeout=60.0, check_same_thread=False)
        with self._lock, self._file:
            self._file.execute("create table if not exists replies (question text primary key, reply text)")

    def get(self, question: str) -> str | None:
        """Return the reply to a question that was asked before."""
        with self._lock:
            found = self._file.execute("select reply from replies where question = ?", (question,)).fetchone()
        return None if found is None else found[0]

    def put(self, question: str, reply: str) -> None:
        """Keep a reply."""
        with self._lock, self._file:
            self._file.execute("insert or replace into replies values (?, ?)", (question, reply))


@dataclasses.dataclass(frozen=True)
class ModelEndpoint:
    """Where a model answers, and how patiently it is asked."""

    url: str
    api_key: str | None
    retries: int
    timeout_s: float
    """Seconds of one attempt, to the last byte of its answer."""
    rate: Rate | None = None
    cache: Cache | None = None
    sleep: Callable[[float], None] = time.sleep
    deadline_s: float = math.inf
    """Seconds of all attempts and the pauses between them."""
    most_mib: int = MOST_MIB
    """Size of an answer above which it is refused."""

    def ask(self, request: Mapping[str, object], read: Callable[[str], AnswerT]) -> AnswerT:
        """Return what can be read in the text of the reply; only a reply that could be read is kept.

        Raises:
            JudgeError: there is none after all attempts, or the request was refused; or what `read` raises.
            DeadlineError: there is none in time.
        """
        body = json.dumps(request, sort_keys=True)
        question = hashlib.sha256(f"{self.url} {body}".encode(errors="surrogatepass")).hexdigest()
        if self.cache is not None and (known := self.cache.get(question)) is not None:
            with contextlib.suppress(JudgeError):  # it was asked for another kind of score
                return read(known)
        reply = self.post(
            "/chat/completions", body, lambda answer: str(answer["choices"][0]["message"]["content"] or "")
        )
        found = read(reply)
        if self.cache is not None:
            self.cache.put(question, reply)
        return found

    def post(self, path: str, body: str | None, read: Callable[[Any], AnswerT]) -> AnswerT:
        """Return what can be read from the JSON that answers a request.

        Args:
            path: below the URL.
            body: JSON; None to get what is there.
            read: given the answer's JSON; where it raises KeyError and the like, the request is made again.

        Raises:
            JudgeError: there is no answer after all attempts, or the request was refused.
            DeadlineError: there is none in time.
        """
        problem, left_s = "", self.deadline_s
        for attempt in range(self.retries + 1):
            if self.rate is not None:
                self.rate.wait()
            began = time.monotonic()
            found, problem, pause_s = self._attempt(path, body, read, min(self.timeout_s, left_s))
            left_s -= time.monotonic() - began
            if found:
                return found[0]
            if pause_s is None:
                raise JudgeError(f"{self.url}: {problem}")
            problem = f"{problem}, {attempt + 1} times"
            if attempt < self.retries:
                pause_s = max(pause_s, min(2.0**attempt, 30.0))
                left_s -= pause_s
            if left_s <= 0:
                raise DeadlineError(self.deadline_s, f"{self.url}: {problem}")
            if attempt < self.retries:
                self.sleep(pause_s)
        raise JudgeError(f"{self.url}: {problem}")

    def _attempt(
        self, path: str, body: str | None, read: Callable[[Any], AnswerT], timeout_s: float
    ) -> tuple[list[AnswerT], str, float | None]:
        """Return the answer, or why there is none and the seconds to wait at least; None if trying again is no use."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else body.encode(errors="replace")
        asked = urllib.request.Request(f"{self.url.rstrip('/')}{path}", data, headers)
        try:  # a socket's timeout is that of one read: a server that sends a byte now and then would be read for ever
            return within(timeout_s, lambda: _exchange(asked, read, timeout_s, self.most_mib))
        except DeadlineError:
            return [], f"no whole answer within {timeout_s:.3g} s", 0.0
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            return [], f"{type(error).__name__}: {error}", 0.0


def _exchange(
    asked: urllib.request.Request, read: Callable[[Any], AnswerT], timeout_s: float, most_mib: int
) -> tuple[list[AnswerT], str, float | None]:
    """Return what `ModelEndpoint._attempt` does."""
    try:
        return [read(ask(asked, timeout_s, most_mib))], "", 0.0
    except UnusableAnswerError as error:
        return [], str(error), None
    except urllib.error.HTTPError as error:
        told = error.read(300).decode(errors="replace")
        after = error.headers.get("Retry-After", "0")
        may_pass = error.code in (408, 409, 425, 429) or error.code >= 500
        pause_s = min(float(after), 120.0) if after.replace(".", "", 1).isdigit() else 0.0
        return [], f"status {error.code}: {told}", pause_s if may_pass else None


@functools.cache
def opened(
    url: str,
    key: str | None,
    per_minute: float | None,
    retries: int,
    timeout_s: float,
    deadline_s: float,
    cache: str | None,
) -> ModelEndpoint:
    """Return an endpoint; the same one for all that ask it in this process.

    Raises:
        JudgeError: the environment variable of the key is not set.
    """
    if key is not None and not os.environ.get(key):
        raise JudgeError(f"the environment variable {key} is not set; it should hold the judge's API key")
    rate = Rate(per_minute, time.monotonic, time.sleep) if per_minute else None
    api_key, kept = os.environ[key] if key else None, Cache(cache) if cache else None
    return ModelEndpoint(url, api_key, retries, timeout_s, rate, kept, deadline_s=deadline_s)
