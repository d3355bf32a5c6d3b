"""A vLLM server as a process of this machine, in an environment of its own.

Owns: its command, its folder, how it ends. Must not know: what is asked of it. Invariant: it does not outlive the
process that started it, however that one ends, and neither does its folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import BinaryIO, Protocol

from rallypoint.generation.vllm.client import Address
from rallypoint.generation.vllm.leftovers import remove_shared, shared_files, take_peak_memory

INSIDE = Path(__file__).parent / "inside"
"""What the server's own processes load of ours; the only folder of ours that they can import from."""

_FOLDER_NAME = "rallypoint-vllm"
_LOG_LINES, _LOG_BYTES = 12, 2**14
"""Of the end of the log, that an error shows."""
_STOP_S = 10.0
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That a server can make room for."""


class Server(Protocol):
    """A server that was started; it may be ready or not."""

    @property
    def address(self) -> Address:
        """Where it listens, or will."""
        ...

    def beat(self) -> int:
        """Return a number that grows while it samples."""
        ...

    def ended(self) -> str | None:
        """Return why it ended, with the last it said; None while it runs."""
        ...

    def last_said(self) -> str:
        """Return the last line of its log; empty where there is none."""
        ...

    def memory_bytes(self) -> int:
        """Return the most private memory that it and what it started had since this was last asked."""
        ...

    def stop(self) -> None:
        """End it, with everything that it started."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started."""

    python: Path
    """The interpreter of vLLM's environment."""
    model: str
    """Hugging Face folder or hub name."""
    dtype: str
    device: str
    """Type of the device that this process holds."""
    num_cpus: int
    max_tokens: int
    """Of a request, with its response."""
    max_rows: int
    """Requests that run together."""
    cache_bytes: int
    """For keys and values."""
    trust_remote_code: bool
    log: Path
    """What the server says is added to it."""
    memory_share: float | None = None
    """Part of its accelerator's memory that has to be free for it; None on a CPU."""
    adapter_rank: int | None = None
    """Of the adapters that are published to it; None where whole models are."""

    def command(self, folder: Path) -> list[str]:
        """Return the server's command line."""
        options = {
            "model": self.model,
            "dtype": self.dtype,
            "uds": str(folder / "socket"),
            "max-model-len": str(self.max_tokens),
            "max-num-seqs": str(self.max_rows),
            "kv-cache-memory-bytes": str(self.cache_bytes),
            # Tokens are drawn by ours, and what it writes into the logits is what we want to be told.
            "logits-processors": "rallypoint_vllm:Drawn",
            "logprobs-mode": "processed_logits",
            "max-logprobs": "2",
            "worker-extension-cls": "rallypoint_vllm.Loading",
        }
        if self.memory_share is not None:
            # It does not start unless so much is free, whatever the cache is told to take: without it 92 %.
            options["gpu-memory-utilization"] = f"{self.memory_share:.4f}"
        flags = ["tokens-only", "skip-tokenizer-init", "no-async-scheduling", "disable-uvicorn-access-log"]
        # Compiling takes half a minute on a CPU, for a fifth of the time of a step.
        flags.append("enforce-eager" if self.device == "cpu" else "enable-sleep-mode")
        flags += ["trust-remote-code"] * self.trust_remote_code
        if self.adapter_rank is not None:
            flags.append("enable-lora")
            options["max-lora-rank"] = str(next(rank for rank in _ADAPTER_RANKS if rank >= self.adapter_rank))
        # Not `vllm serve`: builds for processors have another name than the one under which it looks for its version.
        start = [str(self.python), "-m", "vllm.entrypoints.launchers.api_server.entry"]
        return [*start, *(f"--{name}={value}" for name, value in options.items()), *(f"--{flag}" for flag in flags)]

    def environment(self, folder: Path, key: str) -> dict[str, str]:
        """Return the server's environment: this one's, without what points to our own packages."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return kept | {
            "PYTHONPATH": str(INSIDE),
            "VLLM_API_KEY": key,
            "VLLM_SERVER_DEV_MODE": "1",  # the calls for weights; nobody else can reach the socket
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the newer one has no place for `Drawn` yet
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "RALLYPOINT_BEAT": str(folder / "beat"),
            **(self._of_cpu() if self.device == "cpu" else {}),
        }

    def _of_cpu(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(self.num_cpus),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it takes all cores for itself
            "TORCHDYNAMO_DISABLE": "1",  # it compiles even when told to be eager
        }


class ServerProcess:
    """A `Server` on this machine."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        """Start it.

        Args:
            launch: how.
            folder: of its own, which goes when this process does.
        """
        self.address = Address(folder / "socket", secrets.token_urlsafe(32))
        self._beat, self._log = folder / "beat", launch.log
        self._shared: dict[Path, int] | None = None
        self._beat.write_bytes(bytes(8))
        self.address.socket.unlink(missing_ok=True)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(launch.python), str(INSIDE / "launch.py"), str(folder), *launch.command(folder)],
                env=launch.environment(folder, self.address.key),
                stdin=subprocess.PIPE,  # its end is how they learn of ours
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the first process of its group."""
        return self._process.pid

    def beat(self) -> int:
        """See `Server.beat`."""
        number = int.from_bytes(self._beat.read_bytes(), "little")
        if number and self._shared is None:  # all that it shares is there when it samples for the first time
            self._shared = shared_files(self._process.pid)
        return number

    def ended(self) -> str | None:
        """See `Server.ended`."""
        if self._process.poll() is None:
            return None
        return f"the vllm server ended; the end of {self._log}:\n{_end_of(self._log)}"

    def last_said(self) -> str:
        """See `Server.last_said`."""
        return next(reversed(_lines_of(self._log)), "")

    def memory_bytes(self) -> int:
        """See `Server.memory_bytes`."""
        return take_peak_memory(self._process.pid)

    def stop(self) -> None:
        """See `Server.stop`; one that does not end when it is told to is killed, and cleaned up after."""
        shared = (self._shared or {}) | shared_files(self._process.pid)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        remove_shared(shared, self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()


class OwnFolder:
    """A folder in memory for the server of this process; it is swept up by the next one if this one cannot."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make it, and remove those whose processes are gone."""
        shared = Path("/dev/shm")
        usable = shared.is_dir() and os.access(shared, os.W_OK)
        parent = parent or (shared if usable else Path(tempfile.gettempdir()))
        sweep(parent)
        while (held := hold(Path(tempfile.mkdtemp(prefix=f"{_FOLDER_NAME}-", dir=parent)))) is None:
            pass  # a neighbour that starts now has swept it up, because nobody held it yet
        self.path, self._lock = held

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(parent: Path) -> None:
    """Remove folders that nobody holds."""
    for folder in parent.glob(f"{_FOLDER_NAME}-*"):
        with contextlib.suppress(OSError):
            folder.rmdir()  # which one has no lock yet, or never came to have one, and does if it is empty
        with contextlib.suppress(OSError), (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for as long as its process lives
            shutil.rmtree(folder, ignore_errors=True)


def hold(folder: Path) -> tuple[Path, BinaryIO] | None:
    """Hold a new folder for as long as this process lives; None if it was swept up before it was held."""
    try:
        lock = (folder / "lock").open("wb")
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)  # who sweeps it up holds it meanwhile
    if (folder / "lock").exists():
        return folder, lock
    lock.close()
    return None


def _lines_of(log: Path) -> list[str]:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _end_of(log: Path) -> str:
    """Return what a person wants of the end of a log: its last errors, or its last lines."""
    lines = _lines_of(log)
    errors = [line for line in lines if "Error" in line and "File " not in line]
    return "\n".join((errors or lines)[-_LOG_LINES:])
