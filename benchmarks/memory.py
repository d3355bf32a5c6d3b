"""Memory: what `--dry-run` predicts beside what runs measure, and what each way to save some costs in time.

    python benchmarks/memory.py runs 1M 10M --json memory.json
    python benchmarks/memory.py runs 1M --how LoRA tp2 shard2 --activations keep --steps 24
    python benchmarks/memory.py runs 1M --dtype bfloat16 --activations keep --steps 24
    python benchmarks/memory.py demo
    python benchmarks/memory.py ways 10M --dtype bfloat16

`runs` trains two GRPO steps (or `--steps`) as a user does, each in processes of its own, and reads the run's own
metric; `--how` says what is trained, and by how many ranks. `demo` does the same with some steps of the shipped recipes
that make their own model, role by role. `ways` does the update of `training.py`, turn by turn in a process for each
way: all activations kept, layers checkpointed and, on an accelerator, offloaded, or kept by an engine that sleeps
before and wakes for the update. What the logits of all tokens at once would take is in `head.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from update import GROUP_SIZE, PROMPT_TOKENS as UPDATE_PROMPT_TOKENS, SHAPES, Shape, make_model, make_rows

from rallypoint.config import OptimizerConfig, RoleName, load_config
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.journal import fold, read_journal
from rallypoint.models import ATTENTION, ModelShard
from rallypoint.observability.memory import MemoryMeter, resident_bytes
from rallypoint.prepare.plan import RunPlan, make_plan
from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths

PROMPT_TOKENS, RESPONSE_TOKENS = 96, 64
CAPS = {"1M": 8192, "10M": 4096, "50M": 2048, "50M-32k": 2048}
"""Tokens of a micro-batch; a step has twice as many."""
HOWS = {
    "full": ["model.lora=null"],
    "LoRA": ["model.lora={rank: 8, alpha: 16}"],
    "tp2": ["cluster.pools={main: [2]}", "actor.mesh.tp=2", "reference.mesh.tp=2"],
    "shard2": ["cluster.pools={main: [2]}", "actor.mesh.dp_shard=2", "reference.mesh.dp_shard=2"],
}
Way: TypeAlias = Literal["keep", "checkpoint", "offload", "sleep"]
MIB = 2**20


def write_material(folder: Path, name: str) -> None:
    """Write a model with random weights, prompts of one length, and a reward."""
    shape = SHAPES[name]
    LlamaForCausalLM(shape.config("sdpa")).save_pretrained(folder / name)
    words = Tokenizer(WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, shape.vocabulary)}}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ).save_pretrained(folder / name)
    prompts = [" ".join(f"w{1 + (i * 7 + k) % 500}" for k in range(PROMPT_TOKENS)) for i in range(64)]
    lines = [json.dumps({"prompt": prompt, "ground_truth": ""}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7\n"
    )


def overrides(folder: Path, name: str, dtype: str, activations: str, how: str, steps: int) -> list[str]:
    """Return the config of a run."""
    cap = CAPS[name]
    num_prompts = 2 * cap // (GROUP_SIZE * (PROMPT_TOKENS + RESPONSE_TOKENS))
    return [
        f"model={{path: {folder / name}, dtype: {dtype}}}",
        f"data={{train: {folder / 'prompts.jsonl'}, max_prompt_tokens: {PROMPT_TOKENS}}}",
        f"reward.function={folder / 'reward.py'}:compute_score",
        f"rollout={{num_prompts: {num_prompts}, group_size: {GROUP_SIZE}, max_response_tokens: {RESPONSE_TOKENS}}}",
        f"engine={{max_tokens_per_micro_batch: {cap}, activations: {activations}}}",
        f"trainer={{num_steps: {steps}, runs_dir: {folder / 'runs'}, name: {name}-{dtype}-{activations}-{how}}}",
        *HOWS[how],
    ]


def run(folder: Path, name: str, dtype: str, activations: str, how: str, steps: int) -> dict[str, object]:
    """Train some steps; return predicted and measured MiB of a process."""
    keys = overrides(folder, name, dtype, activations, how, steps)
    plan, measured = train("grpo", keys, folder / "runs" / f"{name}-{dtype}-{activations}-{how}")
    predicted = plan.process_memory("main") / MIB
    return {
        "model": name,
        "dtype": dtype,
        "how": how,
        "activations": activations,
        "predicted": predicted,
        "measured": max(measured.values()),
        "ratio": predicted / max(measured.values()),
        "roles": measured,
    }


def train(recipe: str, keys: list[str], folder: Path) -> tuple[RunPlan, dict[RoleName, float]]:
    """Train as a user does; return the plan, and the MiB of a process that were measured in each role's turns."""
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", recipe, *keys]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    records = fold(read_journal(folder / "journal.jsonl")).records
    plan = make_plan(load_config(recipe, keys).config)
    measured = {
        memory.role: max(record.get(f"{memory.role}/memory_gib", 0.0) for record in records) * 1024
        for memory in plan.memory
    }
    return plan, measured


def demo(wanted: argparse.Namespace) -> list[dict[str, object]]:
    """Print a line for every role of the shipped recipes that make their own model."""
    print("| recipe | role | predicted, MiB | measured, MiB | ratio |\n|---|---|---:|---:|---:|")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in ("digits", "digits-grpo"):
            keys = [f"trainer={{num_steps: {wanted.steps or 20}, runs_dir: {scratch}, name: {recipe}}}"]
            plan, measured = train(recipe, keys, Path(scratch) / recipe)
            for role, mib in measured.items():
                predicted = plan.awake_memory(role) / MIB
                rows.append({"recipe": recipe, "role": role, "predicted": predicted, "measured": mib})
                print(f"| {recipe} | {role} | {predicted:.1f} | {mib:.1f} | {predicted / mib:.2f} |", flush=True)
    return rows


