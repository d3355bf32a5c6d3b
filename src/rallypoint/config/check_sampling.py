"""Contradictions between keys that say how rollouts are drawn; see `check.py`."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.config.limits import BLOCK_TOKENS, MIN_TEMPERATURE
from rallypoint.config.problem import Problem
from rallypoint.config.tree import RunConfig


def sampling_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not fit together in the section `rollout`."""
    rollout = config.rollout
    if rollout.min_response_tokens > rollout.max_response_tokens:
        yield Problem(
            ("rollout.min_response_tokens", "rollout.max_response_tokens"),
            f"rollout.min_response_tokens={rollout.min_response_tokens} is more than rollout.max_response_tokens="
            f"{rollout.max_response_tokens}; expected at most that",
        )
    if "" in rollout.stop:
        yield Problem(
            ("rollout.stop",),
            f"rollout.stop={list(rollout.stop)} has an empty text, which every response begins with; leave it out",
        )
    if rollout.top_k == 1 and rollout.group_size > 1:
        yield Problem(
            ("rollout.top_k", "rollout.group_size"),
            f"rollout.top_k=1 makes the {rollout.group_size} rollouts of a prompt (rollout.group_size) the same; "
            "expected at least 2, or null",
        )
    if 0 < config.validation.temperature < MIN_TEMPERATURE:
        yield Problem(
            ("validation.temperature",),
            f"validation.temperature={config.validation.temperature:g}: expected 0 (greedy) or at least "
            f"{MIN_TEMPERATURE:g}; logits are divided by it",
        )
    if rollout.weights != "auto":
        yield from _way_of_weights(config)
    if rollout.max_batch_rows < rollout.group_size:
        yield Problem(
            ("rollout.max_batch_rows", "rollout.group_size"),
            f"rollout.max_batch_rows={rollout.max_batch_rows} is less than one group: expected at least "
            f"rollout.group_size={rollout.group_size}",
        )
    if rollout.cache_tokens is not None:
        yield from _cache(config, rollout.cache_tokens)


def _cache(config: RunConfig, cache_tokens: int) -> Iterator[Problem]:
    """Yield what there is to say against the size of the KV cache."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    # A prompt and its response begin a block each; one more keeps the longest prompt below the longest row.
    least = (1 + sum(-(-longest // BLOCK_TOKENS) for longest in (prompt, response))) * BLOCK_TOKENS
    if config.rollout.engine == "hf":
        yield Problem(
            ("rollout.cache_tokens", "rollout.engine"),
            f"rollout.cache_tokens={cache_tokens} has no effect: rollout.engine='hf' has no such cache; leave it out",
        )
    elif config.rollout.engine == "native" and cache_tokens < least:
        yield Problem(
            ("rollout.cache_tokens", "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"rollout.cache_tokens={cache_tokens} cannot hold one row of data.max_prompt_tokens={prompt} + "
            f"rollout.max_response_tokens={response}, which lie in blocks of {BLOCK_TOKENS}; expected at least {least}",
        )


def _way_of_weights(config: RunConfig) -> Iterator[Problem]:
    """Yield why published weights cannot take the way that was named."""
    way, device = config.rollout.weights, config.cluster.device
    placements = (config.actor.placement, config.rollout.placement)
    pools = {placement.pool: config.cluster.pools.get(placement.pool, ()) for placement in placements}
    if config.actor.placement.pool in config.cluster.pools and config.rollout_shares_actor:
        yield Problem(
            ("rollout.weights", "rollout.placement.pool", "actor.placement.pool"),
            f"rollout.weights={way!r} has no effect: rollouts are sampled from the actor's own weights, on the same "
            "pool; leave it at auto",
        )
    elif way == "ipc" and device == "cpu":
        yield Problem(
            ("rollout.weights", "cluster.device"),
            "rollout.weights='ipc' shares the memory of accelerators, and cluster.device=cpu has none; "
            "expected auto or memory",
        )
    elif way in ("memory", "ipc") and any(len(nodes) > 1 for nodes in pools.values()):
        name = next(name for name, nodes in pools.items() if len(nodes) > 1)
        yield Problem(
            ("rollout.weights", f"cluster.pools.{name}"),
            f"rollout.weights={way!r} leads from process to process of one node, but cluster.pools.{name}="
            f"{list(pools[name])} has {len(pools[name])}; expected auto, broadcast or folder",
        )
