"""What the loop reports to a display: text and numbers only, every field filled."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rallypoint.config import RECIPES, RunConfig
from rallypoint.config.fields import nested
from rallypoint.config.recipes import WATCHED
from rallypoint.config.transport import transport_kind
from rallypoint.extras import find_unusable
from rallypoint.journal import STEP, TIME, RunBegan, RunState, StepDone, fold, read_journal
from rallypoint.observability.health import health
from rallypoint.observability.numbers import finite_mean
from rallypoint.observability.spans import TIME_PREFIX, spans_of, top_level
from rallypoint.observability.trend import FLAT_STEPS, RewardTrend
from rallypoint.run.agreement import Agreement
from rallypoint.run.folder import RunFolder
from rallypoint.run.waste import Account, account

VALIDATION, REWARD = "validation/score", "reward/mean"
REWARD_FAILED, REWARD_SCORED = "reward/failed", "reward/num_scored"
TOKENS_SAMPLED, TOKENS_TRAINED = "rollout/num_tokens", "actor/num_tokens"
"""Names in metrics.jsonl under which the summary finds a step's token counts."""
MEMORY = "/memory_gib"
"""Suffix after a role's name: the role's peak memory in a step."""


def why_no_plot() -> str:
    """Say why a picture was not drawn."""
    return f"it {find_unusable('matplotlib', 'plot') or 'was not drawn; try it again'}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Facts about a run that are known before its first step."""

    name: str
    """The run's name: `digits-0`."""
    algorithm: str
    """`ppo`, `grpo`."""
    num_steps: int
    run_dir: Path
    detail: str = ""
    """A few words on what runs where: `llama 0.4M, 2 workers on ray`."""
    first_step: int = 1
    """First step of this start; larger than 1 if the run was resumed."""
    watched: Sequence[tuple[str, str]] = WATCHED
    """Scalars of a step that a person wants to see, with short names; the first as a curve."""
    validated: str = "score"
    """What a validation is shown by: its score, or its loss."""
    course: Sequence[float] = ()
    """Values of the first scalar that is watched in the steps before `first_step`, for a resumed run's sparkline."""
    validations: Sequence[float] = ()
    """Validations before `first_step`, oldest first."""
    num_warmup_steps: int = 0
    """Steps of the learning rate's warmup, in which the policy is not expected to learn."""

    @classmethod
    def of(cls, began: RunBegan) -> Self:
        """Return what there is to know of a start, and what was done up to the step that it goes on from."""
        config, folder = RunConfig.model_validate(nested(began.config)), RunFolder(Path(began.folder))
        before, spec = folder.state() if began.first else RunState(), RECIPES[config.recipe]
        watched, validated = config.watched[0][0], f"validation/{spec.validated}"
        steps, validations = (
            [one.metrics for step, one in sorted(done.items()) if step <= began.first]
            for done in (before.steps, before.validations)
        )
        ranks = ", ".join(f"{role} x{config.num_ranks(role)}" for role in config.roles)
        kind = transport_kind(config)
        weights = f"; weights: {kind.name if kind else 'as placed'}" if "rollout" in config.roles else ""
        return cls(
            name=folder.path.name,
            algorithm=config.recipe,
            num_steps=config.trainer.num_steps,
            run_dir=folder.path,
            detail=f"{ranks} on {config.cluster.runtime}{weights}",
            first_step=began.first + 1,
            num_warmup_steps=config.num_warmup_steps,
            watched=config.watched,
            validated=spec.validated,
            course=[metrics[watched] for metrics in steps if watched in metrics],
            validations=[metrics[validated] for metrics in validations if validated in metrics],
        )


