"""Every error a user can meet, in one tree.

Each leaf says in one sentence what happened and carries what a caller needs to react. All of them
survive pickling (they cross process borders) and have a parent from the standard library, so that
`except ValueError` keeps its meaning.
"""

from __future__ import annotations


class RallyError(Exception):
    """Parent of every error that rallypoint raises on purpose."""


def first_line(error: BaseException) -> str:
    r"""Return what an error says, without the traceback that it may carry.

    >>> first_line(ValueError("a word\n\nTraceback ..."))
    'a word'
    """
    return str(error).partition("\n")[0].rstrip()


def how_to_install(extra: str) -> str:
    """Return the command for packages that only some need; rallypoint is on no package index yet.

    >>> how_to_install("serve")
    "in a clone of rallypoint: pip install -e '.[serve]'"
    """
    return f"in a clone of rallypoint: pip install -e '.[{extra}]'"


class ConfigError(RallyError, ValueError):
    """One or more keys of a config are wrong; all of them are listed."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} {noun} in the config:\n{lines}"


class DataError(RallyError, ValueError):
    """A data set cannot be used: the file, the row and the column are named."""


class ModelError(RallyError, ValueError):
    """A model folder cannot be used: the file and the remedy are named."""


class SandboxError(RallyError, RuntimeError):
    """No sandbox works on this machine, or one failed; model-written code was not run."""


class RewardError(RallyError, RuntimeError):
    """The reward function cannot be loaded, or failed for every rollout of a step."""


class EpisodeError(RallyError, RuntimeError):
    """An episode broke a rule of its client; prompt, sample and the remedy are named."""


class EnvironmentFailedError(RallyError, RuntimeError):
    """What an episode talks to failed: raised by the episode, whose rollout is left out and counted."""


class TeacherError(RallyError, RuntimeError):
    """A served teacher gave no answer, or one that is not a judgement of the tokens it was asked about."""


class UserCodeError(RallyError, ValueError):
    """A function in a file of the user's cannot be used: the file and the remedy are named."""


class RowTooLongError(RallyError, ValueError):
    """One row alone exceeds the token cap of a micro-batch."""

    def __init__(self, row: int, num_tokens: int, max_tokens: int, rollout: tuple[int, int] | None = None) -> None:
        super().__init__(row, num_tokens, max_tokens, rollout)
        self.row, self.num_tokens, self.max_tokens = row, num_tokens, max_tokens
        self.rollout = rollout
        """Prompt and sample of the row, where they are known."""

    def __str__(self) -> str:
        which = f"; it is sample {self.rollout[1]} of prompt {self.rollout[0]}" if self.rollout else ""
        return (
            f"row {self.row} has {self.num_tokens} tokens, but a micro-batch may hold {self.max_tokens}: "
            f"raise max_tokens_per_micro_batch or shorten the rows{which}"
        )

    def of_rollout(self, prompt: int, sample: int) -> RowTooLongError:
        """Return the same error with the number of the prompt, and that of the sample in its group."""
        return RowTooLongError(self.row, self.num_tokens, self.max_tokens, (prompt, sample))


