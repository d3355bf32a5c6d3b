"""Everything that a machine with a GPU can show, in one command and at most eight minutes: `make gpu-check`.

With two GPUs and Ray, runs over both are added, and the command takes at most twelve minutes.

    python benchmarks/gpu_check.py                       # tests/gpu, parity with the CPU, kernels, memory, speed, a run
    python benchmarks/gpu_check.py --device cpu          # the same command on a tiny model, to see that it works
    python benchmarks/gpu_check.py --wheels wheels       # with packages that the machine lacks and cannot fetch

Needs torch 2.11 or newer, transformers, pytest and what `NEEDED` names; neither Ray nor an installed rallypoint. Every
part is a process of its own with a deadline of its own, so that none takes the others along; what there is no time for
is skipped and said. Writes report.txt, report.json and the output of every part to the folder of --out.

Ends with 0 when everything ran and was right, 1 when something was not, 3 when there is no accelerator, and 4 when
nothing was wrong but there was no time for a part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
RIGHT, WRONG, NO_DEVICE, NO_TIME = 0, 1, 3, 4
NEEDED = (
    *("torch", "transformers", "safetensors", "tokenizers", "numpy", "pyarrow", "yaml", "xxhash", "jaxtyping", "rich"),
    *("pydantic", "typer", "pytest"),
)
LOOK = """
import importlib.util, json, platform, sys
missing = [name for name in {needed!r} if importlib.util.find_spec(name) is None]
found = {{"python": platform.python_version(), "missing": missing, "device": None, "num_devices": 1}}
if "torch" not in missing:
    import torch
    wanted = {device!r} or torch.accelerator.current_accelerator(check_available=True)
    found["torch"] = torch.__version__
    if wanted is not None:
        device = torch.device(wanted)
        found["device"] = device.type
        if device.type == "cpu":
            found["name"], found["memory_gib"] = platform.processor() or platform.machine(), None
        else:
            module = torch.get_device_module(device)
            found["name"], found["num_devices"] = module.get_device_name(), torch.accelerator.device_count()
            found["memory_gib"] = torch.accelerator.get_memory_info()[1] / 2**30
    for name in ("transformers", "triton", "ray"):
        if importlib.util.find_spec(name) is not None:
            found[name] = __import__(name).__version__
print(json.dumps(found))
"""


OVER_TWO = {
    "dp_shard": ("cluster.pools={main: [2]}", "actor.mesh.dp_shard=2"),
    "tp": ("cluster.pools={main: [2]}", "actor.mesh.tp=2", "rollout.mesh.tp=2"),
    "sp": ("cluster.pools={main: [2]}", "actor.mesh.sp=2"),
    "cp": ("cluster.pools={main: [2]}", "actor.mesh.cp=2"),
    "two-pools": ("cluster.pools={main: [1], rollout: [1]}", "rollout.placement.pool=rollout"),
}
"""Runs over two devices: parts of a model that is published, ranks that sample together, weights between devices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Something to run."""

    name: str
    arguments: tuple[str, ...]
    """Of Python."""
    deadline_s: float
    kind: str = "figures"
    """Of what it leaves: lines of JSON in NAME.json, or a report of tests in NAME.xml."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part."""

    part: str
    status: str
    """right, wrong, late or skipped."""
    seconds: float
    rows: list[dict[str, object]]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that all parts have together."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    began: float = dataclasses.field(default=0.0)

    @property
    def left_s(self) -> float:
        """That are left."""
        return self.total_s - (self.clock() - self.began)


