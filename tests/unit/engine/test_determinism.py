"""Training passes ask for deterministic kernels strictly, and leave the flags of the process as they were."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from forks import run_forked

from rallypoint.engine.determinism import deterministic_kernels, prepare_process, process_as_found
from rallypoint.errors import DeterminismError

UPDATE = Path(__file__).parents[2] / "shared" / "update_bits.py"


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(params=[(False, False, True), (True, True, True), (True, False, False)], ids=str)
def found(request):
    """Flags that somebody else has set in this process."""
    before = flags()

    def have(is_on, only_warns, fills):
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills

    have(*request.param)
    yield request.param
    have(*before)


@pytest.mark.parametrize("error", [None, ValueError("a loss of the user's")])
def test_a_pass_is_strict_and_leaves_the_flags_that_it_found(found, error):
    with contextlib.suppress(ValueError), deterministic_kernels():
        assert flags() == (True, False, False)
        with deterministic_kernels():
            assert flags() == (True, False, False)
        assert flags() == (True, False, False)
        if error is not None:
            raise error
    assert flags() == found


def test_passes_of_two_threads_overlap_and_the_last_one_sets_the_flags_back(found):
    entered, may_leave = threading.Event(), threading.Event()

    def other():
        with deterministic_kernels():
            entered.set()
            may_leave.wait()

    thread = threading.Thread(target=other)
    with deterministic_kernels():
        thread.start()
        entered.wait()
    assert flags() == (True, False, False), "the other pass is under way"
    may_leave.set()
    thread.join()
    assert flags() == found


def test_an_operator_without_a_deterministic_kernel_is_named_with_what_to_do():
    with (
        pytest.raises(DeterminismError, match=r"put_ .* engine.deterministic=false"),
        deterministic_kernels(),
    ):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match="another error"), deterministic_kernels():
        raise RuntimeError("another error")


def test_a_process_that_is_the_users_is_left_as_it_was():
    workspace, has_cudnn = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.backends.cuda.cudnn_sdp_enabled()
    with process_as_found():
        prepare_process()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
    assert torch.backends.cuda.cudnn_sdp_enabled() == has_cudnn


@pytest.mark.slow
def test_two_processes_that_make_the_same_update_have_the_same_bits():
    """On a GPU: tests/gpu/test_determinism.py. One is a fork, with another seed of hashes and other addresses.

    `tests/e2e/test_golden_bits.py` compares steps of whole runs with the bits that other processes have stored.
    """
    first = subprocess.run([sys.executable, UPDATE, "cpu"], capture_output=True, text=True, check=True, timeout=120)
    second = run_forked("-c", UPDATE.read_text(), "cpu")
    assert len(first.stdout.split()) == 3
    assert first.stdout == second.stdout
