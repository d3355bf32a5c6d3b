"""Rollouts of a step, side by side: 16 prompts of 32 tokens, 8 rollouts each, up to 128 tokens.

    python benchmarks/rollout.py                                         # every size, even lengths; many minutes
    python benchmarks/rollout.py --shapes 10M --dtypes bfloat16 --times 3 --skew
    python benchmarks/rollout.py --sides native yardstick generate vllm vllm-eager --vllm-python ~/vllm/bin/python

Each side is a process of its own, and they take turns. `native` is rallypoint's engine, `exact` the same in its mode
of that name; `yardstick` a loop of a page over a static cache with batched products (all rows, all tokens, nobody
leaves); `generate` and `batching` are transformers' generate with a dynamic cache and its continuous batching; `vllm`
and `vllm-eager` are vLLM in the environment of another interpreter, with and without compilation. `even` lets every
rollout have all 128 tokens. `skewed` draws 512 lengths from a lognormal distribution between 16 and 480, of 64 prompts,
and runs at most 128 at a time; `even512` is as many rollouts of the mean length of those, so that their ratio, token
by token, is what the skew costs: `--skew` adds both for `native`.

Seconds are medians; `cpu_s` counts all threads and processes of a side. "ready" is what comes between weights in
memory (vLLM: in a file) and a first run at full speed. "rest" is the peak of resident memory during the runs, of all
processes of a side with their libraries, without weights and without the keys and values that the rollouts have.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.nn import functional
from training import Sample, as_users_have_it, calm, machine_seconds
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from update import SHAPES, Shape, make_model as make_untimed_model

WEIGHTS_ARE_THERE = [0.0]
"""When this side's were."""
PROMPT_TOKENS, MAX_NEW_TOKENS, GROUP_SIZE, ROWS_AT_ONCE = 32, 128, 8, 128


def make_lengths(mix: str) -> list[int]:
    """Return how many tokens each rollout has."""
    if mix == "even":
        return [MAX_NEW_TOKENS] * 128
    generator = torch.Generator().manual_seed(0)
    skewed = torch.empty(512).log_normal_(4.5, 0.8, generator=generator).clamp(16, 480).long()
    return skewed.tolist() if mix == "skewed" else [int(skewed.float().mean())] * 512


def cache_mib(shape: Shape, dtype: str, lengths: list[int]) -> float:
    """Return the size of the keys and values of so many rollouts as run at once, the longest of them."""
    num_tokens = sum(sorted(lengths)[-ROWS_AT_ONCE:]) + PROMPT_TOKENS * ROWS_AT_ONCE // GROUP_SIZE
    return 2 * shape.layers * shape.hidden * num_tokens * getattr(torch, dtype).itemsize / 2**20


def weights_mib(shape: Shape, dtype: str) -> float:
    """Return the size of the weights, whose embeddings are those of the head too."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config("eager"))
    return sum(weight.numel() for weight in model.parameters()) * getattr(torch, dtype).itemsize / 2**20


def make_prompts(num_rows: int, vocabulary: int) -> torch.Tensor:
    """Return [B, 32], the same for the rollouts of a group."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, vocabulary, (num_rows // GROUP_SIZE, PROMPT_TOKENS), generator=generator)
    return prompts.repeat_interleave(GROUP_SIZE, 0)


