"""Which transport carries published weights, as far as a config decides."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rallypoint.config.tree import RunConfig

TransportName: TypeAlias = Literal["shared", "memory", "ipc", "broadcast", "folder"]
"""Transport of weights from the actor to the rollout role; see `rallypoint.weights`."""


def transport_name(config: RunConfig, num_nodes: int | None = None) -> TransportName | None:
    """Return what carries published weights to the rollout role; None if only the placement can tell.

    Args:
        config: the run's.
        num_nodes: nodes that both roles are on together; None: as many as the config says.
    """
    if config.rollout_shares_actor or "rollout" not in config.roles:  # then none are sent
        return "shared"
    if config.rollout.weights != "auto":
        return config.rollout.weights
    has_server = config.rollout.engine == "vllm"
    if (config.model.lora is not None) if has_server else (config.rollout.mesh.tp > 1):
        return "folder"  # vLLM takes adapters from files alone, and a rank reads any part of them
    num_nodes = num_nodes or _num_nodes(config)
    if num_nodes is None:
        return None
    if num_nodes > 1:
        return "broadcast"
    return "memory" if config.cluster.device == "cpu" else "ipc"


def describe_transport(config: RunConfig, name: TransportName | None) -> str:
    """Return a transport in words; None is one that the placement will tell."""
    if name is None:
        near = "memory" if config.cluster.device == "cpu" else "ipc"
        return f"{near} on one node, broadcast across nodes"
    words = {
        "shared": "rollouts are sampled from the actor's own",
        "memory": "shared by the processes of a node",
        "ipc": "device memory, shared by the processes of a node",
        "broadcast": "to all ranks at once, over the network",
        "folder": "safetensors in the run's folder",
    }
    return f"{name} ({words[name]})"


def is_streamed(config: RunConfig) -> bool:
    """Whether ranks of the actor and of the rollout role meet to pass weights on."""
    return transport_name(config) not in ("shared", "folder")


def _num_nodes(config: RunConfig) -> int | None:
    """Return how many nodes actor and rollout are on together, at least; None when that depends on the cluster."""
    if config.cluster.runtime == "inline" or config.cluster.address is None:
        return 1
    pools = [config.roles[role].pool for role in ("actor", "rollout")]
    num_nodes = max(len(config.cluster.pools[pool]) for pool in pools)
    return num_nodes if num_nodes > 1 or pools[0] == pools[1] else None
