"""`rally serve` where it cannot."""

import socket

import pytest
from forks import run_forked

from rallypoint.errors import CacheError, ModelError, ServingError


def problem(result) -> str:
    assert isinstance(result.exception, ServingError | ModelError | CacheError), result.output
    return str(result.exception)


def test_other_machines_are_let_in_with_a_key_only(command, trained):
    said = problem(command("serve", str(trained.run), "--host", "0.0.0.0"))
    assert "RALLYPOINT_API_KEY" in said


@pytest.mark.parametrize("key", ["", " secret", "gehéim"])
def test_keys_that_no_header_can_hold_are_refused(command, trained, key):
    assert "printable ASCII" in problem(command("serve", str(trained.run), "--api-key", key))


def test_a_port_that_is_taken_is_named(command, trained):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = problem(command("serve", str(trained.run), "--port", str(port)))
        assert f"127.0.0.1:{port}: Address already in use" in said
    assert "cannot serve at no.such.host.invalid" in problem(
        command("serve", str(trained.run), "--host", "no.such.host.invalid", "--api-key", "k")
    )


def test_only_runs_can_be_followed(command, trained, tmp_path):
    (tmp_path / "model").symlink_to(trained.checkpoint)
    assert "no newer checkpoints to follow" in problem(command("serve", str(tmp_path / "model"), "--follow"))


def test_a_cache_beyond_memory_is_refused_before_anybody_asks(command, trained):
    said = problem(command("serve", str(trained.run), "--port", "0", "--cache-tokens", "1000000000000"))
    assert "MiB, but this machine has " in said
    assert "--cache-tokens" in said


def test_a_missing_package_is_named_with_the_command_that_installs_it(trained):
    code = "import sys; sys.modules['uvicorn'] = None; from rallypoint.cli.main import run; run()"
    done = run_forked("-c", code, "serve", str(trained.run))
    assert done.returncode == 1
    assert "rally serve needs the package uvicorn, which is not installed" in done.stderr
    assert "in a clone of rallypoint: pip install -e '.[serve]'" in done.stderr
    assert "Traceback" not in done.stderr
