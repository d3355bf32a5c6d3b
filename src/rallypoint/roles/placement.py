"""What a role needs to start: the config, the runtime, the model's folder, and where its ranks meet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import platform
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Protocol, TypeVar

import torch

from rallypoint.cluster import Layout, Mesh, ResourcePoolManager, Runtime, WorkerContext, WorkerGroup
from rallypoint.cluster.call import Process
from rallypoint.cluster.rendezvous import Rendezvous, open_rendezvous, own_address
from rallypoint.config import RoleName, RunConfig
from rallypoint.config.transport import is_streamed
from rallypoint.cpu.onednn import bound_kernel_caches
from rallypoint.data import decoder, load_tokenizer
from rallypoint.disk import naming
from rallypoint.engine.determinism import prepare_process
from rallypoint.errors import PlacementError, WorkerDiedError
from rallypoint.journal import Work
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.colocated import LeaseHolder
from rallypoint.roles.supervisor import Supervisor
from rallypoint.types import Metrics, merge

WorkerT = TypeVar("WorkerT")


@dataclasses.dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder that every node must see: the driver leaves a mark in it, and every worker looks for it."""

    path: Path
    mark: str

    @classmethod
    def marked(cls, path: Path) -> SharedFolder:
        """Leave a mark that no other folder of the same name has.

        Raises:
            DiskError: the disk is full or not writable.
        """
        mark = uuid.uuid4().hex
        with naming(path / _MARK):
            (path / _MARK).write_text(mark)
        return cls(path.absolute(), mark)

    def check(self) -> None:
        """Look for the mark from here.

        Raises:
            PlacementError: this node does not see the folder, or another one of that name.
        """
        try:
            found = (self.path / _MARK).read_text()
        except OSError as error:
            found = str(error)
        if found != self.mark:
            raise PlacementError(
                f"node {platform.node()} does not see the run folder {self.path} of the driver ({found or 'empty'}): "
                "set trainer.runs_dir to a folder that all nodes share"
            )


_MARK = ".shared"


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What every worker of a role is given."""

    config: RunConfig
    model_path: str
    """Hugging Face folder or hub name of the initial policy."""
    folder: SharedFolder
    """Folder of the run."""
    rendezvous: Rendezvous | None
    """Where ranks find each other; None if they need not meet."""

    def prepare(self, context: WorkerContext) -> None:
        """Set up this process (or thread) for its rank.

        Raises:
            PlacementError: this node does not see what it needs.
        """
        if context.device != "cpu":
            prepare_process()
        torch.set_num_threads(context.num_cpus)
        bound_kernel_caches()
        self.folder.check()
        _check_device(context.device)

    def load(
        self, load: Callable[..., ModelShard], path: str, context: WorkerContext, mesh: DeviceMesh | None, **more: Any
    ) -> ModelShard:
        """Load a rank's part of a model as the config has it; all of it without a mesh.

        Args:
            load: a function of `model_files`, such as `load_policy`.
            path: Hugging Face folder or hub name.
            context: of the rank.
            mesh: of its role.
            **more: arguments of the function.
        """
        model, device = self.config.model, torch.device(context.device)
        trust = model.trust_remote_code
        return load(path, dtype=model.dtype, mesh=mesh, device=device, trust_remote_code=trust, **more)

    def load_policy(
        self, context: WorkerContext, mesh: DeviceMesh | None = None, *, frozen: bool = False
    ) -> ModelShard:
        """Load a rank's part of the initial policy; all of it without a mesh."""
        lora, seed = self.config.model.lora, self.config.seed
        return self.load(load_policy, self.model_path, context, mesh, lora=lora, seed=seed, frozen=frozen)

    def load_copy(self, context: WorkerContext) -> ModelShard:
        """Load the initial policy for a rank that samples: its part of a copy that it has with its peers along `tp`."""
        num, own = context.mesh.axes.get("tp", 1), context.mesh.coordinates(context.rank).get("tp", 0)
        if num == 1:
            return self.load_policy(context)
        # Copies do not meet, so that one can be lost without the others.
        name = f"{context.role} {context.mesh.part(context.rank)}"
        with self.meeting(dataclasses.replace(context, role=name, rank=own, mesh=Mesh({"tp": num}))) as mesh:
            return self.load_policy(context, mesh)

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Return what turns tokens into text, with a tokenizer of its own."""
        trust, changes = self.config.model.trust_remote_code, self.config.model.tokenizer
        if changes is not None:  # a file of the driver's machine
            changes = changes.model_copy(update={"chat_template": None})
        return decoder(load_tokenizer(self.model_path, trust_remote_code=trust, for_chat=False, changes=changes))

    def stop_decoder(self) -> Callable[[Sequence[int]], str] | None:
        """Return what decodes tokens, to look for stop texts in them; None if there can be none."""
        return self.decoder() if self.config.rollout.stop or self.config.rollout.episode else None

    @contextlib.contextmanager
    def meeting(self, context: WorkerContext) -> Iterator[DeviceMesh]:
        """Connect to the other ranks of the role, and leave them if the block raises: they would wait for this one.

        Keep the result: the other ranks are connected to it.
        """
        cluster = self.config.cluster
        mesh = DeviceMesh.connect(
            self.rendezvous,
            context.role,
            context.rank,
            context.mesh.axes,
            timeout_s=cluster.call_timeout_s,
            device=cluster.device,
            generation=context.start,
        )
        with mesh.abandoned_on_error():
            yield mesh


def _check_device(wanted: str) -> None:
    """Look for an accelerator of the type that the config names.

    Raises:
        PlacementError: torch finds another one here, or none.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted != "cpu" and (found is None or found.type != wanted):
        raise PlacementError(
            f"cluster.device={wanted}, but on node {platform.node()} torch {torch.__version__} finds "
            f"{'no accelerator' if found is None else f'one of type {found.type}'}: set cluster.device="
            f"{'cpu' if found is None else found.type}, or install the driver and the build of torch for {wanted} there"
        )


