"""Ranks that share a server: when the others have lent their memory to it, and when they have it back."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_models import make_tiny_model

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import load_config
from rallypoint.errors import MembershipLostError, PeerFailedError, PlacementError
from rallypoint.generation import Request, SamplingParams
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.roles.publishing import WrittenFolder
from rallypoint.roles.rank_engine import RankEngine, SliceRequest
from rallypoint.roles.rollout import RolloutWorker
from rallypoint.roles.server_ranks import ServerFollower, ServerRanks, devices_of

MESH = Mesh({"dp_replicate": 1, "tp": 2})


class Engine:
    """As much of an engine as a slice needs."""

    is_asleep = True


@pytest.fixture
def spec(tmp_path):
    overrides = ["cluster.pools={main: [2]}", "rollout.engine=vllm", "rollout.mesh.tp=2"]
    config = load_config("digits", overrides).config
    with open_rendezvous("memory", "servers", lease_s=20) as rendezvous:
        model = make_tiny_model(tmp_path / "model", num_layers=2)
        yield WorkerSpec(config, model, SharedFolder.marked(tmp_path), rendezvous)


def context_of(rank):
    return WorkerContext("rollout", rank, MESH, 1, "cpu", {}, lambda: None, start=1)


@pytest.fixture
def pair(spec):
    """A first rank, and one that follows it, each in a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        engine = Engine()
        first = pool.submit(ServerRanks.meet, context_of(0), spec)
        follower = pool.submit(RolloutWorker, context_of(1), spec, shares_actor=False).result()
        assert isinstance(follower, ServerFollower)
        yield RankEngine(engine, lambda: None, sharing=first.result()), engine, follower, pool


def test_the_server_wakes_when_all_have_lent_their_memory_and_they_have_it_until_it_sleeps(pair):
    first, engine, follower, pool = pair
    holder = follower.lease._memory
    may_end = threading.Event()

    def sample(*, goes_on):
        with first.together():
            held = holder.holder
            may_end.wait()
            engine.is_asleep = not goes_on
        return held

    for goes_on in (True, True, False):
        may_end.clear()
        slice_ = pool.submit(sample, goes_on=goes_on)
        lent = pool.submit(follower.advance, None)
        assert not lent.done(), "the slice has not ended"
        may_end.set()
        lent.result()
        assert slice_.result() is follower.lease
        assert (holder.holder is follower.lease) == goes_on
    engine.is_asleep = True
    persons = pool.submit(sample, goes_on=False)
    assert follower.advance_guests(None) == []
    assert persons.result() is follower.lease
    assert holder.holder is None
    assert [work[0] for work in follower.lease.work()] == ["sample", "advance_guests"]


def test_what_is_forgotten_between_two_slices_gives_the_memory_back(pair):
    first, engine, follower, pool = pair
    engine.is_asleep = False
    lent = pool.submit(follower.advance, None)
    with first.together():
        pass
    lent.result()
    follower.forget()
    assert follower.lease._memory.holder is None


def test_a_slice_that_fails_is_not_waited_for(pair):
    first, _, follower, pool = pair
    lent = pool.submit(follower.advance, None)
    with contextlib.suppress(KeyError), first.together():
        raise KeyError
    with pytest.raises((PeerFailedError, MembershipLostError)):
        lent.result()
    assert follower.lease._memory.holder is None


@pytest.fixture
def unstarted(tmp_path, monkeypatch):
    """An environment of vLLM whose servers are silent."""
    folder = tmp_path / "engines" / "vllm"
    (folder / "bin").mkdir(parents=True)
    (folder / "rallypoint.json").write_text('{"device": "cpu", "version": "0", "packages": {}}')
    (folder / "bin" / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    (folder / "bin" / "python").chmod(0o755)
    monkeypatch.setenv("RALLYPOINT_ENGINES", str(folder.parent))


@pytest.mark.usefixtures("unstarted")
def test_a_slice_for_persons_that_fails_on_the_rank_with_the_server_costs_their_requests_alone(spec):
    asked = SliceRequest(new=((7, Request(tokens=(3, 4), params=SamplingParams(max_new_tokens=2))),))
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(RolloutWorker, context_of(rank), spec, shares_actor=False) for rank in range(2)]
        first, follower = (one.result() for one in made)
        with first:
            for is_open, why in ((False, "it is opened first"), (True, "version 1 was not loaded whole")):
                first._problem = why if is_open else None
                if is_open:
                    first.open_guests(2)
                lent = pool.submit(follower.advance_guests, asked)
                (lost,) = first.advance_guests(asked)
                assert lost.request_id == 7
                assert "these requests failed and are lost: " in str(lost.error)
                assert why in str(lost.error)
                assert lent.result() == []
            first._problem = None
            lent = pool.submit(follower.advance, asked)
            assert not first.advance(asked).outputs
            lent.result()
            assert follower.lease._memory.holder is follower.lease, "the server still samples"


def test_one_that_follows_reads_no_folder(pair, tmp_path):
    _, _, follower, _ = pair
    assert follower.load(3, WrittenFolder(), tmp_path) is None


@pytest.mark.parametrize("others", ["", "2,3"])
def test_the_devices_of_a_server_are_those_of_its_ranks_which_have_one_each(spec, others):
    def met(rank):
        ranks = ServerRanks.meet(context_of(rank), spec).mesh.tp
        yield devices_of(ranks, f"GPU-{rank}")
        yield devices_of(ranks, others if rank else "1")

    with ThreadPoolExecutor(2) as pool:
        found = list(map(met, range(2)))
        assert list(pool.map(next, found)) == [("GPU-0", "GPU-1")] * 2
        for wrong in [pool.submit(next, one) for one in found]:
            with pytest.raises(PlacementError, match=f"CUDA_VISIBLE_DEVICES is '1', '{others}' in them"):
                wrong.result()
