"""Folders on HDFS: fsspec's client of WebHDFS with a server that speaks as much of its protocol as that takes."""

import contextlib
import json
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from rallypoint.data import remote
from rallypoint.data.remote import Remote


class WebHDFS(BaseHTTPRequestHandler):
    """Keeps files below `where`, as HDFS does: none is replaced by a rename, and half of one is seen."""

    protocol_version = "HTTP/1.1"
    where: Path
    cut: list[str]

    def answer(self, status=200, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def act(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = unquote(url.path).removeprefix("/webhdfs/v1").lstrip("/")
        path, op = self.where / name, query["op"].upper()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if op in ("CREATE", "APPEND") and "data" not in query:
            port = self.server.server_port
            self.answer(307, Location=f"http://127.0.0.1:{port}{url.path}?op={op}&data=1")
        elif op == "CREATE":
            path.write_bytes(body)
            self.answer(201)
        elif op == "APPEND":
            if name in self.cut:
                self.cut.remove(name)
                path.write_bytes(body[: len(body) // 2])
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            with path.open("ab") as file:
                file.write(body)
            self.answer()
        elif op == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self.say({"boolean": True})
        elif op == "RENAME":
            to = self.where / query["destination"].lstrip("/")
            self.say({"boolean": not to.exists() and path.exists() and bool(path.rename(to))})
        elif op == "DELETE":
            is_there = path.exists()
            if is_there:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.say({"boolean": is_there})
        elif not path.exists():
            gone = {"exception": "FileNotFoundException", "message": f"File does not exist: {name}"}
            self.say({"RemoteException": gone}, 404)
        elif op == "OPEN":
            first = int(query.get("offset", 0))
            self.answer(body=path.read_bytes()[first:][: int(query.get("length", 2**40))])
        elif op == "GETFILESTATUS":
            self.say({"FileStatus": self.status(path, "")})
        else:
            assert op == "LISTSTATUS", op
            inside = sorted(path.iterdir()) if path.is_dir() else [path]
            found = [self.status(one, one.name if path.is_dir() else "") for one in inside]
            self.say({"FileStatuses": {"FileStatus": found}})

    do_GET = do_PUT = do_POST = do_DELETE = act  # noqa: N815 - as http.server calls them

    def say(self, found, status=200):
        self.answer(status, json.dumps(found).encode(), **{"Content-Type": "application/json"})

    @staticmethod
    def status(path, name):
        kind, size = ("DIRECTORY", 0) if path.is_dir() else ("FILE", path.stat().st_size)
        return {"pathSuffix": name, "type": kind, "length": size, "modificationTime": path.stat().st_mtime_ns}

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def hdfs(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote, "_WAITS_S", (0.0,))
    handler = type("Handler", (WebHDFS,), {"where": tmp_path / "hdfs", "cut": []})
    handler.where.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Remote.of(f"webhdfs://127.0.0.1:{server.server_port}/runs/a"), handler
        server.shutdown()


def test_files_are_sent_replaced_listed_fetched_renamed_and_removed(hdfs, tmp_path):
    there, _ = hdfs
    assert (there.read("x"), there.size("x"), there.folders()) == (None, None, [])
    there.remove("x")
    for text in ("one", "two and more"):
        (tmp_path / "file").write_text(text)
        there.send(tmp_path / "file", "checkpoints/step_000002/model.safetensors")
    there.send(tmp_path / "file", "journal.jsonl")
    assert list(there.files()) == ["checkpoints/step_000002/model.safetensors", "journal.jsonl"]
    assert list(there.files(depth=1)) == ["journal.jsonl"]
    assert there.folders() == ["checkpoints"]
    assert there.below("checkpoints").folders() == ["step_000002"]
    assert (there.size("journal.jsonl"), there.read("journal.jsonl")) == (12, b"two and more")
    there.fetch("checkpoints/step_000002/model.safetensors", tmp_path / "here" / "model.safetensors")
    assert (tmp_path / "here" / "model.safetensors").read_text() == "two and more"
    there.rename("journal.jsonl", "journal.aside")
    there.remove("checkpoints")
    assert list(there.files()) == ["journal.aside"]


def test_a_connection_that_is_cut_while_a_file_is_written_leaves_the_old_one(hdfs, tmp_path):
    there, handler = hdfs
    (tmp_path / "file").write_text("old")
    there.send(tmp_path / "file", "journal.jsonl")
    (tmp_path / "file").write_text("new and longer")
    handler.cut.append("runs/a/journal.jsonl.partial")
    with pytest.raises(OSError, match=r"journal|Connection|aborted|Remote"):
        there.send(tmp_path / "file", "journal.jsonl")
    assert there.read("journal.jsonl") == b"old"
    assert list(there.files()) == ["journal.jsonl"], "half a file is none"
    handler.cut.append("runs/a/journal.jsonl.partial")
    remote.patiently(lambda: there.send(tmp_path / "file", "journal.jsonl"))
    assert there.read("journal.jsonl") == b"new and longer"


def test_nobody_who_answers_is_an_error_of_the_system(tmp_path):
    there = Remote.of("webhdfs://127.0.0.1:9/runs/a")
    with contextlib.suppress(FileNotFoundError), pytest.raises(OSError, match=r"127\.0\.0\.1"):
        there.read("journal.jsonl")


def test_what_speaks_a_protocol_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(remote, "is_installed", lambda _: False)
    assert "gs://b/x: needs the package gcsfs" in (remote.check_url("gs://b/x") or "")
    assert "pip install -e '.[s3]'" in (remote.check_url("s3://b/x") or "")
    assert "did you mean" in (remote.check_url("webhdf://b/x") or "")