class CheckpointError(RallyError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the file is named."""


class UnusableCheckpointError(CheckpointError):
    """The checkpoint that a run was to go on from is damaged, or not there; the way out is said."""


class ResumeError(RallyError, ValueError):
    """A run cannot go on from a checkpoint with what has changed since; all of it is listed."""

    def __init__(self, step: int, changes: tuple[str, ...]) -> None:
        super().__init__(step, changes)
        self.step, self.changes = step, changes

    def __str__(self) -> str:
        lines = "\n".join(f"  - {change}" for change in self.changes)
        return (
            f"the run cannot go on from step {self.step}, because this was otherwise so far:\n{lines}\n"
            "take it back, or begin a new run with the weights of this one: model.path=CHECKPOINT"
        )


class ExportError(RallyError, RuntimeError):
    """There is nothing to export, or it cannot be written to where it was wanted."""


class RunFolderError(RallyError, RuntimeError):
    """A run folder is in use by another process, or cannot be written."""


class FailpointError(RallyError, RuntimeError):
    """A failure on purpose: the environment variable RALLY_FAIL told the run to raise."""


class DiskError(RallyError, OSError):
    """A file of a run cannot be written; it is named, and what the system says."""


class CacheError(RallyError, MemoryError):
    """Keys and values of an engine do not fit into memory; what was asked for and what there is are named."""


class ClusterError(RallyError, RuntimeError):
    """A Ray cluster cannot be started, or cannot be joined."""


class RayLostError(ClusterError):
    """One of Ray's own processes is gone, stopped or silent; it is named, and no worker is to blame."""


class PlacementError(RallyError, RuntimeError):
    """A resource pool does not fit on the cluster, or a node does not have what a role needs."""


class NoPlaceError(PlacementError):
    """A resource pool has waited too long for a place that it could have; another try may help."""


class AbandonedError(RallyError):
    """A step was abandoned after an interruption; it is done again when the run goes on."""


class RequestError(RallyError, ValueError):
    """A prompt cannot be continued as asked: it is empty, too long, or has tokens that the model does not know."""


class GenerationError(RallyError, RuntimeError):
    """An engine that samples has failed or was closed; its requests are lost."""


class RowFullError(GenerationError):
    """A row has no room for a further turn of its rollout."""


class EngineError(RallyError, RuntimeError):
    """An engine's own environment is not there, or cannot be made; the command or the step is named."""


class ServingError(RallyError, RuntimeError):
    """The endpoint cannot be started, or has ended by itself: the port, the key or the package is named."""


class EndpointError(RallyError, ValueError):
    """A request to the endpoint is refused, with an HTTP status; the field and what is expected of it are named."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        return self.message


class BusyError(RallyError, TimeoutError):
    """A request to the endpoint of a run in training got no time within its deadline; another try may."""


class NotFiniteError(RallyError, ArithmeticError):
    """A loss, an advantage, a gradient or a weight is NaN or infinite; training would only spread it."""

    def __init__(self, *said: object, is_of_update: bool = False) -> None:
        """Make one.

        Args:
            said: what is printed.
            is_of_update: whether all ranks have left an optimizer step out because of it, and can go on.
        """
        super().__init__(*said)
        self.is_of_update = is_of_update


class DivergedError(NotFiniteError):
    """Updates of several steps in a row were left out; the run may go on from before them once."""

    def __init__(self, said: str, last: int) -> None:
        super().__init__(said, last)
        self.said, self.last = said, last
        """The last step before them."""

    def __str__(self) -> str:
        return self.said


class OwnLossError(NotFiniteError):
    """What a function of the user's said of a token is NaN or infinite."""

    def __init__(self, row: int, said: str, rollout: tuple[int, int] | None = None) -> None:
        super().__init__(row, said, rollout)
        self.row, self.said, self.rollout = row, said, rollout

    def __str__(self) -> str:
        which = f"of sample {self.rollout[1]} of prompt {self.rollout[0]}" if self.rollout else f"of row {self.row}"
        return f"{self.said} {which}; divide by x.clamp(min=1e-6), and take tokens.ratio for an exp of your own"

    def of_rollout(self, prompt: int, sample: int) -> OwnLossError:
        """Return the same error with the number of the prompt, and that of the sample in its group."""
        return OwnLossError(self.row, self.said, (prompt, sample))


class DeterminismError(RallyError, RuntimeError):
    """A training pass needs an operator without a kernel that gives equal bits; or ranks differ that should not."""


class PeerFailedError(RallyError, RuntimeError):
    """Another rank of the same group found a problem, so that this one stopped as well."""

    is_of_update = False
    """See `NotFiniteError`, which the other rank raises."""


class OffPolicyError(RallyError, RuntimeError):
    """The first update of a step saw other logprobs than those recorded just before it."""


class WeightsMismatchError(RallyError, RuntimeError):
    """The rollout role holds other weights than the actor published."""


class PublishError(RallyError, RuntimeError):
    """Weights did not get from the actor to the rollout role in time; the error names ranks that were missing."""


class StalenessError(RallyError, RuntimeError):
    """A rollout is older than max_staleness allows."""


class ScheduleError(RallyError, ValueError):
    """A schedule cannot be repeated: it cannot be read, or is not of a run with this config."""


class _WorkerProblemError(RallyError, RuntimeError):
    """A call on a rank that did not end well: which rank, which call, and how many others were cancelled."""

    def __init__(
        self,
        role: str,
        rank: int,
        call: str,
        detail: str,
        *more: str,
        step: int | None = None,
        pid: int = 0,
        node: str = "",
    ) -> None:
        super().__init__(role, rank, call, detail, *more)
        self.role, self.rank, self.call, self.detail = role, rank, call, detail
        self.step, self.pid, self.node = step, pid, node
        self.num_cancelled = 0
        """Ranks whose calls were cancelled because of this."""

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, self.__dict__)

    def _told(self, verb: str) -> str:
        """Return who failed where, and when; without the reason."""
        known = ", ".join([f"pid {self.pid}"] * bool(self.pid) + [f"node {self.node}"] * bool(self.node))
        at = "" if self.step is None else f" at step {self.step}"
        ranks = f"{self.num_cancelled} other rank{'s' * (self.num_cancelled != 1)}"
        others = f" (calls of {ranks} cancelled)" if self.num_cancelled else ""
        return f"{self.role} rank {self.rank}{f' ({known})' if known else ''} {verb} {self.call}{at}{others}"


