"""Gives up the connections of a gloo group, so that ranks that wait for this one stop waiting.

gloo cannot do that itself: its `abort` does nothing, and connections live for as long as anything refers to the group,
which parts of torch do. So the sockets are shut down below it. They are told by their addresses: every group listens
on a port of its own, and all connections of a group have one end at a port that one of its ranks listens on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence


def sever(written: Sequence[bytes]) -> int:
    """Shut down the connections of this process that belong to a group; what peers wait for fails at once.

    Args:
        written: what gloo has written for its peers, of every rank: somewhere in it is the address it listens on.

    Returns:
        Their number.
    """
    num_severed = 0
    for connection in _connections():
        with connection, contextlib.suppress(OSError):  # a peer that leaves as well may be faster
            ends = (_as_written(connection.getsockname()), _as_written(connection.getpeername()))
            if any(end in text for end in ends for text in written):
                # Also for other descriptors of the same socket. gloo then reads its end, and closes it. What is sent to
                # one that cannot be written to any more might never be told of it.
                connection.shutdown(socket.SHUT_RD)
                num_severed += 1
    return num_severed


def _connections() -> Iterator[socket.socket]:
    """Yield every TCP connection of this process, by a descriptor of its own."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            descriptor = os.dup(int(name))
            try:
                connection = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            try:
                is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                )
                connected = is_tcp and bool(connection.getpeername())
            except OSError:
                connected = False
            if connected:
                yield connection
            else:
                connection.close()


def _as_written(address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """Return an address as C has it in a `sockaddr`: the port and the IP address in network order.

    >>> _as_written(("127.0.0.1", 258)).hex(" ")
    '01 02 7f 00 00 01'
    """
    host, port = address[:2]
    if ":" in host:
        flow = struct.pack("!I", address[2] if len(address) == 4 else 0)
        return struct.pack("!H", port) + flow + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return struct.pack("!H", port) + socket.inet_aton(host)
