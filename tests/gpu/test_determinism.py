"""The same update in two processes ends with the same bits: what `engine.deterministic` promises."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]
UPDATE = Path(__file__).parents[1] / "shared" / "update_bits.py"


def test_two_processes_that_make_the_same_update_have_the_same_bits():
    device = torch.accelerator.current_accelerator(check_available=True).type
    first, second = (
        subprocess.run([sys.executable, UPDATE, device], capture_output=True, text=True, check=True, timeout=120)
        for _ in range(2)
    )
    assert len(first.stdout.split()) == 3
    assert first.stdout == second.stdout
