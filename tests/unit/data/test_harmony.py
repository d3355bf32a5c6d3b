"""Answers in gpt-oss's format, read as OpenAI's own package reads them. It needs its vocabulary, which it fetches."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.data.tool_formats import ParsedAnswer, harmony

package = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")


@pytest.fixture(scope="module")
def encoding():
    try:
        return package.load_harmony_encoding("HarmonyGptOss")
    except package.HarmonyError as error:
        pytest.skip(f"openai-harmony is not installed with its vocabulary, see TIKTOKEN_ENCODINGS_BASE: {error}")


def read_by_the_package(encoding, text):
    """Return what the package's messages say; None where it raises.

    The first word behind a channel is a recipient for the package, also ` json` and what else is no recipient.
    """
    tokens = encoding.encode(text, allowed_special="all")
    try:
        messages = encoding.parse_messages_from_completion_tokens(tokens, package.Role.ASSISTANT)
    except package.HarmonyError:
        return None
    said = ParsedAnswer("")
    for message in messages:
        body = "".join(part.text for part in message.content)
        if f"to={message.recipient}" in text:
            try:
                arguments = json.loads(body)
            except ValueError:
                arguments = None
            if isinstance(arguments, dict):
                said.calls.append((message.recipient.removeprefix("functions."), arguments))
            else:
                said.malformed.append(message.recipient)
        elif message.channel == "analysis":
            said.reasoning = (said.reasoning or "") + body
        else:
            said.content += body
    return said


CHANNELS = ("analysis", "commentary", "final", "aside")
CONTENT_TYPES = ("", " json", " code", " <|constrain|>json", "<|constrain|>json")
BODIES = ("", "So ü.\n", '{"a": 1}', '{"a": {"b": [1, "<tool_call>"]}}', "[1]", '{"a": ', "1 + 1", "to=functions.g ")
RECIPIENTS = (None, None, "functions.look", "functions.look-up_2", "python", "browser.search")


@st.composite
def headers(draw):
    channel, recipient = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(RECIPIENTS))
    is_first = draw(st.booleans())
    to = f" to={recipient}" if recipient else ""
    before, after = (to, "") if is_first else ("", to)
    return f"{before}<|channel|>{channel}{after}{draw(st.sampled_from(CONTENT_TYPES))}<|message|>"


messages = st.builds(
    str.__add__, headers(), st.sampled_from(BODIES) | st.text(st.characters(exclude_categories=["Cs"]))
)
ends = st.sampled_from(["<|end|>", "<|call|>", "<|return|>"])
answers = st.lists(st.tuples(messages, ends), min_size=1, max_size=4)


@settings(max_examples=10 * settings.default.max_examples)
@given(answers, st.booleans())
def test_whole_answers_say_what_the_package_says(encoding, parts, is_cut):
    text = "<|start|>assistant".join(message + end for message, end in parts)
    text = text.removesuffix(parts[-1][1]) if is_cut else text
    ours, theirs = harmony(text, {}), read_by_the_package(encoding, text)
    assert theirs is not None, text
    assert (ours.calls, ours.reasoning, len(ours.malformed)) == (theirs.calls, theirs.reasoning, len(theirs.malformed))
    if not ours.malformed:  # the text of a call that cannot be read stays in the content
        assert ours.content == theirs.content


MARKS = ("<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
pieces = st.sampled_from((*MARKS, *CHANNELS, *BODIES, " to=functions.look", " json"))


@settings(max_examples=10 * settings.default.max_examples)
@given(st.lists(pieces, max_size=10).map("".join))
def test_calls_of_what_is_no_whole_answer_are_the_packages_or_none_where_it_raises(encoding, text):
    ours, theirs = harmony(text, {}), read_by_the_package(encoding, text)
    if theirs is not None:
        assert ours.calls == theirs.calls
