"""A stream of weights to servers, and what is done where these cannot take them from memory."""

import asyncio
from pathlib import Path

import pytest
import torch

from rallypoint.cluster import Mesh
from rallypoint.errors import WeightsMismatchError, WorkerError
from rallypoint.models import Part
from rallypoint.roles.publishing import Stream, make_plan
from rallypoint.roles.rank_engine import SliceRequest, SliceResult
from rallypoint.roles.rollout import Rollouts
from rallypoint.transport_kinds import BROADCAST, MEMORY
from rallypoint.weights import Held
from rallypoint.weights.relay import relayed

HELD = [{"a": Held(torch.float32, Part.whole([2, 3]))}]


class Run:
    """An actor and a rollout role that keep a record; what is in `failing` raises."""

    def __init__(self, folder, *failing):
        self.folder, self.failing, self.done = folder, set(failing), []
        self.version, self.publisher, self.processes, self.role = 3, None, [object()], self

    def did(self, what):
        self.done.append(what)
        if what in self.failing:
            raise WorkerError("rollout", 0, what, "vllm cannot take weights from memory", "")

    async def held(self):
        return HELD

    async def connect(self, stream, plan):
        self.did("connect")

    async def send(self):
        self.did("send")

    async def written(self, taker=None):
        self.did("write")
        (self.folder / "version_000003").mkdir(exist_ok=True)
        return self.folder / "version_000003"

    async def load(self, version, published: Path | None = None):
        self.did("load" if published is None else "read")


def publish(stream, run, times=1):
    async def publish_all():
        for _ in range(times):
            await stream.publish(run, run)

    asyncio.run(publish_all())
    return run.done


def served():
    return Stream(MEMORY, "xxh3", 10.0, num_workers=1)


def test_servers_are_connected_once_and_get_weights_from_memory(tmp_path):
    assert publish(served(), Run(tmp_path), 2) == ["connect", "connect", "send", "load", "send", "load"]


def test_servers_that_cannot_be_connected_get_every_version_from_a_folder(tmp_path):
    done = publish(served(), Run(tmp_path, "connect"), 2)
    assert done == ["connect", "connect", "write", "read", "write", "read"]


def test_a_version_that_does_not_arrive_comes_from_a_folder_and_the_next_one_from_memory_again(tmp_path):
    run, stream = Run(tmp_path, "load"), served()
    assert publish(stream, run) == ["connect", "connect", "send", "load", "write", "read"]
    run.failing.clear()
    run.done.clear()
    assert publish(stream, run) == ["connect", "connect", "send", "load"]


def test_ranks_with_a_model_of_their_own_have_no_folder_to_fall_back_to(tmp_path):
    with pytest.raises(WorkerError):
        publish(Stream(MEMORY, "xxh3", 10.0), Run(tmp_path, "load"))


def test_the_workers_of_servers_receive_and_processes_only_send():
    one, other, third = object(), object(), object()
    plan = make_plan(Stream(MEMORY, "xxh3", 10.0, num_workers=2), HELD * 2, [one, other], [one, third])
    names = [member.name for member in plan.members]
    assert names == [
        "actor rank 0 and rollout rank 0",
        *(f"worker {worker} of rollout rank {rank}'s server" for rank in (0, 1) for worker in (0, 1)),
    ]
    assert plan.receivers == (1, 2, 3, 4)
    assert [plan.places_of_receiver(rank) for rank in (0, 1)] == [(1, 2), (3, 4)]
    assert [plan.place_of_process(rank) for rank in (0, 1)] == [0, None]


