"""An exported model says where it comes from, and goes to the hub whole or not at all."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from tiny_runs import Runs
from typer.testing import CliRunner

from rallypoint import checkpoint
from rallypoint.cli.main import app
from rallypoint.errors import ExportError
from rallypoint.recipes.export import push

INLINE = ("recipe=grpo", "cluster.runtime=inline", "cluster.pools={main: [1]}", "trainer.num_steps=2")
SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run, and the folder that it was exported to."""
    folder = tmp_path_factory.mktemp("cards")
    (folder / "private").mkdir()
    reward = folder / "private" / "rewards.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    run = Runs(folder).run("mine", *INLINE, f"reward.function={reward}:score", recipe="digits-grpo")
    found = CliRunner().invoke(app, ["export", str(run.path), str(folder / "model")])
    assert found.exit_code == 0, found.output
    return run, folder / "model"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload takes; remembers what it was given."""

    protocol_version = "HTTP/1.1"
    fails_with: int
    files: dict[str, bytes]
    made: list[dict[str, object]]

    def log_message(self, *_):
        pass

    def answer(self, status, found):
        body = json.dumps(found).encode()
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"id": "me/mine", "sha": SHA, "siblings": [], "private": True})

    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(chunks)
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.headers["Authorization"] != "Bearer hf_mine":
            self.answer(401, {"error": "Invalid credentials"})
        elif path == "/api/repos/create":
            type(self).made.append(json.loads(body))
            self.answer(200, {"url": f"http://{self.headers['Host']}/me/mine", "id": "me/mine"})
        elif path.endswith("/preupload/main"):
            paths = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self.answer(200, {"files": modes})
        elif path.endswith("/commit/main"):
            if self.fails_with:
                self.answer(self.fails_with, {"error": "planted"})
                return
            lines = [json.loads(line) for line in body.splitlines()]
            found = [line["value"] for line in lines if line["key"] == "file"]
            type(self).files |= {one["path"]: base64.b64decode(one["content"]) for one in found}
            self.answer(
                200, {"commitUrl": f"{self.url}/me/mine/commit/{SHA}", "commitOid": SHA, "pullRequestUrl": None}
            )
        else:
            self.answer(200, {})


@pytest.fixture
def hub():
    handler = type("OneHub", (Hub,), {"fails_with": 0, "files": {}, "made": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    handler.url = f"http://127.0.0.1:{server.server_port}"
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_card_says_what_a_model_was_made_from_and_nothing_of_the_machines_folders(exported):
    run, model = exported
    text = (model / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["library_name"] == "transformers"
    assert "base_model" not in about, "the run made it"
    saved = run.checkpoints / "step_000002"
    record = json.loads((saved / "training" / "run.json").read_text())
    assert "# mine, step 2" in body
    assert checkpoint.digested(saved) in body
    digests = [digest for files in record["inputs"].values() for digest in files.values()]
    assert digests
    assert all(digest in body for digest in digests)
    assert all(f"{name} {version}" in body for name, version in record["software"].items())
    assert "| reward | rewards.py:score |" in body
    assert f"score {run.state().validations[2].metrics['validation/score']:.4g}" in body
    assert "| `trainer.num_steps` | `2` |" in body
    assert str(run.path.parent) not in text


def test_a_push_makes_a_private_repository_with_all_files_in_one_commit(exported, hub):
    _, model = exported
    push(model, "me/mine", public=False, endpoint=hub.url, token="hf_mine")
    assert [(one["name"], one["organization"], one.get("private"), one.get("visibility")) for one in hub.made] in (
        [("mine", "me", True, None)],
        [("mine", "me", None, "private")],
    )
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}


def test_a_push_that_is_refused_says_what_was_expected_and_leaves_the_folder(exported, hub):
    _, model = exported
    with pytest.raises(ExportError, match="expected OWNER/NAME of a repository that your token"):
        push(model, "me/mine", public=False, endpoint=hub.url, token="hf_other")
    with pytest.raises(ExportError, match="no/such/name"):
        push(model, "no/such/name", public=False, endpoint=hub.url, token="hf_mine")
    hub.fails_with = 403
    with pytest.raises(ExportError, match="is whole: push it again"):
        push(model, "me/mine", public=False, endpoint=hub.url, token="hf_mine")
    assert hub.files == {}
    with pytest.raises(ExportError, match="push it again"):
        push(model, "me/mine", public=False, endpoint="http://127.0.0.1:9", token="hf_mine")