def config_of(began: RunBegan | None) -> RunConfig | None:
    """Return the config of a start; None if there is none that this version can read."""
    try:
        return None if began is None else RunConfig.model_validate(nested(began.config))
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One rollout to look at; its texts are the model's and are shown with care."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The result of one training step."""

    step: int
    scalars: Mapping[str, float]
    spans: Mapping[str, float]
    """Seconds by phase: spans of the top level. Paths of nested spans are passed over."""
    seconds: float
    """Seconds of the whole step."""
    num_tokens: int
    """Tokens sampled in this step; divided by `seconds` they are the speed on the screen."""
    completion: Completion | None = None

    @classmethod
    def of(cls, done: StepDone, rows: Sequence[Mapping[str, Any]] = ()) -> Self:
        """Return the report of a step, with one of its rollouts."""
        metrics, completion = done.metrics, None
        if rows:
            row = rows[done.step % len(rows)]
            completion = Completion(**{field.name: row[field.name] for field in dataclasses.fields(Completion)})
        return cls(
            step=done.step,
            scalars=metrics,
            spans=top_level(spans_of(metrics)),
            seconds=done.seconds,
            num_tokens=int(metrics.get(TOKENS_SAMPLED, metrics.get(TOKENS_TRAINED, 0))),
            completion=completion,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A whole run on one screen; `measured` reads its numbers from the run's own file."""

    name: str
    run_dir: Path
    num_steps: int = 0
    """Steps done, over all restarts."""
    seconds: float = 0.0
    """Seconds at work, over all restarts."""
    validated: str = "score"
    """What a validation is shown by: its score, or its loss."""
    validations: Sequence[tuple[int, float]] = ()
    """(step, score or loss), oldest first."""
    course: tuple[str, float, float, int] | None = None
    """What is watched above all: its short name, its means over the first and the last steps, and over how many."""
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Seconds by phase, summed over the steps."""
    num_tokens_sampled: int = 0
    num_tokens_trained: int = 0
    account: Account | None = None
    """What the run has cost, and what of it was for nothing; None if nothing was measured."""
    step_s: float = math.nan
    """Median of the seconds that a step took, without start-up, validation and checkpoints; NaN without steps."""
    curve: Path | None = None
    """The picture, if there is one."""
    why_no_curve: str = ""
    """Why there is no picture."""
    checkpoints: Sequence[Path] = ()
    """Oldest first."""
    commands: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Commands to run next, by verb: `{"chat": "rally chat runs/digits/checkpoints/step_000300"}`."""
    memory_gib: Mapping[str, tuple[float, float | None]] = dataclasses.field(
        default_factory=dict[str, tuple[float, float | None]]
    )
    """Role -> peak memory of its processes during its calls, and the prediction."""
    agreement: Agreement | None = None
    """Gap between sampler and trainer; None if no step was done."""
    notes: Sequence[str] = ()
    """Warnings to read before trusting the result."""

    def measured(
        self,
        journal: Path,
        *,
        predicted_memory_gib: Mapping[str, float] | None = None,
        num_warmup_steps: int = 0,
        watched: Sequence[tuple[str, str]] = WATCHED,
        text_of: Callable[[int], str] | None = None,
    ) -> Self:
        """Return the summary with the numbers of a journal; a resumed run counts what came before, too.

        Args:
            journal: file of the run.
            predicted_memory_gib: prediction for each role.
            num_warmup_steps: steps in which the policy is not expected to learn.
            watched: scalars that a person wants to see of this run, with short names.
            text_of: token id -> its text.
        """
        entries, shown = list(read_journal(journal)), f"validation/{self.validated}"
        records = fold(entries).records
        return dataclasses.replace(
            self,
            num_steps=int(max((record[STEP] for record in records), default=0)),
            seconds=records[-1][TIME] if records else 0.0,
            validations=[(int(record[STEP]), record[shown]) for record in records if shown in record],
            course=_course(records, *watched[0]),
            phases=top_level(_totals(records, TIME_PREFIX)),
            num_tokens_sampled=int(_total(records, TOKENS_SAMPLED)),
            num_tokens_trained=int(_total(records, TOKENS_TRAINED)),
            account=account(entries),
            step_s=_step_s(records),
            memory_gib=_memory(records, predicted_memory_gib or {}),
            agreement=Agreement.of(records, text_of),
            notes=(*self.notes, *_failures(records), *_not_learning(records, num_warmup_steps)),
        )


def _course(records: Sequence[Mapping[str, float]], name: str, label: str) -> tuple[str, float, float, int] | None:
    values = [record[name] for record in records if math.isfinite(record.get(name, math.nan))]
    num_steps = max(1, min(len(values) // 4, _COURSE_STEPS))
    return (label, finite_mean(values[:num_steps]), finite_mean(values[-num_steps:]), num_steps) if values else None


_COURSE_STEPS = 20
"""Most steps of a mean in the summary."""


def _step_s(records: Sequence[Mapping[str, float]]) -> float:
    steps = [spans_of(record) for record in records if record.keys() & {REWARD, TOKENS_TRAINED}]
    return statistics.median(sum(top_level(spans).values()) for spans in steps) if steps else math.nan


def _not_learning(records: Sequence[Mapping[str, float]], num_warmup_steps: int) -> tuple[str, ...]:
    """Return a warning if the reward did not rise in many steps."""
    steps, course = [record for record in records if REWARD in record], RewardTrend(num_warmup_steps=num_warmup_steps)
    for record in steps:
        course.add(record)
    last = {REWARD: steps[-1][REWARD]} if steps else {}
    found = health({**last, FLAT_STEPS: course.num_flat_steps})
    return (str(course),) if any(finding.name == FLAT_STEPS for finding in found) else ()


def _memory(
    records: Sequence[Mapping[str, float]], predicted: Mapping[str, float]
) -> dict[str, tuple[float, float | None]]:
    names = dict.fromkeys(name for record in records for name in record if name.endswith(MEMORY))
    roles = {name: name.removesuffix(MEMORY) for name in names}
    return {
        role: (max(record[name] for record in records if name in record), predicted.get(role))
        for name, role in roles.items()
    }


def _failures(records: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Say how many rollouts have no score, and so are missing in the mean rewards."""
    failed = _total(records, REWARD_FAILED)
    if failed < 1:
        return ()
    kinds = _totals(records, f"{REWARD_FAILED}_")
    why = ", ".join(f"{number:.0f} {kind}" for kind, number in kinds.items() if number)
    scored = _total(records, REWARD_SCORED)
    of_all, in_which_way = f" of {failed + scored:,.0f}" if scored else "", f" ({why})" if why else ""
    return (
        f"{failed:,.0f}{of_all} rollouts have no score{in_which_way} and were left out: reward/mean is that of the "
        "others; logs/train.log names them",
    )


def _total(records: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(value for record in records if math.isfinite(value := record.get(name, 0.0)))


def _totals(records: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Sum every metric below a prefix, under its name without the prefix."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefix))
    return {name.removeprefix(prefix): _total(records, name) for name in names}
