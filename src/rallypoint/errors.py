"""Every error a user can meet, in one tree.

Each leaf says in one sentence what happened and carries what a caller needs to react. All of them
survive pickling (they cross process borders) and have a parent from the standard library, so that
`except ValueError` keeps its meaning.
"""

from __future__ import annotations


class RallyError(Exception):
    """Parent of every error that rallypoint raises on purpose."""


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


class RewardError(RallyError, RuntimeError):
    """The reward function cannot be loaded, or failed for every rollout of a step."""


class RowTooLongError(RallyError, ValueError):
    """One row alone exceeds the token cap of a micro-batch."""

    def __init__(self, row: int, num_tokens: int, max_tokens: int) -> None:
        super().__init__(row, num_tokens, max_tokens)
        self.row, self.num_tokens, self.max_tokens = row, num_tokens, max_tokens

    def __str__(self) -> str:
        return (
            f"row {self.row} has {self.num_tokens} tokens, but a micro-batch may hold {self.max_tokens}: "
            "raise max_tokens_per_micro_batch or shorten the rows"
        )


class CheckpointError(RallyError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the file is named."""


class RunFolderError(RallyError, RuntimeError):
    """A run folder is in use by another process, or cannot be written."""


class PlacementError(RallyError, RuntimeError):
    """A resource pool does not fit on the cluster."""


class NotFiniteError(RallyError, ArithmeticError):
    """A loss or gradient is NaN or infinite; training would only spread it."""


class PeerFailedError(RallyError, RuntimeError):
    """Another rank of the same group found a problem, so that this one stopped as well."""


class OffPolicyError(RallyError, RuntimeError):
    """The first update of a step saw other logprobs than those recorded just before it."""


class WeightsMismatchError(RallyError, RuntimeError):
    """The rollout role holds other weights than the actor published."""


class StalenessError(RallyError, RuntimeError):
    """A rollout is older than max_staleness allows."""


class WorkerError(RallyError, RuntimeError):
    """A method of a worker raised; the first failing rank's own traceback is shown."""

    def __init__(
        self,
        role: str,
        rank: int,
        call: str,
        cause: str,
        remote_traceback: str,
        *,
        pid: int = 0,
        node: str = "",
        is_consequence: bool = False,
    ) -> None:
        super().__init__(role, rank, call, cause, remote_traceback)
        self.role, self.rank, self.call, self.cause = role, rank, call, cause
        self.remote_traceback, self.pid, self.node = remote_traceback, pid, node
        self.is_consequence = is_consequence

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.role, self.rank, self.call, self.cause, self.remote_traceback)
        return (type(self), arguments, {"pid": self.pid, "node": self.node, "is_consequence": self.is_consequence})

    def __str__(self) -> str:
        where = f"{self.role} rank {self.rank} (pid {self.pid}{', node ' + self.node if self.node else ''})"
        return f"{where} failed in {self.call}: {self.cause}\n\n{self.remote_traceback.rstrip()}"


class WorkerDiedError(RallyError, RuntimeError):
    """A worker process ended while it was needed."""

    def __init__(self, role: str, rank: int, call: str, detail: str) -> None:
        super().__init__(role, rank, call, detail)
        self.role, self.rank, self.call, self.detail = role, rank, call, detail

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} died during {self.call}: {self.detail}"
