"""Ranks that make passes together, as processes of Ray and as threads: what stops one is said, and stops all."""

import os
import signal

import pytest
import torch
from tiny_models import make_tiny_model

from rallypoint.cluster import Layout, Mesh, ResourcePool, WorkerContext, WorkerGroup, at_step, collect
from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.errors import WorkerDiedError, WorkerError
from rallypoint.model_files import load_policy
from rallypoint.parallel import DeviceMesh
from rallypoint.types import Metrics, Sequences

POOL = ResourcePool([2], name="main", num_cpus=0.1)
MESHES = [{"dp_shard": 2}, {"tp": 2}, {"sp": 2}]


class Trainer:
    """One of two ranks; the second one fails in the middle of its pass, if it is asked to."""

    def __init__(self, context: WorkerContext, folder: str, rendezvous, axes: dict[str, int]) -> None:
        torch.set_num_threads(1)
        self.context = context
        # Nobody may wait for this deadline.
        mesh = DeviceMesh.connect(rendezvous, "trainer", context.rank, axes, timeout_s=3600)
        model = load_policy(folder, dtype="float32", mesh=mesh)
        self.engine = TrainingEngine(model, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=64)

    @collect
    def train(self, how: str) -> None:
        loss_mask = torch.tensor([False, True, True, False, True, True])
        batch = Sequences(
            offsets=torch.tensor([0, 3, 6]),
            tokens=torch.tensor([3, 4, 5, 6, 7, 8]),
            loss_mask=loss_mask,
            prompt_index=torch.tensor([0, 1]),
            sample_index=torch.tensor([0, 0]),
        )

        def loss(part, at):
            if self.context.rank == 1 and how == "raise":
                raise ZeroDivisionError("this is the cause")
            if self.context.rank == 1 and how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return policy_outputs(self.engine.shard, part, at, 1.0).logprobs.sum(), Metrics()

        self.engine.train(batch, loss, denominator=4, step=1, num_steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), num_layers=1, num_heads=2, initializer_range=0.2, max_positions=16
    )


class Idle:
    """Keeps its process when no trainer is in it: a new one imports torch first, which takes longer than a pass."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context


@pytest.fixture(scope="module")
def idle(runtime) -> dict[int, WorkerGroup[Idle]]:
    """By the rank whose process they keep."""
    return {}


@pytest.fixture
def train(runtime, run, folder, idle):
    """Return a function that makes two ranks train once, and ends a rank that died without waiting for its peer."""

    def call(axes: dict[str, int], how: str) -> None:
        async def whole() -> None:
            mesh = Mesh({"dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 1} | axes)
            layout = Layout("trainer", await runtime.processes(POOL), mesh)
            for rank, process in enumerate(layout.processes):
                if rank not in idle:
                    idle[rank] = await WorkerGroup.create(Layout("idle", [process]), Idle)
            with open_rendezvous("tcp", "these tests") as rendezvous:
                group = await WorkerGroup.create(layout, Trainer, folder, rendezvous, axes)
                try:
                    with at_step(7):
                        await group.call(Trainer.train, how)
                finally:
                    await group.shutdown(patience_s=3600)
                    if how == "die":
                        await idle.pop(1).shutdown(patience_s=0)

        run(whole())

    return call


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_an_error_of_one_rank_is_what_the_driver_says_and_its_peer_is_free_at_once(train, axes):
    with pytest.raises(
        WorkerError, match=r"trainer rank 1 \(.*\) failed in train at step 7.*: ZeroDivisionError"
    ) as info:
        train(axes, "raise")
    assert "this is the cause" in info.value.cause
    train(axes, "")


@pytest.mark.parametrize("runtime", ["ray"], indirect=True)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_death_in_a_pass_reads_as_the_death_of_that_rank(train, axes):
    with pytest.raises(WorkerDiedError, match=r"trainer rank 1 \(.*\) died during train at step 7"):
        train(axes, "die")
    train(axes, "")
