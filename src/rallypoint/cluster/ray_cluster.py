"""How rallypoint starts, joins and leaves Ray.

Owns every setting of Ray that we make (docs/decisions/0010-ray-settings.md says why) and a promise: a cluster of our
own leaves nothing behind, and a joined one is left as it was found. Must not know what runs on the cluster.

Import it before ray: two of Ray's settings are read when ray is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import mmap
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, ClassVar, Self

from rallypoint.cluster import ray_probe, reaper, warm
from rallypoint.cluster.capacity import num_cores
from rallypoint.cluster.ray_daemons import RayDaemons, environment, only_needed, process_as_found, speak_for_ray
from rallypoint.cluster.ray_thread import RayThread, is_held_by_ray
from rallypoint.errors import ClusterError

_READ_AT_IMPORT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""A cluster that we start is for this machine alone: everything in it listens on loopback. And Ray prints no lines of
its own (a worker died, a node was lost) onto the user's screen: we say it where it matters."""

with environment(_READ_AT_IMPORT), process_as_found(), warnings.catch_warnings():
    logging.disable(logging.INFO)  # in a notebook it speaks of widgets
    warnings.simplefilter("ignore")
    import ray
    from ray._private import node, ray_constants, worker

    importlib.reload(ray_constants)  # in case ray was imported before, without our settings
    logging.disable(logging.NOTSET)
_raylet: Any = importlib.import_module("ray._raylet")  # compiled, so without types

_GCS_PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6)}
"""Seconds after which Ray's C++ ends a process because there is no GCS. Workers that run need none, and the driver's
questions to it have a limit of their own (`RayThread`)."""

