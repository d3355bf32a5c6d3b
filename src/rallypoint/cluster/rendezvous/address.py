"""Which of its addresses a machine is reached at."""

from __future__ import annotations

import ipaddress
import socket


def own_address(towards: str | None) -> str:
    """Return this machine's address on the way to a host, without sending anything.

    Args:
        towards: name or address of the host that everybody reaches; None if there is no other machine.

    >>> own_address(None), own_address("127.0.0.1")
    ('127.0.0.1', '127.0.0.1')
    """
    if towards is None:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket only picks the route
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    return ipaddress.ip_address(address).is_loopback


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on that interface only; with port 0 the system picks one that is free."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    return socket.create_server((address, port), family=family)