def runs(wanted: argparse.Namespace) -> list[dict[str, object]]:
    """Print a line for every run."""
    print("| model | how | type | activations | predicted, MiB | measured, MiB | ratio |")
    print("|---|---|---|---|---:|---:|---:|")
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted.models:
            write_material(Path(scratch), name)
            for how, dtype, activations in itertools.product(wanted.how, wanted.dtype, wanted.activations):
                row = run(Path(scratch), name, dtype, activations, how, wanted.steps or 2)
                rows.append(row)
                print(
                    f"| {name} | {how} | {dtype} | {activations} | {row['predicted']:.0f} | {row['measured']:.0f} "
                    f"| {row['ratio']:.2f} |",
                    flush=True,
                )
    return rows


def way(name: str, dtype: torch.dtype, how: Way) -> tuple[float, float]:
    """Return the CPU seconds and the peak MiB of an update of `training.py`, at best of three.

    An engine that sleeps is asked in between what it holds: that is its peak here.
    """
    shape = SHAPES[name]
    model = make_model(shape, dtype, ATTENTION).eval()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    meter = MemoryMeter(device, resident_bytes(device))
    engine: TrainingEngine[ActorBatch] = TrainingEngine(
        ModelShard.whole(model.to(device)),  # pyright: ignore[reportArgumentType]
        optimizer=OptimizerConfig(),
        max_tokens_per_micro_batch=CAPS[name],
        activations="keep" if how == "sleep" else how,
    )
    batch = make_batch(shape)

    def loss(part: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        return -(policy_outputs(engine.shard, part, at, 1.0).logprobs * part.advantages[at].to(device)).sum(), Metrics()

    seconds: list[float] = []
    for step in (1, 2, 3):
        # On a CPU that others use, too, its seconds say more than those of a clock.
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        began = clock()
        if how == "sleep":
            engine.sleep()
            with meter.measured():
                pass
            engine.wake()
        with contextlib.nullcontext() if how == "sleep" else meter.measured():
            engine.train(batch, loss, denominator=batch.num_loss_tokens, step=step, num_steps=3)
        seconds.append(clock() - began)
    return min(seconds), meter.take().scalars()["memory_gib"] * 1024


def make_batch(shape: Shape) -> ActorBatch:
    """Return the rows of `training.py` as ours."""
    tokens, lengths, advantages = make_rows(shape.vocabulary)
    columns = torch.arange(tokens.shape[1])
    real = columns < lengths.unsqueeze(1)
    return ActorBatch(
        offsets=offsets_from_lengths(lengths),
        tokens=tokens[real],
        loss_mask=(real & (columns >= UPDATE_PROMPT_TOKENS))[real],
        prompt_index=torch.arange(len(lengths)) // GROUP_SIZE,
        sample_index=torch.arange(len(lengths)) % GROUP_SIZE,
        rollout_logprobs=torch.zeros(int(lengths.sum())),
        old_logprobs=torch.zeros(int(lengths.sum())),
        reference_logprobs=None,
        advantages=advantages.unsqueeze(1).expand_as(tokens)[real],
    )


def ways(wanted: argparse.Namespace) -> list[dict[str, object]]:
    """Print what every way to save memory takes: medians of turns, each in a process of its own."""
    print("| model | type | way | peak, MiB | seconds | memory | time |\n|---|---|---|---:|---:|---:|---:|")
    rows: list[dict[str, object]] = []
    hows = ["keep", "checkpoint", *(("offload", "sleep") if torch.accelerator.is_available() else ())]
    for name, dtype in itertools.product(wanted.models, wanted.dtype):
        found: dict[str, list[tuple[float, float]]] = {how: [] for how in hows}
        for _, how in itertools.product(range(wanted.times), hows):
            command = [sys.executable, __file__, "way", name, "--dtype", dtype, "--way", how]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            found[how].append((float(answer[-2]), float(answer[-1])))
        medians = {how: [statistics.median(numbers) for numbers in zip(*found[how], strict=True)] for how in hows}
        for how, (seconds, peak) in medians.items():
            rows.append({"model": name, "dtype": dtype, "way": how, "s": seconds, "mib": peak})
            print(
                f"| {name} | {dtype} | {how} | {peak:.0f} | {seconds:.2f} | {peak / medians['keep'][1]:.2f} "
                f"| {seconds / medians['keep'][0]:.2f} |",
                flush=True,
            )
    return rows


def shape_name(name: str) -> str:
    """Return the name of a shape; argparse's own choices know no list of several that is the default."""
    if name not in SHAPES:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SHAPES)}, found {name}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "demo", "ways", "way"])
    parser.add_argument("models", nargs="*", type=shape_name, default=["1M", "10M", "50M"])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--activations", nargs="+", default=["keep", "checkpoint"])
    parser.add_argument("--how", nargs="+", choices=HOWS, default=["full"])
    parser.add_argument("--way", choices=get_args(Way), default="keep")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run, 2 if not given; of each demo, 20")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    if wanted.what == "way":
        torch.set_num_threads(1)
        print(*way(wanted.models[0], getattr(torch, wanted.dtype[0]), wanted.way))
        return
    rows = {"runs": runs, "demo": demo, "ways": ways}[wanted.what](wanted)
    if wanted.json:
        wanted.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
