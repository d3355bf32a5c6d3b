"""One side of training.py: a process that does the actor's update, forward and backward, whenever it is told to.

    python benchmarks/update.py ours 10M bfloat16 --threads 2 --at-once 4096

Each line on stdin asks for one update; each line on stdout is a JSON object about it. The side `trl` needs no
rallypoint, so that it can run in an environment of its own; `apart` is ours with every row computed by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from trl import GRPOTrainer

MAX_ROWS, GROUP_SIZE, PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 128, 8, 32, 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a Llama with tied embeddings and heads of 32 to 64 numbers."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int

    def config(self, attention: str) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=None,
            attn_implementation=attention,
        )


SHAPES = {
    "1M": Shape(128, 4, 4, 384, 512),
    "10M": Shape(320, 8, 5, 896, 512),
    "50M": Shape(640, 10, 10, 1792, 512),
    "50M-32k": Shape(512, 10, 8, 1536, 32_768),
}


def make_rows(vocabulary: int, num_rows: int = MAX_ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens [B, 160], lengths [B], advantages [B]) of the same rows for every side; half end early."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (MAX_ROWS, PROMPT_TOKENS + MAX_RESPONSE_TOKENS), generator=generator)
    tokens[:, :PROMPT_TOKENS] = tokens[::GROUP_SIZE, :PROMPT_TOKENS].repeat_interleave(GROUP_SIZE, 0)
    early = torch.randint(16, MAX_RESPONSE_TOKENS, (MAX_ROWS,), generator=generator)
    ends_early = torch.rand(MAX_ROWS, generator=generator) < 0.5
    lengths = PROMPT_TOKENS + torch.where(ends_early, early, MAX_RESPONSE_TOKENS)
    return tokens[:num_rows], lengths[:num_rows], torch.randn(MAX_ROWS, generator=generator)[:num_rows]


def make_model(shape: Shape, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(shape.config(attention)).to(dtype)  # pyright: ignore[reportArgumentType]


def ours(shape: Shape, dtype: torch.dtype, num_rows: int, at_once: int, *, apart: bool) -> Callable[[], None]:
    """The engine's passes, `at_once` tokens at a time at most; `apart` computes a prompt for each of its rows."""
    from rallypoint.algorithms.losses import entropy_bonus, policy_loss
    from rallypoint.config import OptimizerConfig
    from rallypoint.engine import TrainingEngine, policy_outputs
    from rallypoint.models import ATTENTION, ModelShard
    from rallypoint.models.layers import replace_layers
    from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths

    model = make_model(shape, dtype, ATTENTION).eval()
    replace_layers(model)
    engine: TrainingEngine[ActorBatch] = TrainingEngine(
        ModelShard.whole(model), optimizer=OptimizerConfig(), max_tokens_per_micro_batch=at_once
    )
    tokens, lengths, advantages = make_rows(shape.vocabulary, num_rows)
    real = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    loss_mask = real & (torch.arange(tokens.shape[1]) >= PROMPT_TOKENS)
    batch = ActorBatch(
        offsets=offsets_from_lengths(lengths),
        tokens=tokens[real],
        loss_mask=loss_mask[real],
        prompt_index=torch.arange(num_rows) // (1 if apart else GROUP_SIZE),
        sample_index=torch.arange(num_rows) % GROUP_SIZE,
        rollout_logprobs=torch.zeros(int(lengths.sum())),
        old_logprobs=torch.full((int(lengths.sum()),), -float(torch.tensor(shape.vocabulary).log())),
        reference_logprobs=None,
        advantages=advantages.unsqueeze(1).expand_as(tokens)[real],
    )

    def loss(part: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        outputs = policy_outputs(engine.shard, part, at, 1.0)
        mask = torch.ones(len(at), dtype=torch.bool)
        clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
        policy = policy_loss(outputs.logprobs, part.old_logprobs[at], part.advantages[at], mask, **clips).sum
        return policy - 1e-3 * entropy_bonus(outputs.entropy, mask).sum, Metrics()

    def update() -> None:
        _, failure = engine.accumulate(batch, loss, batch.num_loss_tokens)
        assert failure is None, failure

    return update


def trl(shape: Shape, dtype: torch.dtype, num_rows: int, at_once: int) -> Callable[[], None]:
    """TRL's own loss on its own padded rows, `at_once` rows at a time, without gradient checkpointing."""
    model = make_model(shape, dtype, "sdpa")
    return trl_update(trl_trainer(model, num_rows, at_once), model, shape, num_rows, at_once)


def trl_trainer(model: LlamaForCausalLM, num_rows: int, at_once: int) -> GRPOTrainer:
    """Return TRL's trainer of a model, outside of its training loop."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=at_once,
            num_generations=GROUP_SIZE,
            gradient_checkpointing=False,
            bf16=False,  # the weights are in `dtype` already
            use_cpu=True,
            beta=0.0,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * num_rows}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"),
    )
    trainer.current_gradient_accumulation_steps = 1  # its training loop sets it, which we are not in
    model.train()
    return trainer


def trl_update(
    trainer: GRPOTrainer, model: LlamaForCausalLM, shape: Shape, num_rows: int, at_once: int
) -> Callable[[], None]:
    """Return forward and backward of TRL's loss on the rows of `make_rows`."""
    tokens, lengths, advantages = make_rows(shape.vocabulary, num_rows)
    mask = (torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)).long()

    def update() -> None:
        for rows in torch.arange(num_rows).split(at_once):
            inputs = {
                "prompt_ids": tokens[rows, :PROMPT_TOKENS],
                "prompt_mask": mask[rows, :PROMPT_TOKENS],
                "completion_ids": tokens[rows, PROMPT_TOKENS:],
                "completion_mask": mask[rows, PROMPT_TOKENS:],
                "advantages": advantages[rows],
                "num_items_in_batch": mask[:, PROMPT_TOKENS:].sum(),
            }
            trainer.compute_loss(model, inputs).backward()

    return update


def memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["ours", "apart", "trl"])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=MAX_ROWS)
    parser.add_argument("--at-once", type=int, required=True, help="tokens (ours) or rows (trl) of a micro-batch")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    shape, dtype = SHAPES[wanted.shape], getattr(torch, wanted.dtype)
    if wanted.side == "trl":
        update = trl(shape, dtype, wanted.rows, wanted.at_once)
    else:
        update = ours(shape, dtype, wanted.rows, wanted.at_once, apart=wanted.side == "apart")
    loaded = memory_mib("VmRSS")
    for _ in sys.stdin:
        began, cpu_began = time.perf_counter(), time.process_time()
        update()
        answer = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
        print(json.dumps(answer | {"peak_mib": memory_mib("VmHWM") - loaded}), file=answers)


if __name__ == "__main__":
    main()
