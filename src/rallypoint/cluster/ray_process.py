"""One process of a pool as a Ray actor, and the driver's end of it.

Owns what is sent to a process and how, and how Ray's errors become ours. Must not know where processes come from.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import os
import pickle
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.pool import ResourcePool
from rallypoint.cluster.process import WAS_ENDED, Invocation, ProcessInfo, Pulse, WorkerProcess
from rallypoint.cluster.reference import Fetch, detach
from rallypoint.cluster.stacks import open_stacks
from rallypoint.errors import RallyError, RayLostError, WorkerDiedError, WorkerError, WorkerHungError

if TYPE_CHECKING:
    from rallypoint.cluster.ray_runtime import RayRuntime

_LARGE_BYTES = 100_000
"""Size from which Ray puts a value into shared memory anyway."""
_TERMINATED = "receives a SIGTERM"
"""Phrase with which Ray tells that a process was asked to end."""
_HEALTH = "health"
"""The concurrency group, a thread of its own in the worker process, that answers while a call is under way."""


class RayWorkerProcess(WorkerProcess):
    """A `WorkerProcess` as a Ray actor."""

    def __init__(
        self, num_cpus: int, device: str, preload: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        os.environ.update(environment or {})
        # Read once, when torch is imported. Here and not in a runtime_env, which would start a process from nothing
        # where Ray has one waiting. `import rallypoint` has set OMP_WAIT_POLICY.
        os.environ["OMP_NUM_THREADS"] = str(num_cpus)
        super().__init__(num_cpus, device, preload)

    def call_packed(self, invocation: bytes, arguments: tuple[Any, Any] = ((), {}), *values: Any) -> Any:
        """See `WorkerProcess.call`. No empty arguments are sent: each costs Ray over a tenth of a call."""
        return self.call(Invocation.unpacked(invocation), *arguments, *values)

    def describe(self) -> ProcessInfo:
        """Return where this process is, once it is ready for calls."""
        context = ray.get_runtime_context()
        devices = tuple(number for numbers in context.get_accelerator_ids().values() for number in numbers)
        return ProcessInfo(platform.node(), context.get_node_id(), os.getpid(), devices, open_stacks())


RayActor: Any = ray.remote(concurrency_groups={_HEALTH: 1}, max_restarts=0)(RayWorkerProcess)  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True, slots=True)
class LostNode:
    """Why a process was lost with its whole node."""

    why: str
    is_ours: bool
    """Whether that is the node of this program, which cannot go on without it."""

    def __str__(self) -> str:
        return self.why


@dataclasses.dataclass(slots=True)
class RayPending:
    """See `Pending`."""

    invocation: Invocation
    process: RayProcess
    handle: ray.ObjectRef | None
    """The reference to its result; None of a call that was never made."""
    _future: Future[Any] | None = None

    def future(self) -> Future[Any]:
        """See `Pending.future`."""
        if self._future is None:
            assert self.handle is not None, "the call was made"
            self._future = self.handle.future()
        return self._future

    def error(self, raised: BaseException) -> BaseException:
        """See `Pending.error`."""
        it, where = self.invocation, self.process.info
        cause = raised.cause if isinstance(raised, RayTaskError) else raised
        if isinstance(cause, RallyError):
            return cause
        if isinstance(cause, RayActorError | OutOfMemoryError | WorkerCrashedError | NodeDiedError):
            return self._death(cause)
        if isinstance(raised, RayError):  # such as a result that cannot be pickled
            reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
            return WorkerError(
                it.role, it.rank, it.method, reason, str(raised), step=it.step, node=where.node, pid=where.pid
            )
        return raised

    def _death(self, cause: RayError) -> WorkerDiedError | RayLostError:
        """Return what died: the process of this call, a process whose result was its argument, or their node."""
        it = self.invocation
        dead = self.process.runtime.process_of(cause.actor_id) if isinstance(cause, RayActorError) else None
        dead = dead or self.process
        if dead.hung is not None:
            return copy.copy(dead.hung)
        gone = None if dead.ended else dead.runtime.node_lost(dead.info, str(cause))
        if gone is not None and gone.is_ours:
            when = "" if it.step is None else f" at step {it.step}"
            return RayLostError(f"{gone}; the workers of node {dead.info.node} ended with it, during {it}{when}")
        detail = WAS_ENDED if dead.ended else without_advice(cause) if gone is None else str(gone)
        if dead is not self.process:
            role, rank = next(iter(dead.roles.items()), ("a process without a role,", 0))
            it = dataclasses.replace(it, role=role, rank=rank, method=f"work that {it} waits for")
        died = it.died(detail, dead.info)
        died.is_preempted = isinstance(cause, RayActorError) and cause.preempted
        died.is_node_lost, died.is_terminated = gone is not None, _TERMINATED in detail
        return died

    def cancel(self) -> None:
        """See `Pending.cancel`."""
        # Asking a lost Ray could block; without one, Ray would start another, which this process would then be tied to.
        if self.process.ended or self.process.runtime.ray_thread.lost is not None or not ray.is_initialized():
            return
        self.process.handle.interrupt.options(concurrency_group=_HEALTH).remote(self.invocation.number)


def without_advice(error: RayError) -> str:
    """Return what Ray says of a death, in a line; the rest is guesses, and advice about Ray's own settings."""
    return " ".join(str(error).split()).split(" Some common causes include")[0]


