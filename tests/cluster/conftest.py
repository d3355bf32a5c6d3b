"""An event loop for each module of tests, and one local Ray for all modules in `groups` and `rendezvous`.

The modules beside these folders start clusters themselves, and a process is in one cluster at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

ResultT = TypeVar("ResultT")
_CLUSTER = pytest.StashKey[Any]()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def run(loop) -> Callable[[Awaitable[ResultT]], ResultT]:
    """Waits for anything that can be awaited, from plain code."""
    return loop.run_until_complete


@pytest.fixture(scope="module")
def local_ray(request, tmp_path_factory):
    """The cluster of this process. A runtime that is shut down leaves it running."""
    pytest.importorskip("ray")
    from rallypoint.cluster.ray_cluster import RayCluster

    class LastingCluster(RayCluster):
        def shutdown(self) -> None:
            """Stay for the next module."""

        end = RayCluster.shutdown

    stash = request.session.stash
    if _CLUSTER not in stash:
        logs = tmp_path_factory.mktemp("ray")
        stash[_CLUSTER] = LastingCluster.start_local(log_folder=logs, object_store_gib=1.2, dashboard=False, say=print)
    return stash[_CLUSTER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End the cluster after the last test that may use it."""
    yield
    stash = item.session.stash
    if _CLUSTER in stash and (nextitem is None or nextitem.path.parent.name not in ("groups", "rendezvous")):
        stash[_CLUSTER].end()
        del stash[_CLUSTER]
