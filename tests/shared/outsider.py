"""Somebody who asks a run in training over HTTP."""

import contextlib
import http.client
import json
import re
import socket
import stat
import threading
import time


class Caller(threading.Thread):
    """Asks a run as soon as it answers, again and again until it has ended.

    So many connections beside it begin a request and never end it.
    """

    def __init__(self, folder, *, num_half_open=0):
        super().__init__(daemon=True)
        self.num_half_open = num_half_open
        self.folder, self.answers, self.statuses, self.mode, self.streamed = folder, [], [], None, []

    def run(self):
        log, key = self.folder / "logs" / "train.log", self.folder / "endpoint.key"
        while not (
            log.is_file() and key.is_file() and (found := re.search(r"at http://127.0.0.1:(\d+)/v1", log.read_text()))
        ):
            time.sleep(0.02)
        self.mode, secret, port = stat.S_IMODE(key.stat().st_mode), key.read_text(), int(found.group(1))
        self.statuses.append(self.ask(port, "wrong")[0])
        until_the_run_has_ended = contextlib.suppress(OSError, http.client.HTTPException)
        with until_the_run_has_ended, contextlib.ExitStack() as half:
            for _ in range(self.num_half_open):
                half.enter_context(socket.create_connection(("127.0.0.1", port), 120)).sendall(b"POST /v1/chat")
            while key.is_file():
                status, body = self.ask(port, secret)
                self.statuses.append(status)
                if status == 200:
                    self.answers.append(json.loads(body))
                self.streamed.append(self.ask(port, secret, stream=True)[1].decode())

    @staticmethod
    def ask(port, key, **more):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            asked = {"messages": [{"role": "user", "content": "493"}], "seed": 3, "n": 3, "return_token_ids": True}
            connection.request("POST", "/v1/chat/completions", json.dumps({**asked, **more}), headers)
            response = connection.getresponse()
            return response.status, response.read()

    @property
    def choices(self):
        """All that were answered, of all requests."""
        return [choice for answer in self.answers for choice in answer["choices"]]
