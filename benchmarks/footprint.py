"""What a process that samples holds beside weights and keys and values: resident memory, part by part.

    python benchmarks/footprint.py
    python benchmarks/footprint.py --shape 10M --threads 1

One part is imported after another, those first that others bring along, and then the rollouts of `rollout.py` run
twice. "files" are pages of libraries, which all processes of a machine share; they count here all the same. The last
two lines are what a worker of a run has in addition: Ray, which imports pyarrow wherever there is one.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

PARTS: Sequence[tuple[str, Sequence[str]]] = (
    ("Python and numpy", ("numpy",)),
    ("torch", ("torch",)),
    ("sympy, which torch.distributed.tensor needs", ("torch.fx.experimental.symbolic_shapes",)),
    ("torch._dynamo, which transformers' generation needs", ("torch._dynamo",)),
    ("transformers' modelling code, the rest", ("transformers.models.llama.modeling_llama",)),
    ("rallypoint, with pydantic for its config", ("rallypoint.generation", "rallypoint.roles.rollout")),
)
RAY: Sequence[tuple[str, Sequence[str]]] = (("ray", ("ray",)), ("pyarrow", ("pyarrow.json",)))


class Table:
    """Prints what has come since it last looked."""

    def __init__(self) -> None:
        self._before = (0.0, 0.0)

    def add(self, part: str, known_mib: float = 0.0) -> None:
        """Print a line for a part, of which so many MiB are weights, or keys and values."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        mib = {name: int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssFile")}
        peak, files = mib["VmHWM"], mib["RssFile"]
        print(f"| {part} | {peak - self._before[0] - known_mib:.0f} | {files - self._before[1]:.0f} |", flush=True)
        self._before = (peak, files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["1M", "10M", "50M"], default="1M")
    parser.add_argument("--threads", type=int, default=2)
    wanted = parser.parse_args()
    print("| part | MiB | of these files |\n|---|---:|---:|")
    table = Table()
    for part, modules in PARTS:
        for module in modules:
            importlib.import_module(module)
        table.add(part)

    import rollout
    import torch
    from update import SHAPES

    torch.set_num_threads(wanted.threads)
    shape, lengths = SHAPES[wanted.shape], rollout.make_lengths("even")
    run = rollout.native(shape, torch.bfloat16, lengths, "fast")
    table.add("the model, without its weights", rollout.weights_mib(shape, "bfloat16"))
    for _ in range(2):
        run()
    table.add("rollouts, without keys and values", rollout.cache_mib(shape, "bfloat16", lengths))
    for part, modules in RAY:
        for module in modules:
            importlib.import_module(module)
        table.add(part)


if __name__ == "__main__":
    main()
