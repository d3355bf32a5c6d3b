"""Eight conversations, with a call in six spellings, in templates of many families: what is trained was sampled.

Each answer is given logprobs by a model that has seen the call's context and nothing else; the rows of the rollout are
then read from their beginning.
"""

import importlib.util
import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from chat_templates import make_published_tokenizer
from rolled_out import rolled_out
from spelled_calls import SPELLINGS, WANTED, WRITTEN
from tool_templates import FAMILIES, make_tool_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from rallypoint.data import Example, Message
from rallypoint.data.prompt_sets import Prompt
from rallypoint.data.template import take_texts
from rallypoint.environments.tools import Tools
from rallypoint.generation import Output, SamplingParams
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.types import Trajectory, assemble

OF_FAMILY = {"qwen2.5": "hermes", "qwen3": "hermes", "llama3.1": "llama"}
"""Families of templates whose calls have another name."""
OF_TRL = {
    "gemma4": ("gemma4", ("<turn|>", "<|tool_response>")),
    "gemma4_v5": ("gemma4", ("<turn|>", "<|tool_response>")),
    "glm4moe": ("glm4.5", ("<|user|>", "<|observation|>")),
    "gptoss": ("gpt-oss", ("<|return|>", "<|call|>")),
    "llama3_1": ("llama", ("<|eot_id|>",)),
    "llama3_2": ("llama", ("<|eot_id|>",)),
    "nemotron_3_nano": ("qwen3-coder", ("<|im_end|>",)),
    "nemotron_3_super": ("qwen3-coder", ("<|im_end|>",)),
    "qwen2_5": ("hermes", ("<|im_end|>",)),
    "qwen3": ("hermes", ("<|im_end|>",)),
    "qwen3_5_nothink": ("qwen3-coder", ("<|im_end|>",)),
    "qwen3_5_think": ("qwen3-coder", ("<|im_end|>",)),
    "qwen3_6": ("qwen3-coder", ("<|im_end|>",)),
    "qwen3_instruct_2507": ("hermes", ("<|im_end|>",)),
}
"""Published templates -> who writes calls as their models do, and what ends their answers."""
THINKING = ("nemotron_3_nano", "nemotron_3_super", "qwen3_5_think", "qwen3_6")
"""Those whose cue opens the reasoning, which every answer has to close."""
CONVERSATIONS = {
    "an answer": ["It is 4."],
    "questions": ["It is 4.", " So: 5\n", "6"],
    "a call": ["CALL", "It is 4."],
    "a call with text": ["Let me see.\nCALL", "It is 4."],
    "call after call": ["CALL", "CALL", "It is 4."],
    "a question after a call": ["CALL", "It is 4.", "CALL", "It is 5."],
    "reasoning": ["<think>\nHm7\n</think>\n\nCALL", "<think>\nHm8\n</think>\n\nIt is 4.", "It is 5."],
    "what is cut": ["It is CUT", "CALL", "It is 4."],
}
"""Answers of the policy; results of tools and further questions stand between them."""


def look(where: str, far: float | None, all: list[Any]) -> str:  # noqa: A002 - the name in the calls
    """Look somewhere.

    Args:
        where: the place.
        far: how far.
        all: what for.
    """
    assert (far, all) == (WANTED["far"], WANTED["all"])
    assert where.startswith('the "end" '), "the tokenizer has no ü"
    return "found metal7"


