"""The kernel for attention over blocks, by Triton's interpreter and compiler: neither needs an accelerator.

Both read an environment variable when they are imported, so they run in processes of their own. The interpreter
multiplies bfloat16 as integers, so half precision is float16 here.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rallypoint.generation.native.accelerator.kernel import find_kernel, num_parts

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SHARED = Path(__file__).parents[4] / "shared"
CASES = [
    {"lengths": [40, 3], "heads": 4, "kv_heads": 2, "dim": 16, "limits": "all", "num_columns": 4},
    {"lengths": [40, 3, 9], "heads": 4, "kv_heads": 1, "dim": 24, "limits": "window", "num_columns": 1},
    {"lengths": [70], "heads": 2, "kv_heads": 2, "dim": 32, "limits": "softcap", "num_columns": 4},
    {"lengths": [150, 33], "heads": 3, "kv_heads": 1, "dim": 16, "limits": "both", "num_columns": 4},
    {"lengths": [40, 3], "heads": 4, "kv_heads": 2, "dim": 16, "limits": "sinks", "num_columns": 4},
    {"lengths": [150, 33], "heads": 4, "kv_heads": 4, "dim": 16, "limits": "sinks", "num_columns": 1},
    {"lengths": [40, 3], "heads": 4, "kv_heads": 2, "dim": 16, "limits": "together", "num_columns": 4},
]
QUICK = ("window", "together")
"""Limits of the cases that are always tried, of which one has all that the kernel can do."""
TOLERANCES = {"float32": 1e-5, "float16": 5e-3}


def run(name, *arguments, interpret):
    done = subprocess.run(
        [sys.executable, SHARED / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_the_kernel_finds_what_products_find_and_stores_the_same(is_quick):
    cases = [{**case, "dtype": dtype} for case, dtype in zip(CASES, itertools.cycle(TOLERANCES), strict=False)]
    cases = [case for case in cases if (case["limits"] in QUICK) == is_quick]
    differences = run("kernel_in_triton.py", *map(json.dumps, cases), interpret=True)
    for case, difference in zip(cases, differences, strict=True):
        assert difference <= TOLERANCES[case["dtype"]], case


@needs_triton
@pytest.mark.slow
def test_the_trial_that_decides_on_a_device_finds_the_kernel_right():
    assert run("kernel_in_triton.py", interpret=True) == [True]


@needs_triton
@pytest.mark.parametrize(("kind", "name"), [("cuda", 90), pytest.param("hip", "gfx942", marks=pytest.mark.slow)])
def test_kernels_can_be_compiled_for_accelerators_of_two_vendors(kind, name):
    assert run("kernel_compiled.py", kind, interpret=False) == [[kind, name]]


def test_where_there_is_no_kernel_rows_are_looked_up_by_products():
    assert find_kernel(torch.device("cpu"), torch.float32, lambda _: True) is None
    assert find_kernel(torch.device("meta"), torch.float64, lambda _: True) is None


@pytest.mark.parametrize("num_programs", [1, 8, 100, 3000])
@pytest.mark.parametrize("num_slots", [1, 3, 32, 5000])
def test_there_are_no_more_parts_than_blocks_and_no_more_programs_than_are_of_use(num_programs, num_slots):
    parts = num_parts(num_programs, num_slots)
    assert 1 <= parts <= num_slots
    assert parts == 1 or parts * num_programs <= 1024


FAILURES = [
    RuntimeError("no such device"),
    subprocess.CalledProcessError(1, ["gcc", "main.c", "-I/usr/include/python3.11"]),  # no headers of Python
    FileNotFoundError(2, "No such file or directory: 'gcc'"),
    NotImplementedError("a backend without this operation"),
    AttributeError("an attribute that this version of Triton has no more"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["made", "tried"])
def test_a_kernel_that_cannot_be_made_or_tried_is_not_used_and_the_log_says_so_once(caplog, error, where):
    def fails(*_):
        raise error

    make, is_right = (fails, lambda _: True) if where == "made" else (lambda: object(), fails)
    device = torch.device("meta", FAILURES.index(error) * 2 + (where == "made"))
    for _ in range(3):
        assert find_kernel(device, torch.float32, is_right, make) is None
    (line,) = caplog.messages
    assert str(error) in line
    assert ("C compiler and Python's headers" in line) is isinstance(
        error, subprocess.CalledProcessError | FileNotFoundError
    )


def test_a_kernel_that_is_wrong_is_not_used_and_one_that_is_right_is(caplog):
    device = torch.device("meta", 100)
    assert find_kernel(device, torch.float32, lambda _: False, lambda: object()) is None
    assert "something else" in caplog.messages[-1]
    kernel = object()
    assert find_kernel(device, torch.float32, lambda _: True, lambda: kernel) is kernel
