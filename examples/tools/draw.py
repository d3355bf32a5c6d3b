"""Draw the validation scores of the runs in `runs/` to tools.png."""

import json
from pathlib import Path

from matplotlib import pyplot

figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
for name in ("calculator", "python", "search", "agent"):
    file = Path("runs") / name / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    scores = {row["step"]: row["validation/score"] for row in rows if "validation/score" in row}
    if scores:
        axes.plot(scores.keys(), scores.values(), marker="o", markersize=3, label=f"{name}.yaml")
axes.set(xlabel="step", ylabel="right answers", ylim=(0, 1))
axes.grid(alpha=0.3)
axes.legend(loc="lower right")
figure.savefig("tools.png", dpi=130)