class Policy:
    """A mailbox that says given texts, and keeps what it said with the logprobs of a model."""

    def __init__(self, tokenizer, stops, texts):
        self._tokenizer, self._stops, self._texts = tokenizer, stops, list(texts)
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        more = {"max_position_embeddings": 16_384, "initializer_range": 0.3}
        self._model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **more)).eval()
        self.sampled = list[tuple[int, ...]]()

    def logprobs(self, tokens, num_before):
        """Return the logprobs of the tokens behind so many."""
        with torch.no_grad():
            found = self._model(torch.tensor([tokens])).logits[0, num_before - 1 : -1].log_softmax(-1)
        return tuple(found.gather(1, torch.tensor(tokens[num_before:])[:, None])[:, 0].tolist())

    async def sample(self, request, rank, deliver=None):
        text = self._texts.pop(0)
        is_cut = text.endswith("CUT")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = tuple(ids) if is_cut else (*ids, self._stops[0])
        self.sampled.append(ids)
        found = self.logprobs((*request.tokens, *ids), len(request.tokens))
        numbers = {"logprobs": found, "sampled_logprobs": found, "version": 0}
        reason = "length" if is_cut else "stop"
        return [Output(request_id=0, tokens=ids, finish_reason=reason, **numbers)]


def compare(tokenizer, stops, call, texts):
    """Play a conversation, compare its rows with what was sampled, and return the largest gap and the calls read."""
    texts = [text.replace("CALL", call) for text in texts]
    policy, tools = Policy(tokenizer, stops, texts), Tools(look)
    terms = Terms(cast("Any", policy), tokenizer, 10**6)
    asked = Message("user", "2+2?")

    async def episode(client, example):
        answer = await client.chat(tools=tools)
        for _ in texts[1:]:
            answer = await client.chat(await tools.results(answer) or [{"role": "user", "content": "So?"}], tools)
        return 1.0

    prompt = Prompt(tuple(tokenizer.encode("2+2?")), Example("rows.jsonl:3", "rows", (asked,), "", "4", {}))
    params = SamplingParams(max_new_tokens=10**5, stop_tokens=tuple(stops))
    found = rolled_out(EpisodeClient(terms, params, (0, prompt), 0, rank=0), episode)
    assert isinstance(found, Trajectory), found
    assert [turn.response for turn in found.turns] == policy.sampled
    batch = assemble([found], prompt_index=0, sample_index=[0], is_narrowed=False)
    assert batch.tokens[batch.loss_mask].tolist() == [token for ids in policy.sampled for token in ids]
    gap = 0.0
    for path in found.sequences:
        row = [token for number in path for token in (*found.turns[number].prompt, *found.turns[number].response)]
        again, place = policy.logprobs(row, 1), 0
        for turn in (found.turns[number] for number in path):
            place += len(turn.prompt)
            there = again[place - 1 : place - 1 + len(turn.response)]
            gap = max(gap, *(abs(one - other) for one, other in zip(turn.logprobs, there, strict=True)))
            place += len(turn.response)
    return gap, tools


def check(tokenizer, stops, writer, opening=""):
    """Play all conversations in all spellings."""
    _, write = WRITTEN[writer]
    for texts, spelling in itertools.product(CONVERSATIONS.values(), SPELLINGS.values()):
        call = write(spelling).replace("Well. ", "")
        if writer in ("llama", "gpt-oss"):  # whose calls are whole answers
            texts = ["CALL" if "CALL" in text else text for text in texts]
        texts = [opening + text for text in texts]
        gap, tools = compare(tokenizer, stops, call, texts)
        assert gap < 1e-5
        assert (tools.num_calls, tools.num_errors) == (sum("CALL" in text for text in texts), 0), texts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_token_is_a_sampled_one_in_every_spelling(family):
    tokenizer, stops = make_tool_tokenizer(family)
    check(tokenizer, stops, OF_FAMILY.get(family, family))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TRL)
def test_every_trained_token_is_a_sampled_one_in_published_templates(name):
    trl = importlib.util.find_spec("trl")
    if trl is None:
        pytest.skip("trl is not installed")
    folder = Path((trl.submodule_search_locations or [])[0]) / "chat_templates"
    tokenizer = make_published_tokenizer((folder / f"{name}.jinja").read_text(encoding="utf-8"))
    take_texts(tokenizer)
    writer, stops = OF_TRL[name]
    check(tokenizer, tokenizer.convert_tokens_to_ids([*stops]), writer, "Hm.</think>" if name in THINKING else "")
