"""Two processes that shard a model publish to a third one that samples, or one to two: real processes."""

import asyncio
import contextlib
import os
import signal

import pytest
import torch
from lasting_ray import lasting_ray
from tiny_models import make_tiny_model

from rallypoint.cluster.ray_runtime import RayRuntime
from rallypoint.config import load_config
from rallypoint.generation import Request, SamplingParams, as_turn
from rallypoint.journal import Journal
from rallypoint.prepare.pools import pools_of
from rallypoint.recipes.recipe import actor_loss_of
from rallypoint.roles.actor import Actor, ActorWorker
from rallypoint.roles.placement import Placement, SharedFolder, rendezvous_of
from rallypoint.roles.publishing import Stream, WrittenFolder
from rallypoint.roles.rollout import Rollouts
from rallypoint.roles.supervisor import Supervisor
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.replay import Schedule
from rallypoint.transport_kinds import BROADCAST, FOLDER, MEMORY
from rallypoint.types import ActorBatch, RolloutBatch, Trajectory, assemble

pytestmark = pytest.mark.lasting_ray

PLACED = ("cluster.pools={main: [2], second: [1]}", "rollout.placement.pool=second", "kl=null", "recipe=grpo")
SHARDED = ("actor.mesh.dp_shard=2", "actor.num_mini_batches=1", "actor.optimizer={lr: 0.05, warmup_ratio: 0}")
PROMPTS = [(3, 9, 10), (4, 5)]
PARAMS = SamplingParams(max_new_tokens=6)


@pytest.fixture
def runtime(request, tmp_path):
    return RayRuntime(
        lasting_ray(request), log_folder=tmp_path, placement_timeout_s=60, silence_s=60, preload=(), say=print
    )


@contextlib.asynccontextmanager
async def placed(config, runtime, tmp_path, **sizes):
    """Yield the placement of a run with a tiny model."""
    model, folder = make_tiny_model(tmp_path / "model", **sizes), SharedFolder.marked(tmp_path)
    pools = pools_of(config)
    await pools.open(runtime)
    with contextlib.closing(rendezvous_of(config, runtime)) as rendezvous:
        supervisor = Supervisor(Journal(tmp_path / "journal.jsonl"))
        yield Placement(config, runtime, pools, model, folder, rendezvous, supervisor)
        await runtime.shutdown()


async def sample(rollouts):
    """Return two rollouts of each prompt."""

    async def group(index, tokens):
        requests = [Request(tokens=tokens, params=PARAMS, prompt_index=index, sample_index=sample) for sample in (0, 1)]
        found = await asyncio.gather(*map(rollouts.sample, requests))
        trajectories = [Trajectory(turns=(as_turn(tokens, outputs),)) for outputs in found]
        return assemble(trajectories, prompt_index=index, sample_index=[0, 1], is_narrowed=False)

    return RolloutBatch.join(await asyncio.gather(*(group(*each) for each in enumerate(PROMPTS))))


async def publish_twice(actor, rollouts):
    """Publish weights as they are and after an update; return how far what is sampled is from the actor, and moved."""
    await actor.publish(rollouts)
    first = await sample(rollouts)
    old = await actor.logprobs(first)
    advantages = torch.where(first.loss_mask, 1.0, 0.0)
    batch = first.widen(ActorBatch, old_logprobs=old, reference_logprobs=None, advantages=advantages)
    await actor.update(batch, 1)
    moved = (await actor.logprobs(first) - old).abs().max()
    await actor.publish(rollouts)
    second = await sample(rollouts)
    gap = (second.rollout_logprobs - await actor.logprobs(second)).abs().max()
    return float(gap), float(moved)


def test_two_that_shard_a_model_publish_to_one_that_samples_by_every_way(runtime, tmp_path):
    config = load_config("digits", [*PLACED, *SHARDED]).config
    loss = actor_loss_of(config)

    async def scenario():
        async with placed(config, runtime, tmp_path) as placement:
            actor = await Actor.create(placement, loss)
            rollouts = await Rollouts.create(placement)
            assert rollouts.transport.kind == MEMORY, "they are on one node"
            actors, samplers = placement.groups["actor"], placement.groups["rollout"]
            assert all(await actors.call(ActorWorker.held)), "each has something to send"
            transports = (Stream.of(MEMORY, config), Stream.of(BROADCAST, config), WrittenFolder())
            for version, transport in enumerate(transports):
                # The same processes, with a line of their own.
                actor, rollouts = Actor(config, actors, loss), Mailbox(Rollouts(samplers, transport), Schedule())
                actor.version = version
                gap, moved = await publish_twice(actor, rollouts)
                assert gap < 1e-4 < 1e-2 < moved, transport.kind

    asyncio.run(scenario())


def test_one_publishes_to_two_that_sample_together_also_after_one_was_killed(runtime, tmp_path):
    apart = ("cluster.pools={main: [1], second: [2]}", "rollout.mesh.tp=2", *SHARDED[1:])
    config = load_config("digits", [*PLACED[1:], *apart]).config

    async def scenario():
        async with placed(config, runtime, tmp_path, num_key_value_heads=2) as placement:
            actor = await Actor.create(placement, actor_loss_of(config))
            rollouts = Mailbox(await Rollouts.create(placement), Schedule(), keeper=placement)
            placement.refillers["rollout"] = rollouts
            assert (rollouts.role.transport.kind, rollouts.role.num_ranks) == (FOLDER, 1)
            gap, moved = await publish_twice(actor, rollouts)
            assert gap < 1e-4 < 1e-2 < moved
            before, pids = await sample(rollouts), [process.info.pid for process in rollouts.role.processes]
            again = asyncio.create_task(sample(rollouts))
            await asyncio.sleep(0)  # they are asked, and one of them does not answer
            os.kill(pids[1], signal.SIGKILL)
            after = await again
            assert torch.equal(after.tokens, before.tokens)
            assert torch.equal(after.rollout_logprobs, before.rollout_logprobs)
            assert not {*pids} & {process.info.pid for process in rollouts.role.processes}, "both are others"

    asyncio.run(scenario())
