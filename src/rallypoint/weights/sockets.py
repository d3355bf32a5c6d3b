"""Sockets between processes of one node, for memory that they share and one byte for every bucket.

Owns: how two processes of one user connect, and what a silent or closed end means. Must not know: weights. A process
that dies closes its sockets, however it dies, so that the other end knows at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from rallypoint.errors import PeerFailedError, PublishError

_LOOK_EVERY_S = 1.0
"""Seconds that a wait stays in the system call; a cancelled call is noticed in between."""
_LOOK_AT_FIRST_S = 1e-4 if sys.platform == "linux" else 0.0
"""Seconds that a wait polls first: waking up takes longer than the other end takes for a bucket."""
_NUMBER = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")


class Peer:
    """The other end of a connection."""

    def __init__(self, connection: socket.socket, name: str, timeout_s: float) -> None:
        """Take over a connection; `name` is for error messages, `timeout_s` bounds every wait."""
        self.name, self._socket, self._timeout_s = name, connection, timeout_s
        self._num_heard = 0
        connection.settimeout(_LOOK_EVERY_S)

    def tell(self) -> None:
        """Send a byte: another bucket is filled, or taken.

        Raises:
            PeerFailedError: the other end is gone.
        """
        try:
            self._socket.sendall(b".")
        except OSError as error:
            raise self._gone(error) from error

    def hear(self, count: int) -> None:
        """Return once `count` bytes have come since the connection was made.

        Raises:
            PeerFailedError: the other end is gone.
            PublishError: it was silent for too long.
        """
        if self._num_heard < count:
            self._look(count)
        while self._num_heard < count:
            self._num_heard += len(self._receive(4096))

    def give(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Send some bytes and open files; before the first `tell`.

        Raises:
            PeerFailedError: the other end is gone.
            PublishError: there are more bytes than a socket holds.
        """
        message = _NUMBER.pack(len(data)) + data
        try:
            num_sent = socket.send_fds(self._socket, [message], descriptors)
        except OSError as error:
            raise self._gone(error) from error
        if num_sent < len(message):  # waiting for room could deadlock: the other end may be sending, too
            raise PublishError(f"{self.name} could be told {num_sent} of {len(message)} bytes about what is shared")

    def given(self) -> tuple[bytes, list[int]]:
        """Return what the other end gave; the caller closes the open files."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                head, descriptors, _, _ = socket.recv_fds(self._socket, _NUMBER.size, 1)
                break
            except TimeoutError as error:  # a cancelled call is noticed in between
                if time.monotonic() > deadline:
                    raise self._gone(error) from error
            except OSError as error:
                raise self._gone(error) from error
        if len(head) < _NUMBER.size:
            raise self._gone(None)
        return self.receive_exactly(_NUMBER.unpack(head)[0]), descriptors

    def receive_exactly(self, count: int) -> bytes:
        """Return `count` bytes."""
        data = b""
        while len(data) < count:
            data += self._receive(count - len(data))
        return data

    def close(self) -> None:
        """End the connection, which the other end notices; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a waiting thread, which `close` does not
        self._socket.close()

    def _look(self, count: int) -> None:
        """Poll for a moment, yielding the processor; errors of the other end are noticed by the wait that follows."""
        until = time.perf_counter() + _LOOK_AT_FIRST_S
        try:
            self._socket.setblocking(False)
            while self._num_heard < count and time.perf_counter() < until:
                with contextlib.suppress(BlockingIOError):
                    received = len(self._socket.recv(4096))
                    self._num_heard += received
                    if not received:
                        break
                os.sched_yield()
            self._socket.settimeout(_LOOK_EVERY_S)
        except OSError as error:
            raise self._gone(error) from error

    def _receive(self, most: int) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                received = self._socket.recv(most)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                raise PublishError(f"{self.name} was silent for {self._timeout_s:g} s; expected a bucket") from None
            except OSError as error:
                raise self._gone(error) from error
            if not received:
                raise self._gone(None)
            return received

    def _gone(self, error: OSError | None) -> PeerFailedError:
        why = f" ({error.strerror})" if error and error.strerror else ""
        return PeerFailedError(f"{self.name} went away while weights were published{why}")


class Listener:
    """An address for other processes of this user and node, until the end of the `with` block."""

    def __init__(self) -> None:
        """Listen at a unique address."""
        name = f"rallypoint-{uuid.uuid4().hex}"
        self._folder: str | None = None
        if sys.platform == "linux":
            self.address = f"\0{name}".encode()  # has no file, and ends with the process
        else:
            self._folder = tempfile.mkdtemp(prefix="rally")  # only this user may enter it
            self.address = os.fsencode(os.path.join(self._folder, "socket"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen(1024)
        self._socket.settimeout(_LOOK_EVERY_S)

    def accept(
        self, names: Sequence[str], expected: Sequence[int], timeout_s: float, *, message_s: float | None = None
    ) -> list[Peer]:
        """Return the peers that connect, in the order of `expected`.

        Args:
            names: of all processes that may connect, by number.
            expected: numbers of those that will.
            timeout_s: how long to wait for all of them.
            message_s: how long to wait later for each message from them; None: as long.

        Raises:
            PublishError: some did not come; they are named.
        """
        found: dict[int, Peer] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [number for number in expected if number not in found]:
            if time.monotonic() > deadline:
                for peer in found.values():
                    peer.close()
                who = ", ".join(names[number] for number in missing)
                raise PublishError(f"waited {timeout_s:g} s for {who} to connect, on this node")
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            if not _is_of_this_user(connection):
                connection.close()
                continue
            peer = Peer(connection, "a process that connected", timeout_s if message_s is None else message_s)
            number: int = _NUMBER.unpack(peer.receive_exactly(_NUMBER.size))[0]
            peer.name = names[number]
            found[number] = peer
        return [found[number] for number in expected]

    def close(self) -> None:
        """Stop listening; connections stay."""
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(address: bytes, name: str, number: int, timeout_s: float) -> Peer:
    """Connect to a listener.

    Args:
        address: of the listener.
        name: of the listener, for error messages.
        number: of this process, for the listener.
        timeout_s: how long to wait for each message from it.

    Raises:
        PeerFailedError: it is gone.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        connection.sendall(_NUMBER.pack(number))
    except OSError as error:
        connection.close()
        raise PeerFailedError(f"{name} cannot be reached on this node: {error.strerror}") from error
    return Peer(connection, name, timeout_s)


@contextlib.contextmanager
def closing_descriptors(descriptors: Iterable[int]) -> Iterator[None]:
    """Close open files at the end of the block."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the other end belongs to the same user; on systems other than Linux the folder ensures that."""
    if sys.platform != "linux":
        return True
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.getuid()
