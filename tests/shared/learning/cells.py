"""The cells of the learning suite: every name of docs/algorithms.md, with what goes with it and the tasks it trains.

Owns: these choices. Must not know: how a cell is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from learning.tasks import PARTS, TASKS, Task
from rallypoint.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    KL,
    OBJECTIVES,
    AdaptiveKL,
    Advantage,
    Correction,
    OverlongPenalty,
    OwnAdvantage,
    OwnObjective,
    PolicyObjective,
    RowMask,
)
from rallypoint.algorithms.aggregation import AggregationName
from rallypoint.config import RunConfig
from rallypoint.config.fields import Section, named_sections
from rallypoint.config.sections import algorithms as sections

_PULL, _WEAK_PULL = 0.2, 0.01
"""Coefficients of the KL where it is part of the optimum, and where the score alone counts."""

Goal = Literal["score", "score and pull", "distance"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """An algorithm: one name of docs/algorithms.md, and what goes with it."""

    axis: Literal["advantage", "loss", "correction", "aggregation", "kl", "shaping"]
    name: str
    advantage: Advantage
    objective: PolicyObjective
    corrections: tuple[Correction, ...] = ()
    aggregation: AggregationName = "token"
    kl: KL | None = None
    adaptive: AdaptiveKL | None = None
    refresh_every_steps: int | None = None
    value_clip: float | None = None
    """How far a critic's value may move in a step before its loss is clipped."""
    mask: RowMask = RowMask()
    """Rows that do not train."""
    overlong: OverlongPenalty | None = None
    """What long responses lose; then the optimum is that of score and penalty."""
    cut_share: float = 0.0
    """Share of rows that are truncated; a policy is judged by whole ones."""
    staleness: int = 0
    """Steps that the sampler's weights are behind."""
    num_epochs: int = 2
    num_mini_batches: int = 2
    num_steps: int = 40
    tasks: tuple[str, ...] = tuple(TASKS)

    def goal(self, task: Task) -> Goal:
        """Return what counts: the score; on the bandit with a KL, what the KL says is the best; or a distance."""
        if self.adaptive is not None:
            return "distance"
        has_pull = self.kl is not None and task.name == "bandit" and self.refresh_every_steps is None
        return "score and pull" if has_pull else "score"

    def coef(self, task: Task) -> float:
        """Return the coefficient of its KL."""
        if self.kl is None:
            return 0.0
        return self.kl.coef if task.name == "bandit" else _WEAK_PULL


def own_loss(name: str, function: Callable[[Any], Any]) -> Cell:
    """Return the cell of a policy loss of one's own; everything else is usual."""
    return dataclasses.replace(CELLS["clip"], name=name, objective=OwnObjective(function=function))


def own_advantage(name: str, function: Callable[[Any], Any]) -> Cell:
    """Return the cell of an advantage of one's own; everything else is usual."""
    return dataclasses.replace(CELLS["grpo"], name=name, advantage=OwnAdvantage(function=function, whiten=False))


