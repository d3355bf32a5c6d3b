"""What a kind of device, or the runtime, does not allow; see `check.py`."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.config.problem import Problem
from rallypoint.config.tree import RunConfig


def device_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Yield what stands against the device that was chosen, whatever machine it is on."""
    cluster = config.cluster
    gpus = cluster.num_gpus_per_process
    if gpus > 1 and gpus % 1:
        yield Problem(
            ("cluster.num_gpus_per_process",),
            f"cluster.num_gpus_per_process={gpus:g}: expected a whole number, or a fraction below 1 to share a GPU",
        )
    if config.engine.activations == "offload" and cluster.device == "cpu":
        yield Problem(
            ("engine.activations", "cluster.device"),
            "engine.activations='offload' has nothing to gain with cluster.device=cpu, where activations lie in CPU "
            "memory already; expected checkpoint or keep",
        )
    if ":" in cluster.device:
        yield Problem(
            ("cluster.device",),
            f"cluster.device={cluster.device!r}: expected the kind alone, such as {cluster.device.split(':')[0]}; "
            "which one a process takes is decided by its place (CUDA_VISIBLE_DEVICES hides some)",
        )
    if cluster.device == "cuda":
        yield from _inline_processes(config)
        yield from _shared_by_ranks(config)


def _inline_processes(config: RunConfig) -> Iterator[Problem]:
    num_processes = sum(map(sum, config.cluster.pools.values()))
    if config.cluster.runtime == "inline" and num_processes > 1:
        yield Problem(
            ("cluster.runtime", "cluster.pools", "cluster.device"),
            f"cluster.runtime=inline with cluster.device=cuda: the {num_processes} processes of cluster.pools would be "
            "threads on one GPU, where NCCL refuses several ranks; use cluster.runtime=ray, or one process",
        )


def _shared_by_ranks(config: RunConfig) -> Iterator[Problem]:
    """Yield roles of which several ranks would be on one GPU: NCCL refuses that."""
    gpus = config.cluster.num_gpus_per_process
    if config.cluster.runtime == "inline" or gpus > 0.5:  # more than half of one is had by one process
        return
    for role, placement in config.roles.items():
        per_node = config.cluster.pools.get(placement.pool, ())
        if role != "rollout" and config.num_ranks(role) > 1 and max(per_node, default=0) > 1:
            yield Problem(
                ("cluster.num_gpus_per_process", f"{role}.placement.pool"),
                f"cluster.num_gpus_per_process={gpus:g} puts several of the {config.num_ranks(role)} ranks of {role} "
                "on one GPU, which NCCL refuses; expected 1, or one process that has the GPU for itself "
                f"(cluster.pools.{placement.pool}=[1])",
            )
            return
