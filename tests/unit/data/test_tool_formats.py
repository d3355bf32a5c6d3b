"""Calls of tools as models of several families write them, in six spellings each, and what is none."""

import functools

import pytest
from hypothesis import given, strategies as st
from spelled_calls import SPELLINGS, TOOLS, TYPES, WANTED, WRITTEN
from tool_templates import FAMILIES, make_tool_tokenizer

from rallypoint.data import AnswerReader
from rallypoint.data.answers import read_answer
from rallypoint.data.messages import calls_of, whole_text
from rallypoint.data.tool_formats import deepseek, format_of, gemma, harmony, kimi, llama, mistral, tagged


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", WRITTEN)
def test_a_call_says_the_same_in_every_spelling(family, spelling):
    read, write = WRITTEN[family]
    said = read(write(SPELLINGS[spelling]), TYPES)
    assert said.calls == [("look", WANTED)]
    assert (said.content, said.malformed) == ("" if family == "llama" else "Well. ", [])


TWO = {
    tagged: '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>',
    llama: '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
    mistral: '[TOOL_CALLS][{"name": "a", "arguments": "{}"}, {"name": "b", "arguments": {"x": 1}, "id": "abcdefghi"}]',
    harmony: "<|channel|>commentary to=functions.a<|message|>{}<|call|>"
    '<|start|>assistant to=functions.b<|channel|>commentary<|message|>{"x": 1}<|call|>',
    gemma: "<|tool_call>call:a{}<tool_call|><|tool_call>call:b{x:1}<tool_call|>",
    deepseek: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
    '<｜tool▁call▁begin｜>b<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    kimi: "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    '<|tool_call_begin|>b<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>',
}


@pytest.mark.parametrize("read", TWO)
def test_an_answer_may_have_several_calls(read):
    said = read(TWO[read], {})
    assert (said.calls, said.content, said.malformed) == ([("a", {}), ("b", {"x": 1})], "", [])


