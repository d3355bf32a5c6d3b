"""What only one kind of place can do: refuse strangers, listen, be somewhere else, leave nothing behind."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time

import pytest

from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous
from rallypoint.cluster.rendezvous.etcd import EtcdClient, EtcdRooms
from rallypoint.cluster.rendezvous.tcp import TcpRooms
from rallypoint.errors import RendezvousError, RendezvousUnreachableError


def refused_connection() -> str:
    """An address on loopback where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_rendezvous_in_memory_cannot_be_sent_away():
    with open_rendezvous("memory", "run") as rendezvous, pytest.raises(TypeError, match="use ray, tcp or etcd"):
        pickle.dumps(rendezvous)


def test_tcp_listens_on_the_interface_that_it_was_given_and_frees_the_port():
    rendezvous = open_rendezvous("tcp", "run", address="127.0.0.2:0")
    assert isinstance(rendezvous.rooms, TcpRooms)
    assert rendezvous.own_address() in {"127.0.0.1", "127.0.0.2"}
    host, port, _ = rendezvous.rooms.__reduce__()[1]
    with socket.create_connection((host, port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    rendezvous.close()
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)


KEEPER = """
import pickle, sys
from rallypoint.cluster.rendezvous import open_rendezvous
with open_rendezvous("tcp", "run", lease_s=1) as rendezvous:
    print(pickle.dumps(rendezvous).hex(), flush=True)
    sys.stdin.read()
"""
LEAVER = """
import pickle, sys, time
class Lingering:
    def __del__(self, sleep=time.sleep):
        sleep(2)
membership = pickle.loads(bytes.fromhex(sys.argv[1])).join("room", rank=0, world_size=1, timeout_s=30)
print("joined", flush=True)
sys.stdin.read()
lingering = Lingering()
"""


def test_a_process_ends_as_it_wants_to_though_its_lease_is_being_renewed():
    def start(*program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", *program]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start(KEEPER) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdin is not None
        with start(LEAVER, keeper.stdout.readline().strip()) as leaver:
            assert leaver.stdout is not None
            assert leaver.stdin is not None
            assert leaver.stdout.readline() == "joined\n"
            os.kill(keeper.pid, signal.SIGSTOP)  # so that the next renewal takes long
            try:
                time.sleep(1)
                leaver.stdin.close()
                time.sleep(1)
            finally:
                os.kill(keeper.pid, signal.SIGCONT)
            assert leaver.wait(30) == 0
        keeper.stdin.close()
        assert keeper.wait(30) == 0


@pytest.mark.parametrize("address", ["192.0.2.1:0", "127.0.0.1", "127.0.0.1:many"])
def test_tcp_says_what_is_wrong_with_an_address_that_it_cannot_listen_on(address):
    with pytest.raises(RendezvousError, match=f"cannot listen on '{address}', expected IP:PORT"):
        open_rendezvous("tcp", "run", address=address)


def test_etcd_needs_an_address_and_says_when_nobody_is_there():
    with pytest.raises(RendezvousError, match="needs the address of the server"):
        open_rendezvous("etcd", "run")
    with pytest.raises(RendezvousError, match="is a URL such as http"):
        open_rendezvous("etcd", "run", address="127.0.0.1:2379")
    with pytest.raises(RendezvousUnreachableError, match=r"no etcd answers .*Connection refused"):
        open_rendezvous("etcd", "run", address=f"http://{refused_connection()}")


def test_nothing_stays_in_etcd(etcd_url):
    everything = {"key": "AA==", "range_end": "AA=="}
    client = EtcdClient(etcd_url)
    with open_rendezvous("etcd", "run", address=etcd_url) as rendezvous:
        with rendezvous.join("a/b c", rank=0, world_size=1, timeout_s=5):
            assert int(client.call("kv/range", everything)["count"]) >= 3
        assert isinstance(rendezvous.rooms, EtcdRooms)
    assert "count" not in client.call("kv/range", everything)
    assert "leases" not in client.call("lease/leases", {})


def test_etcd_with_passwords_lets_in_who_has_one(locked_etcd_url):
    with pytest.raises(RendezvousUnreachableError, match=r"refuses .*user name is empty"):
        EtcdRooms.open(locked_etcd_url, "run", 1.0)
    with pytest.raises(RendezvousUnreachableError, match="refuses user 'root'"):
        EtcdRooms.open(locked_etcd_url, "run", 1.0, "root:wrong")
    with Rendezvous(EtcdRooms.open(locked_etcd_url, "run", 1.0, "root:secret")) as rendezvous:
        elsewhere = pickle.loads(pickle.dumps(rendezvous))
        elsewhere.join("actor", rank=0, world_size=1, timeout_s=5).close()
        with pytest.raises(RendezvousError, match="rank 1 never came"):
            elsewhere.join("critic", rank=0, world_size=2, timeout_s=0.2)


def test_a_ray_actor_goes_with_its_rendezvous_and_a_scope_is_open_once(local_ray):
    import ray

    with open_rendezvous("ray", "run 7") as rendezvous:
        assert "rendezvous of run 7" in ray.util.list_named_actors()
        assert rendezvous.own_address() != ""
        with pytest.raises(RendezvousError, match="scope 'run 7' is open already"):
            open_rendezvous("ray", "run 7")
    deadline = time.monotonic() + 20
    while "rendezvous of run 7" in ray.util.list_named_actors():
        assert time.monotonic() < deadline
        time.sleep(0.05)
