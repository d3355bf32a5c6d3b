"""How ranks that start at different times, on different machines, find each other.

Must not know: tensors, roles; what ranks bring each other is bytes.

One protocol (`Rendezvous.join`), one set of rules (`room`), and four places where rooms can be kept: the memory of one
process, a named Ray actor, torch's TCPStore, an etcd server.

    with rendezvous.join("actor", rank=1, world_size=4, payload=address, timeout_s=60) as membership:
        peers = [member.payload for member in membership.members]
        ...
        membership.check()      # raises when a member died, left, or began anew

Where they are kept is imported when it is asked for: importing this package imports neither torch nor ray.
"""

from __future__ import annotations

import os
from typing import Literal

from rallypoint.cluster.rendezvous.address import (
    is_loopback as is_loopback,
    listening_socket as listening_socket,
    own_address as own_address,
)
from rallypoint.cluster.rendezvous.memory import MemoryRooms
from rallypoint.cluster.rendezvous.protocol import Membership as Membership, Rendezvous as Rendezvous
from rallypoint.cluster.rendezvous.room import Member as Member, Room as Room
from rallypoint.errors import RendezvousError

LEASE_S = 10.0


def open_rendezvous(
    kind: Literal["ray", "tcp", "etcd", "memory"], scope: str, *, address: str | None = None, lease_s: float = LEASE_S
) -> Rendezvous:
    """Open a rendezvous, in the driver; it is closed there, and handed to the workers as it is.

    Args:
        kind: where it is kept. `ray` needs a Ray that is initialised; it lives in the namespace of the driver.
        scope: the run's unique id; runs of different scopes do not see each other.
        address: for `tcp` the `IP:PORT` to listen on, by default loopback and a free port. For `etcd` the URL of the
            server; if it asks who one is, the variable ETCDCTL_USER says so, as `name:password`.
        lease_s: how long a participant may be silent before the others may count it as dead.

    Raises:
        RendezvousError: the address is missing or cannot be listened on, or the scope is open already.
        RendezvousUnreachableError: etcd does not answer.
    """
    if kind == "memory":
        return Rendezvous(MemoryRooms(lease_s))
    if kind == "ray":
        from rallypoint.cluster.rendezvous.ray import RayRooms

        return Rendezvous(RayRooms.open(scope, lease_s))
    if kind == "tcp":
        from rallypoint.cluster.rendezvous.tcp import TcpRooms

        return Rendezvous(TcpRooms.open(address or "127.0.0.1:0", lease_s))
    from rallypoint.cluster.rendezvous.etcd import EtcdRooms

    if address is None:
        raise RendezvousError("rendezvous=etcd needs the address of the server, such as http://127.0.0.1:2379")
    return Rendezvous(EtcdRooms.open(address, scope, lease_s, os.environ.get("ETCDCTL_USER")))
