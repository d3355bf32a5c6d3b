"""Tools of Python: what the model is told of them, and what becomes of a call."""

import asyncio
import json
import threading
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from rallypoint.environments.tools import Tools
from rallypoint.errors import EnvironmentFailedError, UserCodeError


class Place(BaseModel):
    x: int
    y: int = 0


def look(where: str, far: float = 1.5, kinds: list[Literal["food", "way"]] | None = None) -> str:
    """Look around.

    It takes a while.

    Args:
        where: direction, such
            as "north"
        far (float): in metres

    Returns:
        What is there.
    """
    return f"{where} {far} {kinds}"


async def walk(place: Place, json: Annotated[bool, Field(description="in words")] = False):
    """Walk to a place.

    :param place: where to
    """
    await asyncio.sleep(0)
    return {"at": [place.x, place.y], "json": json}


def wait():
    """Do nothing."""
    return threading.current_thread() is threading.main_thread()


def called(tools, *calls, **fields):
    entries = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": entries, **fields}
    return [result["content"] for result in asyncio.run(tools.results(message))]


def test_signature_and_docstring_are_the_schema():
    schema, second, third = Tools(look, walk, wait)
    assert schema == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look around.\n\nIt takes a while.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string", "description": 'direction, such as "north"'},
                    "far": {"type": "number", "default": 1.5, "description": "in metres"},
                    "kinds": {
                        "anyOf": [
                            {"type": "array", "items": {"type": "string", "enum": ["food", "way"]}},
                            {"type": "null"},
                        ],
                        "default": None,
                    },
                },
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
    parameters = second["function"]["parameters"]
    assert parameters["properties"]["json"] == {"type": "boolean", "default": False, "description": "in words"}
    assert parameters["properties"]["place"]["description"] == "where to"
    assert third["function"]["parameters"]["properties"] == {}


def test_calls_are_made_with_checked_arguments_and_counted():
    tools = Tools(look, walk, wait)
    assert called(tools, ("look", {"where": "north", "kinds": ["way"]}), ("walk", {"place": {"x": "3"}})) == [
        "north 1.5 ['way']",
        '{"at": [3, 0], "json": false}',
    ]
    assert called(tools, ("wait", {})) == ["false"], "a function that is not async runs in a thread"
    assert tools.metrics == {"tool_calls": 3, "tool_errors": 0}
    assert called(tools) == []


def test_results_answer_their_calls():
    call = {"id": "abc", "type": "function", "function": {"name": "look", "arguments": '{"where": "up"}'}}
    (result,) = asyncio.run(Tools(look).results({"role": "assistant", "tool_calls": [call]}))
    assert result == {"role": "tool", "tool_call_id": "abc", "name": "look", "content": "up 1.5 None"}


def raises(number: int):
    """Raise."""
    raise KeyError(number)


def fails():
    """Fail."""
    raise EnvironmentFailedError("no connection")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("swim", {}), "error: there is no tool 'swim'; expected one of look, walk, raises"),
        (("look", {}), "error: where: Field required"),
        (("look", {"where": 3}), "error: where: Input should be a valid string"),
        (("look", {"where": "up", "near": 1}), "error: near: Extra inputs are not permitted"),
        (("walk", {"place": {"x": "far"}}), "error: place.x: Input should be a valid integer"),
        (("raises", {"number": 1}), "error: KeyError: 1"),
    ],
)
def test_errors_are_results_and_counted(call, told):
    tools = Tools(look, walk, raises)
    (said,) = called(tools, call)
    assert said.startswith(told)
    assert tools.metrics == {"tool_calls": 1, "tool_errors": 1}


def test_a_call_that_cannot_be_read_is_an_error():
    tools = Tools(look)
    assert called(tools, malformed=["expected JSON"]) == ["error: the call cannot be read: expected JSON"]
    assert tools.num_errors == 1


def test_what_is_no_fault_of_the_policy_costs_the_rollout():
    with pytest.raises(EnvironmentFailedError):
        called(Tools(fails), ("fails", {}))


def undocumented(x: int): ...
def untyped(x):
    """Do."""


def starred(*x: int):
    """Do."""


def any_more(**x: int):
    """Do."""


def by_place(x: int, /):
    """Do."""


def unknown(x: "Nowhere"):  # noqa: F821
    """Do."""


def undescribable(x: threading.Lock):
    """Do."""


def callback(x: int, y: asyncio.Task):
    """Do."""


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (undocumented, "the tool undocumented has no docstring"),
        (untyped, "parameter 'x' of the tool untyped has no type; expected one, such as x: int"),
        (starred, r"parameter 'x' of the tool starred cannot be described: .*found \*x: int"),
        (any_more, r"parameter 'x' of the tool any_more cannot be described: .*found \*\*x: int"),
        (by_place, "parameter 'x' of the tool by_place cannot be described"),
        (unknown, "a type of the tool unknown cannot be found: NameError: name 'Nowhere'"),
        (undescribable, "parameter 'x' of the tool undescribable has the type .*lock.*, which cannot be described"),
        (callback, "parameter 'y' of the tool callback has the type .*Task, which cannot be described"),
        (Place, "a tool is a function, found"),
        ("look", "a tool is a function, found 'look'"),
    ],
)
def test_what_cannot_be_described_names_the_parameter(function, told):
    with pytest.raises(UserCodeError, match=told):
        Tools(function)


def test_two_tools_of_one_name_are_refused():
    def other():
        """Do."""

    other.__name__ = "look"
    with pytest.raises(UserCodeError, match="expected tools with different names, found look for all"):
        Tools(look, other)


def test_a_tool_that_hangs_keeps_no_thread_that_others_need():
    began, over = threading.Event(), threading.Event()

    def hang() -> str:
        """Wait for ever."""
        began.set()
        over.wait()
        return ""

    async def main():
        call = {"id": "1", "type": "function", "function": {"name": "hang", "arguments": "{}"}}
        calls = [asyncio.create_task(Tools(hang).results({"tool_calls": [call]})) for _ in range(40)]
        await asyncio.to_thread(began.wait)
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        (said,) = await Tools(wait).results({"tool_calls": [{**call, "function": {"name": "wait", "arguments": "{}"}}]})
        return said["content"]

    try:
        assert "false" in asyncio.run(main()).lower(), "in a thread, for which there is a place again"
    finally:
        over.set()
