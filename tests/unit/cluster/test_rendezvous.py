"""What a participant meets that needs no backend: imports, addresses, errors."""

import pickle
import subprocess
import sys

import pytest

from rallypoint import errors
from rallypoint.cluster.rendezvous import is_loopback, listening_socket, own_address


def test_importing_it_imports_neither_torch_nor_ray():
    code = "import sys, rallypoint.cluster.rendezvous; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "kind",
    [
        errors.RankTakenError,
        errors.WorldSizeError,
        errors.StaleGenerationError,
        errors.RendezvousTimeoutError,
        errors.MembershipLostError,
        errors.RendezvousUnreachableError,
    ],
)
def test_errors_keep_their_text_and_ranks_on_the_way_to_another_process(kind):
    error = pickle.loads(pickle.dumps(kind("rank 3 never came", (3,))))
    assert isinstance(error, errors.RendezvousError)
    assert (type(error), str(error), error.ranks) == (kind, "rank 3 never came", (3,))


def test_errors_are_what_the_standard_library_calls_them():
    assert issubclass(errors.RendezvousTimeoutError, TimeoutError)
    assert issubclass(errors.MembershipLostError, ConnectionError)
    assert issubclass(errors.RendezvousUnreachableError, ConnectionError)


def test_a_machine_alone_is_reached_on_loopback():
    assert own_address(None) == "127.0.0.1"
    assert is_loopback(own_address("127.0.0.1"))
    assert is_loopback(own_address("::1"))
    assert not is_loopback("192.0.2.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.5"])
def test_a_listening_socket_is_bound_to_one_address_and_a_port_that_was_free(address):
    with listening_socket(address) as one, listening_socket(address) as other:
        assert one.getsockname()[0] == other.getsockname()[0] == address
        assert one.getsockname()[1] != other.getsockname()[1]
