"""A whole GRPO step, side by side with TRL: sample 16 prompts x 8, and take one optimizer step.

    python benchmarks/step.py --trl-python ~/trl/bin/python                        # every size; many minutes
    python benchmarks/step.py --shapes 10M --dtypes bfloat16 --times 3 --trl-python ~/trl/bin/python
    python benchmarks/step.py --shapes 1M --spinning --rows 64    # ours with idle threads that sleep, and that spin
    python benchmarks/step.py --judge            # ours with the pass that several optimizer steps a batch need

Each side is a process of its own that keeps one model, and they take turns. `ours` samples with our engine,
trains with the engine that runs train with, and compares its logprobs with those sampled. `trl` samples with
transformers' generate, as TRL's trainer does without vLLM, with a `--trl-cache` of its kinds, and takes TRL's loss.
With one update for each batch both take the new logprobs for the old ones. Both have the lengths of `training.py`,
where half of the rows end early: generate goes on until the longest row is done. Tokens are drawn from random weights
and no text is scored, so that both train on advantages that are drawn, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from training import Sample, as_users_have_it, calm, machine_seconds
from transformers import GenerationConfig
from update import (
    GROUP_SIZE,
    MAX_RESPONSE_TOKENS,
    MAX_ROWS,
    PROMPT_TOKENS,
    SHAPES,
    Shape,
    make_model,
    make_rows,
    memory_mib,
    trl_trainer,
    trl_update,
)

Phases = dict[str, Callable[[], None]]
"""What a step consists of, in order."""


def ours(shape: Shape, dtype: torch.dtype, num_rows: int, at_once: int, judges: bool) -> Phases:
    """Our engines, both on the very same model; `at_once` tokens in a micro-batch."""
    from rallypoint.algorithms.losses import policy_loss
    from rallypoint.config import OptimizerConfig
    from rallypoint.engine import TrainingEngine, policy_outputs
    from rallypoint.generation import NativeEngine, Request, SamplingParams
    from rallypoint.models import ATTENTION, ModelShard
    from rallypoint.models.layers import replace_layers
    from rallypoint.roles.judging import compare
    from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths

    model = make_model(shape, dtype, ATTENTION).eval()
    replace_layers(model)
    engine: TrainingEngine[ActorBatch] = TrainingEngine(
        ModelShard.whole(model), optimizer=OptimizerConfig(lr=1e-6), max_tokens_per_micro_batch=at_once
    )
    sampler = NativeEngine(model, max_rows=num_rows, cache_tokens=num_rows * 2 * (PROMPT_TOKENS + MAX_RESPONSE_TOKENS))
    tokens, lengths, advantages = make_rows(shape.vocabulary, num_rows)
    row = torch.repeat_interleave(torch.arange(num_rows), lengths)
    offsets = offsets_from_lengths(lengths)
    is_response = torch.arange(len(row)) - offsets[row] >= PROMPT_TOKENS
    index = torch.arange(num_rows)
    batches: list[ActorBatch] = []

    def sample() -> None:
        found: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        for number, prompt in enumerate(tokens[:, :PROMPT_TOKENS].tolist()):
            params = SamplingParams(max_new_tokens=int(lengths[number]) - PROMPT_TOKENS, seed=sampler.version)
            place = {"prompt_index": number // GROUP_SIZE, "sample_index": number % GROUP_SIZE}
            request = sampler.submit(Request(tokens=tuple(prompt), params=params, **place))
            found[request], logprobs[request] = list(prompt), [0.0] * len(prompt)
        while sampler.has_work:
            for output in sampler.step():
                found[output.request_id] += output.tokens
                logprobs[output.request_id] += output.logprobs
        batches[:] = [
            ActorBatch(
                offsets=offsets,
                tokens=torch.tensor([token for response in found.values() for token in response]),
                loss_mask=is_response,
                prompt_index=index // GROUP_SIZE,
                sample_index=index % GROUP_SIZE,
                rollout_logprobs=torch.tensor([logprob for response in logprobs.values() for logprob in response]),
                old_logprobs=None,
                reference_logprobs=None,
                advantages=advantages[row],
            )
        ]

    def judge() -> None:
        engine.evaluate(batches[0], lambda rows, at: policy_outputs(engine.shard, rows, at, 1.0).logprobs)

    def loss(part: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        logprobs = policy_outputs(engine.shard, part, at, 1.0).logprobs
        old, everything = logprobs.detach(), torch.ones(len(at), dtype=torch.bool)
        clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
        return policy_loss(logprobs, old, part.advantages[at], everything, **clips).sum, compare(part, at, old, None)

    def update() -> None:
        batch = batches.pop()
        engine.train(batch, loss, denominator=batch.num_loss_tokens, step=1, num_steps=2)
        sampler.load(sampler.version + 1, None)

    return {"sample": sample, "judge": judge, "update": update} if judges else {"sample": sample, "update": update}


def trl(shape: Shape, dtype: torch.dtype, num_rows: int, at_once: int, cache: str) -> Phases:
    """transformers' generate, then TRL's loss on `at_once` rows at a time."""
    model = make_model(shape, dtype, "sdpa")
    trainer = trl_trainer(model, num_rows, at_once)
    update = trl_update(trainer, model, shape, num_rows, at_once)
    prompts = make_rows(shape.vocabulary, num_rows)[0][:, :PROMPT_TOKENS]
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        min_new_tokens=MAX_RESPONSE_TOKENS,
        top_k=0,
        pad_token_id=0,
        cache_implementation=cache,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    @torch.no_grad()
    def sample() -> None:
        model.eval()
        model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)  # pyright: ignore[reportCallIssue] - typed for a protocol
        model.train()

    def learn() -> None:
        optimizer.zero_grad()
        update()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"sample": sample, "update": learn}


def work(side: str, shape: str, dtype: str, wanted: argparse.Namespace) -> None:
    """Be one side: a line on stdin asks for a step, a line on stdout is about it."""
    torch.set_num_threads(wanted.threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    what = (SHAPES[shape], getattr(torch, dtype), wanted.rows)
    if side != "trl":
        phases = ours(*what, wanted.tokens_at_once, wanted.judge)
    else:
        phases = trl(*what, wanted.trl_rows_at_once, wanted.trl_cache)
    loaded = memory_mib("VmRSS")
    for _ in sys.stdin:
        began, cpu_began, seconds = time.perf_counter(), time.process_time(), {}
        for name, phase in phases.items():
            start = time.perf_counter()
            phase()
            seconds[name] = time.perf_counter() - start
        answer = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began, "phases": seconds}
        print(json.dumps(answer | {"peak_mib": memory_mib("VmHWM") - loaded}), file=answers)


def compare(shape: str, dtype: str, wanted: argparse.Namespace) -> None:
    """Let the sides take turns, and print a line for each."""
    ours = ["ours", "spinning"] if wanted.spinning else ["ours"]
    pythons = dict.fromkeys(ours, sys.executable) | ({"trl": wanted.trl_python} if wanted.trl_python else {})
    # What each has been asked for, this script is asked for again, so that it finds the same options.
    processes = {
        side: subprocess.Popen(
            [python, __file__, *sys.argv[1:], "--work", side, shape, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=as_users_have_it(side),
        )
        for side, python in pythons.items()
    }
    samples: dict[str, list[Sample]] = {side: [] for side in processes}
    last: dict[str, dict[str, float]] = {}
    peaks: dict[str, float] = {}
    for turn in range(wanted.times + 1):
        for side, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            busy, everything = machine_seconds()
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{side} failed; run it alone to see why: {' '.join(map(str, process.args))}")
            answer = json.loads(line)
            after = machine_seconds()
            foreign = max(0.0, (after[0] - busy - answer["cpu_s"]) / (after[1] - everything))
            if turn:  # the first one compiles kernels
                samples[side].append((answer["seconds"], answer["cpu_s"], foreign))
            last[side], peaks[side] = answer["phases"], answer["peak_mib"]
    medians = {
        side: [statistics.median(numbers) for numbers in zip(*calm(taken), strict=True)]
        for side, taken in samples.items()
    }
    for side, process in processes.items():
        process.communicate()
        seconds, cpu_s, foreign = medians[side]
        phases = ", ".join(f"{name} {took:.2f}" for name, took in last[side].items())
        ratio = f"{seconds / medians['ours'][0]:.2f} / {cpu_s / medians['ours'][1]:.2f}"
        print(
            f"| {shape} | {dtype} | {side} | {seconds:.2f} | {cpu_s:.2f} | {ratio} | {phases} "
            f"| {peaks[side]:.0f} | {foreign:.0%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--times", type=int, default=5, help="steps of each side that are measured")
    parser.add_argument("--rows", type=int, default=MAX_ROWS, help="of a step; a multiple of 8")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens-at-once", type=int, default=8192, help="tokens of a micro-batch of ours")
    parser.add_argument("--judge", action="store_true", help="ours judges its rollouts in a pass of its own")
    parser.add_argument("--spinning", action="store_true", help="also ours with idle threads that spin")
    parser.add_argument("--trl-python", type=Path, help="interpreter with trl")
    parser.add_argument("--trl-rows-at-once", type=int, default=16, help="rows of a micro-batch of TRL")
    parser.add_argument("--trl-cache", choices=["dynamic", "static"], default="dynamic", help="of TRL's generate")
    parser.add_argument("--work", nargs=3, metavar=("SIDE", "SHAPE", "DTYPE"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.work:
        work(*wanted.work, wanted)
        return
    print("| model | type | side | s | cpu s | over ours, s / cpu s | seconds of the last step | peak MiB | others |")
    print("|---|---|---|---:|---:|---:|---|---:|---:|")
    for shape in wanted.shapes:
        for dtype in wanted.dtypes:
            compare(shape, dtype, wanted)


if __name__ == "__main__":
    main()
