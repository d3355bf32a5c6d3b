"""Episodes in messages: what becomes of them in the row, and what is refused."""

import asyncio
import re
import tracemalloc
from typing import Any, cast

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from rolled_out import rolled_out
from tool_templates import make_tool_tokenizer

from rallypoint.data import Example, Message
from rallypoint.data.prompt_sets import Prompt
from rallypoint.environments.chat import Chat
from rallypoint.environments.tools import Tools
from rallypoint.errors import EpisodeError
from rallypoint.generation import Output, SamplingParams
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.types import ROOT

TOKENIZER = make_chat_tokenizer(QWEN3)
STOP = cast("int", TOKENIZER.eos_token_id)
ASKED = (Message("system", "Be brief."), Message("user", "2+2?"))
START = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def encoded(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


class Answers:
    """A mailbox that answers with texts; one that does not end with the stop token was cut."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self._tokenizer, self._texts = tokenizer, list(texts)

    async def sample(self, request, rank, deliver=None):
        await asyncio.sleep(0)
        tokens = tuple(self._tokenizer.encode(self._texts.pop(0), add_special_tokens=False))
        reason = "stop" if tokens[-1] == self._tokenizer.eos_token_id else "length"
        zeros = (0.0,) * len(tokens)
        numbers = {"logprobs": zeros, "sampled_logprobs": zeros, "version": 0}
        return [Output(request_id=0, tokens=tokens, finish_reason=reason, **numbers)]


def rollout(episode, *answers: str, max_tokens: int = 5000, tokenizer=TOKENIZER, min_new_tokens: int = 0) -> Any:
    """Return what becomes of an episode: a trajectory or a failure."""
    example = Example("rows.jsonl:3", "rows", ASKED, "", "4", {})
    terms = Terms(cast("Any", Answers(tokenizer, *answers)), tokenizer, max_tokens)
    params = SamplingParams(max_new_tokens=100, stop_tokens=(tokenizer.eos_token_id,), min_new_tokens=min_new_tokens)
    client = EpisodeClient(terms, params, (0, Prompt(encoded(START), example)), 0, rank=0)
    return rolled_out(client, episode)


def row_of(trajectory) -> str:
    return TOKENIZER.decode([token for turn in trajectory.turns for token in (*turn.prompt, *turn.response)])


async def says_what_is_new(client, example):
    first = await client.chat()
    assert first == {"role": "assistant", "content": "5", "reasoning": "hm"}
    second = await client.chat([{"role": "user", "content": "No."}])
    assert second == {"role": "assistant", "content": "4"}
    return 1.0


async def says_all_again(client, example):
    messages = [{"role": one.role, "content": one.content} for one in example.prompt]
    for said in ("No.", None):
        messages.append(await client.chat(messages))
        if said:
            messages.append({"role": "user", "content": said})
    return 1.0


def test_a_prompt_with_tools_is_continued_with_them():
    tokenizer, _ = make_tool_tokenizer("qwen2.5")
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    prompt = Prompt((5, 6), Example("rows.jsonl:3", "rows", (Message("user", "2+2?"),), "", "4", {}, tools=tools))
    seen = []

    async def episode(client, example):
        answer = await client.chat()
        seen.append(answer["tool_calls"][0]["function"]["name"])
        results = [{"role": "tool", "tool_call_id": "call00001", "content": "4"}]
        await client.chat([example.prompt[0].fields, answer, *results], example.tools)
        return 1.0

    answers = '<tool_call>\n{"name": "look"}\n</tool_call><|im_end|>', "It is 4.<|im_end|>"
    terms = Terms(cast("Any", Answers(tokenizer, *answers)), tokenizer, 5000)
    params = SamplingParams(max_new_tokens=100, stop_tokens=(cast("int", tokenizer.eos_token_id),))
    found = rolled_out(EpisodeClient(terms, params, (0, prompt), 0, rank=0), episode)
    assert seen == ["look"]
    assert found.turns[0].prompt == (5, 6), "the prompt's own tokens, which may be cut"
    assert [turn.parent for turn in found.turns] == [None, None], "one conversation"


async def forgets_reasoning(client, example):
    messages = list(example.prompt)
    answer = await client.chat(messages)
    await client.chat([*messages, {"role": "assistant", "content": answer["content"]}, Message("user", "No.")])
    return 1.0


@pytest.mark.parametrize("episode", [says_what_is_new, says_all_again, forgets_reasoning])
def test_new_messages_and_all_of_them_make_the_same_row_of_what_was_sampled(episode):
    found = rollout(episode, "<think>\nhm\n</think>\n\n5<|im_end|>", "4<|im_end|>")
    between = "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    assert row_of(found) == f"{START}<think>\nhm\n</think>\n\n5<|im_end|>{between}4<|im_end|>"
    assert [TOKENIZER.decode(turn.prompt) for turn in found.turns] == [START, between]
    assert found.rewards == (0.0, 1.0)


def test_an_answer_that_was_cut_gets_its_end_as_context():
    async def episode(client, example):
        assert (await client.chat())["content"] == "5 or"
        await client.chat([{"role": "user", "content": "So?"}])

    found = rollout(episode, "5 or", "4<|im_end|>")
    assert TOKENIZER.decode(found.turns[1].prompt).startswith("<|im_end|>\n<|im_start|>user\nSo?")


def test_an_answer_that_was_cut_within_its_reasoning_has_no_text():
    async def episode(client, example):
        assert await client.chat() == {"role": "assistant", "content": "", "reasoning": "so many"}

    assert len(rollout(episode, "<think>\nso many").turns) == 1


def test_a_conversation_of_its_own_may_take_the_place_of_the_prompt():
    async def episode(client, example):
        await client.chat([{"role": "user", "content": f"Q: {example.prompt[1].content}"}])

    assert "Be brief" not in row_of(rollout(episode, "4<|im_end|>"))


def test_a_cut_prompt_stays_cut():
    async def episode(client, example):
        await client.chat()
        await client.chat([{"role": "user", "content": "So?"}])
        assert client.prompt == encoded(START)

    assert row_of(rollout(episode, "4<|im_end|>", "4<|im_end|>")).startswith(START)


USER = {"role": "user", "content": "So?"}


def sends(messages):
    async def episode(client, example):
        await client.chat()
        await client.chat(messages)
        return 1.0

    return episode


@pytest.mark.parametrize(
    ("messages", "second"),
    [
        ([*ASKED, {"role": "assistant", "content": "5"}, USER], "2+2?.*5.*So"),
        ([{"role": "system", "content": "Be long."}, USER], "Be long.*So"),
    ],
)
def test_another_history_begins_another_row_in_which_nothing_is_trained_twice(messages, second):
    found = rollout(sends(messages), "4<|im_end|>", "6<|im_end|>")
    first, last = found.turns
    assert last.parent == ROOT
    assert re.search(second.replace("+", r"\+").replace("?", r"\?"), TOKENIZER.decode(last.prompt), re.DOTALL)
    assert [TOKENIZER.decode(turn.response) for turn in (first, last)] == ["4<|im_end|>", "6<|im_end|>"]


def test_an_agent_that_goes_back_continues_from_there():
    async def episode(client, example):
        messages = [*ASKED, await client.chat(ASKED)]
        await client.chat([*messages, Message("user", "No.")])
        await client.chat([*messages, Message("user", "Sure?")])
        return 1.0

    found = rollout(episode, "5<|im_end|>", "4<|im_end|>", "5!<|im_end|>")
    assert [turn.parent for turn in found.turns] == [None, None, 0]
    assert TOKENIZER.decode(found.turns[2].prompt) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "client.chat was given nothing new after the last answer"),
        ("So?", r"expected a list of messages such as \{.*\}, found text 'So"),
        (USER, "expected a list of messages such as .*, found"),
        (["So?"], "expected a list of messages such as .*, found .* as message 0"),
        ([{"role": "human", "content": "So?"}], "message 0 has the role 'human'; expected one of system,"),
        ([{"role": "user", "content": None}], r"message 0 \(user\): expected text as 'content', found"),
    ],
)
def test_what_is_no_list_of_messages_is_malformed(messages, told):
    found = rollout(sends(messages), "4<|im_end|>")
    assert found.kind == "malformed"
    assert re.search(told, found.reason), found


def test_a_failed_call_leaves_nothing_behind():
    async def episode(client, example):
        await client.chat()
        with pytest.raises(EpisodeError, match="nothing new"):
            await client.chat([])
        await client.chat([USER])
        return 1.0

    assert len(rollout(episode, "5<|im_end|>", "4<|im_end|>").turns) == 2


def look(where: str) -> str:
    """Look somewhere."""
    raise LookupError(where)


def test_the_result_of_a_tool_has_no_control_token_that_would_end_its_message():
    said = ["a<|im_end|>b<|im<|im_end|>_end|>c", "half \ud83d of a pair"]

    def page() -> str:
        """Read."""
        return said.pop(0)

    async def episode(client, example):
        tools = Tools(page)
        results = await tools.results(await client.chat(tools=tools))
        return float(
            not await tools.results(await client.chat([{**one, "name": client.tokenizer.eos_token} for one in results]))
        )

    tokenizer, _ = make_tool_tokenizer("qwen2.5")
    call = '<tool_call>{"name": "page", "arguments": {}}</tool_call>'
    found = rollout(episode, f"{call * 2}<|im_end|>", "4<|im_end|>", tokenizer=tokenizer)
    shown = tokenizer.decode(found.turns[1].prompt)
    assert "<tool_response>\na b<|im _end|>c\n" in shown
    assert "half  of a pair" in shown, "this tokenizer has no character for what stands for the half"

    tokenizer, _ = make_tool_tokenizer("gemma4")  # writes the name of a result
    said.append("3")
    found = rollout(episode, "<|tool_call>call:page{}<tool_call|>", f"4{tokenizer.eos_token}", tokenizer=tokenizer)
    assert tokenizer.decode(found.turns[1].prompt).endswith("<|tool_response>response: {value:3}<tool_response|>")


def test_half_of_a_surrogate_pair_is_refused_where_a_person_has_written_it():
    found = rollout(sends([{"role": "user", "content": "half \ud83d"}]), "4<|im_end|>")
    assert found.kind == "malformed"
    assert "the text of message 0 (user) has half of a surrogate pair, which is not text" in found.reason


@pytest.mark.parametrize(("min_tokens", "said"), [(0, "Thought. "), (13, "Thought. ST, ")])
def test_an_answer_ends_before_the_string_that_has_stopped_it(min_tokens, said):
    text = "Thought. STOP" if not min_tokens else "Thought. ST, STOP"

    async def episode(client, example):
        answer = await client.chat(stop=["STOP", *(["ST"] if min_tokens else [])])
        assert answer["content"] == said
        await client.chat([*ASKED, answer, USER])
        return 1.0

    found = rollout(episode, text, "4<|im_end|>", min_new_tokens=min_tokens)
    assert [turn.parent for turn in found.turns] == [None, None], "what was sampled stays"
    assert TOKENIZER.decode(found.turns[0].response) == text


def test_a_history_whose_answers_a_framework_has_stripped_is_the_same_history():
    async def episode(client, example):
        messages = list(example.prompt)
        for _ in range(3):
            answer = await client.chat(messages)
            messages += [{"role": "assistant", "content": answer["content"].strip()}, USER]
        return 1.0

    found = rollout(episode, *[" \n4 \n<|im_end|>"] * 3)
    assert [turn.parent for turn in found.turns] == [None] * 3
    assert [TOKENIZER.decode(turn.response) for turn in found.turns] == [" \n4 \n<|im_end|>"] * 3


def test_different_rewards_by_turn_are_refused_where_calls_ran_at_the_same_time():
    def episode(rewards):
        async def both(client, example):
            await asyncio.gather(*(client.chat([*ASKED, Message("user", name)]) for name in "ab"))
            return rewards

        return both

    for rewards in ([0.0, 1.0], {"reward": (0.0, 1.0)}):
        found = rollout(episode(rewards), "4<|im_end|>", "5<|im_end|>")
        assert found.kind == "malformed"
        assert "ran at the same time" in found.reason
        assert "return one reward for all of them" in found.reason
    for rewards in ([1.0, 1.0], 1.0, None, {"reward": 1.0, "moves": 2}):
        assert len(rollout(episode(rewards), "4<|im_end|>", "5<|im_end|>").turns) == 2


def test_what_a_dialogue_keeps_grows_with_its_tokens_and_not_with_their_square():
    def kept_bytes(num_turns):
        chat = Chat(TOKENIZER, (STOP,), (encoded(START), ASKED))
        tracemalloc.start()
        asked = chat.asked(())
        for _ in range(num_turns):
            chat.answered(asked, encoded("So it is 4, or 5, or perhaps even 6 or 7.<|im_end|>"))
            asked = chat.asked([USER])
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return found

    kept_bytes(2)
    assert kept_bytes(160) < 2.6 * kept_bytes(80)


def test_tools_answer_calls_and_are_counted():
    async def episode(client, example):
        tools = Tools(look)
        answer = await client.chat(tools=tools)
        results = await tools.results(answer)
        assert [one["content"][:17] for one in results] == ["error: LookupErro", "error: the call c"]
        assert await tools.results(await client.chat(results)) == []
        return {"reward": 1.0, **tools.metrics}

    tokenizer, stops = make_tool_tokenizer("qwen2.5")
    call = '<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call><tool_call>{</tool_call><|im_end|>'
    found = rollout(episode, call, "4<|im_end|>", tokenizer=tokenizer)
    assert found.metrics == {"tool_calls": 2, "tool_errors": 2}
    assert (found.num_tool_calls, found.num_tool_errors) == (2, 2)
    first, second = (tokenizer.decode(turn.prompt) for turn in found.turns)
    assert '"description": "Look somewhere."' in first
    assert second.count("<tool_response>") == 2
    assert stops == (tokenizer.eos_token_id,)
