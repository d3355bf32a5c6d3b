"""A run's newest numbers as text that Prometheus scrapes, in its exposition format 0.0.4.

Owns: names there. A metric has the characters that Prometheus allows, and its own name as a label.

>>> print(exposition("first", 3, {"reward/mean": 0.5}), end="")
# TYPE rallypoint_step gauge
rallypoint_step{run="first"} 3
# TYPE rallypoint_reward_mean gauge
rallypoint_reward_mean{run="first",name="reward/mean"} 0.5
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ODD = re.compile(r"[^a-zA-Z0-9_]")


def exposition(run: str, step: int, metrics: Mapping[str, float]) -> str:
    """Return the text.

    Args:
        run: name of the run, a label of each line.
        step: its newest one.
        metrics: newest value of each, as `metrics.jsonl` names them.
    """
    quoted = _quoted(run)
    lines = ["# TYPE rallypoint_step gauge", f'rallypoint_step{{run="{quoted}"}} {step}']
    by_name = defaultdict[str, list[str]](list)
    for name, value in metrics.items():
        known = f"rallypoint_{_ODD.sub('_', name)}"
        by_name[known].append(f'{known}{{run="{quoted}",name="{_quoted(name)}"}} {_written(value)}')
    for known, samples in by_name.items():
        lines += [f"# TYPE {known} gauge", *samples]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _written(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
