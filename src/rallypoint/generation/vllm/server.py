"""A vLLM server as a process of this machine, in an environment of its own.

Owns: its command, its folder, its memory, and how it ends. Must not know: what it is asked. Invariant: neither the
server nor its folder outlives the process that started it, however that process ends.

Python's `multiprocessing`, by which a server's processes talk, gives shared memory and semaphores names in /dev/shm and
removes them at its end; a process that is killed cannot. So they are removed here: only what processes of the server's
group had mapped, and only if no other process has.
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
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from rallypoint.generation.vllm.client import Address

INSIDE = Path(__file__).parent / "inside"
"""The folder that the server's processes import from; the only one of ours."""

_FOLDER_NAME = "rallypoint-vllm"
_LOG_LINES, _LOG_BYTES = 12, 2**14
"""How much of the end of the log an error shows."""
_STOP_S = 10.0
_NAMES = ("psm_", "sem.mp-")
"""Beginnings of the names that `multiprocessing` gives."""
_FOLDER = Path("/dev/shm")
_PROCESSES = Path("/proc")
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that a server can reserve memory for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started."""

    python: Path
    """The interpreter of vLLM's environment."""
    model: str
    """Hugging Face folder or hub name."""
    dtype: str
    device: str
    """Type of the device."""
    num_cpus: int
    max_tokens: int
    """Tokens of a request with its response."""
    max_rows: int
    """Requests that run together."""
    cache_bytes: int
    """Memory for keys and values on each device."""
    trust_remote_code: bool
    log: Path
    """File to which the server's output is appended."""
    memory_share: float | None = None
    """Part of its accelerator's memory that must be free when it starts; None on a CPU."""
    adapter_rank: int | None = None
    """Rank of the adapters that are published to it; None if whole models are."""
    second_runner: bool = False
    """Whether vLLM's second model runner samples, which needs Triton."""
    records_experts: bool = False
    """Whether answers say which experts of a mixture tokens were sent to; only the second runner does."""
    quantization: Literal["fp8"] | None = None
    """What the server makes of weights that it is given."""
    num_devices: int = 1
    """Devices that it cuts the model over, by tensor parallelism; the first ones that it sees."""
    visible_devices: tuple[str, ...] = ()
    """Accelerators that it sees, in the words of CUDA_VISIBLE_DEVICES; empty: those of this process."""

    def command(self, folder: Path) -> list[str]:
        """Return the server's command line."""
        options = {
            "model": self.model,
            "dtype": self.dtype,
            "uds": str(folder / "socket"),
            "max-model-len": str(self.max_tokens),
            "max-num-seqs": str(self.max_rows),
            "kv-cache-memory-bytes": str(self.cache_bytes),
            # Our processor samples the tokens, and reports what it writes into the logits.
            "logits-processors": f"rallypoint_vllm:{'Drawn' if self.second_runner else 'DrawnOnCpu'}",
            "logprobs-mode": "processed_logits",
            "max-logprobs": "2",
            "worker-extension-cls": "rallypoint_vllm.Loading",
        }
        if self.memory_share is not None:
            # It does not start unless so much is free, 92 % by default, however small the cache is.
            options["gpu-memory-utilization"] = f"{self.memory_share:.4f}"
        if self.quantization is not None:
            # A scale for each row of a weight, and for each token of its input.
            options["quantization"] = f"{self.quantization}_per_channel"
        if self.num_devices > 1:
            options |= {"tensor-parallel-size": str(self.num_devices), "distributed-executor-backend": "mp"}
        flags = ["tokens-only", "skip-tokenizer-init", "disable-uvicorn-access-log"]
        # Processors of the first runner need each token before the next one is scheduled.
        flags.append("async-scheduling" if self.second_runner else "no-async-scheduling")
        # Compiling takes half a minute on a CPU, for a fifth of the time of a step.
        flags.append("enforce-eager" if self.device == "cpu" else "enable-sleep-mode")
        flags += ["enable-return-routed-experts"] * self.records_experts
        flags += ["trust-remote-code"] * self.trust_remote_code
        if self.adapter_rank is not None:
            flags.append("enable-lora")
            options["max-lora-rank"] = str(next(rank for rank in _ADAPTER_RANKS if rank >= self.adapter_rank))
        # Not `vllm serve`: it looks up its version under a name that builds for CPUs do not have.
        start = [str(self.python), "-m", "vllm.entrypoints.launchers.api_server.entry"]
        return [*start, *(f"--{name}={value}" for name, value in options.items()), *(f"--{flag}" for flag in flags)]

    def environment(self, folder: Path, key: str) -> dict[str, str]:
        """Return the server's environment: that of this process, without what points to our packages."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return kept | {
            "PYTHONPATH": str(INSIDE),
            "VLLM_API_KEY": key,
            "VLLM_SERVER_DEV_MODE": "1",  # has the calls for weights; nobody else can reach the socket
            "VLLM_USE_V2_MODEL_RUNNER": str(int(self.second_runner)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "RALLYPOINT_BEAT": str(folder / "beat"),
            **({"CUDA_VISIBLE_DEVICES": ",".join(self.visible_devices)} if self.visible_devices else {}),
            **(self._of_cpu() if self.device == "cpu" else {}),
        }

    def _of_cpu(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(max(1, self.num_cpus // self.num_devices)),  # of each device's process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it takes all cores for itself
            "TORCHDYNAMO_DISABLE": "1",  # it compiles even when told to be eager
        }


class ServerProcess:
    """A server that was started on this machine; it may be ready or not."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        """Start it.

        Args:
            launch: its settings.
            folder: of its own; it is removed when this process ends.
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
                stdin=subprocess.PIPE,  # its end tells them that this process has ended
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group."""
        return self._process.pid

    def beat(self) -> int:
        """Return a number that grows while it samples."""
        number = int.from_bytes(self._beat.read_bytes(), "little")
        if number and self._shared is None:  # all shared memory exists when it samples for the first time
            self._shared = shared_files(self._process.pid)
        return number

    def ended(self) -> str | None:
        """Return why it ended, with the end of its log; None while it runs."""
        if self._process.poll() is None:
            return None
        return f"the vllm server ended; the end of {self._log}:\n{_end_of(self._log)}"

    def last_said(self) -> str:
        """Return the last line of its log, or an empty string."""
        return next(reversed(_lines_of(self._log)), "")

    def memory_bytes(self) -> int:
        """Return the peak of private memory, in bytes, of it and its children since the last call."""
        return take_peak_memory(self._process.pid)

    def stop(self) -> None:
        """End it and all its children; if it does not end in time it is killed, and its shared memory removed."""
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
    """A folder in memory for the server of this process; if this process cannot remove it, the next one does."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make it, and remove those of processes that have ended."""
        shared = Path("/dev/shm")
        usable = shared.is_dir() and os.access(shared, os.W_OK)
        parent = parent or (shared if usable else Path(tempfile.gettempdir()))
        sweep(parent)
        while (held := hold(Path(tempfile.mkdtemp(prefix=f"{_FOLDER_NAME}-", dir=parent)))) is None:
            pass  # a neighbour that starts now has removed it, because nobody held it yet
        self.path, self._lock = held

    def remove(self) -> None:
        """Remove it and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(parent: Path) -> None:
    """Remove folders that nobody holds."""
    for folder in parent.glob(f"{_FOLDER_NAME}-*"):
        with contextlib.suppress(OSError):
            folder.rmdir()  # works if it is empty: it has no lock yet, or its process ended before it had one
        with contextlib.suppress(OSError), (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            shutil.rmtree(folder, ignore_errors=True)


def hold(folder: Path) -> tuple[Path, BinaryIO] | None:
    """Lock a new folder for as long as this process lives; return None if it was removed before it was locked."""
    try:
        lock = (folder / "lock").open("wb")
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that is removing it
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
    """Return the last errors of a log, or its last lines if it has none."""
    lines = _lines_of(log)
    errors = [line for line in lines if "Error" in line and "File " not in line]
    return "\n".join((errors or lines)[-_LOG_LINES:])


def shared_files(group: int) -> dict[Path, int]:
    """Return the shared files of a process group, with their inode numbers."""
    return {path: number for pid in _pids() if _group_of(pid) == group for path, number in _mapped(pid)}


def remove_shared(files: dict[Path, int], group: int) -> None:
    """Remove files of a group that has ended, unless other processes use them or have made new ones of that name."""
    used = {path for pid in _pids() if files and _group_of(pid) != group for path, _ in _mapped(pid)}
    for path, number in files.items():
        with contextlib.suppress(OSError):
            if path not in used and path.stat().st_ino == number:
                path.unlink()


def take_peak_memory(group: int) -> int:
    """Return the peak of private memory of a process group since the last call, in bytes.

    It is the sum of each process's own peak; 0 if the system does not tell.
    """
    return sum(_take_peak(_PROCESSES / str(pid)) for pid in _pids() if _group_of(pid) == group)


def _take_peak(process: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = (process / "status").read_text(errors="replace").splitlines()
        sizes = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in lines)
            if rest.endswith("kB")
        }
        (process / "clear_refs").write_text("5")  # resets the peak
        return sizes.get("VmHWM", 0) - sizes.get("RssFile", 0) - sizes.get("RssShmem", 0)
    return 0


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROCESSES.glob("[0-9]*"))


def _group_of(pid: int) -> int | None:
    """Return the group of a process; None if it has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _mapped(pid: int) -> Iterator[tuple[Path, int]]:
    """Yield path and inode of each `multiprocessing` file that a process has mapped; none of other users."""
    with contextlib.suppress(OSError):
        for line in (_PROCESSES / str(pid) / "maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)  # address, rights, offset, device, number and path, if there is one
            if len(fields) < 6:
                continue
            number, name = fields[4:]
            path = Path(name)
            if path.parent == _FOLDER and path.name.startswith(_NAMES) and not name.endswith(" (deleted)"):
                yield path, int(number)
