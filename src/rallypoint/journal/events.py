"""What can happen in a run. Each kind is frozen, and is one line of the journal.

Tensors and texts are in `rollouts/`; an event has digests of them. A kind is added when something writes it and
something reads it.

>>> event = StepDone(step=3, metrics={"actor/loss": float("nan")}, digests={"tokens": "9f2a"})
>>> fields_of(event)
{'step': 3, 'metrics': {'actor/loss': 'nan'}, 'digests': {'tokens': '9f2a'}, 'seconds': 0.0, 'began_s': 0.0, \
'begins': {}, 'work': {}}
>>> event_of("StepDone", fields_of(event)).metrics
{'actor/loss': nan}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

Level: TypeAlias = Literal["note", "log", "wait", "end"]
"""A message is a warning, or for the log alone, or names what the run waits for, or why it is about to end."""
Ending: TypeAlias = Literal["finished", "stopped", "failed"]
"""How a start of a run ended: all steps are done; it was asked to stop, and is saved; or by an error."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A command that made the run, or resumed it: what a resume needs in addition to the config."""

    overrides: Sequence[str] = ()
    """Overrides of the command line, now and earlier; their paths are valid in any working directory."""
    signed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Signatures of the code that the config names; see `run/trust.py`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """A start of the run: the first one, or a resume. It supersedes what earlier starts did after step `first`."""

    first: int
    """Step of the checkpoint that it goes on from; 0 for none."""
    config: Mapping[str, object]
    """Every key, dotted, with its value."""
    software: Mapping[str, str]
    """Package -> version."""
    machine: str
    """Platform and processor."""
    folder: str = ""
    """Path of the run, on that machine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputsRead:
    """The files that decide the weights, the model and data that the run made for itself among them."""

    files: Mapping[str, Mapping[str, str]]
    """Key of the config -> name of a file -> digest, or a hub's revision."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message for the user, whole."""

    text: str
    level: Level = "note"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Which prompts are done where a start goes on, whose weights are loaded next."""

    step: int
    version: int
    """Version of these weights."""
    done: Mapping[str, Any]
    """As the checkpoint has it; see `sampling/groups.py`."""
    kept: Sequence[int] = ()
    """Prompts whose groups were finished before, and are not sampled again; see `sampling/kept.py`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished:
    """The actor publishes weights, which the ranks that sample load next."""

    version: int
    digest: str
    """Digest of the trained weights that the actor's ranks hold, in the type in which they are trained."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """All ranks that sample have loaded weights."""

    version: int
    num_ranks: int
    digest: str = ""
    """Digest of the weights that each rank holds now. It is that of `WeightsPublished` if an actor's rank holds them
    whole, in the type in which they are sampled from."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SliceSent:
    """What a rank was asked for in a run that samples ahead, in the order in which it was asked."""

    rank: int
    new: Sequence[Sequence[int]]
    """The requests that began, packed; see `sampling/replay.py`."""
    num_steps: int
    """Steps that its engine then took."""


TurnSampled: TypeAlias = tuple[int, int, Sequence[tuple[int, int]], str]
"""A response: its sample, its turn, the version and length of each span of its tokens, and a digest of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailed:
    """A rollout that is left out; a run that repeats this one leaves it out there, too."""

    prompt: int
    """Index of the prompt in the run, or in the validation."""
    sample: int
    validation: int | None
    """Step after which it was validated; None in training."""
    num_turns: int
    """Turns that it had."""
    num_tokens: int = 0
    """Tokens that were sampled for it."""
    why: str
    """Kind of the failure; see `environments/failures.py`."""
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupScored:
    """A prompt whose rollouts are all sampled and scored; times are seconds of its start of the run."""

    prompt: int
    """Index of the prompt in the run, or in the validation."""
    validation: int | None = None
    """Step after which it was validated; None in training."""
    rank: int
    """Rank of the rollout role that sampled it."""
    admitted_s: float
    sampled_s: float
    scored_s: float
    turns: Sequence[TurnSampled]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """A prompt that no step is trained on."""

    prompt: int
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """The trainer got the batch of a step; times are seconds of its start of the run."""

    step: int
    prompts: Sequence[int]
    """Indices in the run, in the order of the batch."""
    asked_s: float
    """When the trainer asked for it."""
    taken_s: float
    loaded_s: float
    """When the weights of the previous step had been loaded."""
    busy_s: Sequence[float]
    """Seconds that each rank has sampled since the previous batch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolesStarted:
    """All roles are there, and a start goes on after a step."""

    step: int
    metrics: Mapping[str, float]
    processes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict[str, Sequence[str]])
    """Role -> number and node of the process of each rank: `4711@node`."""
    planned_gib: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Role -> memory that the plan gives to one of its processes; empty if the plan does not know."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Some rollouts of a step, by column: readers get it before the step is done. Not kept, `rollouts/` has all."""

    step: int
    rows: Sequence[Mapping[str, str | float | bool]]


