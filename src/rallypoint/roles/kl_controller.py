"""The pull to the reference as it is now: its coefficient is fixed, or holds the divergence near a target.

Owns: the coefficient between steps, and its place in a checkpoint. Must not know: where the KL acts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rallypoint.algorithms import KL, AdaptiveKL
from rallypoint.roles.judging import REFERENCE_KL
from rallypoint.types import Last, Metrics, merge

_STATE = Path("training") / "kl.json"
"""In a checkpoint."""


class KLController:
    """The KL of a run, step after step."""

    def __init__(self, kl: KL | None, adaptive: AdaptiveKL | None) -> None:
        """Begin with the KL of the config; without `adaptive` it stays what it is."""
        self.now = kl
        """KL of the current step; None in a run without KL."""
        self._initial, self._adaptive = kl, adaptive

    def adapt(self, metrics: Metrics, num_rollouts: int) -> Metrics:
        """Choose the coefficient of the next step; return the metrics of this one, with the coefficient that it had.

        Args:
            metrics: with the KL to the reference of a step's rollouts.
            num_rollouts: of the step.
        """
        if self.now is None or self._adaptive is None:
            return metrics
        coef, found = self.now.coef, metrics.scalars().get(REFERENCE_KL)
        if found is not None:  # a step in which nothing is trained measures nothing
            self.now = dataclasses.replace(self.now, coef=self._adaptive.next(coef, found, num_rollouts))
        return merge(metrics, Metrics({"kl/coef": Last(coef)}))

    def save(self, folder: Path) -> None:
        """Write the coefficient into a checkpoint, if it adapts."""
        if self.now is not None and self._initial is not None and self._adaptive is not None:
            (folder / _STATE).write_text(json.dumps({"coef": self.now.coef, "began_with": self._initial.coef}))

    def restore(self, folder: Path) -> None:
        """Read the coefficient back from a checkpoint; one that a resumed config has changed begins anew."""
        if self.now is None or self._adaptive is None or not (folder / _STATE).is_file():
            return
        state = json.loads((folder / _STATE).read_text())
        if state["began_with"] == self.now.coef:
            self.now = dataclasses.replace(self.now, coef=state["coef"])
