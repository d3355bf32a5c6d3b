"""The kernels of heads and rotations, by Triton's interpreter; the compiler sees them with those of attention.

The interpreter rounds bfloat16 in its own way, so half precision is float16 here.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rallypoint.models.kernels import Kernels, RowGradients, find_kernels, is_right

CPU = torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_kernels_give_what_operators_give_in_every_precision(dtype):
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "shared" / "kernels_in_triton.py", dtype],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[True, True]]


class InOperators(Kernels):
    """The same by operators, wrong in one place if asked."""

    def __init__(self, wrong=""):
        self.wrong = wrong

    def statistics(self, logits, temperature, softcap):
        wide = logits.double().clamp(min=-1e30)
        scaled = (wide if softcap is None else softcap * (wide / softcap).tanh()) / temperature
        relative = scaled - scaled.amax(-1, keepdim=True)
        total = relative.exp().sum(-1)
        entropy = total.log() - (relative.exp() * relative).sum(-1) / total
        return scaled.amax(-1), total.log(), entropy * (1.001 if self.wrong == "entropy" else 1)

    def to_gradient(self, logits, rows: RowGradients, temperature, softcap):
        wide = logits.double().clamp(min=-1e30)
        capped = wide if softcap is None else softcap * (wide / softcap).tanh()
        log_shares = capped / temperature - rows.normaliser.unsqueeze(1)
        factor = rows.of_shares.unsqueeze(1)
        if rows.of_entropy is not None:
            factor = factor - rows.of_entropy.unsqueeze(1) * (log_shares + rows.entropy.unsqueeze(1))
        grad = log_shares.exp() * factor
        if self.wrong == "targets":  # one of two that are the same is lost
            grad.scatter_(1, rows.targets, rows.of_targets.double())
        else:
            grad.scatter_add_(1, rows.targets, rows.of_targets.double())
        if softcap is not None and self.wrong != "softcap":
            grad *= 1 - (capped / softcap).square()
        logits.copy_(grad)

    def rotate(self, states, cos, sin, *, backwards=False):
        sign = -1 if backwards and self.wrong != "rotation" else 1
        first, second = states.chunk(2, -1)
        return states * cos.unsqueeze(1) + sign * torch.cat((-second, first), -1) * sin.unsqueeze(1)


@pytest.mark.parametrize("wrong", ["", "entropy", "targets", "softcap", "rotation"])
def test_a_trial_tells_right_kernels_from_wrong_ones(wrong):
    assert is_right(InOperators(wrong), CPU, torch.float32) is (wrong == "")


def test_a_cpu_has_none():
    assert find_kernels(torch.zeros(3)) is None
