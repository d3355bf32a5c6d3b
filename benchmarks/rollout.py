"""Rollouts of a step, side by side: 16 prompts of 32 tokens, 8 rollouts each, up to 128 tokens.

    python benchmarks/rollout.py                                         # every size, even lengths; many minutes
    python benchmarks/rollout.py --shapes 10M --dtypes bfloat16 --times 3 --mixes even skewed
    python benchmarks/rollout.py --sides native exact yardstick generate batching

Each side is a process of its own, and they take turns. `native` is rallypoint's engine, `exact` the same in its mode
of that name; `yardstick` a loop of a page over a static cache with batched products (all rows, all tokens, nobody
leaves); `generate` and `batching` are transformers' generate with a dynamic cache and its continuous batching. `even`
lets every rollout have all 128 tokens. `skewed` draws 512 lengths from a lognormal distribution between 16 and 480,
64 prompts x 8, and runs at most 128 at a time; beside it stands `even512`, as many rollouts of the mean length of
those, so that their ratio, token by token, is what the skew costs. Seconds are medians; `cpu_s` counts all threads and
hardly depends on what else runs; memory is the peak over what it was with the weights loaded, with the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional
from training import Sample, calm, machine_seconds
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from update import SHAPES, Shape, make_model, memory_mib

PROMPT_TOKENS, MAX_NEW_TOKENS, GROUP_SIZE, ROWS_AT_ONCE = 32, 128, 8, 128


def make_lengths(mix: str) -> list[int]:
    """Return how many tokens each rollout has."""
    if mix == "even":
        return [MAX_NEW_TOKENS] * 128
    generator = torch.Generator().manual_seed(0)
    skewed = torch.empty(512).log_normal_(4.5, 0.8, generator=generator).clamp(16, 480).long()
    return skewed.tolist() if mix == "skewed" else [int(skewed.float().mean())] * 512


def make_prompts(num_rows: int, vocabulary: int) -> torch.Tensor:
    """Return [B, 32], the same for the rollouts of a group."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, vocabulary, (num_rows // GROUP_SIZE, PROMPT_TOKENS), generator=generator)
    return prompts.repeat_interleave(GROUP_SIZE, 0)


