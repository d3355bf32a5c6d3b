"""A server in a process that may have few descriptors: `python limited_server.py LIMIT`. Prints its port.

Lines about clients go to stderr. It knows `GET /` (hello), `POST /` (the length of the body), `GET /burn` (takes every
descriptor that is left), `GET /free` (gives them back) and `GET /state` (seconds of CPU, open descriptors).
"""

import contextlib
import json
import os
import resource
import sys
import time

from rallypoint.serving import Deadlines, Server, bind

TAKEN: list[int] = []


async def app(scope, receive, send):
    if scope["path"] == "/burn":
        with contextlib.suppress(OSError):
            while True:
                TAKEN.append(os.open("/dev/null", os.O_RDONLY))
    if scope["path"] == "/free":
        while TAKEN:
            os.close(TAKEN.pop())
    length, more = 0, scope["method"] == "POST"
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    said = {"length": length, "cpu_s": time.process_time(), "num_open": len(os.listdir("/dev/fd")) if not TAKEN else 0}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    deadlines = Deadlines(head_s=2.0, idle_s=30.0)
    server = Server(
        app, bound, grace_s=1.0, on_end=lambda: None, say=lambda line: print(line, file=sys.stderr), deadlines=deadlines
    )
    server.start()
    print(port, server.max_connections, flush=True)
    sys.stdin.read()
    server.stop(lambda: None)


if __name__ == "__main__":
    main()
