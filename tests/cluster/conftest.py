"""One local Ray for all tests of a module, and workers that know nothing of training."""

import asyncio
from collections.abc import Iterator

import pytest

from rallypoint.cluster import Runtime, open_runtime


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime(request, tmp_path_factory, loop) -> Iterator[Runtime]:
    runtime = open_runtime(
        request.param,
        log_folder=tmp_path_factory.mktemp("logs"),
        object_store_gib=0.2,
        placement_timeout_s=5,
        say=print,
    )
    yield runtime
    loop.run_until_complete(runtime.shutdown())
