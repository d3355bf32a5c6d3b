"""The table of drills: tiny runs, and what befalls them.

A drill is a row: a run and a failpoint (`rallypoint.failpoints`), or a deed from outside for what has none: signals,
Ray's own processes, damaged files, a second writer, rewards that fail. `recipes/drilling.py` does and judges them.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rallypoint.cluster import reaper
from rallypoint.errors import ConfigError
from rallypoint.run.folder import RunFolder

TINY = (
    "model.create={hidden_size: 16, num_layers: 1, num_heads: 2, num_key_value_heads: 1, intermediate_size: 32}",
    "data.generate={num_digits: 3, num_train_prompts: 64, num_validation_prompts: 16}",
    "rollout={num_prompts: 8, group_size: 4, max_response_tokens: 5}",
    "actor={num_mini_batches: 2, optimizer: {lr: 3e-3, warmup_ratio: 0.25}}",
    "critic={num_mini_batches: 2, optimizer: {lr: 3e-3, warmup_ratio: 0.25}}",
    "kl={coef: 1e-2, placement: loss, estimator: k3}",
    "trainer.num_steps=4",
    "checkpoint.every_steps=2",
    "validation.every_steps=4",
    "cluster={heartbeat_timeout_s: 10, call_timeout_s: 45}",
)
HANGS_S, _SILENCE_S, _LATE_S = 8.0, 10.0, 5.0
"""Deadline of calls in drills that hang, seconds without a sign of life, and how much later either may be noticed."""
BACK_WITHIN_S = 15.0
"""Seconds within which a run is to be at work again after it has noticed a loss, by itself."""
_LOSES = frozenset({"kill", "term", "stop", "hang"})
_APART = ("cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side")
RUNS: Mapping[str, tuple[str, ...]] = {
    "one": ("cluster.pools={main: [1]}",),
    "split": (*_APART, "reference.placement.pool=side"),
    "two": ("cluster.pools={main: [2]}",),
    "ahead": (*_APART, "rollout.max_staleness=1"),
    "reward": ("cluster.pools={main: [1]}", "reward.num_processes=1", "reward.timeout_s=3"),
}
"""Name of a run -> its keys: all roles in one process; sampling apart from training; two ranks of each role; sampling
ahead; a reward function of the user's in a process of its own."""
REWARD = '''"""A reward function that has no score for some prompts, always the same, and says so in different ways."""

import os
import time


def _score(answer, truth):
    return float(sum(one == other for one, other in zip(answer, truth)))


def raises(data_source, solution_str, ground_truth, extra_info):
    if ground_truth.startswith("01"):
        raise ValueError("no score")
    return _score(solution_str, ground_truth)


def exits(data_source, solution_str, ground_truth, extra_info):
    if ground_truth.startswith("01"):
        os._exit(3)
    return _score(solution_str, ground_truth)


def hangs(data_source, solution_str, ground_truth, extra_info):
    while ground_truth.startswith("01"):
        time.sleep(1)
    return _score(solution_str, ground_truth)


def lies(data_source, solution_str, ground_truth, extra_info):
    return float("nan") if ground_truth.startswith("01") else _score(solution_str, ground_truth)
'''
_LEFT_S = 10.0
"""Seconds after the death of a driver until nothing of its run may be left."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drill:
    """A row of the table."""

    run: str
    """Name of a run."""
    fails: str = ""
    """Failpoint, as RALLY_FAIL takes it."""
    deed: str = ""
    """What is done from outside: a name of `SIGNALS`, `DAMAGES` or `REWARDS`."""

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.run}/{self.deed or self.fails}"

    @property
    def of_role(self) -> bool:
        """Whether it befalls a role."""
        return "." in self.fails.partition(":")[0]

    @property
    def how(self) -> str:
        """How it fails, without a number."""
        return self.fails.rpartition(":")[2].partition("=")[0]

    @property
    def alone(self) -> bool:
        """Whether the run must go on by itself; otherwise it may end, and `--resume` goes on."""
        return self.num_lost > 0 or self.how in {"slow", "disk_full"} or self.deed in REWARDS

    @property
    def num_lost(self) -> int:
        """Processes of roles that are lost in it, of which the run hears."""
        return int(self.of_role and self.how in _LOSES)

    @property
    def noticed_within_s(self) -> float:
        """Seconds within which a loss is to be noticed: at once, or that after the deadline of what hangs or stops."""
        return {"hang": HANGS_S + _LATE_S, "stop": _SILENCE_S + _LATE_S}.get(self.how, 1.0)

    @property
    def on_ray(self) -> bool:
        """Whether roles must have processes of their own."""
        return self.num_lost > 0 or self.deed in _OF_RAY

    @property
    def in_child(self) -> bool:
        """Whether it needs a driver that may be killed."""
        return bool(self.deed in SIGNALS or self.deed in DAMAGES or (not self.of_role and self.how in _LOSES))


def _calls(run: str, calls: Sequence[str], conditions: Sequence[str], how: str) -> Iterator[Drill]:
    for call in calls:
        for condition in conditions:
            yield Drill(run, ":".join(filter(None, (call, condition, how))))


_STEP = ("actor.logprobs", "actor.train", "critic.values", "critic.train", "reference.logprobs", "rollout.advance")
_BETWEEN = ("actor.save", "critic.save", "actor.measured", "rollout.measured")
_PUBLISH = ("actor.digest", "rollout.load")
_STREAM = (*_PUBLISH, "actor.send")
_EVENTS = (
    "RunBegan",
    "InputsRead",
    "RolesStarted",
    "GroupScored",
    "BatchTaken",
    "StepDone",
    "WeightsPublished",
    "WeightsLoaded",
    "Validated",
    "CheckpointSaved",
    "RunEnded",
)
_OFTEN = ("GroupScored", "BatchTaken", "StepDone", "WeightsPublished", "WeightsLoaded")


def table() -> list[Drill]:
    """Return all drills."""
    return [
        *_calls("split", (*_STEP, *_STREAM), ("step=1", "step=3", "step=4"), "kill"),
        *_calls("split", (*_STEP, *_STREAM), ("step=3",), "stop"),
        *_calls("split", (*_STEP, *_STREAM), ("step=2",), "hang"),
        *_calls("split", (*_STEP, *_STREAM), ("step=2",), "slow=1"),
        *_calls("split", ("actor.train", "rollout.advance"), ("step=3",), "term"),
        *_calls("split", _BETWEEN, ("n=1", "n=2"), "kill"),
        *_calls("split", ("rollout.advance",), ("n=3", "n=6"), "kill"),
        *_calls("split", ("actor.__init__", "rollout.__init__"), ("",), "kill"),
        *_calls("one", (*_STEP, *_PUBLISH), ("step=2", "step=4"), "kill"),
        *_calls("two", (*_STEP, *_PUBLISH), ("rank=0:step=3", "rank=1:step=2"), "kill"),
        *_calls("two", ("actor.train", "rollout.advance"), ("rank=1:step=3",), "slow=1"),
        *_calls("ahead", ("actor.train", "critic.train", *_STREAM), ("step=1", "step=3"), "kill"),
        *_calls("ahead", ("rollout.advance",), ("step=1", "n=3", "n=4"), "kill"),
        *_calls("ahead", ("actor.train",), ("step=2",), "stop"),
        *_calls("ahead", ("rollout.advance",), ("n=4",), "stop"),
        *_calls("one", (*_STEP, *_PUBLISH, *_BETWEEN[:3]), ("n=2",), "raise"),
        *_calls("one", _BETWEEN[:2], ("n=1", "n=2"), "disk_full"),
        *_calls("one", _EVENTS, ("",), "kill"),
        *_calls("one", _OFTEN, ("n=3", "n=4"), "kill"),
        *_calls("one", _EVENTS, ("",), "disk_full"),
        *_calls("one", _OFTEN, ("n=3",), "disk_full"),
        *_calls("one", _EVENTS, ("",), "raise"),
        *_calls("one", _OFTEN, ("n=3",), "stop"),
        *_calls("two", _OFTEN, ("n=2",), "kill"),
        *_calls("ahead", (*_OFTEN, "SliceSent"), ("n=2", "n=3"), "kill"),
        *_calls("ahead", ("CheckpointSaved",), ("n=1", "n=2"), "kill"),
        *(Drill("one", "StepDone:step=4:kill", deed) for deed in DAMAGES),
        *(Drill("one", deed=deed) for deed in SIGNALS if deed not in _OF_RAY),
        *(Drill("split", deed=deed) for deed in _OF_RAY),
        *(Drill("reward", deed=deed) for deed in REWARDS),
    ]


def chosen(names: Sequence[str]) -> list[Drill]:
    """Return the drills of these names, or those that have one of them as a part of theirs.

    Raises:
        ConfigError: there is none.
    """
    drills = table()
    if missing := [name for name in names if not any(name in drill.name for drill in drills)]:
        raise ConfigError((f"no drill has {missing[0]!r} in its name; `rally drill --list` has all {len(drills)}",))
    return [drill for drill in drills if not names or any(name in drill.name for name in names)]


SHORT = (
    "split/actor.train:step=3:kill",
    "split/critic.train:step=1:kill",
    "split/reference.logprobs:step=3:kill",
    "split/rollout.advance:step=4:kill",
    "split/rollout.load:step=3:kill",
    "split/actor.send:step=1:kill",
    "split/actor.save:n=1:kill",
    "one/rollout.advance:step=2:kill",
    "one/actor.train:n=2:raise",
    "one/actor.save:n=1:disk_full",
    "one/RolesStarted:kill",
    "one/BatchTaken:n=3:kill",
    "one/WeightsLoaded:n=3:kill",
    "one/CheckpointSaved:kill",
    "one/StepDone:n=3:disk_full",
    "one/RunEnded:kill",
    "ahead/SliceSent:n=3:kill",
    "one/an edited journal",
    "one/a torn journal",
    "one/a flipped bit",
)
"""Names of those that a test does."""


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield number and program of a process's children."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if (found := reaper.stat_of(int(entry))) is not None and found[2] == pid:
            yield int(entry), found[0]


def _signal(number: signal.Signals, program: str = "") -> Callable[[int, RunFolder], str]:
    """Return a deed: send a signal to the driver, or to a program that it has started."""

    def send(driver: int, run: RunFolder) -> str:
        del run
        found = [pid for pid, name in children_of(driver) if name.startswith(program)] if program else [driver]
        for pid in found:
            os.kill(pid, number)
        return "" if found else f"the driver has no {program} that could be killed"

    return send


def _write_too(driver: int, run: RunFolder) -> str:
    """Try to train in the folder that a driver trains in, which is stopped meanwhile; return what is wrong."""
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", str(run.path), "--resume"]
    os.kill(driver, signal.SIGSTOP)
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    os.kill(driver, signal.SIGCONT)
    return "" if f"in use by process {driver}" in said else f"a second writer was not refused: {said or 'it wrote'}"


def _kill_on_ray(driver: int, run: RunFolder) -> str:
    """Kill a driver with 9; return what is left of its Ray after 10 s."""
    link = run.logs / "ray"
    folder = Path(os.readlink(link)).parents[2] if link.is_symlink() else None
    os.kill(driver, signal.SIGKILL)
    if folder is None:  # it had not begun to start Ray
        return ""
    until = time.monotonic() + _LEFT_S
    while found := reaper.num_left(folder.name.removeprefix("rally-"), str(folder)) or folder.exists():
        if time.monotonic() > until:
            return f"{int(found)} processes, or {folder}, are left after {_LEFT_S:g} s"
        time.sleep(0.2)
    return ""


SIGNALS: Mapping[str, tuple[str, Callable[[int, RunFolder], str]]] = {
    "SIGTERM while it samples": ("GroupScored", _signal(signal.SIGTERM)),
    "SIGTERM between steps": ("StepDone", _signal(signal.SIGTERM)),
    "SIGINT in an update": ("BatchTaken", _signal(signal.SIGINT)),
    "SIGHUP after a checkpoint": ("CheckpointSaved", _signal(signal.SIGHUP)),
    "a second writer": ("BatchTaken", _write_too),
    "raylet killed at BatchTaken": ("BatchTaken", _signal(signal.SIGKILL, "raylet")),
    "raylet killed at StepDone": ("StepDone", _signal(signal.SIGKILL, "raylet")),
    "GCS killed at BatchTaken": ("BatchTaken", _signal(signal.SIGKILL, "gcs_server")),
    **{f"driver killed at {kind}": (kind, _kill_on_ray) for kind in _EVENTS[:-1]},
}
"""Name of a deed -> the kind of event at whose first it is done, and what is done to the driver."""
_OF_RAY = [name for name in SIGNALS if " killed at " in name]


def _flipped(run: RunFolder) -> Iterator[str]:
    weights = max(run.checkpoints.iterdir()) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    yield "model.safetensors"
    weights.write_bytes(whole)


def _edited(run: RunFolder) -> Iterator[str]:
    whole = run.journal.read_bytes()
    place = whole.index(b'"kind": "StepDone"')
    number = whole[:place].count(b"\n") + 1
    run.journal.write_bytes(whole[:place] + whole[place:].replace(b'"step": 1', b'"step": 9', 1))
    yield f"line {number + 1}"  # has the hash of the one that was edited
    run.journal.write_bytes(whole)


def _torn(run: RunFolder) -> Iterator[str]:
    with run.journal.open("ab") as file:
        file.write(b'{"n": 99, "time": 17')
    yield ""


def _without_metrics(run: RunFolder) -> Iterator[str]:
    run.metrics.unlink()
    yield ""


def _torn_metrics(run: RunFolder) -> Iterator[str]:
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 3, "rew')
    yield ""


DAMAGES: Mapping[str, Callable[[RunFolder], Iterator[str]]] = {
    "a flipped bit": _flipped,
    "an edited journal": _edited,
    "a torn journal": _torn,
    "no metrics": _without_metrics,
    "torn metrics": _torn_metrics,
}
"""Name of a damage to the files of a killed run -> generator that does it, yields a part of the message with which a
resume must refuse them (empty if it must go on), and undoes it."""
REWARDS = {"reward exits": "exits", "reward hangs": "hangs", "reward is NaN": "lies"}
"""Name of a deed -> the function that fails in place of one that raises."""