class RayProcess:
    """The driver's end of one Ray actor."""

    def __init__(self, runtime: RayRuntime, pool: ResourcePool, handle: Any) -> None:
        """Wrap a Ray actor; it is ready for calls once `info` is known."""
        self.runtime, self.pool, self.watch, self.handle = runtime, pool, runtime.watch, handle
        self.info = ProcessInfo("", "", 0)
        self.roles: dict[str, int] = {}
        self.ended = False
        """Whether we ended it; it may also have died by itself."""
        self.hung: WorkerHungError | None = None
        """Why it was killed."""

    def create(self, invocation: Invocation, kind: type, mesh: Mesh, args: Any, kwargs: Any) -> RayPending:
        """See `Process.create`."""
        self.roles[invocation.role] = invocation.rank
        with _clear_errors(invocation):
            handle = self._send(invocation, lambda: self.handle.create.remote(invocation, kind, mesh, args, kwargs))
        return RayPending(invocation, self, handle)

    def call(self, invocation: Invocation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RayPending:
        """See `Process.call`. References are arguments of their own: Ray waits for those and brings them here."""
        args, kwargs, handles = detach(args, kwargs)
        arguments = [(args, kwargs)] if args or kwargs else []
        with _clear_errors(invocation):
            if arguments:
                handle = self._send(
                    invocation, lambda: self.handle.call_packed.remote(invocation.packed(), *arguments, *handles)
                )
            else:  # no data that Ray would need room for
                handle = self.handle.call_packed.remote(invocation.packed(), *handles)
        return RayPending(invocation, self, handle)

    def _send(self, invocation: Invocation, send: Callable[[], ray.ObjectRef]) -> ray.ObjectRef:
        return self.runtime.ray_thread.ask(f"Ray to take the arguments of {invocation}", send, needs_gcs=False)

    def share(self, value: Any) -> Any:
        """See `Process.share`; what is small travels with the call, which takes Ray less time."""
        if not _is_large(value):
            return value
        what = "Ray to take an argument of several ranks"
        reference = self.runtime.ray_thread.ask(what, lambda: ray.put(value), needs_gcs=False)
        return Fetch((reference,), operator.itemgetter(0))

    def pulse(self) -> Future[Pulse]:
        """See `Process.pulse`."""
        return self.handle.pulse.options(concurrency_group=_HEALTH).remote().future()

    def retire(self, invocation: Invocation) -> RayPending:
        """See `Process.retire`."""
        return RayPending(invocation, self, self.handle.retire.remote(invocation))

    def release(self, role: str) -> None:
        """See `Process.release`."""
        if self.roles.pop(role, None) is not None:
            self.runtime.released(self)

    def end(self) -> None:
        """Let Ray end the process, and remember that this was intended."""
        if not self.ended:
            self.ended = True
            with contextlib.suppress(RayLostError):  # then the process is gone, or ends with this program
                self.runtime.ray_thread.ask(f"Ray to end process {self.info.pid}", lambda: ray.kill(self.handle))

    def kill(self, why: WorkerHungError) -> None:
        """See `Process.kill`."""
        self.hung = why
        # A process that is stopped, or whose interpreter is held, does not react to Ray.
        if self.info.node_id == ray.get_runtime_context().get_node_id():
            _kill_process(self.info.pid)
        else:
            self.runtime.ray_thread.put(lambda: on_node(self.info.node_id, _kill_process).remote(self.info.pid))
        self.ended = True
        self.runtime.ray_thread.put(lambda: ray.kill(self.handle))  # the watchdog calls this, and must not block


def on_node(node_id: str, work: Callable[..., Any]) -> Any:
    """Return a function as a Ray task for one node; it takes nothing there."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(work).options(num_cpus=0, scheduling_strategy=where)


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _clear_errors(invocation: Invocation) -> Iterator[None]:
    """Name the call and the reason where an argument cannot be pickled; Ray prints a page about it."""
    try:
        yield
    except (TypeError, pickle.PicklingError) as error:
        reason = error.__cause__ or error
        raise TypeError(
            f"{invocation}: an argument for rank {invocation.rank} cannot be sent: {type(reason).__name__}: {reason}"
        ) from None


def _is_large(value: Any) -> bool:
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except (TypeError, AttributeError, pickle.PicklingError):  # Ray can pickle more, such as functions without a name
        return False
    return len(data) + sum(buffer.raw().nbytes for buffer in buffers) > _LARGE_BYTES


PREFIXES = (
    "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "GLOO_", "UCX_", "FI_", "CUDA_", "CUBLAS_", "HSA_", "RCCL_",
    "TRITON_", "VLLM_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "KMP_", "RALLYPOINT_",
)  # fmt: skip
"""Prefixes of the names that are forwarded."""

OF_THE_NODE = frozenset(
    {
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_HOSTID",
        "OMP_NUM_THREADS",
        "RALLYPOINT_CLUSTER",
        "TORCH_EXTENSIONS_DIR",
        "VLLM_API_KEY",
        "VLLM_HOST_IP",
    }
)
"""Names with such a prefix that are not forwarded: they describe one machine, or what a process was given there."""

_SET_BY_US = ("OMP_WAIT_POLICY", "passive")
"""Variable that every process sets by itself, and its value (`rallypoint/__init__.py`); a node's own value wins."""


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver's environment that workers on a joined cluster get.

    Workers of our own cluster inherit all of them. On another one they have the environment of `ray start`, where what
    a user sets for `rally train` would silently have no effect. So what configures the workers' libraries is forwarded,
    and wins over what the node has; everything else stays here, and so does what every
    process sets by itself.

    >>> forwarded_environment({"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET_ACCESS_KEY": "..."})
    {'NCCL_DEBUG': 'INFO'}
    >>> [forwarded_environment({"OMP_WAIT_POLICY": value}) for value in ("passive", "active")]
    [{}, {'OMP_WAIT_POLICY': 'active'}]
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) and name not in OF_THE_NODE and (name, value) != _SET_BY_US
    }
