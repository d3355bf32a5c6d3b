"""An event loop for each module of tests, and one local Ray for all modules in `groups` and `rendezvous`.

The modules beside these folders start clusters themselves, and a process is in one cluster at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

SHARING = ("groups", "rendezvous")

ResultT = TypeVar("ResultT")


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
def local_ray(request):
    """The cluster of this process. A runtime that is shut down leaves it running."""
    pytest.importorskip("ray")
    from lasting_ray import lasting_ray

    return lasting_ray(request)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in SHARING:
            item.add_marker("lasting_ray")
