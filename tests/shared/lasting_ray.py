"""One local Ray for tests that follow each other, for it takes seconds to start: a runtime's end leaves it running.

It says that this machine has three cores, however many there are.

A process is in one cluster at a time, so it is ended before a test that has not the mark `lasting_ray`.
"""

import pytest
from ray_forks import forked_workers

from rallypoint.cluster.capacity import num_cores
from rallypoint.cluster.ray_cluster import RayCluster


class LastingCluster(RayCluster):
    """Ends with the last test that may use it."""

    start_local = vars(RayCluster)["start_local"]  # the method itself, also while tests get this cluster by its name
    end = RayCluster.shutdown

    def shutdown(self) -> None:
        """Stay for the next test."""


_CLUSTER = pytest.StashKey[LastingCluster]()


def lasting_ray(request: pytest.FixtureRequest) -> LastingCluster:
    """Return the cluster of this process; the first to ask starts it."""
    stash = request.session.stash
    if _CLUSTER not in stash:
        logs = request.getfixturevalue("tmp_path_factory").mktemp("ray")
        with forked_workers(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("rallypoint.cluster.ray_cluster.num_cores", lambda: max(3, num_cores()))  # so that pools fit
            stash[_CLUSTER] = LastingCluster.start_local(log_folder=logs, object_store_gib=1.2, say=print)
    return stash[_CLUSTER]


def end_before(nextitem: pytest.Item | None, session: pytest.Session) -> None:
    """End the cluster unless the next test may use it."""
    if _CLUSTER in session.stash and (nextitem is None or nextitem.get_closest_marker("lasting_ray") is None):
        session.stash[_CLUSTER].end()
        del session.stash[_CLUSTER]
