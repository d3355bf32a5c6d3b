"""Which transport carries published weights, as far as a config decides."""

from __future__ import annotations

from rallypoint.config.tree import RunConfig
from rallypoint.transport_kinds import BROADCAST, FOLDER, SHARED, TRANSPORT_KINDS, TransportKind, within_a_node


def transport_kind(config: RunConfig, num_nodes: int | None = None) -> TransportKind | None:
    """Return what carries published weights to the rollout role; None if only the placement can tell.

    Args:
        config: the run's.
        num_nodes: nodes that both roles are on together; None: as many as the config says.
    """
    if config.rollout_shares_actor or "rollout" not in config.roles:  # then none are sent
        return SHARED
    if config.rollout.weights != "auto":
        return TRANSPORT_KINDS[config.rollout.weights]
    has_server = config.rollout.engine == "vllm"
    if (config.model.lora is not None) if has_server else (config.rollout.mesh.tp > 1):
        return FOLDER  # vLLM takes adapters from files alone, and a rank reads any part of them
    num_nodes = num_nodes or _num_nodes(config)
    if num_nodes is None:
        return None
    if num_nodes > 1:
        return BROADCAST
    return within_a_node(config.cluster.device)


def describe_transport(config: RunConfig, kind: TransportKind | None) -> str:
    """Return a transport in words; None is one that the placement will tell."""
    if kind is None:
        return f"{within_a_node(config.cluster.device).name} on one node, {BROADCAST.name} across nodes"
    return f"{kind.name} ({kind.words})"


def is_streamed(config: RunConfig) -> bool:
    """Whether ranks of the actor and of the rollout role meet to pass weights on."""
    kind = transport_kind(config)
    return kind is None or kind.is_streamed


def _num_nodes(config: RunConfig) -> int | None:
    """Return how many nodes actor and rollout are on together, at least; None when that depends on the cluster."""
    if config.cluster.runtime == "inline" or config.cluster.address is None:
        return 1
    pools = [config.roles[role].pool for role in ("actor", "rollout")]
    num_nodes = max(len(config.cluster.pools[pool]) for pool in pools)
    return num_nodes if num_nodes > 1 or pools[0] == pools[1] else None
