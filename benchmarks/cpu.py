"""What the parts of `rallypoint/cpu` gain on this machine; docs/cpu.md has the figures.

    OMP_NUM_THREADS=1 python benchmarks/cpu.py

Times are CPU seconds, the best of nine runs that take turns. Kernels are measured in processes of their own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from rallypoint.cpu import onednn
from rallypoint.cpu.pages import give_back
from rallypoint.models import norm
from rallypoint.observability.memory import resident_bytes

CPU = torch.device("cpu")
TIMES = 9


def best_of_each(*runs: Callable[[], None]) -> list[float]:
    """Run each of them in turn, several times; return the least CPU seconds of each."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(TIMES):
        for run, times in zip(runs, found, strict=True):
            begin = time.process_time()
            run()
            times.append(time.process_time() - begin)
    return [min(times) for times in found]


def strips() -> None:
    """Norms of 8,192 tokens, forward and backward, in strips and in one piece."""
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(8192, 320, dtype=dtype, requires_grad=True)
        chain = norm.RMSNorm(torch.nn.Parameter(torch.ones(320, dtype=dtype)), 1e-6)

        grad = torch.randn_like(states)

        def run(elements: int, states=states, chain=chain, grad=grad) -> None:
            before, norm._STRIP_ELEMENTS = norm._STRIP_ELEMENTS, elements
            chain(states).backward(grad)
            norm._STRIP_ELEMENTS = before

        in_strips, whole = best_of_each(partial(run, norm._STRIP_ELEMENTS), partial(run, 2**40))
        print(f"norm, {dtype}: in strips {1000 * in_strips:.1f} ms, in one piece {1000 * whole:.1f} ms")


def kernels(*, filled: bool, bounded: bool) -> None:
    """400 passes of four layers over 500 to 1,500 tokens; print their seconds and the memory that they leave."""
    if bounded:
        onednn.bound_kernel_caches()
    weights = [torch.randn(1280, 320, dtype=torch.bfloat16), torch.randn(320, 1280, dtype=torch.bfloat16)] * 2
    numbers = torch.randint(500, 1500, (400,), generator=torch.Generator().manual_seed(0)).tolist()

    def run(num: int) -> None:
        states = torch.ones(onednn.filled_up(num, torch.bfloat16, CPU) if filled else num, 320, dtype=torch.bfloat16)
        for weight in weights:
            states = functional.linear(states, weight)

    run(2000)
    before, begin = resident_bytes(CPU), time.process_time()
    for num in numbers:
        run(num)
    seconds = time.process_time() - begin
    give_back(CPU)
    print(json.dumps([seconds, (resident_bytes(CPU) - before) / 2**20]))


def kernels_in_processes() -> None:
    for filled, bounded in ((False, False), (False, True), (True, False), (True, True)):
        code = f"import cpu; cpu.kernels(filled={filled}, bounded={bounded})"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=here())
        seconds, mib = json.loads(out.stdout)
        print(f"bfloat16 passes, filled up: {filled}, caches bounded: {bounded}: {seconds:.2f} s, {mib:.0f} MiB left")


def here() -> str:
    return os.path.dirname(os.path.abspath(__file__))


def heap() -> None:
    """An update of a small model by torch alone; what is left of it before and after memory is given back."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    before = resident_bytes(CPU)
    for _ in range(3):
        model(input_ids=torch.zeros(32, 160, dtype=torch.int64), use_cache=False).logits.sum().backward()
        model.zero_grad()
    after, begin = resident_bytes(CPU), time.perf_counter()
    give_back(CPU)
    seconds = time.perf_counter() - begin
    print(
        f"heap after an update of a 1M model: {(after - before) / 2**20:.0f} MiB, "
        f"given back in {1000 * seconds:.1f} ms: {(resident_bytes(CPU) - before) / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    heap()
    strips()
    kernels_in_processes()
