"""What a recorded call leaves: the profiler's file, and beside it the allocations of a CUDA device."""

import json

import pytest
import torch

from rallypoint.roles.colocated import recorded


class Allocations:
    """Stands for `torch.cuda.memory` where there is no such device."""

    def __init__(self):
        self.told = []

    def _record_memory_history(self, enabled="all", *, max_entries=0):
        self.told.append((enabled, max_entries))

    def _dump_snapshot(self, filename):
        self.told.append(filename)


def test_a_call_that_is_recorded_on_cuda_leaves_a_snapshot_of_its_memory_beside_its_profile(tmp_path):
    path, allocations = tmp_path / "profile" / "step-000003-actor-rank0-train.json", Allocations()
    with recorded(path, allocations):
        torch.ones(3).add(1)
    assert any(one.get("name") == "aten::add" for one in json.loads(path.read_text())["traceEvents"])
    snapshot = str(path.parent / "step-000003-actor-rank0-train.memory.pickle")
    assert allocations.told == [("all", 100_000), snapshot, (None, 0)]


def test_allocations_are_recorded_no_longer_after_an_error(tmp_path):
    allocations = Allocations()
    with pytest.raises(ZeroDivisionError), recorded(tmp_path / "a.json", allocations):
        raise ZeroDivisionError
    assert allocations.told == [("all", 100_000), (None, 0)]
