"""Clients that mean harm: a proper one is answered all the while, and neither descriptors, CPU nor logs run away."""

import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.serving import Deadlines

CHILD = Path(__file__).parents[2] / "shared" / "limited_server.py"
LIMIT = 160
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Le"
HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HARM = {
    "half a head": (HALF, 300),
    "many halves": (HALF, 2000),
    "nothing": (b"", 300),
    "half a body": (HEAD + b"Content-Length: 1000\r\n\r\n{", 300),
    "a body without an end": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9, 300),
    "no HTTP": (b"\x16\x03\x01\x00\xff\xfe\r\n\r\n", 300),
    "a huge head": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 60_000, 300),
}
"""What harmful clients send, and how many of them there are."""


class Limited:
    """A server in another process that may have few descriptors."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log
        self.port, self.max_connections = map(int, process.stdout.readline().split())

    def get(self, path: str) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[Limited]:
    log = tmp_path_factory.mktemp("limited") / "stderr"
    with log.open("w") as stderr:
        command = [sys.executable, str(CHILD), str(LIMIT)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            yield Limited(process, log)
            process.stdin.close()
            assert process.wait(60) == 0


@contextlib.contextmanager
def many_descriptors(num: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < num:
        pytest.skip(f"this process may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, num), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("sends", "num"),
    [pytest.param(*harm, id=name, marks=[pytest.mark.slow] * (harm[1] > 300)) for name, harm in HARM.items()],
)
def test_a_proper_client_is_answered_beside_many_that_are_not(limited, sends, num):
    began, num_lines = time.monotonic(), len(limited.lines)
    with many_descriptors(num + 200), contextlib.ExitStack() as open_ones:
        for count in range(1, num + 1):
            harmful = open_ones.enter_context(limited.connect())
            with contextlib.suppress(ConnectionError):  # it was closed already
                harmful.sendall(sends)
            if count % 100 == 0:
                assert limited.get("/")["length"] == 0
        state = limited.get("/state")
    assert limited.max_connections < LIMIT / 2
    assert state["num_open"] < LIMIT - 20
    assert len(limited.lines) - num_lines <= 2 + time.monotonic() - began


def test_a_process_without_descriptors_waits_for_some_without_a_storm(limited):
    kept = http.client.HTTPConnection("127.0.0.1", limited.port, timeout=60)
    kept.request("GET", "/burn")
    before, num_lines, began = json.loads(kept.getresponse().read()), len(limited.lines), time.monotonic()
    with limited.connect() as waiting:
        waiting.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while not any("no connection can be accepted" in line for line in limited.lines):
            time.sleep(0.01)
        time.sleep(1.0)  # for a storm to show
        kept.request("GET", "/free")
        after, took = json.loads(kept.getresponse().read()), time.monotonic() - began
        kept.close()
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")
    assert after["cpu_s"] - before["cpu_s"] < 0.5 * took
    assert len(limited.lines) - num_lines <= 2 + took


def closed(connection: socket.socket) -> bytes:
    """Return what the other side says until it closes, which the connection's own timeout makes it do."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            said += part
    return said


def test_a_head_that_does_not_come_is_told_so_however_slowly_it_comes(serve):
    served = serve(deadlines=Deadlines(head_s=0.5))
    for sends in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.client.port), timeout=60) as slow:
            slow.sendall(sends)
            stops = threading.Event()

            def trickle(slow=slow, stops=stops):
                with contextlib.suppress(OSError):
                    for byte in (HALF[n : n + 1] for n in range(len(HALF))):
                        if stops.wait(0.05):
                            return
                        slow.sendall(byte)

            trickling = threading.Thread(target=trickle)
            trickling.start()
            said = closed(slow)
            stops.set()
            trickling.join()
        assert b"HTTP/1.1 408" in said, said
        assert b"did not arrive within 0.5 s" in said
    assert served.client.complete("x").status == 200
    assert any("the head of a request did not arrive" in line for line in served.said)


def test_a_connection_that_is_kept_for_nothing_is_closed(serve):
    served = serve(deadlines=Deadlines(idle_s=0.3, head_s=60))
    with socket.create_connection(("127.0.0.1", served.client.port), timeout=60) as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert closed(kept).startswith(b"HTTP/1.1 200")
    assert served.said == []


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_body_that_goes_on_after_it_was_refused_is_not_read_for_ever(serve, path):
    served = serve(keys=("secret",), deadlines=Deadlines(rest_s=0.5))
    with socket.create_connection(("127.0.0.1", served.client.port), timeout=60) as endless:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        endless.sendall(head.encode())
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # noqa: PT012
            while True:
                endless.sendall(b"1\r\nx\r\n" * 10)
                time.sleep(0.005)
    assert served.client.get("/health").status == 200


def test_a_client_that_asks_again_and_again_and_reads_nothing_is_closed(serve):
    served = serve(deadlines=Deadlines(unread_s=0.5), send_buffer_bytes=4096)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(60)
        deaf.connect(("127.0.0.1", served.client.port))
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                deaf.sendall(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)
    assert served.client.get("/health").status == 200


def test_what_is_no_body_ends_the_answer_that_is_under_way_without_a_traceback(serve):
    served = serve("hello" * 60)
    served.engine.is_frozen = True
    with socket.create_connection(("127.0.0.1", served.client.port), timeout=60) as client:
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        client.sendall(HEAD.replace(b"POST /", b"POST /v1/completions") + b"Content-Length: %d\r\n\r\n" % len(body))
        client.sendall(body)
        served.client.wait_until(lambda health: health["num_running"] == 1)
        client.sendall(b"\x00\x00 no HTTP\r\n\r\n")
        served.engine.is_frozen = False
        assert b"[DONE]" in closed(client)
    assert not any("Traceback" in line for line in served.said)
