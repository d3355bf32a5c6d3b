"""The newest numbers of runs as text that Prometheus scrapes, in its exposition format 0.0.4.

Owns: names there. A metric has the characters that Prometheus allows, and its own name as a label.

>>> print(exposition({"first": (3, {"reward/mean": 0.5})}), end="")
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


def exposition(runs: Mapping[str, tuple[int, Mapping[str, float]]]) -> str:
    """Return the text.

    Args:
        runs: name of each, a label of its lines -> its newest step, and the newest value of each metric, as
            `metrics.jsonl` names them.
    """
    by_name = defaultdict[str, list[str]](list)
    for run, (step, metrics) in runs.items():
        quoted = _quoted(run)
        by_name["rallypoint_step"].append(f'rallypoint_step{{run="{quoted}"}} {step}')
        for name, value in metrics.items():
            known = f"rallypoint_{_ODD.sub('_', name)}"
            by_name[known].append(f'{known}{{run="{quoted}",name="{_quoted(name)}"}} {_written(value)}')
    return "".join(f"# TYPE {known} gauge\n" + "\n".join(samples) + "\n" for known, samples in by_name.items())


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _written(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