_OF_OUR_CLUSTERS = {
    **_GCS_PATIENCE,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray makes its workers nice (15); ours do the actual work, and the driver waits for them.
    "RAY_worker_niceness": "0",
    # In processes without GPUs of their own Ray leaves the visible GPUs unchanged, and does not warn about it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_HEALTH = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""With these a dead or frozen node is noticed in seconds, not a minute; the first check leaves time to start."""

_NO_SPARE_WORKERS = {"prestart_worker_first_driver": False}
"""Ray would start a worker for each core, and wait for them, before a run asks for any."""

_MAX_SOCKET_PATH = 103
"""Characters in the path of a Unix socket, on the system that allows fewest."""

_SOCKETS = "/rally-0123456789ab/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LEAVE_TIMEOUT_S, _END_TIMEOUT_S = 20.0, 20.0
_REAPER_PATIENCE = 12.0
"""How many limits the reaper waits: longer than `RayThread`, which acts first if it can run."""

Say = Callable[[str], None]


class RayCluster:
    """Ray as this program uses it: a cluster of its own on this machine, or one that it has joined.

    A process is in one cluster at a time: Ray allows no more.
    """

    kept: ClassVar[RayCluster | None] = None
    """The local cluster that all runs of this process share inside `keep`."""

    def __init__(self, *, address: str, namespace: str, own: _OwnCluster | None, silence_s: float, say: Say) -> None:
        """Use `start_local` or `join`; nothing else makes a cluster."""
        self.address = address
        """host:port of the cluster."""
        self.namespace = namespace
        """Ray namespace of this run alone; its named Ray actors live in it."""
        self._own, self._say = own, say
        self.daemons = RayDaemons(worker._global_node, None if own is None else own.logs)
        """Ray's daemons that this program needs."""
        note_busy = (lambda _: None) if own is None else own.note_busy
        self.ray_thread = RayThread(limit_s=silence_s, fault=self.daemons.fault, note_busy=note_busy, say=say)
        """The thread that makes all calls to Ray that may block."""
        self._leaving = threading.Event()
        threading.Thread(target=self._watch_raylet, name="raylet", daemon=True).start()

    @property
    def is_local(self) -> bool:
        """Whether this program started the cluster, for itself."""
        return self._own is not None

    @classmethod
    def start_local(
        cls,
        *,
        log_folder: Path,
        object_store_gib: float,
        say: Say,
        silence_s: float = 60.0,
        imported: Sequence[str] = (),
    ) -> Self:
        """Start a cluster on this machine that nobody else can use, and that ends with this process, however it ends.

        Call it from the main thread: Linux ends Ray's processes together with the thread that started them.

        Args:
            log_folder: receives Ray's own logs, below `ray/`.
            object_store_gib: shared memory for data between processes.
            say: called, from any thread, with one line about everything that a user should know.
            silence_s: how long Ray may leave a question unanswered.
            imported: modules that workers need: they are forks of a process that has imported them; empty for none.

        Raises:
            ClusterError: Ray does not start, or would not keep to itself.
        """
        if isinstance(cls.kept, cls):
            return cls.kept
        _check_that_ray_is_free()
        _check_that_a_cluster_would_keep_to_itself()
        own = _OwnCluster(log_folder, say, silence_s)
        forks = own.forks(imported)
        speak_for_ray(say)
        try:
            with (
                _ray_environment({**own.environment, warm.SOCKET: forks}),
                asking_for_forks(forks is not None),
                only_needed(node.Node),
            ):
                context: Any = ray.init(
                    address="local",
                    namespace=own.name,
                    num_cpus=num_cores(),
                    include_dashboard=False,
                    object_store_memory=int(object_store_gib * 2**30),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(own.ray_folder),
                    _system_config={**_HEALTH, **_NO_SPARE_WORKERS},
                )
        except (Exception, SystemExit) as error:
            ray.shutdown()
            own.end()
            if isinstance(error, SystemExit):  # Ray's way to end at SIGTERM
                raise KeyboardInterrupt from error
            raise ClusterError(f"Ray did not start: {error} (its logs: {own.logs})") from error
        return cls(
            address=context.address_info["gcs_address"], namespace=own.name, own=own, silence_s=silence_s, say=say
        )

    @classmethod
    @contextlib.contextmanager
    def keep(
        cls, *, log_folder: Path, object_store_gib: float, say: Say, imported: Sequence[str] = ()
    ) -> Iterator[None]:
        """Give all runs inside the block one local cluster, which takes seconds to start; see `start_local`."""
        RayCluster.kept = kept = cls.start_local(
            log_folder=log_folder, object_store_gib=object_store_gib, say=say, imported=imported
        )
        try:
            yield
        finally:
            RayCluster.kept = None
            kept.shutdown()

    @classmethod
    def join(cls, address: str, *, namespace: str, say: Say, timeout_s: float = 30.0, silence_s: float = 60.0) -> Self:
        """Join a cluster that somebody started, and bring this program's rallypoint to its workers.

        The token is looked for where Ray does: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

        Args:
            address: host:port, or "auto": RAY_ADDRESS, else the cluster of this machine.
            namespace: unique to this run.
            say: called, from any thread, with one line about everything that is waited for.
            timeout_s: how long the cluster may take to answer.
            silence_s: how long it may leave a question unanswered later.

        Raises:
            ClusterError: there is no cluster, it refuses, runs other versions, or does not answer in time.
        """
        _check_that_ray_is_free()
        token = _token_environment()
        address = ray_probe.ask(address, {**_READ_AT_IMPORT, **token}, say, timeout_s)
        speak_for_ray(say)
        try:
            with _ray_environment({**token, **_GCS_PATIENCE}):
                ray.init(
                    address=address,
                    namespace=namespace,
                    runtime_env={"py_modules": [str(Path(__file__).parents[1])]},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (OSError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise ClusterError(f"cannot join the Ray cluster at {address}: {error}") from error
        return cls(address=address, namespace=namespace, own=None, silence_s=silence_s, say=say)

    def shutdown(self) -> None:
        """Leave the cluster. Of our own only the logs remain; from a joined one, what this program had is removed.

        Never raises, and returns within a minute. A Ray with a fault is not asked to disconnect: this process stays
        tied to it until it ends, and the reaper cleans up.
        """
        if self is RayCluster.kept:
            return
        self._leaving.set()
        left = None
        if self.ray_thread.lost is None and self.daemons.fault() is None:
            left = self.ray_thread.put(lambda: ray.shutdown(wait_for_processes=True))
            wait([left], timeout=_LEAVE_TIMEOUT_S)
        if left is None or not left.done():
            atexit.unregister(ray.shutdown)  # it would wait for what does not answer
            self.ray_thread.abandon()
            return
        if (error := left.exception()) is not None:
            self._say(f"Ray was left with an error: {error}")
        self.ray_thread.close()
        _forget_token()
        if self._own is not None:
            self._own.end()

    def _watch_raylet(self) -> None:
        """Report at once that the raylet is gone: at the next access to its store Ray's C++ would end this program."""
        self.daemons.wait_for_raylet(self._leaving)
        found = self.daemons.fault()
        if found is not None and not self._leaving.is_set():
            self._say(f"{found}: nothing can go on without it")
            self.ray_thread.lose(found.what)


class _OwnCluster:
    """What a cluster of our own has in addition to Ray: a private folder with its token, a mark, and a reaper."""

    def __init__(self, log_folder: Path, say: Say, silence_s: float) -> None:
        mark = secrets.token_hex(6)
        self.name = f"rallypoint-{mark}"
        self._say, self._forks = say, contextlib.ExitStack()
        base = tempfile.gettempdir()
        self.folder = Path(base if len(base + _SOCKETS) <= _MAX_SOCKET_PATH else "/tmp") / f"rally-{mark}"
        self.logs = log_folder.absolute() / "ray"
        self._start_reaper(mark, silence_s)  # first: a kill leaves nothing behind
        self.folder.mkdir(mode=0o700)
        self.ray_folder = self.folder / "ray"  # Ray lets everybody write to its folder; nobody else reaches it in ours
        self.token = self.folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.environment = {**_OF_OUR_CLUSTERS, **_READ_AT_IMPORT, reaper.MARK: mark} | _token_in(self.token)
        self.logs.parent.mkdir(parents=True, exist_ok=True)
        if self.logs.is_symlink():
            self.logs.unlink()
        elif self.logs.exists():
            shutil.rmtree(self.logs)
        self.logs.symlink_to(self.ray_folder / "session_latest" / "logs")

    def forks(self, modules: Sequence[str]) -> str | None:
        """Return the path of the socket at which workers are given: forks of a process that has imported modules."""
        path = os.environ.get(warm.SOCKET)
        if path is None:
            if not modules:
                return None
            path = str(self.folder / "warm")
            self._forks.enter_context(warm.forks(path, modules, {**os.environ, reaper.MARK: self.folder.name[6:]}))
        return path

    def _start_reaper(self, mark: str, silence_s: float) -> None:
        page = reaper.open_page()
        self._page = None if page is None else mmap.mmap(page, reaper.PAGE_BYTES)
        guard = [] if page is None else [str(page), f"{_REAPER_PATIENCE * silence_s:g}"]
        paths = [str(self.folder), str(self.logs)]
        with environment({reaper.MARK: None}):  # it must outlive a cluster that this program itself may run on
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), mark, *paths, *guard],
                pass_fds=() if page is None else (page,),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        if page is not None:
            os.close(page)  # the reaper and the map have their own

    def note_busy(self, number: int) -> None:
        """Tell the reaper the number of the call that Ray is working on; 0 for none."""
        if self._page is not None:
            self._page[:] = number.to_bytes(reaper.PAGE_BYTES, sys.byteorder)

    def end(self) -> None:
        """Let the reaper end what Ray left, and keep the logs."""
        self._forks.close()
        try:
            self._reaper.communicate(b"\n", timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._say(f"Ray's processes did not end within {_END_TIMEOUT_S:g} s; {self.folder} may remain")
        if self._page is not None:
            self._page.close()


def _check_that_ray_is_free() -> None:
    if is_held_by_ray():
        raise ClusterError(
            "this process is tied to a Ray that was lost, until it ends: start a new one (in a notebook, restart the "
            "kernel), or go on without Ray by cluster.runtime=inline"
        )
    if ray.is_initialized():
        raise ClusterError(
            "this process is in a Ray cluster already, and can be in one only: call ray.shutdown() first"
        )


def _check_that_a_cluster_would_keep_to_itself() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ClusterError("a local Ray ends together with the thread that starts it: start it from the main thread")
    if ray.util.get_node_ip_address() not in {"127.0.0.1", "::1"}:
        raise ClusterError(
            "a local Ray cluster would listen on every network interface, because ray was imported without "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0: import rallypoint.cluster.ray_cluster before ray"
        )


@contextlib.contextmanager
def _ray_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change the environment, and make Ray read it anew: it caches the token of the last cluster."""
    with environment(changes), process_as_found():
        _forget_token()
        yield


@contextlib.contextmanager
def asking_for_forks(wanted: bool) -> Iterator[None]:
    """Have a Ray that is started inside the block run `warm` where it would prepare a worker.

    Ray's own way to another Python, `runtime_env`, would first import Ray once more for each worker.
    """
    prepares: str | None = getattr(ray_constants, "SETUP_WORKER_FILENAME", None)
    if not wanted or prepares is None:  # a Ray that has another name for it starts workers the slow way
        yield
        return
    ray_constants.SETUP_WORKER_FILENAME = warm.__file__  # Ray joins it to a folder; an absolute path stays
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = prepares


def _forget_token() -> None:
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _token_in(path: Path) -> dict[str, str | None]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(path)}


def _token_environment() -> dict[str, str | None]:
    """Return the variables that make Ray use the user's token, if there is one; given an address, it would not.

    Raises:
        ClusterError: a token is promised, and is not there. Ray would abort this process.
    """
    mode, path = os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN_PATH")
    if mode not in {None, "token"}:
        return {}
    if os.environ.get("RAY_AUTH_TOKEN"):
        return {"RAY_AUTH_MODE": "token"}
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    if file.is_file() and file.read_text().strip():
        return _token_in(file)
    if mode or path:
        raise ClusterError(
            f"{'RAY_AUTH_TOKEN_PATH' if path else 'RAY_AUTH_MODE=token'} is set, but there is no token in {file}: "
            "put the cluster's token there, or into RAY_AUTH_TOKEN"
        )
    return {}
