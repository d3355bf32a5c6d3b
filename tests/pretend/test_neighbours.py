"""A process beside this one on the same accelerator, such as vLLM."""

import pytest
import torch

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.config import load_config
from rallypoint.roles.engines import _has_a_device_alone, _memory_share
from rallypoint.roles.turns import Turns, make_room_for_neighbour


class Sleeper:
    """What a role has on the device, as far as turns know it."""

    def __init__(self):
        self.is_asleep = False

    def sleep(self):
        self.is_asleep = True

    def wake(self, *, to_train=True):
        self.is_asleep = False


@pytest.fixture
def context():
    return WorkerContext("actor", 0, Mesh({"dp_replicate": 1}), 1, "pretend", {})


def test_what_sleeps_leaves_its_memory_to_a_neighbour_and_to_nobody_without_one(pretend, context):
    turns, sleeper = Turns(context), Sleeper()
    turns.sleep_between(sleeper)
    with turns.turn():
        assert not sleeper.is_asleep
    assert pretend.kernels["empty_cache"] == 0, "torch keeps it for the next role of this process"
    make_room_for_neighbour(context)
    assert pretend.kernels["empty_cache"] == 1, "before the neighbour looks what is free"
    with turns.turn():
        assert pretend.kernels["empty_cache"] == 1
    assert pretend.kernels["empty_cache"] == 2
    other = Turns(context)
    other.sleep_between(Sleeper())
    assert pretend.kernels["empty_cache"] == 3, "a role that comes later in the same process"


def test_a_neighbour_asks_for_no_more_free_memory_than_it_takes():
    _, total = torch.accelerator.get_memory_info()
    assert _memory_share(total // 4, "pretend") == pytest.approx(0.25, rel=1e-6)
    assert _memory_share(2 * total, "pretend") == 1.0
    assert 0 < _memory_share(1, "pretend") < 0.01
    assert _memory_share(total // 4, "cpu") is None


@pytest.mark.parametrize(
    ("more", "is_alone"),
    [
        ((), True),
        (("cluster.num_gpus_per_process=0.5",), False),
        (("actor.placement.pool=side",), False),
        (("rollout.serve=0",), False),
        (("cluster.device=cpu",), False),
    ],
)
def test_rollouts_keep_their_memory_only_where_no_other_role_or_process_may_be_on_the_device(more, is_alone):
    placed = ("cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side", "cluster.device=cuda")
    assert _has_a_device_alone(load_config("digits", [*placed, *more]).config) == is_alone
