"""Deterministic kernels are asked for in a whole process, so the test has one of its own."""

import subprocess
import sys

SAID = """
import os, torch
from rallypoint.engine.determinism import make_deterministic, operators_without
make_deterministic()
make_deterministic()  # every role of a process asks
assert torch.are_deterministic_algorithms_enabled()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
torch.zeros(3).index_add_(0, torch.tensor([1, 1]), torch.ones(2))
assert operators_without() == frozenset()
for _ in range(3):
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
print(*operators_without())
"""


def test_an_operator_without_a_deterministic_kernel_is_warned_of_once_and_remembered():
    done = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["put_"]
    assert done.stderr.count("put_ does not have a deterministic implementation") == 1
