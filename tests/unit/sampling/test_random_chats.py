"""Random conversations with tools, in templates of eleven families: a trained token is a sampled one in its context."""

import functools
import json
from random import Random
from typing import Any, cast

import pytest
from rolled_out import rolled_out
from tool_templates import FAMILIES, make_tool_tokenizer

from rallypoint.data import Example, Message
from rallypoint.data.prompt_sets import Prompt
from rallypoint.environments.tools import Tools
from rallypoint.errors import EpisodeError
from rallypoint.generation import Output, SamplingParams
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.types import ROOT, assemble

CALLS = {
    "llama3.1": ('{{"name": "add", "parameters": {}}}',),
    "mistral": ('[TOOL_CALLS][{{"name": "add", "arguments": {}}}]', "[TOOL_CALLS]add[ARGS]{}"),
    "gpt-oss": ("<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}",),
    "gemma4": ("<|tool_call>call:add{}<tool_call|>",),
    "deepseek": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>",),
    "deepseek3.1": ("<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",),
    "kimi-k2": ("<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>",),
}
FEW = range(12)
"""Seeds of conversations; `make test-slow` has a thousand."""
REASONING = "hmhm7"
TAGGED = ('<tool_call>{{"name": "add", "arguments": {}}}</tool_call>',)
XML = "<tool_call><function=add><parameter=a>1</parameter><parameter=b>{}</parameter></function></tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Policy:
    """A mailbox that answers with text, reasoning, calls in any spelling, or whatever tokens there are."""

    def __init__(self, family: str, random: Random) -> None:
        self._family, self._random = family, random
        self.tokenizer, self.stops = make_tool_tokenizer(family)
        self.sampled: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def _say(self) -> str:
        values = {"a": self._random.randrange(99), "b": self._random.randrange(99)}
        spelled = json.dumps(values, **self._random.choice([{}, {"separators": (",", ":")}, {"indent": 2}]))
        spelled = self._random.choice([spelled, spelled.replace('"a"', '"c"'), spelled[:-1], "[1]"])
        call = self._random.choice([*CALLS.get(self._family, TAGGED), XML]).format(spelled)
        thought = f"<think>\n{REASONING}\n</think>\n\n4"
        if self._family == "gpt-oss":
            thought = f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant<|channel|>final<|message|>4"
        text = self._random.choice(["", "It is 4.", "  So\n\n", thought, "<think>"])
        return text + self._random.choice(["", call, call * 2])

    async def sample(self, request, rank, deliver=None):
        tokens = tuple(self.tokenizer.encode(self._say(), add_special_tokens=False))
        if self._random.random() < 0.2:
            tokens = tuple(self._random.choices(range(len(self.tokenizer)), k=self._random.randrange(1, 9)))
            tokens = tuple(token for token in tokens if token not in self.stops)
        if has_ended := (self._random.random() < 0.8 or not tokens):
            tokens = (*tokens, self._random.choice(self.stops))
        self.sampled.setdefault(request.tokens, []).append(tokens)
        zeros = (0.0,) * len(tokens)
        numbers = {"logprobs": zeros, "sampled_logprobs": zeros, "version": 0}
        return [Output(request_id=0, tokens=tokens, finish_reason="stop" if has_ended else "length", **numbers)]


def episode_of(random: Random, refused: list[str]):
    async def episode(client, example):
        tools = Tools(add)
        said: list[Any] = [Message("user", "2+2?")]
        for turn in range(random.randrange(1, 7)):
            new = [] if turn else said
            if turn:
                new = await tools.results(said[-1]) or [{"role": "user", "content": random.choice(["So?", " and\n"])}]
                said += new
            if random.random() < 0.1 and len(said) > 3:  # the agent goes back
                said = said[:1]
            try:
                said.append(await client.chat(said if said[1:] == [] or random.random() < 0.5 else new, tools))
            except EpisodeError as error:
                refused.append(str(error))
                break
        return 1.0

    return episode


@functools.cache
def check(family: str, seed: int, *, strips: bool = False) -> tuple[list[str], int]:
    """Make a rollout of a random conversation, and compare its rows with what was sampled.

    Returns what was refused, and how many sequences begin anew.
    """
    random, refused = Random(f"{family} {seed}"), list[str]()
    policy = Policy(family, random)
    terms = Terms(cast("Any", policy), policy.tokenizer, 10**6, strips_thinking=strips)
    params = SamplingParams(max_new_tokens=10**5, stop_tokens=policy.stops)
    prompt = Prompt((1, 2), Example("rows.jsonl:3", "rows", (Message("user", "2+2?"),), "", "4", {}))
    client = EpisodeClient(terms, params, (0, prompt), 0, rank=0)
    found = rolled_out(client, episode_of(random, refused))
    paths: list[tuple[int, ...]] = []
    for number, turn in enumerate(found.turns):
        parent = turn.parent if turn.parent is not None else number - 1
        asked = (paths[parent] if parent >= 0 else ()) + turn.prompt
        assert turn.response in policy.sampled[asked], "a response is trained in the context in which it was sampled"
        paths.append(asked + turn.response)
        if strips and number and parent == ROOT and family != "qwen3":
            assert REASONING not in policy.tokenizer.decode(asked), "the template leaves it out"
    batch = assemble([found], prompt_index=0, sample_index=[0], is_narrowed=False)
    trained = sorted(batch.tokens[batch.loss_mask].tolist())
    assert trained == sorted(token for turn in found.turns for token in turn.response)
    return refused, sum(turn.parent == ROOT for turn in found.turns[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_token_is_a_sampled_one(family):
    refused = [why for seed in FEW for why in check(family, seed)[0]]
    assert len(refused) < 3, refused


@pytest.mark.parametrize("family", FAMILIES)
def test_where_thinking_is_stripped_a_question_begins_a_sequence_and_tokens_are_trained_once_too(family):
    kept, stripped = ([check(family, seed, strips=strips) for seed in FEW] for strips in (False, True))
    num_kept, num_stripped = (sum(num for _, num in each) for each in (kept, stripped))
    # The template of one family keeps all reasoning: then the conversation goes on as it is.
    assert num_stripped == num_kept if family == "qwen3" else num_stripped > num_kept
    assert len([why for refused, _ in stripped for why in refused]) < 3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_token_is_a_sampled_one_in_a_thousand_conversations(family):
    refused = [why for seed in range(1000) for why in check(family, seed)[0]]
    assert len(refused) < 100, set(refused)
