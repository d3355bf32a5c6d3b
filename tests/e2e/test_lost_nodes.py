"""A run on a cluster that loses a node goes on: on another one, or with fewer processes if none comes."""

import os
import signal
import subprocess
import sys

import pytest
from tiny_runs import weights_of

from rallypoint.cluster import ray_cluster
from rallypoint.journal import PoolShrunk, RoleLost, RolesRestarted, RunBegan, StepDone, read_journal
from rallypoint.recipes.drills import children_of

# isort: split
from ray.cluster_utils import Cluster

assert ray_cluster.ray, "imported before, for its settings"

CHECKS = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
"""Longer than those of `examples/cluster`, for a busy machine; Ray's own would take longer than a sign of life may."""
STORE = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
RUN = (
    "trainer.num_steps=8",
    "rollout.exact=true",
    "cluster.pools={main: [1], side: [1, 1]}",
    "rollout.placement.pool=side",
    "rollout.weights=folder",
)


@pytest.fixture
def cluster():
    """Two nodes, of which the second holds one rank that samples."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": CHECKS, **STORE})
    cluster.second, cluster.stopped = cluster.add_node(num_cpus=1, **STORE), []
    yield cluster
    for pid in cluster.stopped:
        os.kill(pid, signal.SIGKILL)
    cluster.shutdown()


def silence(cluster):
    """Let the second node say nothing any more, as one without power or network: its connections stay open."""
    raylet = cluster.second.all_processes["raylet"][0].process.pid
    cluster.stopped += [*(pid for pid, _ in children_of(raylet)), raylet]
    for pid in cluster.stopped:
        os.kill(pid, signal.SIGSTOP)


def events(run, kind):
    return [entry.event for entry in read_journal(run.journal) if isinstance(entry.event, kind)]


def wait_for(process, run, kind, is_it=lambda event: True):
    """Wait until a run has such an event; return whether it is still at work then."""
    while process.poll() is None:
        if run.journal.is_file() and any(map(is_it, events(run, kind))):
            return True
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["another comes", "none comes", "it says nothing"])
def test_a_run_that_loses_a_node_ends_with_the_weights_of_one_that_lost_none(runs, cluster, how):
    whole = runs.run("whole", *RUN, "cluster.runtime=inline")
    timeout_s = 60 if how == "none comes" else 300  # all processes must start within it, too
    there = (f"cluster.address={cluster.address}", f"cluster.placement_timeout_s={timeout_s}")
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint.cli.main", "train", "digits", *runs.overrides("lost", *RUN, *there)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )
    run = type(whole)(runs.folder / "lost")
    assert wait_for(process, run, StepDone, lambda event: event.step == 2), process.communicate()[0]
    if how == "it says nothing":
        silence(cluster)
    else:
        cluster.remove_node(cluster.second, allow_graceful=False)
    if how != "none comes" and wait_for(process, run, RoleLost):
        cluster.add_node(num_cpus=1, **STORE)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert weights_of(run) == weights_of(whole)
    losses = events(run, RoleLost)
    assert "Ray has lost node" in losses[0].why
    assert len(losses) in (1, 2), "Ray may start another process there before it has noticed"
    assert len(events(run, RolesRestarted)) == 1
    shrunk = events(run, PoolShrunk)
    if how != "none comes":
        assert not shrunk
        assert len(events(run, RunBegan)) == 1, "the ranks that sample were made again alone"
    else:
        assert [(list(event.was), list(event.now)) for event in shrunk] == [([1, 1], [1])]
        assert "pool 'side' goes on with [1] of [1, 1] processes" in printed
