"""What a script reads of a run's `metrics.jsonl`."""

import json
from pathlib import Path


def read_metrics(path):
    """The lines, oldest first; numbers that are not finite are as they were."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [record | {name: float(odd) for name, odd in record.pop("not_finite", {}).items()} for record in records]
