"""Draw the validation scores of all runs in `runs/` of this folder to curve.png."""

import json
from pathlib import Path

from matplotlib import pyplot

figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
for file in sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda one: one.stat().st_mtime):
    rows = map(json.loads, file.read_text().splitlines())
    scores = {row["step"]: row["validation/score"] for row in rows if "validation/score" in row}
    if scores:
        axes.plot(scores.keys(), scores.values(), marker="o", markersize=3, label=f"{file.parent.name}.yaml")
axes.set(xlabel="step", ylabel="mean reward of the validation set", ylim=(None, 1))
axes.grid(alpha=0.3)
axes.legend(loc="lower right")
figure.savefig("curve.png", dpi=130)
