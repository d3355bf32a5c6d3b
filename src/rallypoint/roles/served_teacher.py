"""A teacher behind an HTTP endpoint: rows of token ids go out, logprobs of their tokens come back.

Owns: what is asked, and what an answer means. Must not know: losses, or whose rows these are. Two kinds of endpoint:

    http://host:8000/v1           vLLM's completions; one token is sampled and thrown away
        {"prompt": [1, 2, 7], "prompt_logprobs": K, "max_tokens": 1}
        {"choices": [{"prompt_logprobs": [null, {"2": {"logprob": -0.1}, ...}, {"7": {"logprob": -1.2}, ...}]}]}

    http://host:30000/generate    SGLang's own
        {"input_ids": [1, 2, 7], "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": K, ...}
        {"meta_info": {"input_token_logprobs": [[null, 1, null], [-0.1, 2, null], [-1.2, 7, null]],
                       "input_top_logprobs": [null, [[-0.1, 2, null], ...], [[-0.7, 9, null], ...]]}}

Both give the model's own logprobs, at temperature 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from rallypoint.config.sections.learning import ServedTeacherConfig
from rallypoint.environments.deadline import DaemonThreads
from rallypoint.environments.shipped.judge import JudgeError, ModelEndpoint
from rallypoint.errors import TeacherError
from rallypoint.types import Sequences

Place: TypeAlias = "tuple[float, list[tuple[int, float]]]"
"""What is said of one token: its logprob, and the likeliest tokens in its place with theirs."""

_MOST_MIB = 512
"""Size of an answer: the 20 likeliest tokens of each of 100,000 places take about 150."""
_LOWEST = -100.0
"""Logprob that a token counts with at least: an endpoint may say -inf, of which no loss is finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedTeacher:
    """One endpoint."""

    endpoint: ModelEndpoint
    model: str | None
    """As the endpoint calls it; None for SGLang's, which has one."""
    threads: DaemonThreads
    """One for each request at a time; a server that is silent does not hold up the end of the program."""

    @classmethod
    def open(cls, url: str, settings: ServedTeacherConfig) -> ServedTeacher:
        """Find out which model answers.

        Raises:
            TeacherError: nothing answers there, or several models do; or the key is not set.
        """
        if settings.key is not None and not os.environ.get(settings.key):
            raise TeacherError(f"the environment variable {settings.key} of teacher.served.key is not set")
        key = os.environ[settings.key] if settings.key else None
        threads = DaemonThreads(settings.concurrency, "teacher")

        def pause(seconds: float) -> None:
            if not threads.pause(seconds):
                raise TeacherError(f"{url}: the run has ended, and nobody asks again")

        endpoint = ModelEndpoint(url, key, settings.retries, settings.timeout_s, sleep=pause, most_mib=_MOST_MIB)
        model = settings.model
        if url.rstrip("/").endswith("/generate"):
            model = None
        elif model is None:
            model = _only_model(url, endpoint)
        return cls(endpoint, model, threads)

    def close(self) -> None:
        """Ask nothing any more; what is under way goes on in threads that nobody waits for."""
        self.threads.close()

    async def judge(self, batch: Sequences, top_k: int | None) -> Tensor:
        """Return what it says of every trained token: [T], or [T, 1 + 2K] as `likeliest_tokens`; 0 of others.

        Raises:
            TeacherError: it gave no answer in all attempts, or one that is not of these tokens.
        """
        rows = [
            batch.tokens[start:stop].tolist() for start, stop in batch.by_sequence().offsets.unfold(0, 2, 1).tolist()
        ]
        work = [functools.partial(self._ask, row, top_k or 0) for row in rows]
        asked = [asyncio.wrap_future(self.threads.submit(one)) for one in work]
        try:
            said = [place for row in await asyncio.gather(*asked) for place in row]
        finally:
            for one in asked:
                one.cancel()
        found = torch.zeros(batch.num_tokens, 1 if top_k is None else 1 + 2 * top_k)
        asked_about = [said[at] for at in batch.loss_mask.nonzero().flatten().tolist()]
        numbers = [[own, *(logprob for _, logprob in top), *(token for token, _ in top)] for own, top in asked_about]
        if numbers:
            found[batch.loss_mask] = torch.tensor(numbers)
        return found[:, 0] if top_k is None else found

    def _ask(self, ids: list[int], top_k: int) -> list[Place]:
        """Return what is said of each token of a row; nothing is said of the first."""
        if self.model is None:
            path, request, read = "", _for_sglang(ids, top_k), _from_sglang
        else:
            path, request, read = "/completions", {"model": self.model, **_for_vllm(ids, top_k)}, _from_vllm
        try:
            said = self.endpoint.post(path, json.dumps(request), read)
        except JudgeError as error:
            raise TeacherError(f"the teacher gave no answer: {error}") from error
        if len(said) != len(ids):
            raise TeacherError(
                f"{self.endpoint.url}: expected logprobs of the {len(ids)} tokens of a row, found {len(said)}; "
                "does the endpoint add tokens of its own?"
            )
        return [(0.0, []), *(self._place(*one, top_k) for one in zip(ids[1:], said[1:], strict=True))]

    def _place(self, token: int, named: Mapping[int, float], top_k: int) -> Place:
        if token not in named or len(named) < top_k:
            what = f"the logprob of token {token}" if token not in named else f"the {top_k} likeliest tokens"
            raise TeacherError(
                f"{self.endpoint.url}: expected {what}, found {len(named)} tokens: {sorted(named)[:8]}; its model may "
                "have another tokenizer, or the endpoint a bound on their number (vLLM: --max-logprobs)"
            )
        known = {one: max(logprob, _LOWEST) for one, logprob in named.items()}
        return known[token], sorted(known.items(), key=lambda one: -one[1])[:top_k]


def _only_model(url: str, endpoint: ModelEndpoint) -> str:
    try:
        names = endpoint.post("/models", None, lambda answer: [str(one["id"]) for one in answer["data"]])
    except JudgeError as error:
        raise TeacherError(f"no teacher answers: {error}") from error
    if len(names) != 1:
        raise TeacherError(f"{url} serves {', '.join(names) or 'no model'}; set teacher.served.model to one")
    return names[0]


def _for_vllm(ids: list[int], top_k: int) -> dict[str, Any]:
    return {"prompt": ids, "prompt_logprobs": top_k, "max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}


def _from_vllm(answer: Any) -> list[dict[int, float]]:
    """Return logprobs by id of each place: of the token there, and of the likeliest."""
    places = cast("list[dict[str, dict[str, Any]] | None] | None", answer["choices"][0].get("prompt_logprobs"))
    if places is None:
        raise TeacherError("expected `prompt_logprobs` in the answer, as vLLM's server gives them, found none")
    return [{int(token): float(one["logprob"]) for token, one in (place or {}).items()} for place in places]


def _for_sglang(ids: list[int], top_k: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 0, "temperature": 0}
    wants = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
    return {"input_ids": ids, "sampling_params": sampling, **wants}


def _from_sglang(answer: Any) -> list[dict[int, float]]:
    """Return the logprobs of tokens at each position, by id."""
    own = cast("list[list[Any]]", answer["meta_info"]["input_token_logprobs"])
    tops = cast("list[list[list[Any]] | None]", answer["meta_info"].get("input_top_logprobs") or [None] * len(own))
    return [
        {int(one[1]): float(one[0]) for one in [*(top or []), mine] if one[0] is not None}
        for mine, top in zip(own, tops, strict=True)
    ]
