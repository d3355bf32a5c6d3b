"""Pools that an error suggests to a run that samples ahead, which `rally simulate` takes, too, load."""

import shlex

import pytest

from rallypoint.config import load_config
from rallypoint.config.check_sampling_ahead import is_placeable, with_pool_of_its_own
from rallypoint.errors import ConfigError
from rallypoint.prepare.inventory import imagine
from rallypoint.prepare.machine import check_machine
from rallypoint.prepare.plan import make_plan

AHEAD = "rollout.max_staleness=1"
ON_GPUS = "cluster.device=cuda"
GRPO = ("digits-grpo", "kl=null")
SUGGESTED = {
    ("digits", "{main: [1]}"): "'cluster.pools={main: [1], sampling: [1]}' rollout.placement.pool=sampling",
    ("digits", "{main: [2]}"): "'cluster.pools={main: [1], sampling: [1]}' rollout.placement.pool=sampling",
    ("digits", "{main: [3]}"): "'cluster.pools={main: [2], sampling: [1]}' rollout.placement.pool=sampling",
    ("digits", "{main: [2, 2, 2]}"): "'cluster.pools={main: [2, 2], sampling: [2]}' rollout.placement.pool=sampling",
    ("digits", "{main: [2], sampling: [1]}", "critic.placement.pool=sampling"): (
        "'cluster.pools={main: [1], sampling: [1], sampling_2: [1]}' rollout.placement.pool=sampling_2"
    ),
    ("digits", "{main: [4]}", "rollout.placement.num_ranks=1"): (
        "'cluster.pools={main: [3], sampling: [1]}' rollout.placement.pool=sampling"
    ),
    # Meshes that do not fit into half of the processes: other divisions, narrower meshes, and at last more processes.
    ("digits", "{main: [6]}", "actor.mesh.sp=2"): (
        "'cluster.pools={main: [4], sampling: [2]}' rollout.placement.pool=sampling"
    ),
    ("digits", "{main: [4]}", "actor.placement.num_ranks=3"): (
        "'cluster.pools={main: [3], sampling: [1]}' rollout.placement.pool=sampling"
    ),
    (*GRPO, "{main: [4]}", "actor.mesh.dp_shard=4"): (
        "'cluster.pools={main: [2], sampling: [2]}' rollout.placement.pool=sampling actor.mesh.dp_shard=2"
    ),
    (*GRPO, "{main: [2]}", "actor.mesh.sp=2"): (
        "one more process: 'cluster.pools={main: [2], sampling: [1]}' rollout.placement.pool=sampling"
    ),
    (*GRPO, ON_GPUS, "{main: [1]}"): (
        "one more process: 'cluster.pools={main: [1], sampling: [1]}' rollout.placement.pool=sampling "
        "cluster.num_gpus_per_process=0.5"
    ),
    (*GRPO, ON_GPUS, "{main: [2]}", "engine.sleep=true"): (
        "'cluster.pools={main: [1], sampling: [1]}' rollout.placement.pool=sampling engine.sleep=false"
    ),
}  # fmt: skip


def arguments(case):
    name, *rest = case
    return name, [f"cluster.pools={one}" if one.startswith("{") else one for one in (*rest, "cluster.runtime=ray")]


@pytest.mark.parametrize("case", SUGGESTED)
def test_the_pools_that_are_suggested_are_accepted_and_have_room(case):
    name, overrides = arguments(case)
    with pytest.raises(ConfigError, match=AHEAD) as raised:
        load_config(name, [*overrides, AHEAD])
    (problem,) = raised.value.problems
    assert SUGGESTED[case] in problem
    suggested = shlex.split(problem[problem.index("'cluster.pools=") :].rsplit(" (", 1)[0])
    config = load_config(name, [*overrides, AHEAD, *suggested]).config
    before = load_config(name, overrides).config.cluster
    if ON_GPUS in case:  # no more GPUs than before
        check_machine(config, make_plan(config), imagine(f"{sum(before.pools['main'])}xH100"))
    elif "one more process" not in SUGGESTED[case] and before.pools != {"main": (1,)}:
        assert sum(map(sum, config.cluster.pools.values())) == sum(map(sum, before.pools.values()))


def test_a_config_with_the_suggested_pools_shares_no_process_and_keeps_those_that_are_there():
    config = load_config("digits", ["cluster.pools={main: [8]}", "actor.mesh.tp=2"]).config
    apart = with_pool_of_its_own(config)
    assert (apart.num_ranks("rollout"), apart.num_ranks("actor")) == (4, 4)
    assert with_pool_of_its_own(apart) is apart
    assert is_placeable(apart, {})


def test_servers_over_several_ranks_become_processes_with_as_many_devices():
    cut = ["cluster.pools={main: [8]}", "rollout.engine=vllm", "rollout.mesh.tp=2"]
    apart = with_pool_of_its_own(load_config("digits", cut).config)
    assert dict(apart.cluster.pools) == {"main": (4,), "sampling": (2,)}
    assert apart.devices_of_rollout == 2
    with pytest.raises(
        ConfigError, match=r"expected a pool for rollout alone: 'cluster.pools=\{main: \[4\], sampling: \[2\]"
    ):
        load_config("digits", [*cut, AHEAD])
