"""What `--dry-run` predicts of a worker process's memory, beside what its processes held at their peak.

    python benchmarks/memory.py digits
    python benchmarks/memory.py digits trainer.num_steps=2 model.create.hidden_size=320

Every run is a process of its own with Ray, as a user starts it. Measured is the most that a worker held in private
memory, without the pages of files and of the object store. What Python, torch, transformers and Ray hold by
themselves is the same figure of a run with a model of next to nothing, and is taken off.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rallypoint.config import load_config, make_plan

NEXT_TO_NOTHING = (
    "model.create={hidden_size: 8, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 8}",
    "rollout.num_prompts=2",
    "actor.num_mini_batches=1",
    "critic.num_mini_batches=1",
)
WORKER = "ray::"


def private_peak(pid: int) -> int | None:
    """Return the most private memory that a worker process has had, in bytes; None for any other process.

    The kernel keeps the peak of all resident pages; those of files and of shared memory are taken off as they are.
    """
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    status = dict(line.split(":", 1) for line in lines)
    if not name.startswith(WORKER) or "VmHWM" not in status:
        return None
    kib = {key: int(status[key].split()[0]) for key in ("VmHWM", "RssFile", "RssShmem")}
    return 1024 * (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"])


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(deeper for child in children for deeper in descendants(child))]


def measure(recipe: str, overrides: list[str]) -> int:
    """Run a recipe to its end and return the largest private peak of its workers, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rallypoint.cli.main", "train", recipe, *overrides]
        command += [f"trainer.runs_dir={folder}", "trainer.name=memory"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            peak = max([peak, *(private_peak(pid) or 0 for pid in descendants(process.pid))])
            time.sleep(0.1)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
        return peak


def main() -> None:
    """Print prediction and measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    overrides = ["trainer.num_steps=3", *arguments.overrides]
    plan = make_plan(load_config(arguments.recipe, overrides).config)
    for memory in plan.memory:
        print(
            f"{memory.role:10} weights {memory.weights / 2**20:7.1f}  gradients {memory.gradients / 2**20:7.1f}"
            f"  optimizer {memory.optimizer / 2**20:7.1f}  activations {memory.activations / 2**20:7.1f}"
            f"  cache {memory.cache / 2**20:7.1f} MiB"
        )
    empty = measure(arguments.recipe, [*overrides, *NEXT_TO_NOTHING])
    measured = measure(arguments.recipe, overrides) - empty
    predicted = max(plan.process_memory(pool) for pool in {memory.pool for memory in plan.memory})
    print(f"a process without a model  {empty / 2**20:8.1f} MiB")
    print(f"predicted beyond it        {predicted / 2**20:8.1f} MiB")
    print(f"measured beyond it         {measured / 2**20:8.1f} MiB")
    print(f"predicted / measured       {predicted / measured:8.2f}")


if __name__ == "__main__":
    main()
