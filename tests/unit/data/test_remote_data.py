"""Data sets on S3 and on the hub, read from servers that speak as much of both as that takes."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rallypoint.data import RowStream, load_dataset
from rallypoint.data.files import Problems
from rallypoint.errors import DataError

ROWS = [{"prompt": f"{n} + 1", "ground_truth": str(n + 1)} for n in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def as_parquet(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


FILES = {
    "sums/main/train-00000-of-00001.parquet": as_parquet(ROWS),
    "sums/main/test.parquet": as_parquet(ROWS[:2]),
    "lines/train.jsonl": LINES,
}


class Served(BaseHTTPRequestHandler):
    """Answers from `FILES`; remembers what it was asked for."""

    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_HEAD(self):
        self.do_GET()

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def answer_file(self, content, **headers):
        first, _, last = self.headers.get("Range", "bytes=-").removeprefix("bytes=").partition("-")
        if first:
            stop = min(int(last or len(content)), len(content) - 1)
            headers["Content_Range"] = f"bytes {first}-{stop}/{len(content)}"
            content = content[int(first) : stop + 1]
        self.answer(206 if first else 200, content, ETag='"1"', **headers)

    def log_message(self, *_arguments):
        pass


class Bucket(Served):
    """The bucket `lab` of S3: lists, and files or ranges of them."""

    def do_GET(self):
        self.asked.append(self.path)
        url = urlsplit(self.path)
        name, query = unquote(url.path).removeprefix("/lab").lstrip("/"), parse_qs(url.query)
        if not name and self.command == "GET":
            self.answer(200, self.listed(query.get("prefix", [""])[0], query.get("delimiter", [""])[0]))
        elif name in FILES:
            self.answer_file(FILES[name], Last_Modified="Tue, 24 Nov 2026 05:00:00 GMT", Accept_Ranges="bytes")
        else:
            self.answer(404, b"")

    @staticmethod
    def listed(prefix, delimiter):
        files, folders = [], set()
        for name in sorted(one for one in FILES if one.startswith(prefix)):
            head, found, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(f"<CommonPrefixes><Prefix>{prefix}{head}/</Prefix></CommonPrefixes>")
            else:
                files.append(
                    f'<Contents><Key>{name}</Key><Size>{len(FILES[name])}</Size><ETag>"1"</ETag>'
                    "<LastModified>2026-11-24T05:00:00.000Z</LastModified></Contents>"
                )
        inside = "".join([*files, *folders])
        text = f"<ListBucketResult><Name>lab</Name><IsTruncated>false</IsTruncated>{inside}</ListBucketResult>"
        return text.encode()


class Hub(Served):
    """The data set `lab/sums` of the hub: what it holds, and its files."""

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        inside = {name.removeprefix("sums/"): content for name, content in FILES.items() if name.startswith("sums/")}
        if url.path.startswith("/api/datasets/lab/sums/tree/"):
            found = [{"type": "file", "path": name, "oid": "1", "size": len(one)} for name, one in inside.items()]
            self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
        elif url.path.startswith("/api/datasets/lab/sums"):
            found = {"id": "lab/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in inside]}
            self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
        elif url.path.startswith("/datasets/lab/sums/resolve/") and (name := url.path.split("/", 6)[-1]) in inside:
            self.answer_file(inside[name], X_Repo_Commit=COMMIT)
        else:
            self.answer(404, b"", X_Error_Code="RepoNotFound")


@pytest.fixture
def served(request, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = type("Handler", (request.param,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
        server.shutdown()


@pytest.mark.parametrize("served", [Bucket], indirect=True)
def test_files_and_folders_on_s3_are_read_and_streamed(served, monkeypatch):
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", served[0])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    whole = load_dataset(["s3://lab/lines/train.jsonl"])
    assert [one.ground_truth for one in whole] == [row["ground_truth"] for row in ROWS]
    assert [one.ground_truth for one in load_dataset(["s3://lab/sums"])] == [row["ground_truth"] for row in ROWS]
    rows = RowStream.of_prompts(["s3://lab/sums"])
    assert rows.count() == 5
    assert [one.name for one in rows.read(3, Problems())] == [f"train-00000-of-00001.parquet:{n}" for n in (3, 4)]
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: there is no s3://lab/none\.jsonl"):
        load_dataset(["s3://lab/none.jsonl"])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=r"s3://lab/sums cannot be read: NoCredentialsError: Unable to locate"):
        load_dataset(["s3://lab/sums"])


READ = """\
import sys
from huggingface_hub import constants
from rallypoint.data import DataSet, load_dataset
from rallypoint.errors import DataError

for name, is_offline in (("lab/sums", False), ("lab/none", False), ("lab/sums", True)):
    constants.HF_HUB_OFFLINE = is_offline
    if is_offline:
        constants.ENDPOINT = "http://127.0.0.1:9"
    try:
        print([one.ground_truth for one in load_dataset([DataSet(name, subset="main")])])
    except DataError as error:
        print(str(error).replace("\\n", " "))
"""
READ_URLS = """\
from rallypoint.data import RowStream, load_dataset
from rallypoint.data.files import Problems
from rallypoint.errors import DataError

for name in ("/main/train-00000-of-00001.parquet", "", "/none.parquet"):
    try:
        rows = RowStream.of_prompts([f"hf://datasets/lab/sums{name}"])
        print([one.ground_truth for one in load_dataset([f"hf://datasets/lab/sums{name}"])], rows.count())
    except DataError as error:
        print(str(error).replace("\\n", " "))
"""


@pytest.mark.parametrize("served", [Hub], indirect=True)
def test_a_data_set_of_the_hub_is_downloaded_once_and_then_read_without_it(served, tmp_path):
    # In a process of its own: the hub's client reads its variables when it is imported.
    changed = {**os.environ, "HF_ENDPOINT": served[0], "HF_HOME": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True, env=changed).stdout
    first, missing, again = said.splitlines()
    assert first == again == "['1', '2', '3', '4', '5']"
    assert "lab/none: no such file or folder is here, and the hub does not give it" in missing
    downloads = [line for line in served[1] if line.startswith("GET /datasets/")]
    assert downloads == ["GET /datasets/lab/sums/resolve/main/main/train-00000-of-00001.parquet"], "of this split"


@pytest.mark.parametrize("served", [Hub], indirect=True)
def test_files_and_folders_of_the_hub_are_read_by_their_urls(served, tmp_path):
    changed = {**os.environ, "HF_ENDPOINT": served[0], "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", READ_URLS], capture_output=True, text=True, check=False, env=changed)
    file, folder, missing = done.stdout.splitlines() or [done.stderr] * 3
    assert file == folder == "['1', '2', '3', '4', '5'] 5"
    assert "hf://datasets/lab/sums/none.parquet" in missing
