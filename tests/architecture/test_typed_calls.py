"""A type checker understands calls on groups: it accepts the right ones and finds every wrong one."""

import json
import subprocess
import sys

SNIPPETS = '''
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_type

from rallypoint.cluster import (
    Call, DispatchRule, Layout, Process, WorkerContext, WorkerGroup, broadcast, collect, dispatched, first_rank,
    scatter, shard,
)

@dataclass
class Batch:
    tokens: list[int]

@dataclass
class Values:
    numbers: list[float]

class Actor:
    def __init__(self, context: WorkerContext, path: str, *, seed: int = 0) -> None: ...

    @shard
    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Values:
        """A docstring."""
        return Values([])

    @broadcast
    def load(self, step: int) -> None: ...

    @collect
    def metrics(self, scale: float = 1.0) -> dict[str, float]:
        return {}

    @scatter
    def take(self, item: str, suffix: str = "") -> int:
        return 0

    @first_rank
    def snapshot(self) -> bytes:
        return b""

    @dispatched(DispatchRule("mine", lambda mesh, args, kwargs: [], list))
    def mine(self, number: int) -> str:
        return ""

    def undecorated(self) -> int:
        return 0

class Critic:
    def __init__(self, context: WorkerContext) -> None: ...

    @shard
    def train(self, batch: Batch, values: Values) -> None: ...

async def right(processes: Sequence[Process], batch: Batch) -> None:
    actor = await WorkerGroup.create(Layout("actor", processes), Actor, "model", seed=1)
    critic = await WorkerGroup.create(Layout("critic", processes), Critic)
    assert_type(actor, WorkerGroup[Actor])
    assert_type(actor.call(Actor.logprobs, batch), Call[Values])
    assert_type(await actor.call(Actor.logprobs, batch, temperature=0.5), Values)
    assert_type(await actor.call(Actor.logprobs, batch=batch), Values)
    assert_type(actor.call(Actor.logprobs, batch).result(timeout_s=1.0), Values)
    assert_type(await actor.call(Actor.metrics), list[dict[str, float]])
    assert_type(await actor.call(Actor.take, ["a", "b"], suffix="c"), list[int])
    assert_type(await actor.call(Actor.take, ("a", "b")), list[int])
    assert_type(await actor.call(Actor.snapshot), bytes)
    assert_type(await actor.call(Actor.mine, 3), str)
    values = actor.call(Actor.logprobs, batch)
    assert_type(values.reference, Values)
    await critic.call(Critic.train, batch, values.reference)
    await critic.call(Critic.train, batch, values=await values)

async def wrong(
    actor: WorkerGroup[Actor], critic: WorkerGroup[Critic], processes: Sequence[Process], batch: Batch
) -> None:
    values = actor.call(Actor.logprobs, batch)
    await actor.call(Actor.logprob, batch)  # error: misspelt method
    await actor.call(Actor.logprobs)  # error: missing argument
    await actor.call(Actor.logprobs, batch, temprature=0.5)  # error: misspelt keyword
    await actor.call(Actor.logprobs, batch, 0.5)  # error: keyword-only
    await actor.call(Actor.logprobs, [1, 2])  # error: wrong batch type
    await actor.call(Actor.logprobs, batch=[1, 2])  # error: wrong batch type, by name
    await actor.call(Actor.take, [1, 2])  # error: wrong scatter items
    await actor.call(Actor.take, ["a"], suffix=1)  # error: wrong argument beside the items
    await actor.call(Actor.take, item="a")  # error: one item by name
    await actor.call(Critic.train, batch, await values)  # error: method of another worker
    await critic.call(Critic.train, batch, values)  # error: a call is not its result
    await critic.call(Critic.train, batch, actor.call(Actor.metrics).reference)  # error: result of another type
    (await values).tokens  # error: the result has no such field
    values.numbers  # error: a call has no field of its result
    (await actor.call(Actor.metrics)).keys()  # error: one for each rank
    number: int = await actor.call(Actor.mine, 3)  # error: the result is a str
    await WorkerGroup.create(Layout("actor", processes), Actor)  # error: constructor without its argument
    await WorkerGroup.create(Layout("actor", processes), Actor, "model", seed="0")  # error: wrong constructor argument
    await WorkerGroup.create(Layout("actor", processes), Actor, 3)  # error: wrong constructor argument
'''


def test_right_calls_pass_and_every_wrong_one_is_found(tmp_path):
    file = tmp_path / "snippets.py"
    file.write_text(SNIPPETS)
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    found = {
        one["range"]["start"]["line"]: one["message"]
        for one in json.loads(ran.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    }
    lines = SNIPPETS.splitlines()
    expected = {number for number, line in enumerate(lines) if "# error: " in line}
    assert len(expected) == 19
    assert {f"{lines[number]}: {message}" for number, message in found.items() if number not in expected} == set()
    assert [lines[number] for number in sorted(expected - set(found))] == []
