"""What a display is told: what run it is, and what there is to say of each step."""

from __future__ import annotations

from rallypoint.config import RECIPES, RunConfig
from rallypoint.observability import Spans
from rallypoint.plan.run_plan import transport_name
from rallypoint.run import Completion, RunInfo, StepReport, read_metrics
from rallypoint.run.folder import RunFolder
from rallypoint.run.rollouts import RolloutRecord


def step_report(step: int, scalars: dict[str, float], spans: Spans, records: tuple[RolloutRecord, ...]) -> StepReport:
    """Return the report of a step, with one of its rollouts."""
    completion = None
    if records:
        shown = records[step % len(records)]
        completion = Completion(
            prompt=shown.prompt, response=shown.response, ground_truth=shown.ground_truth, score=shown.score
        )
    return StepReport(
        step=step,
        scalars=scalars,
        spans=spans.phases(),
        seconds=spans.elapsed_s,
        num_tokens=int(scalars.get("rollout/num_tokens", scalars["actor/num_tokens"])),
        completion=completion,
    )


def run_info(config: RunConfig, folder: RunFolder, first: int) -> RunInfo:
    """Return what run it is, and what it has done up to the step that it goes on from."""
    before, spec = read_metrics(folder.metrics) if first else [], RECIPES[config.recipe]
    watched, validated = config.watched[0][0], f"validation/{spec.validated}"
    ranks = ", ".join(f"{role} x{config.num_ranks(role)}" for role in config.roles)
    weights = f"; weights: {transport_name(config) or 'as placed'}" if "rollout" in config.roles else ""
    return RunInfo(
        name=folder.path.name,
        algorithm=config.recipe,
        num_steps=config.trainer.num_steps,
        run_dir=folder.path,
        detail=f"{ranks} on {config.cluster.runtime}{weights}",
        first_step=first + 1,
        num_warmup_steps=config.num_warmup_steps,
        watched=config.watched,
        validated=spec.validated,
        course=[record[watched] for record in before if watched in record],
        validations=[record[validated] for record in before if validated in record],
    )
