"""Others on the same accelerator, in this process or beside it, such as vLLM: what is left for a cache."""

import pytest
import torch

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.config import load_config
from rallypoint.config.limits import CACHE_MARGIN
from rallypoint.errors import CacheError
from rallypoint.generation.native.kv_cache import CacheSize
from rallypoint.prepare.plan import make_plan
from rallypoint.roles.colocated import MemoryLease, make_room_for_neighbour
from rallypoint.roles.engines import _memory_share, keeps_memory, planned_cache

DEVICE, TOKEN_BYTES, LIMIT = torch.device("pretend:1"), 1000, 1_000_000
LEFT = 900_000
"""Of the limit, with a margin of a tenth."""


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
    lease, sleeper = MemoryLease(context), Sleeper()
    lease.sleep_between(sleeper)
    with lease.held():
        assert not sleeper.is_asleep
    assert pretend.kernels["empty_cache"] == 0, "torch keeps it for the next role of this process"
    make_room_for_neighbour(context)
    assert pretend.kernels["empty_cache"] == 1, "before the neighbour looks what is free"
    with lease.held():
        assert pretend.kernels["empty_cache"] == 1
    assert pretend.kernels["empty_cache"] == 2
    other = MemoryLease(context)
    other.sleep_between(Sleeper())
    assert pretend.kernels["empty_cache"] == 3, "a role that comes later in the same process"


def test_a_role_measures_its_peak_on_the_device_with_what_others_of_the_process_keep_there(context):
    def taken(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8, device="pretend")

    not_ours = taken(5_000)
    actor, critic, asleep = (MemoryLease(context) for _ in range(3))
    with actor.held():
        weights = taken(10_000)
        taken(50_000)
    with critic.held():
        taken(20_000)
        with critic.held():  # as weights that are loaded while a rank samples
            taken(7_000)
    measured = [lease.metrics().scalars() for lease in (actor, critic, asleep)]
    assert measured == [{"memory_gib": 60_000 / 2**30}, {"memory_gib": 30_000 / 2**30}, {}]
    with actor.held():
        del weights, not_ours
    assert actor.metrics().scalars() == {"memory_gib": 10_000 / 2**30}, "of the calls since it was last asked"


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
        (("rollout.serve=0",), False),
        (("cluster.device=cpu",), False),
    ],
)
def test_rollouts_without_another_role_keep_their_memory_where_no_other_process_may_be_on_the_device(more, is_alone):
    placed = ("cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side", "cluster.device=cuda")
    config = load_config("digits", [*placed, *more]).config
    assert keeps_memory(config) == is_alone


def test_rollouts_beside_training_keep_their_memory_where_the_plan_has_room_for_all_of_it(pretend):
    config = load_config("digits", ["cluster.device=pretend"]).config
    plan = make_plan(config)
    cache = next(memory.cache for memory in plan.memory if memory.role == "rollout")
    turns = {memory.role: plan.awake_memory(memory.role) for memory in plan.memory}
    most = max(num_bytes + (role != "rollout") * cache for role, num_bytes in turns.items())
    enough = int(most / (1 - CACHE_MARGIN)) + 2
    for limit, keeps in ((enough, True), (enough - 2**20, False)):
        with pretend.limited(limit):
            assert keeps_memory(config) is keeps
    asleep = load_config("digits", ["cluster.device=pretend", "engine.sleep=true"]).config
    assert not keeps_memory(asleep), "the actor's weights come back to other addresses"
    kept = plan.within({"main": enough})
    for memory in plan.memory:
        beside = 0 if memory.role == "rollout" else cache
        assert kept.awake_memory(memory.role) == turns[memory.role] + beside


@pytest.mark.parametrize(
    ("room", "num_tokens"),
    [
        (CacheSize(800, 100), 800),
        (CacheSize(5_000, 100), 900),
        (CacheSize(5_000, 100, spared_bytes=500_000), 400),
        (CacheSize(5_000, 100, spared_bytes=2_000_000), 100),
        (CacheSize(5_000, 100, share=0.5), 450),
        (CacheSize.of(5_000), 5_000),
    ],
    ids=["all", "what is left", "less what is spared", "never less than a row", "of a part", "as it was said"],
)
def test_a_cache_takes_what_is_free_between_its_two_sizes(pretend, room, num_tokens):
    with pretend.limited(LIMIT):
        assert room.num_tokens(TOKEN_BYTES, DEVICE) == num_tokens


def test_what_others_hold_is_theirs(pretend):
    with pretend.limited(LIMIT):
        held = torch.empty(300_000, dtype=torch.uint8, device=DEVICE)
        assert CacheSize(5_000, 100).num_tokens(TOKEN_BYTES, DEVICE) == (LEFT - held.numel()) // TOKEN_BYTES


def test_a_device_without_room_for_one_row_is_refused_with_the_keys_that_help(pretend):
    with (
        pretend.limited(LIMIT),
        pytest.raises(CacheError, match=r"1,000 tokens, take 1 MiB, but the device has 1 MiB .*engine\.sleep=true"),
    ):
        CacheSize(5_000, 1_000).num_tokens(TOKEN_BYTES, DEVICE)


def test_a_server_gets_the_cache_that_the_plan_leaves_room_for(pretend):
    config = load_config("digits", ["cluster.device=pretend", "rollout.engine=vllm"]).config
    whole = planned_cache(config)
    assert whole is not None
    with pretend.limited(whole):
        little = planned_cache(config)
    assert little is not None
    assert little < whole
