"""What every client of a service takes for its answer: nothing from elsewhere, and not without end."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rallypoint.cluster.rendezvous.etcd import EtcdClient
from rallypoint.environments.sandbox.choose import Remote
from rallypoint.environments.shipped.judge import ModelEndpoint

CLIENTS = {
    "a judge": lambda url: ModelEndpoint(url, "key", 0, 60.0).ask({"messages": []}, str),
    "a sandbox": lambda url: Remote(url, "key", pauses_s=()).run("print(42)"),
    "etcd": lambda url: EtcdClient(url, "me:key").call("kv/range", {}),
}
ANSWER = {
    "choices": [{"message": {"content": "10"}}],
    "run_result": {"status": "Finished", "stdout": "42\n", "return_code": 0},
    "token": "x",
}


class Handler(BaseHTTPRequestHandler):
    """Redirects to `server.target`, or answers without end if there is none."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(self.path)
        self.send_response(self.server.status)
        if self.server.target:
            self.send_header("Location", self.server.target)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())
        with contextlib.suppress(OSError):
            while self.server.target is None:
                self.wfile.write(b" " * 2**20)
                self.server.num_mib += 1

    def do_GET(self):
        """Note what a redirect that is followed becomes; it has no body."""
        self.server.seen.append(self.path)
        self.send_error(404)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(status=200, target=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.status, server.target, server.num_mib, server.daemon_threads = [], status, target, 0, True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_redirect_is_an_error_that_names_it_and_nothing_is_sent_there(client, status):
    with serving() as (other, elsewhere), serving(status, f"{elsewhere}/x") as (first, url):
        with pytest.raises(Exception, match=f"redirects to {elsewhere}/x, which is not followed"):
            CLIENTS[client](url)
        assert (len(first.seen), other.seen) == (1, [])


@pytest.mark.parametrize("client", CLIENTS)
def test_an_answer_without_end_is_refused_and_not_kept(client):
    with serving() as (server, url):
        with pytest.raises(Exception, match=r"(answered with|an answer of) more than \d+ MiB"):
            CLIENTS[client](url)
        assert server.num_mib < 128
