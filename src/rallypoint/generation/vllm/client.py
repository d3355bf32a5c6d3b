"""As much of HTTP as it takes to talk to a server on this machine: one request a connection, over a Unix socket.

Owns: bytes on the wire. Must not know: what they say. Every wait ends: the caller gives a deadline or cancels.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

_MAX_HEADER_BYTES = 2**16


class LostError(Exception):
    """The connection ended before the answer did, or was refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what callers must have."""

    socket: Path
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer; the body comes in parts."""

    status: int
    body: AsyncIterator[bytes]

    async def whole(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.body])


@contextlib.asynccontextmanager
async def ask(at: Address, method: str, path: str, body: bytes = b"") -> AsyncIterator[Answer]:
    """Send a request and yield the answer; leaving closes the connection, which is how a server learns to stop.

    Raises:
        LostError: nobody listens, or the connection broke.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(at.socket), limit=_MAX_HEADER_BYTES)
    except OSError as error:
        raise LostError(f"nobody answers at {at.socket}: {error}") from error
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {at.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            await writer.drain()
            status, headers = await _read_head(reader)
            yield Answer(status, _body(reader, headers))
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise LostError(f"the connection broke: {type(error).__name__}: {error}") from error
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        yield (
            await reader.readexactly(int(headers["content-length"]))
            if "content-length" in headers
            else (await reader.read())
        )
        return
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def events(answer: Answer) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events until the one that says that it is done.

    Raises:
        LostError: the stream ended without it.
    """
    rest = b""
    async for part in answer.body:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise LostError("the stream ended before it was done")
