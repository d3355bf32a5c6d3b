"""A server that speaks as much of OpenAI's API as a judge is asked for, busy and broken in turn."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def what_it_is_told(text):
    """Return what stands behind the last `reply ` in what a judge is asked."""
    return text.rpartition("reply ")[2].partition("\n")[0]


class Handler(BaseHTTPRequestHandler):
    """Refuses as often as it has refusals, then says the replies that it has, then what `says` makes of a question."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked.append((self.path, self.headers.get("Authorization"), asked))
            refusals = self.server.refusals.pop(0) if self.server.refusals else None
        if self.server.together is not None:
            self.server.together.wait(60)
        status, headers = refusals or (200, {})
        reply = self.server.replies.pop(0) if self.server.replies else self.server.says(text)
        body = json.dumps({"choices": [{"message": {"content": reply}}]} if status == 200 else {"error": "busy"})
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body.encode()))}).items():
            self.send_header(name, value)
        if not text.startswith("drip a header"):
            self.end_headers()
        if text.startswith("drip"):
            self.drip()
        else:
            self.wfile.write(body.encode())

    def drip(self):
        """Send a byte now and then, until the test is over."""
        with contextlib.suppress(OSError):
            while not self.server.is_over.wait(0.02):
                self.wfile.write(b" ")
                self.wfile.flush()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def judging(says=what_it_is_told):
    """Yield a server that judges with `says`, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.refusals, server.lock, server.together = [], [], threading.Lock(), None
    server.replies, server.is_over, server.daemon_threads = [], threading.Event(), True
    server.says, server.url = says, f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