Work: TypeAlias = tuple[str, float, float, float, int]
"""What a rank did: the name of its call, when it began and ended (seconds since the epoch, by the clock of its
machine), how long it took, and 1; of calls that are together when the first began and the last ended, their seconds and
their number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A training step."""

    step: int
    metrics: Mapping[str, float]
    """What `metrics.jsonl` has of it."""
    digests: Mapping[str, str]
    """What it trained on: name of a part of the batch -> digest, in the order in which the parts come to be."""
    seconds: float = 0.0
    began_s: float = 0.0
    """When it began: seconds since the epoch, by the clock of the driver; 0 in journals that did not have it yet."""
    begins: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Phase -> seconds after the step's beginning at which it first began; `metrics` has how long it took."""
    work: Mapping[str, Sequence[Sequence[Work]]] = dataclasses.field(
        default_factory=dict[str, Sequence[Sequence["Work"]]]
    )
    """Role -> what each of its ranks did since the previous step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """The validation after a step; 0 is before the first."""

    step: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint that is whole and visible."""

    step: int
    weights: str
    """Digest of its weights."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoleLost:
    """A worker process that died or hung while it was needed, with all its roles; the run goes on."""

    role: str
    """The role whose call it was."""
    rank: int
    step: int | None
    """Step that was under way; None if none was."""
    why: str
    """The error, in a line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolesRestarted:
    """What was lost is there again."""

    first: int | None
    """Step after which the run goes on, if a role that trains was lost; None if the step under way goes on."""
    seconds: float
    """Seconds since the loss was noticed."""
    processes: Mapping[str, Sequence[str]]
    """Those of the roles that were made anew; see `RolesStarted`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolShrunk:
    """A pool whose nodes were lost, and that goes on with fewer processes."""

    pool: str
    was: Sequence[int]
    """Processes per node."""
    now: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The end of a start; a start without one was killed."""

    how: Ending
    why: str = ""
    """The error, whole."""


Event: TypeAlias = (
    Launched
    | RunBegan
    | InputsRead
    | Said
    | Resumed
    | WeightsPublished
    | WeightsLoaded
    | SliceSent
    | RolloutFailed
    | GroupScored
    | GroupDropped
    | BatchTaken
    | RolesStarted
    | Shown
    | StepDone
    | Validated
    | CheckpointSaved
    | RoleLost
    | RolesRestarted
    | PoolShrunk
    | RunEnded
)

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
NUMBERS_OF = {
    name: [field.name for field in dataclasses.fields(kind) if field.type in {"int", "int | None"}]
    for name, kind in _KINDS.items()
}
"""Kind of an event -> names of its whole numbers, such as step and rank."""


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of an event as JSON has them: it has no NaN and no infinity, so such a metric is a word."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    if "metrics" in values:
        metrics = cast("Mapping[str, float]", values["metrics"])
        values["metrics"] = {name: one if math.isfinite(one) else str(float(one)) for name, one in metrics.items()}
    return values


def event_of(kind: str, values: Mapping[str, Any]) -> Event:
    """Return the event of a line.

    Raises:
        KeyError: there is no such kind.
        TypeError: it has other fields.
    """
    fields = dict(values)
    if "metrics" in fields:
        fields["metrics"] = {
            name: float(one) if isinstance(one, str) else one for name, one in fields["metrics"].items()
        }
    return _KINDS[kind](**fields)