def make_model(shape: Shape, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    model = make_untimed_model(shape, dtype, attention)
    WEIGHTS_ARE_THERE[0] = time.perf_counter()
    return model


def native(shape: Shape, dtype: torch.dtype, lengths: list[int], mode: str) -> Callable[[], object]:
    """Our engine, through its requests, because each has a length of its own."""
    from rallypoint.generation import NativeEngine, Request, SamplingParams
    from rallypoint.models import ATTENTION
    from rallypoint.models.layers import allocate_joined
    from rallypoint.models.norm import replace_norms

    model = make_model(shape, dtype, ATTENTION).eval()
    replace_norms(model)
    for weight, place in allocate_joined(model, torch.device("cpu")):  # as where a model is loaded
        weight.data = place.copy_(weight.data)
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
            num_tokens += sum(len(output.tokens) for output in engine.step())
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


def vllm(shape: Shape, dtype: torch.dtype, lengths: list[int], *, eager: bool) -> Callable[[], object]:
    """vLLM's own loop over token ids, with the logprob of each token, without tokenizer and ends of rows."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - of another environment

    folder = tempfile.mkdtemp()
    make_model(shape, dtype, "eager").save_pretrained(folder)
    WEIGHTS_ARE_THERE[0] = time.perf_counter()
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=ROWS_AT_ONCE,
        seed=0,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in make_prompts(len(lengths), shape.vocabulary).tolist()]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for n in lengths]

    def run() -> None:
        found = engine.generate(prompts, params, use_tqdm=False)
        assert [len(one.outputs[0].token_ids) for one in found] == lengths
        engine.reset_prefix_cache()

    return run


SIDES: dict[str, Callable[[Shape, torch.dtype, list[int]], Callable[[], object]]] = {
    "native": lambda *what: native(*what, mode="fast"),
    "exact": lambda *what: native(*what, mode="exact"),
    "yardstick": yardstick,
    "generate": generate,
    "batching": batching,
    "vllm": lambda *what: vllm(*what, eager=False),
    "vllm-eager": lambda *what: vllm(*what, eager=True),
}


def processes() -> list[Path]:
    """Return the folders in /proc of this session, which a side has for itself."""
    found: list[Path] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getsid(int(folder.name)) == os.getsid(0):
                found.append(folder)
    return found


def cpu_seconds() -> float:
    """Return what all threads of all processes of this side have used."""
    ticks = 0
    for folder in processes():
        ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_mib() -> float:
    """Return the sum of the peaks of all processes of this side, since they were forgotten."""
    lines = [line.split() for folder in processes() for line in (folder / "status").read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] == "VmHWM:") / 1024


def work(side: str, shape: str, dtype: str, mix: str, threads: int) -> None:
    """Be one side: a line on stdin asks for one run, a line on stdout is about it."""
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    run = SIDES[side](SHAPES[shape], getattr(torch, dtype), make_lengths(mix))
    ready_s = time.perf_counter() - WEIGHTS_ARE_THERE[0]
    for folder in processes():
        (folder / "clear_refs").write_text("5")  # forgets the peak; a model is made in float32
    print(json.dumps({"ready_s": ready_s}), file=answers)
    for _ in sys.stdin:
        began, cpu_began = time.perf_counter(), cpu_seconds()
        run()
        answer = {"seconds": time.perf_counter() - began, "cpu_s": cpu_seconds() - cpu_began}
        print(json.dumps(answer | {"peak_mib": peak_mib()}), file=answers)


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
    ready_s: float
    rest_mib: float
    samples: list[Sample]

    def __str__(self) -> str:
        return (
            f"| {self.shape} | {self.dtype} | {self.mix} | {self.side} | {self.seconds:.2f} | {self.cpu_s:.2f} "
            f"| {self.num_tokens / self.seconds:,.0f} | {self.num_tokens / self.cpu_s:,.0f} "
            f"| {self.ready_s:.1f} | {self.rest_mib:.0f} |"
        )


def start(mix: str, side: str, wanted: argparse.Namespace, shape: str, dtype: str) -> subprocess.Popen[str]:
    """Start a side in a session of its own."""
    python = wanted.vllm_python if side.startswith("vllm") else sys.executable
    return subprocess.Popen(
        [python, __file__, "--work", side, shape, dtype, mix, "--threads", str(wanted.threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=as_users_have_it(side.partition("-")[0]) | {"OMP_NUM_THREADS": str(wanted.threads)},
    )


def listen(process: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for the next answer of a side."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a side failed; run it alone to see why: {process.args}")
    return json.loads(line)


def compare(shape: str, dtype: str, wanted: argparse.Namespace) -> list[Row]:
    """Let sides take turns."""
    names = [(mix, side) for mix in wanted.mixes for side in wanted.sides]
    names += [(mix, "native") for mix in ("even512", "skewed") if wanted.skew]
    started: dict[tuple[str, str], subprocess.Popen[str]] = {}
    ready_s: dict[tuple[str, str], float] = {}
    for name in names:  # one after the other, so that none gets ready beside another
        started[name] = start(*name, wanted, shape, dtype)
        ready_s[name] = listen(started[name])["ready_s"]
    samples: dict[tuple[str, str], list[Sample]] = {name: [] for name in started}
    answers: dict[tuple[str, str], dict[str, float]] = {}
    for turn in range(wanted.times + 1):
        for name, process in started.items():
            assert process.stdin is not None
            busy, everything = machine_seconds()
            process.stdin.write("\n")
            process.stdin.flush()
            answer = answers[name] = listen(process)
            after = machine_seconds()
            foreign = max(0.0, (after[0] - busy - answer["cpu_s"]) / (after[1] - everything))
            if turn:
                samples[name].append((answer["seconds"], answer["cpu_s"], foreign))
            else:
                ready_s[name] += answer["seconds"]
    for process in started.values():
        process.communicate()
    rows: list[Row] = []
    for (mix, side), taken in samples.items():
        good = calm(taken)
        seconds, cpu_s = (statistics.median(sample[place] for sample in good) for place in (0, 1))
        answer, lengths = answers[mix, side], make_lengths(mix)
        until_full_speed = max(0.0, ready_s[mix, side] - seconds)
        rest_mib = answer["peak_mib"] - weights_mib(SHAPES[shape], dtype) - cache_mib(SHAPES[shape], dtype, lengths)
        rows.append(Row(shape, dtype, mix, side, sum(lengths), seconds, cpu_s, until_full_speed, rest_mib, taken))
    return rows


def summary(rows: list[Row]) -> str:
    """Return a line with what is promised of `native` for one model and type; in brackets by seconds of CPU."""
    by_name = {(row.mix, row.side): row for row in rows}
    ours = by_name.get(("even", "native"))
    if ours is None:
        return ""

    def over(sides: tuple[str, ...]) -> str:
        others = [row for row in rows if row.mix == "even" and row.side in sides]
        if not others:
            return "-"
        wall, cpu = min(row.seconds for row in others), min(row.cpu_s for row in others)
        return f"{wall / ours.seconds:.2f} ({cpu / ours.cpu_s:.2f})"

    skewed, even = by_name.get(("skewed", "native")), by_name.get(("even512", "native"))
    skew = "-"
    if skewed and even:
        tokens = skewed.num_tokens / even.num_tokens
        skew = f"{skewed.seconds / even.seconds / tokens:.2f} ({skewed.cpu_s / even.cpu_s / tokens:.2f})"
    peers = " | ".join(over(sides) for sides in (("generate",), ("yardstick",), ("vllm", "vllm-eager")))
    return f"| {ours.shape} | {ours.dtype} | {peers} | {skew} | {ours.ready_s:.2f} | {ours.rest_mib:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--mixes", nargs="+", choices=["even", "even512", "skewed"], default=["even"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["native", "yardstick", "generate"])
    parser.add_argument("--skew", action="store_true", help="add what a skewed mix costs `native`")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter with vllm")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=4, metavar=("SIDE", "SHAPE", "DTYPE", "MIX"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.work:
        side, shape, dtype, mix = wanted.work
        work(side, shape, dtype, mix, wanted.threads)
        return
    print("| model | type | lengths | side | s | cpu s | tokens/s | tokens/cpu s | ready s | rest MiB |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    rows: list[Row] = []
    lines: list[str] = []
    for shape in wanted.shapes:
        for dtype in wanted.dtypes:
            found = compare(shape, dtype, wanted)
            print(*found, sep="\n", flush=True)
            rows += found
            lines.append(summary(found))
    print("\n`native` beside its peers: their seconds over its own; in brackets those of CPU")
    print("| model | type | generate | yardstick | vllm | skewed over even | ready s | rest MiB |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    print(*filter(None, lines), sep="\n")
    if wanted.json:
        wanted.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
