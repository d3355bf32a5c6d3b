"""The journal: what happened in a run, event by event, and what follows from it.

Owns: the kinds of events, the one file that they are appended to, the state of a run that they make, and the first
place in which two runs part.

Must not know: roles, torch, Ray, or who reads it.
"""

from rallypoint.journal.diff import Change, Difference, changes, config_changes, first_difference
from rallypoint.journal.events import (
    NUMBERS_OF,
    BatchTaken,
    CheckpointSaved,
    Ending,
    Event,
    GroupDropped,
    GroupScored,
    InputsRead,
    Launched,
    Level,
    PoolShrunk,
    Resumed,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    RolloutFailed,
    RunBegan,
    RunEnded,
    Said,
    Shown,
    SliceSent,
    StepDone,
    TurnSampled,
    Validated,
    WeightsLoaded,
    WeightsPublished,
    Work,
)
from rallypoint.journal.log import Entry, Journal, JournalTail, Later, Reader, read_journal
from rallypoint.journal.state import RunState, fold

__all__ = [
    "NUMBERS_OF",
    "BatchTaken",
    "Change",
    "CheckpointSaved",
    "Difference",
    "Ending",
    "Entry",
    "Event",
    "GroupDropped",
    "GroupScored",
    "InputsRead",
    "Journal",
    "JournalTail",
    "Later",
    "Launched",
    "Level",
    "PoolShrunk",
    "Reader",
    "Resumed",
    "RoleLost",
    "RolesRestarted",
    "RolesStarted",
    "RolloutFailed",
    "RunBegan",
    "RunEnded",
    "RunState",
    "Said",
    "Shown",
    "SliceSent",
    "StepDone",
    "TurnSampled",
    "Validated",
    "WeightsLoaded",
    "WeightsPublished",
    "Work",
    "changes",
    "config_changes",
    "first_difference",
    "fold",
    "read_journal",
]
