"""What a run cannot have that samples while the actor trains, and pools that it could have; see `check.py`.

Every placement that is suggested, or simulated, is checked as one that somebody has set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

from rallypoint.config.check_placement import roles_and_pools
from rallypoint.config.fields import Problem, changed, shown
from rallypoint.config.tree import RunConfig


def ahead_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Yield settings that a run which samples ahead cannot have, or that have no effect there."""
    if "rollout" in config.roles:
        yield from _keys(config)
        yield from _shared_pool(config)


def _keys(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    staleness, widest = rollout.max_staleness, rollout.max_staleness * rollout.num_prompts + 1
    if rollout.window > widest:
        needed = -(-(rollout.window - 1) // rollout.num_prompts)
        yield Problem.of(
            f"^rollout.window={rollout.window} leaves fewer than ^rollout.num_prompts={rollout.num_prompts} groups "
            f"under way, as each prompt of it is one less: expected at most {widest} with "
            f"^rollout.max_staleness={staleness}, or rollout.max_staleness={needed}"
        )
    if rollout.schedule is not None and not staleness:
        yield Problem.of(
            "^rollout.schedule repeats a run that samples ahead, but ^rollout.max_staleness=0 samples and trains in "
            "turns, the same each time; leave it out, or set rollout.max_staleness to that of its run"
        )
    if staleness and rollout.serve is not None:
        yield Problem.of(
            f"^rollout.serve={rollout.serve}: requests from outside are sampled while training samples nothing, which "
            f"with ^rollout.max_staleness={staleness} hardly ever happens; expected null, or rollout.max_staleness=0"
        )
    if rollout.on_load == "keep" and not staleness and rollout.engine != "vllm":  # refused for another reason
        yield Problem.of(
            "^rollout.on_load='keep' has no effect: with ^rollout.max_staleness=0 no response is under way when "
            "weights arrive; leave it out, or set rollout.max_staleness"
        )
    elif rollout.on_load == "keep" and rollout.engine == "hf":
        yield Problem.of(
            "^rollout.on_load='keep' has no effect: ^rollout.engine='hf' keeps no keys and values from step to step "
            "that new weights could go on with; leave it out, or use rollout.engine=native"
        )


def _shared_pool(config: RunConfig) -> Iterator[Problem]:
    """Yield roles whose processes would have to sample and compute at the same time."""
    staleness, pool = config.rollout.max_staleness, config.roles["rollout"].pool
    others = [role for role, placement in config.roles.items() if placement.pool == pool and role != "rollout"]
    nodes = config.cluster.pools.get(pool, ())
    if not staleness or not others or not nodes or min(nodes) < 1:
        return
    found = pool_of_its_own(config)
    more = sum(map(sum, cast("Mapping[str, tuple[int, ...]]", found["cluster.pools"]).values()))
    more -= sum(map(sum, config.cluster.pools.values()))
    expected = "a pool for rollout alone"
    if more > 0:
        expected += f", and for that {'one more process' if more == 1 else f'{more} more processes'}"
    written = {key: value if isinstance(value, str) else shown(value) for key, value in found.items()}
    settings = " ".join(f"'{key}={text}'" if " " in text else f"{key}={text}" for key, text in written.items())
    yield Problem(
        ("rollout.max_staleness", "rollout.placement.pool", "cluster.pools"),
        f"rollout.max_staleness={staleness} samples while the actor trains, but pool {pool!r} has {', '.join(others)}, "
        f"too, and a process does one thing at a time; expected {expected}: {settings}",
    )


def pool_of_its_own(config: RunConfig) -> dict[str, object]:
    """Return the keys that give the rollout role a pool of its own, of the processes that there are if possible.

    About half of the nodes, or processes, sample. Where meshes leave no such division, they shard over fewer ranks, and
    where that does not help either, there has to be another process.
    """
    first: dict[str, object] | None = None
    for changes in _candidates(config):
        first = changes if first is None else first
        if is_placeable(config, changes):
            return changes
    assert first is not None, "there is always the candidate of another process"
    return first


def with_pool_of_its_own(config: RunConfig) -> RunConfig:
    """Return the config with these keys; itself if its rollout role has such a pool."""
    pool = config.roles["rollout"].pool
    is_shared = any(role != "rollout" and placement.pool == pool for role, placement in config.roles.items())
    return changed(config, pool_of_its_own(config)) if is_shared else config


def is_placeable(config: RunConfig, changes: Mapping[str, object]) -> bool:
    """Whether a config with other values for some dotted keys has nothing against its pools that it had not before."""
    before = {problem.text for problem in roles_and_pools(config)}
    return all(problem.text in before for problem in roles_and_pools(changed(config, changes)))


def _candidates(config: RunConfig) -> Iterator[dict[str, object]]:
    pool, own = config.roles["rollout"].pool, _free_name(config)
    nodes, rest = config.cluster.pools[pool], {"rollout.placement.pool": own}
    num, num_ranks = sum(nodes), config.rollout.placement.num_ranks
    usual = sum(nodes[len(nodes) - len(nodes) // 2 :]) or num // 2
    given = sorted(range(1, num), key=lambda one: (abs(one - usual), one)) if num_ranks is None else [num_ranks]
    as_it_is, awake = dict[str, object](), dict[str, object]({"engine.sleep": False})
    without_sleep = (as_it_is, awake) if config.engine.sleep else (as_it_is,)
    each = config.rollout.mesh.tp if config.rollout.engine == "vllm" else 1  # devices of a process that has a server
    divided = [(kept, {"cluster.pools": {**config.cluster.pools, pool: kept, own: tuple(one // each for one in away)}})
               for kept, away in (divide(nodes, one) for one in given if one < num)
               if not any(one % each for one in away)]  # fmt: skip
    for extra in without_sleep:
        for _, pools in divided:
            yield {**pools, **rest, **extra}
    for extra in without_sleep:
        for kept, pools in divided:
            yield {**pools, **rest, **_narrower(config, pool, sum(kept)), **extra}
    another: dict[str, object] = {
        "cluster.pools": {**config.cluster.pools, own: (num_ranks or config.mesh("rollout")["tp"] // each,)},
        **rest,
    }
    if (
        num == 1 and config.cluster.device != "cpu"
    ):  # two processes can have a GPU together, if none has two ranks there
        another["cluster.num_gpus_per_process"] = config.cluster.num_gpus_per_process / 2
        another |= {"cluster.runtime": "ray"} if config.cluster.runtime == "inline" else {}
    for extra in without_sleep:
        yield {**another, **extra}


def divide(nodes: tuple[int, ...], num_away: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the processes of each node that stay, and those that go: of the last nodes.

    >>> divide((2,), 1), divide((8, 8, 8), 8), divide((8, 8), 10)
    (((1,), (1,)), ((8, 8), (8,)), ((6,), (2, 8)))
    """
    kept, away = list[int](), list[int]()
    for num in reversed(nodes):
        taken = min(num, num_away)
        num_away -= taken
        away = [taken, *away] if taken else away
        kept = [num - taken, *kept] if taken < num else kept
    return tuple(kept), tuple(away)


def _narrower(config: RunConfig, pool: str, num_processes: int) -> dict[str, object]:
    """Return how wide the roles of a pool can shard over so many processes."""
    found: dict[str, object] = {}
    for role, placement in config.roles.items():
        if role != "rollout" and placement.pool == pool:
            shards = config.mesh(role)["dp_shard"]
            if (fewer := math.gcd(shards, num_processes)) < shards:
                found[f"{role}.mesh.dp_shard"] = fewer
    return found


def _free_name(config: RunConfig) -> str:
    names = ("sampling", *(f"sampling_{number}" for number in range(2, len(config.cluster.pools) + 3)))
    return next(name for name in names if name not in config.cluster.pools)
