"""From a rendezvous to a torch process group."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rallypoint.cluster.rendezvous import Member, open_rendezvous
from rallypoint.errors import PlacementError, RendezvousError, WorldSizeError
from rallypoint.parallel import meet


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests", lease_s=5) as rendezvous:
        yield rendezvous


@pytest.fixture
def groups(rendezvous):
    """Three ranks, connected."""

    def rank_of(rank):
        return meet(rendezvous, "meeting", rank=rank, world_size=3, timeout_s=60)

    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(rank_of, range(3)))
    yield groups
    for group in groups:
        group.close()


def test_the_group_works_with_torchs_own_functions_and_is_not_the_global_one(groups):
    def reduce(group):
        tensor = torch.full((2,), 10.0**group.rank)
        dist.all_reduce(tensor, group=group.torch_group)
        return group.rank, group.size, tensor.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reduce, groups)) == [(rank, 3, [111.0, 111.0]) for rank in range(3)]
    assert not dist.is_initialized()


def test_a_group_listens_nowhere_but_on_the_address_that_it_was_given(rendezvous):
    before = listening_addresses()
    with ThreadPoolExecutor(2) as pool:
        groups = list(
            pool.map(
                lambda rank: meet(
                    rendezvous, "elsewhere", rank=rank, world_size=2, timeout_s=60, address=f"127.0.0.{2 + rank}"
                ),
                range(2),
            )
        )
    opened = listening_addresses() - before
    assert {address for address, _ in opened} == {"127.0.0.2", "127.0.0.3"}
    for group in groups:
        group.close()


def listening_addresses() -> set[tuple[str, int]]:
    """Addresses and ports on which sockets of this process listen."""
    inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def test_a_group_that_is_closed_is_missed_by_the_others(groups):
    groups[0].check()
    groups[2].close()
    with pytest.raises(RendezvousError, match="rank 2") as caught:
        groups[0].check()
    assert caught.value.ranks == (2,)


def test_loopback_between_two_machines_is_refused_instead_of_waited_for(rendezvous):
    elsewhere = Member(1, b"127.0.0.1 gloo", "another-machine", 1, "elsewhere")
    rendezvous.rooms.renew("meeting", "elsewhere")
    rendezvous.rooms.transact("meeting", lambda room: room.join(elsewhere, 2))
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(meet, rendezvous, "meeting", rank=0, world_size=2, timeout_s=60)
        room = rendezvous.rooms.wait("meeting", 0, 20)
        while not room.assembled:
            room = rendezvous.rooms.wait("meeting", room.news, 20)
        rendezvous.rooms.transact("meeting", lambda room: room.confirm("elsewhere"))
        with pytest.raises(RendezvousError, match=r"on 2 machines, but rank 0 .* offers 127.0.0.1, which only its own"):
            here.result()


def test_what_the_rendezvous_refuses_is_refused(rendezvous):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous.join, "meeting", rank=1, world_size=3, timeout_s=1)
        while not rendezvous.rooms.transact("meeting", lambda room: room).seats:
            pass
        with pytest.raises(WorldSizeError):
            meet(rendezvous, "meeting", rank=0, world_size=2, timeout_s=60)
        assert first.exception()


def test_a_device_that_torch_has_no_collectives_for_is_refused_with_those_that_it_has(rendezvous):
    with pytest.raises(
        PlacementError, match=r"no collectives for devices of type 'warp'; it has backends for gloo \(cpu\)"
    ):
        meet(rendezvous, "meeting", rank=0, world_size=2, timeout_s=60, device="warp")
