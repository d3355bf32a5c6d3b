"""One runtime for all tests of a module: threads, and real processes of a local Ray.

A module may set `OBJECT_STORE_GIB` and `SILENCE_S`; a test of one of the two says
`@pytest.mark.parametrize("runtime", ["ray"], indirect=True)`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from rallypoint.cluster import Runtime, open_runtime

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


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime(request, tmp_path_factory, loop) -> Iterator[Runtime]:
    runtime = open_runtime(
        request.param,
        log_folder=tmp_path_factory.mktemp("logs"),
        object_store_gib=getattr(request.module, "OBJECT_STORE_GIB", 0.2),
        placement_timeout_s=20,
        silence_s=getattr(request.module, "SILENCE_S", 60.0),
        say=print,
    )
    yield runtime
    loop.run_until_complete(runtime.shutdown())