class WorkerError(_WorkerProblemError):
    """A method of a worker raised; the first failing rank's own traceback is shown where it helps."""

    def __init__(
        self,
        role: str,
        rank: int,
        call: str,
        cause: str,
        remote_traceback: str,
        *,
        step: int | None = None,
        pid: int = 0,
        node: str = "",
        is_consequence: bool = False,
    ) -> None:
        super().__init__(role, rank, call, cause, remote_traceback, step=step, pid=pid, node=node)
        self.cause, self.remote_traceback, self.is_consequence = cause, remote_traceback, is_consequence

    def __str__(self) -> str:
        return f"{self._told('failed in')}: {self.cause}\n\n{self.remote_traceback}".rstrip()


class WorkerDiedError(_WorkerProblemError):
    """A worker process ended while it was needed."""

    verb = "died during"
    is_preempted = False
    """Whether the machine's owner took it away, with notice."""
    is_terminated = False
    """Whether somebody sent it SIGTERM, as a scheduler does."""
    is_node_lost = False
    """Whether its whole node was lost, with all processes there."""
    is_final = False
    """Whether another try would end the same way: the cause is in the call."""

    def __str__(self) -> str:
        return f"{self._told(self.verb)}: {self.detail}"


class WorkerHungError(WorkerDiedError):
    """A worker process gave no sign of life, or a call made no progress until its deadline; it was ended."""

    verb = "hung in"


class CallCancelledError(RallyError, RuntimeError):
    """A call was stopped because nobody waits for it any more."""


class RendezvousError(RallyError, RuntimeError):
    """Ranks did not find each other, or one that was found is gone; `ranks` are those it is about."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankTakenError(RendezvousError):
    """Two live participants claim the same rank; the one that came second is refused."""


class WorldSizeError(RendezvousError):
    """A participant expects another number of ranks than those who are there already."""


class StaleGenerationError(RendezvousError):
    """A participant belongs to an earlier attempt; a newer generation has begun."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Some ranks did not come in time; each is listed with where and when it was last seen."""


class MembershipLostError(RendezvousError, ConnectionError):
    """A member of a complete generation died or left, or this one was expelled because it did not renew."""


class RendezvousUnreachableError(RendezvousError, ConnectionError):
    """The place that keeps the rendezvous does not answer."""
