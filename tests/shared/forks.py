"""Programs and commands in processes that are forked, see `fork_server`."""

import atexit
import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from multiprocessing.connection import Connection
from pathlib import Path

from fork_server import fork_context
from ray_forks import forked_workers

from rallypoint.cli.main import run


def run_forked(
    *command: str, typed: bytes = b"", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with `-c`, a program and its arguments, as `subprocess.run` does in an interpreter that is new.

    What reads its environment when it is imported, like the hub's client, has done so already, and the seed of hashes
    and the places of libraries in memory are those of other forks.
    """
    with tempfile.TemporaryDirectory() as folder, forked_workers():
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        streams[0].write_bytes(typed)
        given = (command, streams, {**os.environ, **environment}, cwd or Path.cwd())
        process = fork_context().Process(target=_be_python, args=given, daemon=True)
        process.start()
        process.join()
        out, err = (stream.read_text(encoding="utf-8") for stream in streams[1:])
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _be_python(command: tuple[str, ...], streams: list[Path], environment: dict[str, str], cwd: Path) -> None:
    for number, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDWR | os.O_CREAT, 0o600), number)
    _become(environment, cwd)
    option, program, *arguments = command
    assert option == "-c", command
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


class ForkedRally:
    """The command line in a process of its own, with the methods of `subprocess.Popen`; stdout has stderr too.

    The workers of a local Ray that it starts are forks, too: see `ray_forks`.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        cwd: Path | None = None,
        kill_before: str | None = None,
        terminal: str | None = None,
        **environment: str,
    ) -> None:
        """Start it.

        Args:
            arguments: of `rally`.
            cwd: working directory; by default this process's.
            environment: variables that are added to this process's.
            kill_before: the process is killed before it renames anything to a path that ends with this.
            terminal: path of the terminal that it is started in, as the leader of a session, in place of a pipe.
        """
        context = fork_context()
        ours, theirs = context.Pipe(duplex=False)
        with forked_workers():
            given = (arguments, theirs, {**os.environ, **environment}, cwd or Path.cwd(), kill_before, terminal)
        self._process = context.Process(target=_be_rally, args=given, daemon=True)
        self._process.start()
        theirs.close()
        with ours:
            self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        assert self._process.pid is not None
        self.pid, self._said = self._process.pid, b""

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rally", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Read all that it prints until it has ended."""
        until = time.monotonic() + timeout
        while select.select([self.stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
            data = os.read(self.stdout.fileno(), 65536)
            self._said += data
            if not data:
                self.wait(max(until - time.monotonic(), 0.0))
                self.stdout.close()
                return self._said.decode(), None
        raise subprocess.TimeoutExpired("rally", timeout)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_rally(
    arguments: list[str],
    stdout: Connection,
    environment: dict[str, str],
    cwd: Path,
    kill_before: str | None,
    terminal: str | None,
) -> None:
    for stream in (1, 2):
        os.dup2(stdout.fileno(), stream)
    stdout.close()
    if terminal is not None:
        _open_terminal(terminal)
    _become(environment, cwd)
    sys.argv = ["rally", *arguments]
    if kill_before is not None:
        sys.addaudithook(lambda event, details: _kill_before(kill_before, event, details))
    try:
        run()
    finally:
        atexit._run_exitfuncs()


def _open_terminal(path: str) -> None:
    os.setsid()
    terminal = os.open(path, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(terminal, stream)
    os.close(terminal)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


def _become(environment: dict[str, str], cwd: Path) -> None:
    os.chdir(cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(environment)


def _kill_before(ending: str, event: str, details: tuple[object, ...]) -> None:
    """Look at what the interpreter is about to do: it tells of every rename before it is done."""
    if event == "os.rename" and str(details[1]).endswith(ending):
        os.kill(os.getpid(), signal.SIGKILL)
