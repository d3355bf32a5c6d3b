"""`rally serve` as a process of its own, over real HTTP, to its end by a signal."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import ForkedRally
from tiny_models import make_tiny_model

from rallypoint import checkpoint
from rallypoint.config import load_config
from rallypoint.run.folder import RunFolder, create_run

SIZES = {"num_layers": 1, "num_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5, "max_positions": 512}


def save(run: RunFolder, step: int, version: int) -> None:
    """Leave a checkpoint behind, as training does."""
    with checkpoint.writing(run.checkpoints, step) as folder:
        make_tiny_model(folder, **SIZES, seed=step)
        (folder / "training").mkdir()
        (folder / "training" / "state.json").write_text(json.dumps({"version": version}))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(load_config("digits", [f"trainer.runs_dir={tmp_path}", "trainer.name=sorter"]))
    save(run, 4, 16)
    return run


def start(*arguments: str, code: str = "", **environment: str) -> ForkedRally | subprocess.Popen[str]:
    """Start a server: by the command line, or in a new interpreter by a program of a test's own."""
    if not code:
        return ForkedRally(["serve", *arguments, "--port", "0"], **environment)
    return subprocess.Popen(
        [sys.executable, "-c", code, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )


@contextlib.contextmanager
def serving(
    *arguments: str, code: str = "", **environment: str
) -> Iterator[tuple[ForkedRally | subprocess.Popen[str], int, list[str]]]:
    """Yield a server's process, its port, and the lines that it printed when it was ready."""
    process = start(*arguments, code=code, **environment)
    assert process.stdout is not None
    try:
        lines = [next(process.stdout)]
        found = re.search(r" at http://127\.0\.0\.1:(\d+)/v1$", lines[0])
        assert found, lines[0] + process.stdout.read()
        lines += [next(process.stdout) for _ in range(3)]
        yield process, int(found.group(1)), lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


BREAKS = """
from rallypoint.generation import NativeEngine
step = NativeEngine.step
def broken(engine):
    if engine.has_work:
        raise OSError("burnt")
    return step(engine)
NativeEngine.step = broken
from rallypoint.cli.main import run
run()
"""


def call(port: int, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        sent = None if body is None else json.dumps(body)
        connection.request("POST" if sent else "GET", path, sent, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()


ASKED = {"messages": [{"role": "user", "content": "493105"}], "seed": 3, "max_tokens": 20, "return_token_ids": True}


@pytest.mark.parametrize("options", [(), ("--on-load", "recompute")], ids=["by default", "recompute"])
def test_a_run_is_served_and_followed_until_a_signal_ends_it(run: RunFolder, options: tuple[str, ...]):
    with serving(str(run.path), "--follow", *options) as (process, port, lines):
        assert lines[0].startswith("serving sorter (version 16, float32)")
        assert "512 tokens each" in lines[1]
        first = json.loads(call(port, "/v1/chat/completions", ASKED)[1])
        again = json.loads(call(port, "/v1/chat/completions", ASKED)[1])
        assert first["choices"] == again["choices"]
        assert first["system_fingerprint"] == "version-16"
        assert len(first["choices"][0]["token_ids"]) >= 1
        streamed = call(port, "/v1/chat/completions", {**ASKED, "stream": True})[1].decode().split("\n\n")
        assert streamed[-2] == "data: [DONE]"
        events = [json.loads(event.removeprefix("data: ")) for event in streamed[:-2]]
        tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert tokens == first["choices"][0]["token_ids"]

        save(run, 8, 32)
        while json.loads(call(port, "/health")[1])["version"] != 32:
            time.sleep(0.05)
        newer = json.loads(call(port, "/v1/chat/completions", ASKED)[1])
        assert newer["system_fingerprint"] == "version-32"
        assert newer["choices"] != first["choices"]

        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[0]
        assert process.returncode == 0
        assert "serving step_000008 now" in rest
        assert "SIGTERM: 0 responses under way" in rest
        assert "Traceback" not in rest


def test_the_key_of_the_environment_is_asked_for_and_the_printed_example_works(run: RunFolder):
    environment = {"RALLYPOINT_API_KEY": "one two"}
    with serving(str(run.checkpoints / "step_000004"), **environment) as (process, port, lines):
        assert "a key is needed" in lines[1]
        assert call(port, "/v1/models")[0] == 401
        assert call(port, "/v1/models", Authorization="Bearer two")[0] == 200
        command = lines[2].removeprefix("try:").strip().replace('"..."', '"12"')
        shown = {**os.environ, "RALLYPOINT_API_KEY": "one"}
        done = subprocess.run(["bash", "-c", command], env=shown, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_server_whose_engine_fails_again_and_again_ends_and_says_why(run: RunFolder):
    with serving(str(run.path), code=BREAKS) as (process, port, _):
        status, body = call(port, "/v1/completions", {"prompt": "12"})
        assert status == 500
        assert json.loads(body)["error"]["message"].endswith("its requests are lost: OSError: burnt")
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "Traceback" in said
    assert said.rstrip().splitlines()[-1] == "error: the engine failed again, and is given up: OSError: burnt"