def native(shape: Shape, dtype: torch.dtype, lengths: list[int], mode: str) -> Callable[[], object]:
    """Our engine, through its requests, because each has a length of its own."""
    from rallypoint.generation import NativeEngine, Request, SamplingParams
    from rallypoint.models import ATTENTION

    model = make_model(shape, dtype, ATTENTION).eval()
    prompts = make_prompts(len(lengths), shape.vocabulary).tolist()
    engine = NativeEngine(
        model, max_rows=ROWS_AT_ONCE, cache_tokens=ROWS_AT_ONCE * 640, mode="exact" if mode == "exact" else "fast"
    )

    def run() -> None:
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(max_new_tokens=length)
            engine.submit(Request(tokens=tuple(prompt), params=params, prompt_index=row // 8, sample_index=row % 8))
        num_tokens = 0
        while engine.has_work:
            num_tokens += sum(len(piece.tokens) for piece in engine.step())
        assert num_tokens == sum(lengths)
        engine.load(engine.version + 1, None)  # prompts are not found again

    return run


@torch.no_grad()
def yardstick(shape: Shape, dtype: torch.dtype, lengths: list[int]) -> Callable[[], object]:
    """A static cache of [rows, heads, tokens, D], batched products, and torch.multinomial."""
    model = make_model(shape, dtype, "eager").eval()
    prompts, total = make_prompts(len(lengths), shape.vocabulary), PROMPT_TOKENS + max(lengths)
    heads, dim = shape.heads, shape.hidden // shape.heads
    num_rows = len(lengths)
    cache = torch.zeros(2, shape.layers, num_rows * heads, total, dim, dtype=dtype)
    cos, sin = model.model.rotary_emb(cache, torch.arange(total).unsqueeze(0))

    def rotate(states: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        first, second = states.chunk(2, -1)
        return states * cos[:, start:stop] + torch.cat((-second, first), -1) * sin[:, start:stop]

    def by_head(states: torch.Tensor) -> torch.Tensor:
        return states.view(num_rows, -1, heads, dim).transpose(1, 2).reshape(num_rows * heads, -1, dim)

    def forward(tokens: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + tokens.shape[1]
        states = model.model.embed_tokens(tokens)
        hidden = torch.full((stop - start, stop), float("-inf"), dtype=dtype).triu(start + 1)
        for index, layer in enumerate(cast("list[LlamaDecoderLayer]", list(model.model.layers))):
            attention, inner = layer.self_attn, layer.input_layernorm(states)
            query = rotate(by_head(attention.q_proj(inner)), start, stop)
            cache[0, index, :, start:stop] = rotate(by_head(attention.k_proj(inner)), start, stop)
            cache[1, index, :, start:stop] = by_head(attention.v_proj(inner))
            scores = torch.baddbmm(hidden, query, cache[0, index, :, :stop].transpose(1, 2), alpha=dim**-0.5)
            out = torch.bmm(scores.softmax(-1), cache[1, index, :, :stop])
            out = out.view(num_rows, heads, -1, dim).transpose(1, 2).reshape(states.shape)
            states = states + attention.o_proj(out)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return model.lm_head(model.model.norm(states[:, -1]))

    @torch.no_grad()
    def run() -> None:
        tokens, logprobs = prompts, []
        for position in range(max(lengths)):
            start = 0 if position == 0 else PROMPT_TOKENS + position - 1
            everything = functional.log_softmax(forward(tokens, start).float(), -1)
            tokens = torch.multinomial(everything.exp(), 1)
            logprobs.append(everything.gather(1, tokens))

    return run


def generate(shape: Shape, dtype: torch.dtype, lengths: list[int]) -> Callable[[], object]:
    """`model.generate` on all rows at once; it goes on until the longest is done."""
    model = make_model(shape, dtype, "sdpa").eval()
    prompts = make_prompts(len(lengths), shape.vocabulary)
    config = GenerationConfig(
        do_sample=True, max_new_tokens=max(lengths), min_new_tokens=max(lengths), top_k=0, pad_token_id=0
    )
    return lambda: model.generate(  # pyright: ignore[reportAttributeAccessIssue] - typed for a protocol
        prompts, attention_mask=torch.ones_like(prompts), generation_config=config
    )


def batching(shape: Shape, dtype: torch.dtype, lengths: list[int]) -> Callable[[], object]:
    """transformers' continuous batching; its lengths are those of the longest."""
    model = make_model(shape, dtype, "sdpa").eval()
    prompts = make_prompts(len(lengths), shape.vocabulary).tolist()
    config = GenerationConfig(do_sample=True, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0)
    return lambda: model.generate_batch(inputs=prompts, generation_config=config)


SIDES: dict[str, Callable[[Shape, torch.dtype, list[int]], Callable[[], object]]] = {
    "native": lambda *what: native(*what, mode="fast"),
    "exact": lambda *what: native(*what, mode="exact"),
    "yardstick": yardstick,
    "generate": generate,
    "batching": batching,
}


def work(side: str, shape: str, dtype: str, mix: str, threads: int) -> None:
    """Be one side: a line on stdin asks for one run, a line on stdout is about it."""
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    began = time.perf_counter()
    run = SIDES[side](SHAPES[shape], getattr(torch, dtype), make_lengths(mix))
    ready_s, loaded = time.perf_counter() - began, memory_mib("VmRSS")
    for _ in sys.stdin:
        began, cpu_began = time.perf_counter(), time.process_time()
        run()
        answer = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
        print(json.dumps(answer | {"ready_s": ready_s, "peak_mib": memory_mib("VmHWM") - loaded}), file=answers)


@dataclasses.dataclass
class Row:
    """A line of the table."""

    shape: str
    dtype: str
    mix: str
    side: str
    num_tokens: int
    seconds: float
    cpu_s: float
    peak_mib: float
    samples: list[Sample]

    def __str__(self) -> str:
        return (
            f"| {self.shape} | {self.dtype} | {self.mix} | {self.side} | {self.seconds:.2f} | {self.cpu_s:.2f} "
            f"| {self.num_tokens / self.seconds:,.0f} | {self.num_tokens / self.cpu_s:,.0f} | {self.peak_mib:.0f} |"
        )


def compare(shape: str, dtype: str, mixes: list[str], sides: list[str], times: int, threads: int) -> list[Row]:
    """Let sides take turns."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    processes = {
        (mix, side): subprocess.Popen(
            [sys.executable, __file__, "--work", side, shape, dtype, mix, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for mix in mixes
        for side in sides
    }
    samples: dict[tuple[str, str], list[Sample]] = {name: [] for name in processes}
    peaks: dict[tuple[str, str], float] = {}
    for turn in range(times + 1):
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            busy, everything = machine_seconds()
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{name} failed; run it alone to see why: {process.args}")
            answer = json.loads(line)
            after = machine_seconds()
            foreign = max(0.0, (after[0] - busy - answer["cpu_s"]) / (after[1] - everything))
            peaks[name] = answer["peak_mib"]
            if turn:
                samples[name].append((answer["seconds"], answer["cpu_s"], foreign))
    for process in processes.values():
        process.communicate()
    rows: list[Row] = []
    for (mix, side), taken in samples.items():
        good = calm(taken)
        seconds, cpu_s = (statistics.median(sample[place] for sample in good) for place in (0, 1))
        num_tokens = sum(make_lengths(mix))
        rows.append(Row(shape, dtype, mix, side, num_tokens, seconds, cpu_s, peaks[mix, side], taken))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--mixes", nargs="+", choices=["even", "even512", "skewed"], default=["even"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["native", "yardstick", "generate"])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=4, metavar=("SIDE", "SHAPE", "DTYPE", "MIX"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.work:
        side, shape, dtype, mix = wanted.work
        work(side, shape, dtype, mix, wanted.threads)
        return
    print("| model | type | lengths | side | s | cpu s | tokens/s | tokens/cpu s | peak MiB |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|")
    rows: list[Row] = []
    for shape in wanted.shapes:
        for dtype in wanted.dtypes:
            found = compare(shape, dtype, wanted.mixes, wanted.sides, wanted.times, wanted.threads)
            print(*found, sep="\n", flush=True)
            rows += found
    if wanted.json:
        wanted.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