class Refiller(Protocol):
    """Knows what the ranks of a role have."""

    async def refill(self, ranks: Sequence[int]) -> None:
        """Give it to data-parallel ranks that were made anew, with their peers."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Puts worker groups onto the pools of a run."""

    config: RunConfig
    runtime: Runtime
    pools: ResourcePoolManager
    model_path: str
    folder: SharedFolder
    rendezvous: Rendezvous | None
    supervisor: Supervisor
    groups: dict[RoleName, WorkerGroup[Any]] = dataclasses.field(default_factory=dict[RoleName, WorkerGroup[Any]])
    """Those that were started."""
    refillers: dict[RoleName, Refiller] = dataclasses.field(default_factory=dict[RoleName, "Refiller"])
    """What gives a role whose workers have no state of their own what they had."""
    _restoring: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    _restores: set[asyncio.Task[None]] = dataclasses.field(default_factory=set[asyncio.Task[None]])
    _closing: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()

        def tell(death: WorkerDiedError) -> None:
            with contextlib.suppress(RuntimeError):  # the run has ended
                loop.call_soon_threadsafe(self._restore_early, death)

        self.runtime.tell_deaths(tell)

    def _restore_early(self, death: WorkerDiedError) -> None:
        """Make roles again before they are called, if none of them trains; otherwise the next call says so."""
        if not self._restores and not self._closing.is_set():
            restore = asyncio.create_task(self.restore(death))
            restore.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def group(
        self, role: RoleName, kind: Callable[Concatenate[WorkerContext, WorkerSpec, ...], WorkerT], *args: Any
    ) -> WorkerGroup[WorkerT]:
        """Start the workers of a role where the config places them.

        Args:
            role: names the placement in the config.
            kind: the worker's class, called with its context, a `WorkerSpec` and the further arguments.
            *args: for every worker's constructor.
        """
        processes = (await self.pools.processes(self.runtime, role))[: self.config.num_ranks(role)]
        mesh = Mesh(self.config.mesh(role))
        layout = Layout(role, processes, mesh, deadline_s=self.config.cluster.call_timeout_s, keeper=self)
        self.groups[role] = group = await WorkerGroup.create(layout, kind, self.spec, *args)
        return group

    @property
    def spec(self) -> WorkerSpec:
        """What every worker is given."""
        return WorkerSpec(self.config, self.model_path, self.folder, self.rendezvous)

    async def restore(self, error: WorkerDiedError) -> None:
        """Make the roles of a process that was lost again, in another one; the rest of the run does not notice.

        A role whose ranks are connected to each other is made again on all of them. Does nothing if the process was
        replaced already.

        Raises:
            WorkerDiedError: the given one, if a role had a state there that nothing else has: one that is trained, or
                what it has sampled ahead. Or there were too many, or all groups are ended meanwhile.
        """
        restore = asyncio.create_task(self._restore(error))
        self._restores.add(restore)
        restore.add_done_callback(self._restores.discard)
        try:
            await restore
        except asyncio.CancelledError:
            if self._closing.is_set():
                raise error from None
            raise

    async def _restore(self, error: WorkerDiedError) -> None:
        async with self._restoring:
            lost, roles = self._lost_by(error), set[RoleName]()
            if not lost and not self._closing.is_set():
                return
            while True:
                roles |= self._lost_with(lost)
                is_moved = error.is_node_lost and any(len(self.pools.pool(role).sources) > 1 for role in roles)
                if is_moved:  # ranks of pools that are taken together follow the machines
                    raise error
                if self._closing.is_set() or error.is_final or not roles <= self._renewable:
                    raise error
                self.supervisor.lost(error)
                try:
                    await self._renew(roles, lost)
                    break
                except WorkerDiedError as another:
                    error, lost = another, self._lost_by(another)
            self.supervisor.restarted({role: found for role, found in self.processes.items() if role in roles})

    async def _renew(self, roles: set[RoleName], lost: set[Process]) -> None:
        """Make roles again in new processes instead of lost ones; if that fails, no new one is taken for whole."""
        for process in lost:
            process.end()
        before = self._all
        try:
            for role in list(self.groups):
                if role not in roles:
                    continue
                processes = (await self.pools.processes(self.runtime, role))[: self.config.num_ranks(role)]
                ranks = await self.groups[role].renew(processes)
                if role in self.refillers:
                    mesh = self.groups[role].mesh
                    await self.refillers[role].refill(sorted({mesh.part(rank) for rank in ranks}))
        except WorkerDiedError:
            for process in self._all - before:
                process.end()
            raise

    @property
    def _all(self) -> set[Process]:
        """The processes of all roles."""
        return {process for group in self.groups.values() for process in group.processes}

    def _lost_by(self, error: WorkerDiedError) -> set[Process]:
        """Return the process of a loss, with all of its node if that was lost; nothing if it was replaced already."""
        processes = self._all
        lost = {process for process in processes if (process.info.pid, process.info.node) == (error.pid, error.node)}
        nodes = {process.info.node_id for process in lost if error.is_node_lost}
        return lost | {process for process in processes if process.info.node_id in nodes}

    def _lost_with(self, lost: set[Process]) -> set[RoleName]:
        """Return the roles of lost processes; add processes of ranks that are connected to one of these."""
        num_lost = 0
        while num_lost < len(lost):
            num_lost = len(lost)
            for role, group in self.groups.items():
                if role != "rollout":
                    connected = [list(range(group.mesh.size))]
                else:  # its data-parallel ranks sample each for itself
                    connected = [group.mesh.sharing(part) for part in range(group.mesh.num_parts)]
                for ranks in connected:
                    processes = {group.processes[rank] for rank in ranks}
                    lost |= processes if lost & processes else set()
        return {role for role, group in self.groups.items() if lost.intersection(group.processes)}

    @property
    def _renewable(self) -> set[RoleName]:
        """The roles that have no state which nothing else has."""
        roles: set[RoleName] = {"reward", "teacher"}
        if self.config.reference.refresh_every_steps is None:
            roles.add("reference")
        rollout = self.config.rollout  # one that replaces groups while others are sampled asks for them at other steps
        if not rollout.max_staleness and (rollout.over_sampling is None or not rollout.dynamic_sampling):
            roles.add("rollout")
        return roles

    @property
    def processes(self) -> dict[str, list[str]]:
        """Role -> number and node of the process of each rank."""
        return {
            role: [f"{process.info.pid}@{process.info.node}" for process in group.processes]
            for role, group in self.groups.items()
        }

    async def close(self) -> None:
        """End all groups at once, and their processes, whose places stay; calls that are still under way fail."""
        self._closing.set()
        self.runtime.keep_places()
        for restore in self._restores:
            restore.cancel()
        await asyncio.gather(*self._restores, return_exceptions=True)
        await asyncio.gather(*(group.shutdown(patience_s=0) for group in self.groups.values()))
        self.groups.clear()

    async def profile(self, step: int) -> None:
        """Have every role recorded in a step, until `measured` is called."""
        folder = self.folder.path / "profile"
        for group in self.groups.values():
            await group.retried(lambda group=group: group.call(LeaseHolder.profile, folder, step))

    async def measured(self) -> tuple[Metrics, dict[str, list[Sequence[Work]]]]:
        """Return the peak memory of every role, and what each of its ranks did, since this was last asked."""
        measured = await asyncio.gather(
            *(group.retried(lambda group=group: group.call(LeaseHolder.measured)) for group in self.groups.values())
        )
        found = dict(zip(self.groups, measured, strict=True))
        memory = merge(*(merge(*(one for one, _ in ranks)).prefixed(role) for role, ranks in found.items()))
        return memory, {role: [work for _, work in ranks] for role, ranks in found.items()}


def module_of(role: RoleName) -> str:
    """Return the module of a role's workers.

    >>> module_of("actor"), module_of("reward")
    ('rallypoint.roles.actor', 'rallypoint.roles.frozen')
    """
    return f"rallypoint.roles.{'frozen' if role == 'reward' else role}"


def rendezvous_of(config: RunConfig, runtime: Runtime) -> Rendezvous | None:
    """Open the place where the ranks of a run meet; the driver closes it. None if no ranks have to meet.

    Raises:
        RendezvousError: it cannot be opened.
    """
    if not is_streamed(config) and all(config.num_ranks(role) == 1 for role in config.roles):
        return None
    kind, scope = config.cluster.rendezvous, f"rallypoint-{uuid.uuid4().hex}"
    if "://" in kind:
        return open_rendezvous("etcd", scope, address=kind)
    if kind == "tcp":
        return open_rendezvous("tcp", scope, address=f"{own_address(runtime.head)}:0")
    return runtime.open_rendezvous(scope)