def parts(device: str, out: Path, *, over_two: bool = False) -> Iterator[list[Part]]:
    """Return what is run, in order of what it tells; parts of one list run side by side."""
    is_tiny = device == "cpu"
    folder = ROOT / "tests" / "gpu"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib")

    def tests(name: str, path: Path) -> Part:
        report = f"--junitxml={out / name}.xml"
        return Part(name, (*options, f"--confcutdir={folder}", str(path), report), 120.0, "tests")

    # On a CPU all of them are skipped, which one process says as well.
    yield [tests("gpu", folder)] if is_tiny else [tests(file.stem, file) for file in sorted(folder.glob("test_*.py"))]
    models, at = (("tiny",), ("--device", "cpu")) if is_tiny else (("0.6B", "1.7B"), ("--device", device))
    small = ("--rows", "8", "--length", "32", "--times", "1") if is_tiny else ("--times", "3")
    few = ("--batches", "2", "--tokens", "16", "--times", "1", "--dtype", "float32") if is_tiny else ("--times", "2")

    def figures(name: str, script: str, *arguments: str, deadline_s: float = 60.0) -> list[Part]:
        json_file = ("--json", str(out / f"{name}.json"))
        return [Part(name, (str(BENCHMARKS / script), *at, *arguments, *json_file), deadline_s)]

    yield figures("parity", "parity.py")
    of_first = ("--model", models[0])
    yield figures("kernels", "accelerator_kernels.py", *of_first, "--rows", "8" if is_tiny else "256")
    tight = ("--rows", "8", "--tokens", "16", "--cache-gib", "0.01", "--times", "1") if is_tiny else ("--tokens", "256")
    size = ("--prompts", "4", "--tokens", "8") if is_tiny else ("--prompts", "8", "--tokens", "128")
    for model in models:
        update = ("--models", model, *small)
        yield figures(f"update-{model}-ragged", "accelerator.py", *update, "--activations", "keep", "--ragged")
        for keeps in ("keep", "checkpoint"):
            yield figures(f"update-{model}-{keeps}", "accelerator.py", *update, "--activations", keeps)
        if model == models[0]:  # beside update-...-keep: what deterministic kernels cost
            yield figures(
                f"update-{model}-any-order", "accelerator.py", *update, "--activations", "keep", "--any-order"
            )
            yield figures("prefill", "accelerator_prefill.py", *of_first, *tight, deadline_s=90.0)
            yield figures("run", "accelerator_run.py", *of_first, *size, deadline_s=120.0)
            for name, keys in OVER_TWO.items() if over_two else ():
                on_ray = ("--runtime", "ray", "--keys", *keys)
                yield figures(f"run-{name}", "accelerator_run.py", *of_first, *size, *on_ray, deadline_s=150.0)
        yield figures(f"rollouts-{model}", "accelerator_rollouts.py", "--models", model, *few)
        if model == models[0]:  # through a model's own code
            mixture = ("--models", "tiny-experts" if is_tiny else "experts", *few)
            yield figures("rollouts-adapters", "accelerator_rollouts.py", "--models", model, "--lora", "16", *few)
            yield figures("rollouts-experts", "accelerator_rollouts.py", *mixture)


def run(part: Part, budget: Budget, out: Path, environment: dict[str, str]) -> Outcome:
    """Run a part, unless there is too little time, and stop it at its deadline."""
    limit = min(part.deadline_s, budget.left_s)
    if limit < part.deadline_s / 4:
        return Outcome(
            part.name, "skipped", 0.0, [], f"{max(0.0, budget.left_s):.0f} s of {budget.total_s:.0f} were left"
        )
    began, log = budget.clock(), out / f"{part.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(part.name, "late", limit, _rows(part, out)[0], f"stopped after {limit:.0f} s")
    rows, note = _rows(part, out)
    is_right = process.returncode == 0 and (rows != [] or part.kind == "tests") and not note
    if not is_right and not note:
        note = (
            " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])[-300:] or f"status {process.returncode}"
        )
    return Outcome(part.name, "right" if is_right else "wrong", budget.clock() - began, rows, note)


