"""The journal: what happened in a run, event by event, and what follows from it.

Owns: the kinds of events, the one file that they are appended to, the state of a run that they make, and the first
place in which two runs part.

Must not know: roles, torch, Ray, or who reads it.
"""

from rallypoint.journal.diff import (
    Change as Change,
    Difference as Difference,
    changes as changes,
    config_changes as config_changes,
    first_difference as first_difference,
)
from rallypoint.journal.events import (
    NUMBERS_OF as NUMBERS_OF,
    BatchTaken as BatchTaken,
    CheckpointSaved as CheckpointSaved,
    Ending as Ending,
    Event as Event,
    GroupDropped as GroupDropped,
    GroupScored as GroupScored,
    InputsRead as InputsRead,
    Launched as Launched,
    PoolShrunk as PoolShrunk,
    Resumed as Resumed,
    RoleLost as RoleLost,
    RolesRestarted as RolesRestarted,
    RolesStarted as RolesStarted,
    RolloutFailed as RolloutFailed,
    RunBegan as RunBegan,
    RunEnded as RunEnded,
    Said as Said,
    Shown as Shown,
    SliceSent as SliceSent,
    StepDone as StepDone,
    TurnSampled as TurnSampled,
    Validated as Validated,
    WeightsLoaded as WeightsLoaded,
    WeightsPublished as WeightsPublished,
    Work as Work,
)
from rallypoint.journal.log import (
    Entry as Entry,
    Journal as Journal,
    JournalTail as JournalTail,
    Later as Later,
    read_journal as read_journal,
)
from rallypoint.journal.state import STEP as STEP, TIME as TIME, RunState as RunState, fold as fold
