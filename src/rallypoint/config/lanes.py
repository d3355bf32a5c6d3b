"""How many lanes the passes of a rank may have: of the engine, which has them, and of the plan of its memory."""

from __future__ import annotations

from rallypoint.config.sections import ClusterConfig

_LANE_BYTES = 2**30
"""Of the gradients that further lanes may add up for themselves, beside those that are stepped.

A model that has more does not need lanes: its operations are so large that they keep several cores busy by themselves.
"""


def max_lanes(num_threads: int, gradient_bytes: int) -> int:
    """Return how many lanes a rank may have on a CPU, of as many threads each as there are for it.

    >>> max_lanes(16, gradient_bytes=0), max_lanes(16, gradient_bytes=200 * 2**20), max_lanes(2, gradient_bytes=2**31)
    (16, 5, 1)

    Args:
        num_threads: that operations may use.
        gradient_bytes: of the gradients that a lane adds up; 0 where there are none.
    """
    most = num_threads if gradient_bytes == 0 else min(num_threads, 1 + _LANE_BYTES // gradient_bytes)
    threads_per_lane = -(-num_threads // most)
    return num_threads // threads_per_lane


def idle_cores(cluster: ClusterConfig, num_here: int) -> str | None:
    """Say how many cores of this machine a run leaves idle, and the line that changes it; None when there are none.

    >>> idle_cores(ClusterConfig(pools={"main": (1,)}), 8)
    'cores: 1 of 8 here; all would work with cluster.num_cpus_per_process=8'
    """
    num_processes, num_each = sum(map(sum, cluster.pools.values())), cluster.num_cpus_per_process
    if cluster.address is not None or cluster.device != "cpu" or num_here // max(num_processes, 1) <= num_each:
        return None
    return (
        f"cores: {num_processes * num_each} of {num_here} here; all would work with "
        f"cluster.num_cpus_per_process={num_here // num_processes}"
    )
