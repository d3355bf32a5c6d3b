"""A model on the hub where there is no network, or only a hub of one's own."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rallypoint.data.hub import unreachable


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def closed_port():
    """A port of this machine at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


class Nothing(BaseHTTPRequestHandler):
    """A hub that knows no model."""

    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def hub():
    with HTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask_for(model, **environment):
    """Check a name as a run does, in a process of its own: the hub's client reads its variables when it is imported."""
    program = (
        "import sys\nfrom rallypoint.data.hub import check_hub\nfrom rallypoint.errors import ModelError\n"
        "try:\n    check_hub(sys.argv[1])\n    print('there')\nexcept ModelError as error:\n    print(error)\n"
    )
    changed = {**os.environ, **environment}
    command = [sys.executable, "-c", program, model]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=changed).stdout.strip()


def test_a_hub_that_cannot_be_reached_is_one_error_with_what_to_do(closed_port, tmp_path):
    said = ask_for("Some/Model", HF_ENDPOINT=f"http://127.0.0.1:{closed_port}", HF_HOME=str(tmp_path))
    assert f"Some/Model: the hub at http://127.0.0.1:{closed_port} (HF_ENDPOINT) cannot be reached" in said
    assert "Connection refused" in said
    assert "hf download Some/Model --local-dir FOLDER" in said
    assert f"set HF_HOME to a cache that has it (now {tmp_path})" in said


def test_offline_mode_asks_nobody_and_takes_what_is_in_the_cache(closed_port, tmp_path):
    offline = {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert "not in the cache, and HF_HUB_OFFLINE forbids to download it" in ask_for("Some/Model", **offline)
    folder = tmp_path / "hub" / "models--Some--Model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    assert ask_for("Some/Model", **offline) == "there"


def test_without_a_network_what_the_cache_has_is_used_and_said(closed_port, tmp_path):
    snapshot = tmp_path / "hub" / "models--Some--Model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    program = (
        "import os, warnings\nfrom rallypoint.data.hub import check_hub, hub_as_found\n"
        "from huggingface_hub import constants\n"
        "def state():\n    return constants.is_offline_mode(), os.environ.get('HF_HUB_OFFLINE')\n"
        "with warnings.catch_warnings(record=True) as said, hub_as_found():\n"
        "    warnings.simplefilter('always')\n"
        "    with hub_as_found():\n"
        "        check_hub('Some/Model')\n"
        "    print(said[0].message, *state())\n"
        "print('afterwards', *state(), check_hub.cache_info().currsize)\n"
    )
    changed = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=changed)
    assert "cannot be reached" in done.stdout
    assert "what the cache has of it is used, as with HF_HUB_OFFLINE=1 True 1\n" in done.stdout
    assert done.stdout.endswith("afterwards False None 0\n"), "the next run asks again"


def test_whatever_answers_is_a_hub(hub):
    assert unreachable(f"{hub}/Some/Model/resolve/main/config.json") is None


def test_somebody_who_takes_the_call_and_says_nothing_is_no_hub():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert "timed out" in (unreachable(f"http://127.0.0.1:{port}/", patience_s=0.3) or "")
