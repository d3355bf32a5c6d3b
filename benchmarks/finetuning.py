"""Packed fine-tuning and DPO beside TRL's trainers: tokens a second on this machine, and their ratio.

In an environment with TRL and rallypoint (`pip install trl==1.16.0`), on a quiet machine:

    python benchmarks/finetuning.py [--steps 6] [--sizes 10M 50M] [--only sft dpo] [--dtype float32]

Each side trains the same random model on the same rows on the CPU, with the same number of threads, in float32 or with
bfloat16 with float32 masters (TRL's `bf16=True`): TRL in this process with packing for fine-tuning, and for DPO with
padding and reference logprobs that are computed beforehand, as ours are; rallypoint with `cluster.runtime=inline`. A
step's time is the median over all steps but the first; TRL's, where a step has packed rows, for as many tokens as ours.
The sizes are those of the layers; embedding and head have 32,768 tokens besides. Lengths are log-normal: prompts have
50 tokens and answers 110 in the median, and few have 500.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "10M": {"hidden_size": 256, "num_layers": 8, "num_heads": 8, "intermediate_size": 1024},
    "50M": {"hidden_size": 512, "num_layers": 14, "num_heads": 8, "intermediate_size": 1792},
}
ROWS_PER_STEP, LONGEST = 16, 1024
VOCABULARY = 32_768
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- "<" + message.role + "> " + message.content -}}{{- " " + eos_token + " " -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant> " -}}{%- endif -%}
"""


def make_tokenizer() -> Any:
    """Return a tokenizer of words `w0`, `w1` and so on, with `<eos>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = ["<eos>", "<pad>", "<user>", "<assistant>"]
    words = [*named, *(f"w{number}" for number in range(VOCABULARY - len(named)))]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(folder: Path, size: str) -> str:
    """Write a random model with its tokenizer, and return its folder."""
    from rallypoint.model_files import create_model

    sizes = SIZES[size]
    create_model(
        folder,
        make_tokenizer(),
        architecture="llama",
        num_key_value_heads=sizes["num_heads"],
        tie_embeddings=False,
        initializer_range=0.02,
        max_positions=LONGEST,
        seed=0,
        **sizes,
    )
    return str(folder)


def rows_of(kind: str, num: int) -> list[dict[str, Any]]:
    """Return rows of very different lengths, as data has them."""
    draw = random.Random(0)

    def words(median: int, most: int) -> str:
        length = min(most, max(4, round(draw.lognormvariate(math.log(median), 0.8))))
        return " ".join(f"w{draw.randrange(30_000)}" for _ in range(length))

    def said(role: str, median: int, most: int) -> list[dict[str, str]]:
        return [{"role": role, "content": words(median, most)}]

    def row() -> dict[str, Any]:
        answers = ("completion",) if kind == "sft" else ("chosen", "rejected")
        return {"prompt": said("user", 50, 300)} | {name: said("assistant", 110, 700) for name in answers}

    return [row() for _ in range(num)]


def ours(kind: str, model: str, file: Path, steps: int, threads: int, dtype: str) -> list[float]:
    """Return seconds of each step but the first."""
    from rallypoint.display import Silent
    from rallypoint.journal import fold, read_journal
    from rallypoint.prepare.preflight import load_checked
    from rallypoint.recipes.loop import train
    from rallypoint.run.folder import create_run

    with tempfile.TemporaryDirectory() as folder:
        keys = [
            f"model={{path: {model}, dtype: {dtype}}}",
            f"data={{train: {file}, num_examples: {ROWS_PER_STEP}, max_row_tokens: {LONGEST}, shuffle: false}}",
            f"trainer={{num_steps: {steps}, num_epochs: null, runs_dir: {folder}, name: run}}",
            "checkpoint.every_steps=1000",
            f"cluster={{runtime: inline, pools: {{main: [1]}}, num_cpus_per_process: {threads}}}",
            "engine.max_tokens_per_micro_batch=4096",
        ]
        loaded = load_checked(kind, keys)
        run = create_run(loaded)
        train(loaded, run, Silent(), resume=False)
        torch.set_num_threads(threads)
        return [
            record["time_s/learn"] for record in fold(read_journal(run.journal)).records if "time_s/learn" in record
        ][1:]


def theirs(kind: str, model: str, rows: list[dict[str, Any]], steps: int, threads: int, dtype: str) -> list[float]:
    """Return seconds of each step but the first."""
    import transformers
    import trl
    from datasets import Dataset

    class Clock(transformers.TrainerCallback):
        """Takes the time of every step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    torch.set_num_threads(threads)
    trainer_class, config_class = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[kind]
    own: dict[str, Any] = {"max_length": LONGEST}
    if kind == "sft":  # as many tokens in a step as the rows have, in packed rows
        own |= {"packing": True, "per_device_train_batch_size": 1}
    else:
        own |= {"precompute_ref_log_probs": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            max_steps=steps,
            report_to=[],
            use_cpu=True,
            bf16=dtype == "bfloat16",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            **own,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        data = Dataset.from_list(rows)
        trainer = trainer_class(
            model=loaded, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[clock]
        )
        if kind == "sft":  # steps of about as many tokens
            packed = [len(row) for row in trainer.train_dataset["input_ids"]]
            num_tokens = sum(packed) / len(rows) * ROWS_PER_STEP
            accumulated = max(1, round(num_tokens / statistics.mean(packed)))
            trainer.args.gradient_accumulation_steps = accumulated
            trainer.accelerator.gradient_accumulation_steps = accumulated
            scale = num_tokens / (accumulated * statistics.mean(packed))
        else:
            scale = 1.0
        trainer.train()
    return [seconds * scale for seconds in clock.seconds[1:]]


def main() -> None:
    """Print a line for each size and kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=["sft", "dpo"])
    wanted = parser.parse_args()
    for size in wanted.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder) / "model", size)
            for kind in wanted.only:
                rows = rows_of(kind, ROWS_PER_STEP * wanted.steps)
                file = Path(folder) / f"{kind}.jsonl"
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                mine = statistics.median(ours(kind, model, file, wanted.steps, wanted.threads, wanted.dtype))
                other = statistics.median(theirs(kind, model, rows, wanted.steps, wanted.threads, wanted.dtype))
                print(
                    f"{size} {kind}, {wanted.dtype}: a step of {ROWS_PER_STEP} examples takes {mine:.2f} s, "
                    f"TRL {other:.2f} s: {other / mine:.2f} times",
                    flush=True,
                )


if __name__ == "__main__":
    main()
