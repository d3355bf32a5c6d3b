"""A run in training is asked over HTTP, and ends with the weights of one that nobody asked."""

import contextlib
import http.client
import json
import re
import stat
import threading
import time

import pytest

ONE = "cluster.pools={main: [1]}"
SPLIT = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second")
LONG = "trainer={num_steps: 8, num_logged_rollouts: 2}"


class Caller(threading.Thread):
    """Asks a run as soon as it answers, again and again until it has ended."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.answers, self.statuses, self.mode, self.streamed = folder, [], [], None, []

    def run(self):
        log, key = self.folder / "logs" / "train.log", self.folder / "endpoint.key"
        while not (
            log.is_file() and key.is_file() and (found := re.search(r"at http://127.0.0.1:(\d+)/v1", log.read_text()))
        ):
            time.sleep(0.02)
        self.mode, secret, port = stat.S_IMODE(key.stat().st_mode), key.read_text(), int(found.group(1))
        self.statuses.append(self.ask(port, "wrong")[0])
        with contextlib.suppress(OSError, http.client.HTTPException):  # the run has ended
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


@pytest.mark.parametrize("placement", [(ONE,), SPLIT], ids=["colocated", "split"])
def test_a_run_that_is_asked_while_it_trains_ends_with_the_same_weights(runs, weights_of, placement):
    alone = runs.run("alone", *placement, LONG)
    caller = Caller(runs.folder / "asked")
    caller.start()
    asked = runs.run("asked", *placement, LONG, "rollout.serve=0")
    caller.join(60)
    assert not caller.is_alive()
    assert weights_of(asked) == weights_of(alone)
    assert caller.mode == 0o600
    assert caller.statuses[0] == 401
    assert set(caller.statuses[1:]) <= {200, 500, 503}
    assert not (asked.path / "endpoint.key").exists()
    versions = {version for answer in caller.answers for choice in answer["choices"] for version in choice["versions"]}
    assert len(versions) > 1, caller.statuses
    assert versions <= set(range(17))
    assert all(len(answer["choices"]) == 3 for answer in caller.answers)
    by_version = {
        (choice["index"], *choice["versions"][:1]): choice["token_ids"]
        for answer in caller.answers
        for choice in answer["choices"]
        if len(set(choice["versions"])) == 1
    }
    for answer in caller.answers:
        for choice in answer["choices"]:
            if len(set(choice["versions"])) == 1:
                assert choice["token_ids"] == by_version[choice["index"], choice["versions"][0]]
    assert any(text.endswith("data: [DONE]\n\n") for text in caller.streamed)
