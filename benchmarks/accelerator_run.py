"""A whole run on one accelerator: steps of `gsm8k-grpo` with a random model of a real shape, stopped and resumed.

    python benchmarks/accelerator_run.py                          # Qwen3 shape of 0.6B, 3 steps, without Ray
    python benchmarks/accelerator_run.py --runtime ray
    python benchmarks/accelerator_run.py --runtime ray --keys 'cluster.pools={main: [2]}' actor.mesh.dp_shard=2
    python benchmarks/accelerator_run.py --model tiny --device cpu --prompts 4 --tokens 8

One run takes all steps; another ends after the checkpoint of its second and is resumed. Their journals must tell of the
same tokens and weights, which `rally diff` says. Every row is a step: seconds of its phases, and what it used.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from accelerator import SIZES, config_of
from figures import Table
from transformers import AutoModelForCausalLM

import rallypoint as rally
from rallypoint.data import make_digits_tokenizer, save_tokenizer
from rallypoint.run.comparison import compare_runs

PHASES = ("rollout", "reward", "weigh", "learn", "publish")
COLUMNS = {
    "run": "",
    "step": "d",
    **{f"{phase} s": ".2f" for phase in PHASES},
    "generated": ",.0f",
    "MFU": ".0%",
    "GiB": ".1f",
    "ratio error": ".4f",
    "equal to the first": "",
}
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None, flexible=True):
    return float(len(solution_str) % 7)
"""


def make_folder(name: str, folder: Path, device: torch.device) -> None:
    """Write random weights of a shape, a tokenizer that knows the first of its tokens, prompts, and a reward."""
    with device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name))
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    save_tokenizer(make_digits_tokenizer(), folder / "model")
    digits = ["".join(str((row * 7 + at * at) % 10) for at in range(24)) for row in range(256)]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"question": prompt, "answer": "1"}) + "\n" for prompt in digits)
    )
    (folder / "rewards.py").write_text(REWARD)


def run(wanted: argparse.Namespace, device: torch.device, folder: Path, name: str, num_steps: int) -> rally.Run:
    """Take steps of such a run: the recipe's keys, but for the sizes of a step and where it runs."""
    settings: dict[str, object] = {
        "model.path": str(folder / "model"),
        "data": {"train": {"path": str(folder / "prompts.jsonl")}, "validation": None},
        "reward": {"function": f"{folder / 'rewards.py'}:score"},
        "rollout": {"num_prompts": wanted.prompts, "group_size": 8, "max_response_tokens": wanted.tokens},
        "actor.num_mini_batches": 2,
        "cluster": {"runtime": wanted.runtime, "device": device.type},
        "checkpoint.every_steps": num_steps,
        "trainer": {"num_steps": num_steps, "runs_dir": str(folder / "runs")},
    }
    for key, _, value in (one.partition("=") for one in wanted.keys):
        settings[key] = yaml.safe_load(value)
    return rally.train("gsm8k-grpo", name=name, display=False, config=settings)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; `arguments` are those of the command line by default. Ends with 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=SIZES)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="of a response at most")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--runtime", default="inline", choices=["inline", "ray"])
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY=VALUE", help="of the config, such as a mesh")
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = (
        torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator(check_available=True)
    )
    if device is None:
        raise SystemExit("no accelerator was found; --model tiny --device cpu shows that it runs")
    table, is_equal = Table(COLUMNS, wanted.json), True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(wanted.model, folder, device)
        whole = run(wanted, device, folder, "whole", wanted.steps)
        stopped = run(wanted, device, folder, "resumed", wanted.steps - 1)
        resumed = rally.train(stopped, resume=True, num_steps=wanted.steps, display=False)
        found = compare_runs(whole.folder, resumed.folder)
        for title, one in (("whole", whole), ("resumed", resumed)):
            for metrics in (line for line in one.metrics if "time_s/learn" in line):
                step, first = int(metrics["step"]), found.first
                differs = first is not None and step >= first.step and title == "resumed"
                is_equal &= not differs
                table.add(
                    run=title,
                    step=step,
                    **{f"{phase}_s": metrics.get(f"time_s/{phase}", float("nan")) for phase in PHASES},
                    generated=metrics.get("rollout/num_tokens", float("nan")),
                    mfu=metrics.get("actor/mfu", float("nan")),
                    gib=metrics.get("actor/memory_gib", float("nan")),
                    ratio_error=metrics.get("actor/ratio_error", float("nan")),
                    equal="no" if differs else "yes",
                )
        if found.first is not None:
            print(found.first, *found.where, sep="\n")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