def _rows(part: Part, out: Path) -> tuple[list[dict[str, object]], str]:
    """Return what a part has left, and what was wrong with it as far as that says."""
    if part.kind == "figures":
        file = out / f"{part.name}.json"
        return ([json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []), ""
    file = out / f"{part.name}.xml"
    if not file.is_file():
        return [], ""
    suite = next(ElementTree.parse(file).iter("testsuite"))
    failed = [
        case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    num_wrong, num_skipped = counts["failures"] + counts["errors"], counts["skipped"]
    row = {"passed": counts["tests"] - num_wrong - num_skipped, "failed": num_wrong, "skipped": num_skipped}
    return [row], ", ".join(str(case.get("name")) for case in failed)[:300]


def run_all(groups: Sequence[list[Part]], jobs: int, run_one: Callable[[Part], Outcome]) -> list[Outcome]:
    """Run the parts, those of one list side by side, and say of each what came of it."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        for group in groups:
            for outcome in pool.map(run_one, group):
                outcomes.append(outcome)
                print(line_of(outcome), flush=True)
    return outcomes


def line_of(outcome: Outcome) -> str:
    """Return a line for a person."""
    return f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.part}{f': {outcome.note}' if outcome.note else ''}"


def table_of(found: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """Return the report as text: a line for each part, then its figures under their names."""
    memory = f", {found['memory_gib']:.0f} GiB" if found.get("memory_gib") else ""
    versions = ", ".join(
        f"{name} {found[name]}" for name in ("python", "torch", "transformers", "triton") if name in found
    )
    lines = [f"{found['device']}: {found['name']}{memory}; {versions}", "", *map(line_of, outcomes)]
    rows = [(outcome.part, row) for outcome in outcomes for row in outcome.rows]
    for head in dict.fromkeys(tuple(row) for _, row in rows):
        lines += ["", f"| part | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for part, row in rows:
            if tuple(row) == head:
                cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
                lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def status_of(outcomes: Sequence[Outcome]) -> int:
    """Return the status that the command ends with."""
    found = {outcome.status for outcome in outcomes}
    return WRONG if found & {"wrong", "late"} else NO_TIME if "skipped" in found else RIGHT


def environment_with(wheels: Path | None, out: Path) -> dict[str, str]:
    """Return the environment of all parts; packages from wheels are unpacked beside the report."""
    folders = [ROOT / "src", BENCHMARKS, ROOT / "tests" / "shared", ROOT / "tests" / "distributed"]
    if wheels is not None:
        site = out / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*pip, str(site), *map(str, sorted(wheels.glob("*.whl")))], check=True)
        folders.append(site)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *([before] if before else [])])}


def main(arguments: list[str] | None = None) -> int:
    """Run everything, print the report, and return the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator that torch finds; cpu runs tiny models")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to use beside what is installed")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-check", help="a folder for the report")
    parser.add_argument("--budget-s", type=float, help="seconds for everything; default: 460, with two devices 700")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="test files at once"
    )
    wanted = parser.parse_args(arguments)
    began = time.monotonic()
    out = wanted.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (file for file in out.iterdir() if file.suffix in (".json", ".xml", ".log", ".txt")):
        old.unlink()
    environment = environment_with(wanted.wheels, out)
    look = LOOK.format(needed=NEEDED, device=wanted.device)
    seen = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=False)
    if seen.returncode != 0:
        print(f"{wanted.device or 'torch'} cannot be used: {seen.stderr.strip().splitlines()[-1]}")
        return WRONG
    found = json.loads(seen.stdout.splitlines()[-1])
    if found["missing"]:
        print(f"{sys.executable} lacks {', '.join(found['missing'])}: install them, or carry wheels (CONTRIBUTING.md)")
        return WRONG
    if found["device"] is None:
        print(f"no GPU: torch {found['torch']} finds no accelerator; `make gpu-check DEVICE=cpu` runs all of it tiny")
        return NO_DEVICE
    over_two = found["num_devices"] > 1 and "ray" in found
    budget = Budget(wanted.budget_s or (700.0 if over_two else 460.0), began=began)
    print(f"{found['name']}, torch {found['torch']}, at most {budget.total_s:.0f} s; logs in {out}", flush=True)
    if found["num_devices"] > 1 and not over_two:
        print("ray is not installed: runs over two devices are left out")
    groups = [*parts(found["device"], out, over_two=over_two)]
    outcomes = run_all(groups, wanted.jobs, lambda part: run(part, budget, out, environment))
    text = table_of(found, outcomes)
    report = {"machine": found, "status": status_of(outcomes), "parts": [dataclasses.asdict(one) for one in outcomes]}
    (out / "report.txt").write_text(text + "\n", encoding="utf-8")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{budget.total_s - budget.left_s:.0f} s; {out / 'report.json'}")
    return status_of(outcomes)


if __name__ == "__main__":
    sys.exit(main())
