"""A Ray cluster as a user may have one: two nodes that `ray start` made, a token, and no rallypoint on either.

The nodes are processes on this machine with addresses of their own (127.0.0.2 and 127.0.0.3), interpreters of their
own, and nothing in common with other tests or with the home folder. The first has no rallypoint at all; the second
has another version of it. Importlib mode cannot import this file by name: load it from its path.
"""

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.cluster import reaper

OTHER_VERSION = "0.0.0+other"
RAY = """
from ray._private.node import Node

for name in ("start_log_monitor", "start_monitor", "start_api_server", "start_ray_client_server"):
    setattr(Node, name, lambda *_, **__: None)
from ray.scripts.scripts import main

main()
"""
"""The program `ray`, without the daemons that nobody here asks."""


@dataclasses.dataclass(frozen=True)
class TwoNodes:
    """What a driver needs to know; each node has 2 CPUs and one of the resource "head" or "second"."""

    address: str
    environment: dict[str, str]
    """Makes a process trusted: it names the token's file."""
    folder: Path
    """Everything of the cluster is below it."""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with start() as nodes:
        yield nodes


@contextlib.contextmanager
def start() -> Iterator[TwoNodes]:
    folder = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))  # paths of Unix sockets must be short
    mark = f"two-nodes-{secrets.token_hex(6)}"
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    trusted = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    environment |= trusted | {"HOME": str(folder), "PYTHONUNBUFFERED": "1", reaper.MARK: mark}
    environment["RAY_prestart_worker_first_driver"] = "0"  # of workers that nobody asks for
    processes: list[subprocess.Popen[str]] = []

    def ray_start(name: str, ip: str, *arguments: str) -> str:
        """Start a node, and return the address that it names."""
        options = [f"--node-ip-address={ip}", "--num-cpus=2", f'--resources={{"{name}": 1}}', f"--temp-dir={folder}"]
        options += ["--object-store-memory=200000000", "--disable-usage-stats", "--block"]
        process = subprocess.Popen(
            [interpreter(folder / name), "-c", RAY, "start", *arguments, *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        said: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "--block" in line:  # all is up: from here on it only watches
                break
        else:
            raise AssertionError("".join(said))
        found = re.search(r"ray start --address='(\S+)'", "".join(said))
        return found[1] if found else ""

    try:
        interpreter(folder / "head", create=True)
        elsewhere = interpreter(folder / "second", create=True)
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        done = subprocess.run([elsewhere, "-c", code], capture_output=True, text=True, check=True)
        package = Path(done.stdout.strip()) / "rallypoint"
        package.mkdir()
        (package / "__init__.py").write_text(f'__version__ = "{OTHER_VERSION}"\n')
        address = ray_start("head", "127.0.0.2", "--head", "--port=0", "--include-dashboard=false")
        ray_start("second", "127.0.0.3", f"--address={address}")
        yield TwoNodes(address, trusted, folder)
    finally:
        for process in processes:
            process.kill()  # Ray's own processes on the node end with it; SIGTERM would take 40 s
        for process in processes:
            process.communicate()
        reaper.end_processes(mark, grace_s=0.2)  # two helpers ignore SIGTERM
        shutil.rmtree(folder)


def interpreter(folder: Path, create: bool = False) -> str:
    """The Python of a virtual environment that has this one's packages, but not those that are installed editable.

    A folder named in a .pth file is searched; the .pth files in that folder are not read.
    """
    python = str(folder / "bin" / "python")
    if create:
        venv.EnvBuilder(symlinks=True).create(folder)
        pth = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "outer.pth"
        pth.write_text(sysconfig.get_paths()["purelib"] + "\n")
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        found = "from importlib.util import find_spec; print(bool(find_spec('ray')), find_spec('rallypoint'))"
        done = subprocess.run([python, "-c", found], env=own, capture_output=True, text=True, check=True)
        assert done.stdout == "True None\n", "rallypoint has to be installed editable for this test"
    return python
