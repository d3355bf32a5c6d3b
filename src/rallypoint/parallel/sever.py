"""Shuts down the connections of a gloo group, so that ranks that wait for this one stop waiting.

gloo cannot do that itself: its `abort` does nothing, and connections live as long as anything refers to the group,
which parts of torch do. So the sockets are shut down below it. Their addresses identify them: every group listens on a
port of its own, and each connection of a group has one end at a port that one of its ranks listens on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence


def sever(written: Sequence[bytes]) -> int:
    """Shut down the connections of this process that belong to a group; waits of its peers fail at once.

    Args:
        written: what gloo of each rank has written for its peers; it contains the address that it listens on.

    Returns:
        Number of connections.
    """
    num_severed = 0
    for connection in _connections():
        with connection, contextlib.suppress(OSError):  # a peer that leaves as well may be faster
            ends = (_as_written(connection.getsockname()), _as_written(connection.getpeername()))
            if any(end in text for end in ends for text in written):
                # This holds for all descriptors of the socket. gloo then reads its end and closes it. Only the reading
                # side: an operation that sends might never learn that its socket cannot be written to.
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
