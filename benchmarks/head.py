"""The head alone: logprobs and entropies of tokens from hidden states, forward and backward, and its memory.

    python benchmarks/head.py                        # 4,096 tokens, width 512, vocabularies of 512 and 32k
    python benchmarks/head.py --vocabularies 131072 --threads 1

`chunks` is ours; `logits` holds those of all tokens; `cross entropy` is torch's chunked one, which knows no entropy and
is asked for a plain sum, so that it does less. Seconds are of CPU, all threads, medians of turns. Memory is what a call
takes at most beyond what was there, each in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import LinearCrossEntropyOptions, functional
from update import memory_mib

from rallypoint.models.head import head_outputs


def chunks(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    logprobs, entropy, _ = head_outputs(states, weight, None, targets, 1.0)
    (logprobs.sum() - 1e-3 * entropy.sum()).backward()


def logits(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    everything = functional.linear(states, weight).float().log_softmax(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    (everything.gather(-1, targets.unsqueeze(-1)).sum() - 1e-3 * entropy.sum()).backward()


def cross_entropy(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    options = LinearCrossEntropyOptions()
    functional.linear_cross_entropy(states, weight, targets, reduction="sum", options=options).backward()


WAYS = {"chunks": chunks, "logits": logits, "cross entropy": cross_entropy}


def make_call(way: str, num_tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(vocabulary, width, generator=generator)).to(dtype).requires_grad_()
    return functools.partial(WAYS[way], states, weight, torch.randint(vocabulary, (num_tokens,), generator=generator))


def measure_memory(way: str, *shape: object) -> float:
    """Return MiB; to be called once in a process."""
    call = make_call(way, *shape)  # pyright: ignore[reportArgumentType]
    before = memory_mib("VmRSS")
    call()
    return memory_mib("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[512, 32_768])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    print("| vocabulary | precision | way | CPU s | peak MiB |\n|---|---|---|---|---|")
    for vocabulary in wanted.vocabularies:
        for dtype in (torch.float32, torch.bfloat16):
            shape = (wanted.tokens, wanted.width, vocabulary, dtype)
            calls = {way: make_call(way, *shape) for way in WAYS}
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(wanted.times):
                for way, call in calls.items():
                    began = time.process_time()
                    call()
                    seconds[way].append(time.process_time() - began)
            for way in WAYS:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    peak = pool.apply(measure_memory, (way, *shape))
                print(
                    f"| {vocabulary} | {dtype} | {way} | {statistics.median(seconds[way]):.3f} | {peak:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