def test_calls_of_the_new_form_of_mistral_may_follow_each_other():
    text = '[TOOL_CALLS]a[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": 1}'
    assert mistral(text, {}).calls == [("a", {}), ("b", {"x": 1})]


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (tagged, '<tool_call>{"name": "a", "arguments": {"x": 1</tool_call>', "expected JSON: "),
        (tagged, '<tool_call>{"name": "a", "arguments": {', "expected JSON: .*; it has no </tool_call>"),
        (tagged, '<tool_call>{"arguments": {}}</tool_call>', "expected the name of a tool as 'name', found"),
        (tagged, '<tool_call>{"name": 3}</tool_call>', "expected the name of a tool as 'name', found"),
        (tagged, '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "expected an object as the arguments of a"),
        (tagged, '<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "expected JSON"),
        (tagged, '<tool_call>{"name": "a"} so</tool_call>', "expected nothing after the JSON, found 'so'"),
        (tagged, '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        (tagged, '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
        (tagged, "<tool_call>" + '{"a":' * 100_000 + "</tool_call>", "more brackets than can be read"),
        (tagged, f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', "expected JSON: "),
        (tagged, "<tool_call>look for it</tool_call>", "expected an object in JSON, .* or a name with <arg_key>"),
        (tagged, "<tool_call></tool_call>", "the call has no name"),
        (tagged, "<tool_call><function=a><parameter=x>1</tool_call>", "the call of a has no </function>"),
        (
            tagged,
            "<tool_call><function=a><parameter=x>1</function></tool_call>",
            "has 1 parameters, but 0 with a value",
        ),
        (tagged, "<tool_call>a<arg_key>x</arg_key><arg_value>1</tool_call>", "has 1 parameters, but 0 with a value"),
        (llama, '{"name": "a", "parameters": ', "expected JSON: "),
        (llama, '{"name": "a"} and {"name": "b"}', "expected JSON: "),
        (mistral, "[TOOL_CALLS][1]", "expected an object with 'name' and 'arguments', found"),
        (mistral, "[TOOL_CALLS]", "expected JSON: "),
        (mistral, "[TOOL_CALLS]a[ARGS]{", "expected JSON: "),
        (harmony, "<|channel|>commentary to=functions.a<|message|>so", "expected JSON: "),
        (gemma, "<|tool_call>call:a{x:up}<tool_call|>", "expected JSON: "),
        (gemma, '<|tool_call>call:a{x:<|"|>up}<tool_call|>', "expected JSON: "),
        (gemma, "<|tool_call>a{}<tool_call|>", r"expected call:NAME\{...\}, found 'a\{\}'"),
        (gemma, "<|tool_call>call:a{", "expected JSON: .*; it has no <tool_call|>"),
        (deepseek, "<｜tool▁call▁begin｜>a {}<｜tool▁call▁end｜>", "expected the name of a tool and <｜tool▁sep｜>"),
        (deepseek, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{", "expected JSON: .*; it has no <｜tool"),
        (kimi, "<|tool_call_begin|>functions.a:0 {}<|tool_call_end|>", "expected functions.NAME:0 and <|tool_call_arg"),
        (kimi, "<|tool_call_begin|>a:0<|tool_call_argument_begin|>[1]<|tool_call_end|>", "expected an object as the"),
    ],
)
def test_what_is_no_call_is_malformed_and_stays_in_the_text(read, text, told):
    said = read(text, {})
    assert not said.calls
    assert said.content.strip() == text.strip()
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(said.malformed[0])


def test_a_good_call_beside_a_malformed_one_is_read():
    said = tagged('<tool_call>{"name": </tool_call> So: <tool_call>{"name": "a"}</tool_call>', {})
    assert said.calls == [("a", {})]
    assert said.content == '<tool_call>{"name": </tool_call> So: '
    assert len(said.malformed) == 1


def test_json_that_names_no_tool_is_an_answer_of_llama():
    assert llama('{"answer": 4}', {}).content == '{"answer": 4}'


def test_text_of_a_parameter_stays_text():
    body = "<parameter=where>\n 12 \n</parameter><parameter=far>x</parameter>"
    said = tagged(f"<tool_call><function=look>{body}</function></tool_call>", TYPES)
    assert said.calls == [("look", {"where": " 12 ", "far": "x"})]


MARKS = (
    *("<tool_call>", "</tool_call>", '{"name": "a", "arguments": {', "}}", "<function=a>", "<parameter=x>"),
    *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "[TOOL_CALLS]", "[ARGS]", "[", "<|message|>"),
    *("<|channel|>analysis", "<|end|>", " to=functions.a", "<|python_tag|>", '"', "\\u12", "1e999", "\ud800", ";"),
    *("<|tool_call>", "<tool_call|>", "call:a{", '<|"|>', "x:", "None", "```json", "<｜tool▁call▁begin｜>", "function"),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)
pieces = st.sampled_from(MARKS)


@pytest.mark.parametrize("read", [tagged, llama, mistral, harmony, gemma, deepseek, kimi])
@given(st.lists(pieces | st.text(max_size=5), max_size=12).map("".join))
def test_nothing_raises(read, text):
    said = read(text, TYPES)
    assert all(isinstance(arguments, dict) for _, arguments in said.calls)
    assert said.malformed or said.calls or text.strip() in (said.content.strip(), "") or read is harmony


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_say_which_format_their_models_write(family):
    others = {"llama3.1": llama, "mistral": mistral, "gpt-oss": harmony, "gemma4": gemma, "kimi-k2": kimi}
    wanted = (others | {"deepseek": deepseek, "deepseek3.1": deepseek}).get(family, tagged)
    assert format_of(FAMILIES[family][0]) is wanted


def test_an_answer_is_a_message_with_its_calls():
    tokenizer, stops = make_tool_tokenizer("qwen3")
    text = 'So.\n</think>\n\nI look.<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call><|im_end|>'
    ids = tokenizer.encode("<think>\n" + text, add_special_tokens=False)
    function = {"name": "look", "arguments": '{"where": "up"}'}
    wanted = {"role": "assistant", "content": "I look.", "reasoning": "So."}
    called = {"tool_calls": [{"id": "call00003", "type": "function", "function": function}]}
    assert read_answer(tokenizer, ids, stop_tokens=stops, tools=TOOLS, num_calls=2) == wanted | called
    untold = read_answer(tokenizer, ids, stop_tokens=stops)
    assert "tool_calls" not in untold
    assert untold["content"].startswith("I look.<tool_call>")


def test_an_answer_of_gpt_oss_has_its_channels():
    tokenizer, stops = make_tool_tokenizer("gpt-oss")
    text = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert read_answer(tokenizer, ids, stop_tokens=stops) == {
        "role": "assistant",
        "content": "Four.",
        "reasoning": "So.",
    }


ANSWERS = (
    "Well.\n",
    " ",
    "<think>\nHm.\n</think>\n\nSo: ",
    "a < b <tool",
    "x { y",
    '<tool_call>{"name": ',
    "{",
    "<th",
    "",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_tools", [True, False])
def test_an_answer_that_is_read_while_it_comes_is_the_whole_one(family, has_tools):
    tokenizer, stops = make_tool_tokenizer(family)
    calls = [write(SPELLINGS["escaped"]) for _, write in WRITTEN.values()]
    for text in [*ANSWERS, *(before + call for before in ANSWERS for call in calls), calls[0] + "then"]:
        ids = [*tokenizer.encode(text, add_special_tokens=False), stops[0]]
        tools = TOOLS if has_tools else []
        reader = AnswerReader(tokenizer, stop_tokens=stops, tools=tools)
        pieces = [reader.push(reader.decode([token])) for token in ids[:-1]]
        message, rest = reader.finish(ids)
        assert message == read_answer(tokenizer, ids, stop_tokens=stops, tools=tools)
        assert "".join(pieces) + rest == message["content"], (text, pieces)
        assert reader.reasoning in (None, message.get("reasoning"))


UNCLOSED = {
    "parameters": (tagged, "<tool_call><function=f>" + "<parameter=a>" * 200_000 + "</function></tool_call>"),
    "keys": (tagged, "<tool_call>f" + "<arg_key>" * 200_000 + "</tool_call>"),
    "values": (tagged, "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 200_000 + "</tool_call>"),
    "calls": (tagged, "<tool_call>f<" * 200_000),
    "values of JSON": (llama, '{"name": "f"}' + ";{}" * 200_000),
}


@pytest.mark.parametrize(("read", "text"), UNCLOSED.values(), ids=UNCLOSED)
def test_tags_that_are_never_closed_are_read_once_and_not_from_each_on(read, text):
    said = read(text, {})
    assert not said.calls
    assert said.malformed
    assert "".join(said.content.split()) == "".join(text.split())


@pytest.mark.parametrize(("depth", "is_read"), [(60, True), (80, False), (5_000, False), (200_000, False)])
def test_arguments_of_many_levels_are_malformed_wherever_they_are_read(depth, is_read):
    nested = "[" * depth + "]" * depth
    said = tagged(f'<tool_call>{{"name": "f", "arguments": {{"a": {nested}}}}}</tool_call>', {})
    assert bool(said.calls) is is_read
    assert bool(said.malformed) is not is_read
    (call,) = calls_of({"tool_calls": [{"function": {"name": "f", "arguments": f'{{"a": {nested}}}'}}]})
    assert isinstance(call.arguments, dict) is is_read
    value = functools.reduce(lambda inner, _: [inner], range(depth), 1)
    message = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": value}}}]}
    assert bool(whole_text(message))
    assert isinstance(calls_of(message)[0].arguments, dict) is is_read