def test_ranks_that_share_a_server_send_and_its_workers_receive_once():
    processes = [object() for _ in range(4)]
    held = [{f"w{rank}": next(iter(HELD[0].values()))} for rank in range(4)]
    stream = Stream(MEMORY, "xxh3", 10.0, num_workers=2, num_sharing=2)
    plan = make_plan(stream, held, processes, processes)
    names = [member.name for member in plan.members]
    assert names == [
        *(f"actor rank {rank} and rollout rank {rank}" for rank in range(4)),
        *(f"worker {worker} of rollout rank {rank}'s server" for rank in (0, 2) for worker in (0, 1)),
    ]
    assert [plan.places_of_receiver(rank) for rank in range(4)] == [(4, 5), (), (6, 7), ()]
    assert [plan.place_of_process(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_processes_pass_on_to_their_servers_what_is_broadcast():
    one, other, third = object(), object(), object()
    plan = make_plan(Stream(BROADCAST, "xxh3", 10.0, num_workers=2), HELD * 2, [one, other], [one, third])
    assert [member.name for member in plan.members] == ["actor rank 0 and rollout rank 0", "rollout rank 1"]
    own = relayed(plan, 1, num_workers=2)
    assert [member.name for member in own.members] == [
        "rollout rank 1",
        *(f"worker {worker} of rollout rank 1's server" for worker in (0, 1)),
    ]
    assert own.receivers == (1, 2)
    assert [bucket.rectangles for bucket in own.manifest.buckets] == [
        bucket.rectangles for bucket in plan.manifest.buckets
    ]


def test_of_ranks_that_share_a_server_the_first_passes_on_and_others_send_what_they_have():
    processes, held = [object() for _ in range(4)], [{f"w{rank}": HELD[0]["a"]} for rank in range(3)]
    stream = Stream(BROADCAST, "xxh3", 10.0, num_workers=2, num_sharing=2)
    apart = make_plan(stream, held, [object() for _ in range(3)], processes)
    assert [(member.sender, member.receiver) for member in apart.members[3:]] == [(None, 0), (None, 2)]
    plan = make_plan(stream, held, processes, processes)
    assert [(member.sender, member.receiver) for member in plan.members] == [(0, 0), (1, 1), (2, 2)]
    assert [plan.place_of_process(rank) for rank in range(4)] == [0, 1, 2, None]


class Ranks:
    """Two ranks that sample, each the process of an actor's rank, too; the first one has lost its weights."""

    role, mesh = "rollout", Mesh({"dp_replicate": 2})

    def __init__(self, *slices):
        self.processes, self.slices, self.loaded = [object(), object()], list(slices), []

    async def call_ranks(self, ranks, method, *args):
        if method.__name__ == "load":
            self.loaded.append((ranks, args[0]))
            return None
        return self.slices.pop(0)


def test_a_rank_that_lost_its_weights_gets_them_when_the_actor_of_its_processes_has_memory(tmp_path):
    lost = SliceResult(lacks_weights=True)
    ranks = Ranks(SliceResult(is_sampling=True), lost, SliceResult(), lost)
    actor = Run(tmp_path)
    actor.processes = ranks.processes

    async def run():
        rollouts = Rollouts(ranks, served())
        rollouts.publisher, actor.is_published = actor, asyncio.Event()
        loaded = []
        for rank in (1, 0, 1, 0):
            await rollouts.advance(rank, SliceRequest(version=3))
            loaded.append(list(ranks.loaded))
            actor.is_published.set()
        return loaded

    before, *others, after = asyncio.run(run())
    assert before == others[0] == others[1] == []
    assert [(list(each), version) for each, version in after] == [([0], 3)]


class LostBoth(Ranks):
    """Both have lost their weights, and answer at other times."""

    async def call_ranks(self, ranks, method, *args):
        await asyncio.sleep(0.001 * (1 + ranks[0]))
        if method.__name__ == "load":
            return await super().call_ranks(ranks, method, *args)
        return SliceResult(lacks_weights=ranks not in [each for each, _ in self.loaded])


def test_ranks_that_all_lost_their_weights_get_one_folder_together(tmp_path):
    ranks, actor = LostBoth(), Run(tmp_path)
    actor.processes = ranks.processes

    async def sample(rollouts, rank):
        while (await rollouts.advance(rank, SliceRequest(version=3))).lacks_weights:
            pass

    async def run():
        rollouts = Rollouts(ranks, served())
        rollouts.publisher, actor.is_published = actor, asyncio.Event()
        actor.is_published.set()
        async with asyncio.timeout(20):
            await asyncio.gather(sample(rollouts, 0), sample(rollouts, 1))

    asyncio.run(run())
    assert sorted(ranks.loaded) == [([0], 3), ([1], 3)]
    assert actor.done.count("write") <= 2


def test_a_rank_that_lost_its_weights_waits_for_newer_ones_that_the_actor_trains(tmp_path):
    ranks, actor = Ranks(SliceResult(lacks_weights=True)), Run(tmp_path)

    async def run():
        rollouts = Rollouts(ranks, served())
        rollouts.publisher, actor.is_published = actor, asyncio.Event()
        await rollouts.advance(0, SliceRequest(version=3))

    asyncio.run(run())
    assert ranks.loaded == actor.done == []


class Trains(Run):
    """An actor that begins an update before its weights are written."""

    async def written(self, taker=None):
        self.is_published.clear()
        return await super().written(taker)


@pytest.mark.parametrize(("kind", "done"), [(Run, []), (Trains, ["write"])])
def test_a_rank_that_is_lost_while_the_actor_trains_samples_from_the_next_weights(tmp_path, kind, done):
    """What the actor writes then is newer than what the other ranks have, and would get their version's number."""
    ranks, actor = Ranks(), kind(tmp_path)

    async def run():
        rollouts = Rollouts(ranks, served())
        rollouts.publisher, actor.is_published = actor, asyncio.Event()
        if kind is Trains:
            actor.is_published.set()
        await rollouts.refill(1)
        await rollouts.until_whole([0])
        waiting = asyncio.create_task(rollouts.until_whole([1]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        actor.is_published.set()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(run())
    assert (ranks.loaded, actor.done) == ([], done)


@pytest.mark.parametrize(("checksum", "num_messages"), [("xxh3", 4), ("sums", 1)])
def test_accelerators_broadcast_in_larger_messages(checksum, num_messages):
    held = [{"a": Held(torch.float32, Part.whole([1024, 4000]))}]
    plan = make_plan(Stream(BROADCAST, checksum, 10.0), held, [object()], [object()])
    assert len(plan.manifest.buckets) == num_messages


class Answering(Ranks):
    """Ranks that share servers two by two, the first of each with a digest of its weights."""

    mesh = Mesh({"dp_replicate": 2, "tp": 2})

    async def call(self, method, *args):
        return self.slices


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        (["a" * 9, None, "b" * 9, None], "rank 0: aaaaaaaa, rank 2: bbbbbbbb"),
        (
            ["a" * 9, "c" * 9, "a" * 9, "b" * 9],
            "rank 0: aaaaaaaa, rank 1: cccccccc, rank 2: aaaaaaaa, rank 3: bbbbbbbb",
        ),
    ],
    ids=["servers", "own models"],
)
def test_ranks_that_hold_different_weights_are_named(digests, named):
    with pytest.raises(WeightsMismatchError, match=f"different weights of version 3: {named}$"):
        asyncio.run(Rollouts(Answering(*digests), served()).load(3))
