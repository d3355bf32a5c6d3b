"""How long `--dry-run` says that a step takes on this machine's cores, beside how long it takes.

    python benchmarks/step_time.py [--models demo 10M 50M] [--times 3]

What the cores do is measured, then some steps run, and so on in turns, because other programs and the processor's clock
change it from minute to minute. All responses are as long as they may be, so the upper bounds are compared. A ratio is
what was predicted, over what was measured: the medians of a run's steps without the first. Rewards are left out, as
they are in the prediction.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rallypoint.config.fields import values_of
from rallypoint.journal import fold, read_journal
from rallypoint.prepare.inventory import look_around, measure_cores
from rallypoint.prepare.machine import plan_on
from rallypoint.prepare.preflight import load_checked
from rallypoint.prepare.step_time import step_time
from rallypoint.run.folder import RunFolder

NEVER = 1_000_000
QUIET = (
    *("checkpoint.snapshots=false", f"checkpoint.every_steps={NEVER}"),
    *(f"validation.every_steps={NEVER}", "validation.max_prompts=8"),
)
MODELS = {
    "demo": (9, ("rollout.min_response_tokens=8",)),
    "10M": (
        5,
        (
            *("model.create.hidden_size=320", "model.create.num_layers=8", "model.create.intermediate_size=896"),
            *("model.create.num_heads=5", "model.create.num_key_value_heads=5"),
            "rollout={num_prompts: 32, group_size: 8, max_response_tokens: 32, min_response_tokens: 32}",
        ),
    ),
    "50M": (
        4,
        (
            *("model.create.hidden_size=512", "model.create.num_layers=14", "model.create.intermediate_size=1792"),
            *("model.create.num_heads=8", "model.create.num_key_value_heads=8"),
            "rollout={num_prompts: 32, group_size: 4, max_response_tokens: 24, min_response_tokens: 24}",
        ),
    ),
}
"""Name -> steps of a run, and what it changes in digits-grpo."""
PHASES = {
    "rollout": (("rollout",), ("time_s/rollout",)),
    "judge": (("actor pass", "reference pass"), ("time_s/judge",)),
    "learn": (("actor update",), ("time_s/learn",)),
}
"""Phase -> the phases of a prediction, and the spans of a run."""
STEP = ("time_s/rollout", "time_s/judge", "time_s/weigh", "time_s/learn", "time_s/publish")


def predicted(keys: list[str]) -> dict[str, float]:
    """Return what a dry run would say now, had it measured nothing before."""
    config = load_checked("digits-grpo", keys).config
    cluster = config.cluster
    num_processes = sum(map(sum, cluster.pools.values()))
    cores = measure_cores(num_processes, cluster.num_cpus_per_process, str(dict(values_of(config))["model.dtype"]))
    assert cores is not None, "torch runs here"
    time = step_time(config, plan_on(config, look_around(config)), cores)
    assert time is not None, "the model is made from the config"
    most = {phase.name: phase.most_s for phase in time.phases}
    return {name: sum(most[one] for one in ours) for name, (ours, _) in PHASES.items()} | {"step": time.seconds[1]}


def measured(folder: Path, name: str, keys: list[str]) -> dict[str, float]:
    """Train, and return the medians of the steps without the first."""
    own = [f"trainer.runs_dir={folder}", f"trainer.name={name}"]
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", "digits-grpo", *keys, *own]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [one for one in fold(read_journal(RunFolder(folder / name).journal)).records if "time_s/learn" in one]
    spans = {name: spans for name, (_, spans) in PHASES.items()} | {"step": STEP}
    return {
        name: statistics.median(sum(one[span] for span in spans) for one in records[1:])
        for name, spans in spans.items()
    }


def main(*, models: list[str], times: int) -> None:
    """Take turns, and print a table."""
    found = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(times):
            for model in models:
                num_steps, changes = MODELS[model]
                keys = [*QUIET, *changes, f"trainer.num_steps={num_steps}"]
                said, took = predicted(keys), measured(Path(folder), f"{model}-{turn}", keys)
                for phase, seconds in said.items():
                    found[model, phase].append((seconds, took[phase]))
    print("| model | phase | predicted, s | measured, s | predicted / measured, each time | median |")
    print("|---|---|---:|---:|---|---:|")
    for (model, phase), pairs in found.items():
        said, took = (statistics.median(one) for one in zip(*pairs, strict=True))
        ratios = [one / other for one, other in pairs]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {model} | {phase} | {said:.2f} | {took:.2f} | {each} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--times", type=int, default=3)
    main(**vars(parser.parse_args()))