def _parameters(kind: type[Section], name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that a config has for a name, with changes."""
    defaults = kind.model_validate({"name": name})
    return {key: getattr(defaults, key) for key in kind.model_fields if key != "name"} | changes


def _advantage(name: str, **changes: Any) -> Advantage:
    return ADVANTAGES[name](**_parameters(named_sections(RunConfig.model_fields["advantage"])[name], name, changes))


def _objective(name: str, **changes: Any) -> PolicyObjective:
    return OBJECTIVES[name](**_parameters(named_sections(RunConfig.model_fields["loss"])[name], name, changes))


_CORRECTION_SECTIONS = {
    "tis": sections.TISConfig,
    "icepop": sections.IcePopConfig,
    "mask": sections.MaskConfig,
    "kl_mask": sections.KLMaskConfig,
    "off_policy_mask": sections.OffPolicyMaskConfig,
}


def _correction(name: str, **changes: Any) -> Correction:
    return CORRECTIONS[name](**_parameters(_CORRECTION_SECTIONS[name], name, changes))


def _cells() -> dict[str, Cell]:
    usual = Cell(axis="advantage", name="", advantage=_advantage("grpo"), objective=_objective("clip"))
    with_kl = dataclasses.replace(usual, axis="kl", advantage=_advantage("rloo"), num_steps=80)
    cells = [
        *_advantages(usual),
        *_losses(dataclasses.replace(usual, axis="loss")),
        *_corrections(dataclasses.replace(usual, axis="correction", staleness=2)),
        *(
            dataclasses.replace(usual, axis="aggregation", name=f"aggregation: {name}", aggregation=name)
            for name in ("token", "sequence", "fixed_length", "prompt")
        ),
        *_kls(with_kl),
        *_shapings(dataclasses.replace(usual, axis="shaping")),
    ]
    return {cell.name: cell for cell in cells}


def _advantages(usual: Cell) -> list[Cell]:
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        **{name: (name, {"weights": dict.fromkeys(PARTS, 1.0)} if name == "gdpo" else {}) for name in ADVANTAGES},
        "gae, VAPO": ("gae", {"value_lambda": 1.0, "length_alpha": 0.5}),
        "gae, turns": ("gae", {"unit": "turn"}),
        "grpo by token": ("grpo", {"token_discount": 1.0}),
    }
    cells = [
        dataclasses.replace(usual, name=name, advantage=_advantage(kind, **changes))
        for name, (kind, changes) in variants.items()
    ]
    only = {
        "gdpo": ("copy", "sort"),  # only they have two rewards that one policy earns both of
        "pass_at_k": ("bandit",),  # scores above 0 are right answers, and only the bandit has no others
        "grpo by token": ("bandit", "copy", "sort"),  # its baseline is a reward a token: on the chain both ways pay 0.2
    }
    clipped = dataclasses.replace(usual, name="gae, value clip", advantage=_advantage("gae"), value_clip=0.2)
    return [*(dataclasses.replace(cell, tasks=only.get(cell.name, cell.tasks)) for cell in cells), clipped]


def _losses(usual: Cell) -> list[Cell]:
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        **{name: (name, {}) for name in OBJECTIVES},
        "clip-higher": ("clip", {"clip_high": 0.28}),
        "dual clip": ("clip", {"dual_clip": 3.0}),
        "cispo, anchor rollout": ("cispo", {"anchor": "rollout"}),
        "dppo, KL": ("dppo", {"divergence": "kl"}),
        # So many that it matters: the steps of these tasks have a hundredth of the tokens of the paper's.
        "clip_cov": ("clip_cov", {"fraction": 0.05, "covariance_low": 0.5}),
        "kl_cov": ("kl_cov", {"fraction": 0.02}),
    }
    by_row, stale = {"gspo", "gmpo", "sapo"}, {"decoupled", "dppo", "dppo, KL", "cispo, anchor rollout"}
    return [
        dataclasses.replace(
            usual,
            name=name,
            objective=_objective(kind, **changes),
            aggregation="sequence" if kind in by_row else "token",
            staleness=2 if name in stale else 0,
            # As many updates as the others, one a step; and bounds so narrow that most of them do little.
            **({"num_epochs": 1, "num_mini_batches": 1, "num_steps": 160} if kind == "policy_gradient" else {}),
            **({"num_steps": 80} if kind == "gspo" else {}),
        )
        for name, (kind, changes) in variants.items()
    ]


def _corrections(usual: Cell) -> list[Cell]:
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "tis, token": ("tis", {"level": "token"}),
        "tis, sequence": ("tis", {"level": "sequence"}),
        "icepop": ("icepop", {}),
        "mask, token": ("mask", {"level": "token"}),
        "mask, product": ("mask", {"level": "product"}),
        "mask, geometric": ("mask", {"level": "geometric", "low": 0.8, "high": 1.25}),
        "kl_mask, k2": ("kl_mask", {"estimator": "k2"}),
        "kl_mask, k3": ("kl_mask", {"estimator": "k3"}),
        "off_policy_mask": ("off_policy_mask", {}),
    }
    return [
        dataclasses.replace(usual, name=name, corrections=(_correction(kind, **changes),))
        for name, (kind, changes) in variants.items()
    ]


def _kls(usual: Cell) -> list[Cell]:
    kinds = {
        "kl: k1 in the reward": KL(coef=_PULL, estimator="k1", placement="reward"),
        "kl: k2": KL(coef=_PULL, estimator="k2", placement="loss"),
        "kl: k3": KL(coef=_PULL, estimator="k3", placement="loss"),
        "kl: abs": KL(coef=_PULL, estimator="abs", placement="loss"),
        "kl: k1, corrected": KL(coef=_PULL, estimator="k1", placement="loss", importance_corrected=True),
        "kl: k3, corrected": KL(coef=_PULL, estimator="k3", placement="loss", importance_corrected=True),
    }
    cells = [dataclasses.replace(usual, name=name, kl=kl) for name, kl in kinds.items()]
    too_weak = KL(coef=0.1, estimator="k2", placement="loss")
    strong = KL(coef=1.0, estimator="k2", placement="loss")
    return [
        *cells,
        dataclasses.replace(
            usual,
            name="kl: adaptive",
            kl=too_weak,
            adaptive=AdaptiveKL(target=0.5, horizon=1024.0),
            tasks=("bandit",),
            num_steps=160,
        ),
        dataclasses.replace(usual, name="kl: refreshed", kl=strong, refresh_every_steps=4, tasks=("bandit",)),
    ]


def _shapings(usual: Cell) -> list[Cell]:
    # On the chain five tokens earn 1 and lose 1, so that one token is best; elsewhere all rows are of one length.
    penalty = OverlongPenalty(max_tokens=5, buffer=4, factor=1.0)
    return [
        dataclasses.replace(
            usual,
            name="mask: truncated",
            mask=RowMask(truncated=True),
            cut_share=0.3,
            tasks=("chain", "copy", "sort"),  # a response of one token cannot be cut
        ),
        dataclasses.replace(usual, name="mask: zero variance", mask=RowMask(zero_variance=True)),
        dataclasses.replace(usual, name="overlong penalty", overlong=penalty, tasks=("chain",)),
    ]


CELLS = _cells()
"""Every algorithm by name."""
